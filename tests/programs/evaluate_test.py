"""Tests of tff_programs.evaluate, as a user runs it."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
import subprocess
import sys

import pytest

from feast_tf.space import SupernetSpec, VariantCache

ROOT = Path(__file__).resolve().parents[2]
# Without what the tests themselves set for TensorFlow.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
ENVIRONMENT["PYTHONPATH"] = str(ROOT)
SPACE = dict(stem=8, bases=(8, 16), depths=(0, 1), widths=(0.5, 1.0), expansions=(0.5, 1.0),
             strides=(1, 2))


def program(folder, name, *arguments):
    """(exit code, printed lines, lines on stderr that are no log lines)"""
    result = subprocess.run([sys.executable, "-m", f"tff_programs.{name}", *arguments], cwd=folder,
                            env=ENVIRONMENT, capture_output=True, text=True, timeout=180)
    return result.returncode, result.stdout.splitlines(), [
        line for line in result.stderr.splitlines() if not line.startswith(("I", "W"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run of two rounds, `run`, whose cache file is no longer where it was."""
    folder = tmp_path_factory.mktemp("evaluate")
    spec = SupernetSpec(classes=10, image_size=8, **SPACE)
    VariantCache(spec, [spec.variant(d=0, e=0.5, w=0.5), spec.variant(d=(1, 0), e=0.5, w=1.0),
                        spec.variant(d=1, e=1.0, w=1.0)]).save(folder / "tiny.csv")
    code, _, errors = program(
        folder, "run", f"--config={ROOT / 'configs' / 'digits.py'}:smoke", "--output_dir=run",
        f"--config.cache={folder / 'tiny.csv'}", "--config.image_size=8",
        *(f"--config.space.{key}={value}" for key, value in SPACE.items()),
        "--config.population.num_clients=8", "--config.population.cohort_size=3",
        "--config.population.budgets=120e3,200e3,400e3")
    assert (code, errors) == (0, [])
    (folder / "tiny.csv").unlink()
    return folder


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_is_measured_as_it_was(folder):
    code, printed, errors = program(folder, "evaluate", "--run=run", "--uncached=3", "--seed=1",
                                    "--output_dir=found")
    assert (code, errors) == (0, [])
    found, of_run = (read(folder / name / "operating_points.csv") for name in ("found", "run"))
    columns = ("variant", "macs", "params", "accuracy", "split")
    assert [[row[name] for name in columns] for row in found[:3]] == [
        [row[name] for name in columns] for row in of_run[:3]]
    content = json.loads((folder / "found" / "evaluation.json").read_text())
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert content["population_accuracy"] == summary["population_accuracy"]
    assert content["complete"] and content["post_hoc"]["variants"] == 3
    assert printed[0].startswith("run: the best of 2 rounds in validation, round ")
    assert printed[-1] == "report: found/evaluation.html"
    assert f"serving: {summary['population_accuracy']:.4f}" in "\n".join(printed)


@pytest.mark.parametrize("arguments, message", [
    ([], "name the folder of a run, such as --run=runs/digits"),
    (["--run=none"], "none is not the folder of a run: it has no config.json"),
    (["--run=run", "--dataset=digits"], "--config and --dataset are not read here: the run's own "
                                        "config.json is"),
    (["--run=run", "--split=train"], "flag --split=train: value should be one of "
                                     "<test|validation>"),
])
def test_mistakes_are_one_line(folder, arguments, message):
    before = sorted(os.listdir(folder / "run"))
    code, _, errors = program(folder, "evaluate", *arguments)
    assert (code, errors) == (1, [f"evaluate: {message}"])
    assert sorted(os.listdir(folder / "run")) == before
