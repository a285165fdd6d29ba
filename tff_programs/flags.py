"""Flags of the programs: a configuration by data set, and one line for every mistake."""

from __future__ import annotations

import difflib
import pathlib
import runpy
import sys
from collections.abc import Callable, Sequence
from typing import Optional

from absl import app, flags, logging
from ml_collections import config_flags

from feast_tf.datasets import NAMES

CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs"

DATASET = flags.DEFINE_enum("dataset", None, NAMES,
                            "Data set; without --config also picks the configuration.")
CONFIG = config_flags.DEFINE_config_file(
    "config", help_string="Configuration, configs/<name>.py[:smoke]; --config.a.b=value overrides.")


def with_default_config(argv: Sequence[str]) -> list[str]:
    """`argv` with --config=configs/<dataset>.py in front where no configuration is named."""
    argv, name = list(argv), "digits"
    for place, argument in enumerate(argv[1:], start=1):
        key, equals, value = argument.lstrip("-").partition("=")
        if not argument.startswith("-"):
            continue
        if key == "config":
            return argv
        if key == "dataset":
            name = value if equals else "".join(argv[place + 1: place + 2])
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
    path, _, argument = value.partition(":")
    if not pathlib.Path(path).is_file():
        raise ValueError(f"--config: there is no file {path}; there are configs/<name>.py for "
                         f"{', '.join(sorted(NAMES))}")
    module = runpy.run_path(path)
    if "get_config" not in module:
        raise ValueError(f"{path} has no get_config(arg)")
    return module["get_config"](argument or None)


def _unknown_key(argv: Sequence[str]) -> Optional[str]:
    """The message for the first --config.<key> that the configuration does not have, or None.

    Also loads the file in plain sight: the flag's own loader wraps errors in a traceback.
    """
    names = [argument.lstrip("-").partition("=")[0] for argument in argv[1:]
             if argument.startswith("-")]
    files = [a.partition("=")[2] for a in argv if a.lstrip("-").startswith("config=")]
    if not files:
        return None
    known = _keys(load_config(files[-1]))
    for name in names:
        if name.startswith("config.") and name not in known:
            # A key of the right name in another section is the likeliest slip.
            last = name.rpartition(".")[2]
            near = [key for key in known if key.rpartition(".")[2] == last]
            near += difflib.get_close_matches(name, known, n=3)
            hint = ", ".join(f"--{key}" for key in dict.fromkeys(near))
            return f"unknown configuration key --{name}" + (
                f"; did you mean {hint}?" if hint else "")
    return None


def parse(argv: Sequence[str]) -> list[str]:
    """A `flags_parser` for `app.run`: ends the program with one line for a wrong flag or key."""
    argv = with_default_config(argv)
    try:
        message = _unknown_key(argv)
        if message is None:
            return app.parse_flags_with_usage(argv) if _asks_for_help(argv) else flags.FLAGS(argv)
    except (flags.Error, OSError, ValueError, AttributeError, TypeError, SyntaxError) as error:
        message = " ".join(str(error).split())
    sys.exit(f"{pathlib.Path(argv[0]).stem}: {message}")


def log_own_lines() -> None:
    """Shows this project's progress lines, and of other libraries only warnings."""
    logging.set_verbosity(max(logging.INFO, flags.FLAGS.verbosity))
    root = str(pathlib.Path(__file__).resolve().parent.parent)
    own = lambda record: record.levelno > 20 or record.pathname.startswith(root + "/feast_tf") or (
        record.pathname.startswith(root + "/tff_programs"))
    logging.get_absl_handler().addFilter(own)


def _asks_for_help(argv: Sequence[str]) -> bool:
    return any(argument.lstrip("-").startswith("help") for argument in argv[1:])


def run_main(main: Callable[[Sequence[str]], None]) -> None:
    """Runs a program: one line and exit code 1 for what a user can mend, 130 for Ctrl-C."""

    def guarded(argv):
        if len(argv) > 1:
            sys.exit(f"{pathlib.Path(argv[0]).stem}: unexpected argument {argv[1]!r}; "
                     "all settings are flags, see --help")
        try:
            main(argv)
        except KeyboardInterrupt:
            print("interrupted; the same command goes on from the last checkpoint",
                  file=sys.stderr)
            sys.exit(130)
        except (ValueError, OSError, RuntimeError, ImportError, FloatingPointError) as error:
            if flags.FLAGS.verbosity > 0:  # --verbosity=1 shows where it came from
                raise
            sys.exit(f"{pathlib.Path(argv[0]).stem}: {' '.join(str(error).split())}")

    app.run(guarded, flags_parser=parse)
