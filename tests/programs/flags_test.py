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
    (tmp_path / "mine.py").write_text(
        "from configs import digits\n"
        "def get_config(arg):\n    config = digits.get_config(arg)\n    config.rounds = 77\n"
        "    return config\n")
    assert parsed("--config=mine.py", folder=tmp_path)["rounds"] == 77
    (tmp_path / "mine.py").write_text("def get_configuration():\n    pass\n")
    result = program("--config=mine.py", folder=tmp_path)
    assert result.stderr == "run: mine.py has no get_config(arg)\n"
    (tmp_path / "mine.py").write_text("def get_config(arg:\n")
    result = program("--config=mine.py", folder=tmp_path)
    assert "mine.py" in result.stderr and result.stderr.count("\n") == 1


MISTAKES = {
    "an unknown flag": (["--nope=1"], "Unknown command line flag 'nope'"),
    "a flag misspelt": (["--round=3"], "'round'. Did you mean: rounds ?"),
    "an unknown key": (["--config.nope=1"], "unknown configuration key --config.nope; did you mean "),
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
