"""Tests of tff_programs.flags: what a command line means, and the one line for every mistake."""

from __future__ import annotations

import json
import os
from pathlib import Path
import subprocess
import sys

import pytest

from tff_programs import flags

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
DIGITS = f"--config={ROOT / 'configs' / 'digits.py'}"
PRINT_CONFIG = ("import json, sys\nfrom tff_programs import flags, run\n"
                "flags.parse(sys.argv)\nprint(json.dumps(flags.CONFIG.value.to_dict()))")


def program(*arguments, name="run", folder=None):
    return subprocess.run([sys.executable, "-m", f"tff_programs.{name}", *arguments],
                          cwd=folder or ROOT, env=ENVIRONMENT, capture_output=True, text=True,
                          timeout=120)


def parsed(*arguments, folder=None):
    """The configuration that the flags of `run` give."""
    result = subprocess.run([sys.executable, "-c", PRINT_CONFIG, *arguments], cwd=folder or ROOT,
                            env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("given, name", [
    ([], "digits"), (["--dataset=cifar10"], "cifar10"), (["--dataset", "cinic10"], "cinic10"),
    (["-dataset=cifar100", "--rounds=3"], "cifar100"), (["--dataset=imagenet"], "digits"),
    (["--dataset"], "digits"), (["--", "--dataset=cifar10"], "digits"),
    (["--output_dir", "dataset"], "digits"), (["--config.dataset=cifar10"], "digits"),
])
def test_the_data_set_picks_the_configuration(given, name):
    assert flags.with_default_config(["run.py", *given]) == [
        "run.py", f"--config={ROOT / 'configs' / name}.py", *given]


@pytest.mark.parametrize("given", [["--config=a.py"], ["--config", "a.py"], ["-config=a.py:smoke"],
                                   ["--dataset=cifar10", "--config=a.py"]])
def test_a_named_configuration_stands(given):
    assert flags.with_default_config(["run.py", *given]) == ["run.py", *given]


def test_keys_on_the_command_line_change_the_configuration():
    config = parsed(f"{DIGITS}:smoke", "--config.training.rule=min", "--config.held_out", "0.3",
                    "--noconfig.evaluation.recalibrate", "--config.space.bases=(8,16)",
                    "--config.space.strides=1,2", "--config.training.learning_rate=1",
                    "--config.population.budgets=25e6:60,100e6:40",
                    "--config.evaluation.anchors=1e6")
    assert config["rounds"] == 2 and config["training"]["rule"] == "min"
    assert config["held_out"] == 0.3 and config["evaluation"]["recalibrate"] is False
    assert config["space"]["bases"] == [8, 16] and config["space"]["strides"] == [1, 2]
    assert config["training"]["learning_rate"] == 1.0
    assert config["population"]["budgets"] == "25e6:60,100e6:40"
    assert config["evaluation"]["anchors"] == [1e6]


def test_a_flag_file_is_read(tmp_path):
    (tmp_path / "preset").write_text(f"{DIGITS}:smoke\n--config.training.rule=max\n--rounds=9\n")
    config = parsed("--flagfile=preset", "--config.held_out=0.3", folder=tmp_path)
    assert (config["dataset"], config["rounds"]) == ("digits", 2)
    assert (config["training"]["rule"], config["held_out"]) == ("max", 0.3)
    result = program("--flagfile=missing", folder=tmp_path)
    assert result.returncode == 1 and "missing" in result.stderr


def test_a_configuration_of_the_users_own(tmp_path):
    body = "    config = digits.get_config({})\n    config.rounds = 77\n    return config\n"
    mine, start = tmp_path / "mine.py", "from configs import digits\n"
    mine.write_text(start + "def get_config():\n" + body.format(""))
    assert parsed("--config=mine.py", folder=tmp_path)["rounds"] == 77
    mine.write_text(start + "def get_config(arg=None):\n" + body.format("arg"))
    found = parsed("--config=mine.py:smoke", folder=tmp_path)
    assert (found["rounds"], found["population"]["cohort_size"]) == (77, 4)


@pytest.mark.parametrize("text, message", [
    ("def get_configuration(): pass", "mine.py has no get_config(arg=None)"),
    ("def get_config(): return {}.seed", "mine.py: 'dict' object has no attribute 'seed'"),
    ("def get_config(arg): return {}", "mine.py: get_config() missing 1 required positional"),
    ("def get_config(arg:", "mine.py, line 1"),
])
def test_a_faulty_configuration_is_named(tmp_path, text, message):
    (tmp_path / "mine.py").write_text(text + "\n")
    result = program("--config=mine.py", folder=tmp_path)
    assert message in result.stderr and result.stderr.count("\n") == 1


MISTAKES = {
    "an unknown flag": (["--nope=1"], "Unknown command line flag 'nope'"),
    "a flag misspelt": (["--round=3"], "'round'. Did you mean: rounds ?"),
    "an unknown key": (["--config.nope=1"],
                       "unknown configuration key --config.nope; did you mean "),
    "a key misspelt": (["--config.training.lerning_rate=1"],
                       "--config.training.lerning_rate; did you mean "
                       "--config.training.learning_rate"),
    "a key of another section": (["--config.learning_rate=1"],
                                 "--config.learning_rate; did you mean "
                                 "--config.training.learning_rate"),
    "a key turned off": (["--noconfig.evaluation.recalibrat"],
                         "--noconfig.evaluation.recalibrat; did you mean "
                         "--config.evaluation.recalibrate"),
    "a key after --config <file>": (["--config", "configs/digits.py", "--config.nope=1"],
                                    "unknown configuration key --config.nope"),
    "a key in two words": (["--config.nope", "1"], "unknown configuration key --config.nope"),
    "a key before its file": (["--config.rounds=3", DIGITS], "--config.rounds=3 in argv before"),
    "no number": (["--config.rounds=abc"], "--config.rounds=abc: invalid literal for int()"),
    "no whole number": (["--config.rounds=1.5"], "--config.rounds=1.5"),
    "too few rounds": (["--rounds=0"], "--rounds=0: 0 is not a positive integer"),
    "a negative seed": (["--seed=-1"], "--seed=-1: -1 is not a non-negative integer"),
    "no value": (["--config.rounds"], "Missing value for flag --config.rounds"),
    "an unknown size": (["--config=configs/digits.py:big"], "unknown size 'big'"),
    "no such file": (["--config=configs/nope.py"], "there is no file 'configs/nope.py'"),
    "an empty file name": (["--config="], "--config: there is no file ''"),
    "an unknown data set": (["--dataset=imagenet"],
                            "--dataset=imagenet: value should be one of <digits|cifar10|"),
    "an unknown runtime": (["--runtime=gpu"], "--runtime=gpu: value should be one of <in_process|"),
    "an argument": (["--rounds=2", "tinyimagenet"],
                    "unexpected argument 'tinyimagenet'; all settings are flags, see --help"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistake, tmp_path):
    arguments, message = MISTAKES[mistake]
    result = program(*arguments)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith("run: ") and result.stderr.count("\n") == 1
    assert message in result.stderr


def test_help_lists_all_flags_and_where_training_runs():
    result = program("--help")
    for flag in ("config", "data_dir", "dataset", "[no]dry_run", "output_dir", "rounds", "runtime",
                 "seed", "workers"):
        assert f"\n  --{flag}: " in result.stdout
    assert "GPU" in result.stdout and "resume" in result.stdout
    assert result.stderr == ""


def test_tensorflows_errors_are_mendable():
    import tensorflow as tf

    full_disk = tf.errors.ResourceExhaustedError(None, None, "disk full")
    assert isinstance(full_disk, flags._mendable())
    assert not isinstance(KeyError("x"), flags._mendable())


GUARDED = """
import sys
from tff_programs import flags
def main(argv):
    {}
flags.run_main(main, interrupted="interrupted; nothing is lost")
"""


def guarded(statement, *arguments):
    return subprocess.run([sys.executable, "-c", GUARDED.format(statement), *arguments], cwd=ROOT,
                          env=ENVIRONMENT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("statement, code, message", [
    ("raise ValueError('first\\n   second')", 1, "-c: first second\n"),
    ("open('/missing/file')", 1, "-c: [Errno 2] No such file or directory: '/missing/file'\n"),
    ("raise FloatingPointError('round 3: no')", 1, "-c: round 3: no\n"),
    ("import missing_module", 1, "-c: No module named 'missing_module'\n"),
    ("raise KeyboardInterrupt", 130,
     "interrupted; nothing is lost\n"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", 130,
     "interrupted; nothing is lost\n"),
    ("sys.exit(7)", 7, ""),
    ("pass", 0, ""),
])
def test_how_a_program_ends(statement, code, message):
    result = guarded(statement)
    assert (result.returncode, result.stderr, result.stdout) == (code, message, "")


def test_a_fault_of_our_own_has_a_traceback():
    result = guarded("{}['missing']")
    assert result.returncode == 1 and "Traceback" in result.stderr
    assert "Traceback" in guarded("raise ValueError('x')", "--verbosity=1").stderr


def test_ctrl_c_does_not_wait_for_asyncio():
    # Python 3.11's asyncio lets a coroutine that never awaits run on.
    result = guarded("import asyncio, os, signal, time\n"
                     "    async def round_of_minutes():\n"
                     "        os.kill(os.getpid(), signal.SIGINT)\n"
                     "        time.sleep(0.01)\n"
                     "        print('went on')\n"
                     "    asyncio.run(round_of_minutes())")
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr.count("\n") == 1


def test_in_the_background_ctrl_c_is_ignored():
    # As nohup and `&` in a script set it.
    result = subprocess.run(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", GUARDED.format(
            "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('went on')")],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (0, "went on\n")


SIGNALLED = """import gc, os, signal, time, weakref
    def here(sent=[]): sent or (sent.append(1), os.kill(os.getpid(), signal.{}))
    def remove(_): here()
    class Thing: pass
    class Final:
        def __del__(self): here()
    {}
    for _ in range(50): time.sleep(0.1)
    print('went on')"""


@pytest.mark.parametrize("name, code", [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize("place", [
    "gc.callbacks.append(lambda *_: here()); gc.collect()",
    "Final()",
    "thing = Thing(); kept = weakref.ref(thing, remove); del thing",
    "try: here(); time.sleep(0.05)\n    except: pass",
    "try: here(); time.sleep(0.05)\n    except: raise AttributeError('no attribute') from None",
    "try: here(); time.sleep(0.05)\n    except BaseException: gc.callbacks.append(lambda *_: 1)",
])
def test_a_signal_is_not_lost_where_exceptions_are_dropped(place, name, code):
    result = guarded(SIGNALLED.format(name, place))
    assert (result.returncode, result.stdout) == (code, "")
    assert result.stderr.count("\n") == (name == "SIGINT")


@pytest.mark.parametrize("name, code", [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_leaves_time_to_clean_up(name, code):
    result = guarded(SIGNALLED.format(
        name, "try: here(); time.sleep(5)\n    finally: time.sleep(0.5); print('cleaned up')"))
    assert (result.returncode, result.stdout) == (code, "cleaned up\n")
