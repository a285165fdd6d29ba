"""Flags of the programs: a configuration by data set, and one line for every mistake."""

from __future__ import annotations

import difflib
import gc
import pathlib
import runpy
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Optional

from absl import app, flags, logging
from ml_collections import config_flags

from feast_tf.datasets import NAMES

CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs"

DATASET = flags.DEFINE_enum("dataset", None, NAMES,
                            "Data set; without --config also picks the configuration.")
CONFIG = config_flags.DEFINE_config_file(
    "config", help_string="Configuration, configs/<name>.py[:smoke]; --config.a.b=value overrides.")


def _given(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name, value) of every flag in `argv`, as --name=value or --name value."""
    for place, argument in enumerate(argv[1:], start=1):
        if argument == "--":
            return
        if argument.startswith("-"):
            name, equals, value = argument.lstrip("-").partition("=")
            yield name, value if equals else "".join(argv[place + 1: place + 2])


def with_default_config(argv: Sequence[str]) -> list[str]:
    """`argv` with --config=configs/<dataset>.py in front where no configuration is named."""
    given = dict(_given(argv))
    if "config" in given:
        return list(argv)
    name = given.get("dataset", "digits")
    if name not in NAMES:  # the enum flag explains it
        name = "digits"
    return [argv[0], f"--config={CONFIGS / name}.py", *argv[1:]]


def _keys(config, prefix: str = "config") -> list[str]:
    found = []
    for key in config:
        found.append(f"{prefix}.{key}")
        if hasattr(config[key], "keys"):
            found += _keys(config[key], found[-1])
    return found


def load_config(value: str):
    """The configuration that --config=<path>[:<argument>] names."""
    path, *arguments = value.split(":", 1)
    if not pathlib.Path(path).is_file():
        raise ValueError(f"--config: there is no file {path!r}; there are configs/<name>.py for "
                         f"{', '.join(sorted(NAMES))}")
    module = runpy.run_path(path)
    if "get_config" not in module:
        raise ValueError(f"{path} has no get_config(arg=None)")
    try:
        return module["get_config"](*arguments)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from error


def _unknown_key(argv: Sequence[str]) -> Optional[str]:
    """The message for the first --config.<key> that the configuration does not have, or None.

    Also loads the file in plain sight: the flag's own loader wraps errors in a traceback.
    """
    given = dict(_given(argv))
    known = _keys(load_config(given["config"]))
    for name in given:
        key = name[2:] if name.startswith("noconfig.") else name
        if key.startswith("config.") and key not in known:
            # A key of the right name in another section is the likeliest slip.
            last = key.rpartition(".")[2]
            near = [other for other in known if other.rpartition(".")[2] == last]
            near += difflib.get_close_matches(key, known, n=3)
            hint = ", ".join(f"--{other}" for other in dict.fromkeys(near))
            return f"unknown configuration key --{name}" + (
                f"; did you mean {hint}?" if hint else "")
    return None


def parse(argv: Sequence[str]) -> list[str]:
    """A `flags_parser` for `app.run`: ends the program with one line for a wrong flag or key."""
    try:
        # Flag files are read first: they may name a configuration, or its keys.
        argv = with_default_config(flags.FLAGS.read_flags_from_files(list(argv), force_gnu=False))
        message = _unknown_key(argv)
        if message is None:
            return app.parse_flags_with_usage(argv) if _asks_for_help(argv) else flags.FLAGS(argv)
    except (flags.Error, OSError, ValueError, AttributeError, TypeError, SyntaxError) as error:
        message = " ".join(str(error).split())
    sys.exit(f"{pathlib.Path(argv[0]).stem}: {message}")


def refuse_configuration(instead: str) -> None:
    """For programs that read no configuration: ValueError where the command names one.

    Args:
      instead: the end of the message, what the program reads.
    """
    if any(name.startswith(("config", "dataset")) for name, _ in _given(sys.argv)):
        raise ValueError(f"--config and --dataset are not read here: {instead}")


def log_own_lines() -> None:
    """Shows this project's progress lines, and of other libraries only warnings."""
    logging.set_verbosity(max(logging.INFO, flags.FLAGS.verbosity))
    root = str(pathlib.Path(__file__).resolve().parent.parent)
    own = lambda record: record.levelno > 20 or record.pathname.startswith(root + "/feast_tf") or (
        record.pathname.startswith(root + "/tff_programs"))
    logging.get_absl_handler().addFilter(own)


def _asks_for_help(argv: Sequence[str]) -> bool:
    return any(argument.lstrip("-").startswith("help") for argument in argv[1:])


def _mendable() -> tuple[type[BaseException], ...]:
    """The errors that tell a user what to mend; TensorFlow's own are those of a full disk, say."""
    tensorflow = sys.modules.get("tensorflow")
    return (ValueError, OSError, RuntimeError, ImportError, FloatingPointError,
            *([tensorflow.errors.OpError] if tensorflow else ()))


def _raiser(error: BaseException, raised: list[BaseException]) -> Callable:
    """A signal handler that raises `error`, again and again until the program unwinds.

    Python drops what finalisers and the callbacks of weak references and of the garbage collector
    raise, and extension modules drop or replace what is raised in code that they call. jax, which
    TFF imports, has such a callback: while a run started, a third of all signals were lost in it.
    Therefore `raised` gets the error as well.
    """
    def handle(number, frame):
        del number
        raised.append(error)
        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        dropping = {getattr(callback, "__code__", None) for callback in gc.callbacks}
        while frame:
            code = frame.f_code
            if code in dropping or code.co_name in ("__del__", "remove", "_remove", "cb"):
                return  # raised here, it would also be complained of
            frame = frame.f_back
        if sys.exc_info()[1] is not error:  # else the program is unwinding: let it clean up
            raise error

    return handle


def _end(error: BaseException, name: str, interrupted: str) -> None:
    """Ends the program as `run_main` says, or raises the error."""
    if isinstance(error, KeyboardInterrupt):
        print(interrupted, file=sys.stderr)
        sys.exit(130)
    if isinstance(error, _mendable()) and flags.FLAGS.verbosity <= 0:
        sys.exit(f"{name}: {' '.join(str(error).split())}")
    raise error  # --verbosity=1 shows where it came from


def run_main(main: Callable[[Sequence[str]], None], *, interrupted: str = "interrupted") -> None:
    """Runs a program: one line and exit code 1 for what a user can mend, 130 for Ctrl-C.

    Args:
      main: takes the command line without the flags.
      interrupted: what is said after Ctrl-C.
    """

    def guarded(argv):
        name, raised = pathlib.Path(argv[0]).stem, []
        # On SIGTERM too a worker is to be ended.
        signal.signal(signal.SIGTERM, _raiser(SystemExit(143), raised))
        # Python's own handler would make asyncio wait for the end of the round first.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not so under nohup
            signal.signal(signal.SIGINT, _raiser(KeyboardInterrupt(), raised))
        if len(argv) > 1:
            sys.exit(f"{name}: unexpected argument {argv[1]!r}; all settings are flags, see --help")
        try:
            main(argv)
        except BaseException as error:
            _end(raised[0] if raised else error, name, interrupted)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    app.run(guarded, flags_parser=parse)
