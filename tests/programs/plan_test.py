"""Tests of tff_programs.plan, as a user runs it."""

import json
import os
from pathlib import Path
import subprocess
import sys

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAPER = f"--config={ROOT / 'configs' / 'paper.py'}"


def plan(folder, *flags):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-m", "tff_programs.plan", *flags], cwd=folder,
                          env=environment, capture_output=True, text=True, timeout=120)


def content(result, path):
    assert result.returncode == 0, result.stderr
    return json.loads(path.read_text())


def test_paper(tmp_path):
    result = plan(tmp_path, PAPER, "--output_dir=out", "--bandwidth_mbps=10")
    found = content(result, tmp_path / "out" / "plan.json")
    assert found["training_pmacs"] == pytest.approx(31.01, abs=0.005)
    assert found["transfer"]["known"] == 100
    assert "published" in result.stdout and "reconstruction" in result.stdout
    assert (tmp_path / "out" / "plan.html").exists()


def test_without_flags_the_digits_are_planned(tmp_path):
    found = content(plan(tmp_path), tmp_path / "plans" / "digits" / "plan.json")
    assert found["clients"] == 30 and found["published"] == {}


def test_what_if(tmp_path):
    result = plan(tmp_path, PAPER, "--gamma=0.5", "--zipf_s=0.8", "--alpha=0.9", "--cohort=20",
                  "--rounds=100", "--clients=200", "--output_dir=out")
    found = content(result, tmp_path / "out" / "plan.json")
    settings = found["config"]["population"]
    assert (settings["gamma"], settings["zipf_s"], settings["cohort_size"]) == (0.5, 0.8, 20)
    assert (found["alpha_eff"], found["clients"], found["config"]["rounds"]) == (0.9, 200, 100)


def test_population_file(tmp_path):
    (tmp_path / "devices.csv").write_text(
        "device,count,bandwidth_mbps\nwatch,15,1\nphone,5,20\n")
    result = plan(tmp_path, PAPER, "--population=devices.csv", "--devices=watch:30e6,phone:300e6",
                  "--output_dir=out")
    found = content(result, tmp_path / "out" / "plan.json")
    assert [(group["clients"], group["lowest"]) for group in found["groups"]] == [
        (15, 30e6), (5, 300e6)]
    assert found["transfer"]["slowest"] == pytest.approx(64 * found["groups"][1]["payload"] / 20e6)


@pytest.mark.parametrize("flags, message", [
    (["--zipf_s=1"], "--zipf_s changes nothing: the budgets are given by config.population"),
    (["--population=none.csv"], "No such file or directory: 'none.csv'"),
    (["--population=x.csv", "--clients=3"], "--clients does not go with --population"),
    (["--cohort=31"], "population.cohort_size must be in 1..30"),
    (["--gama=1"], "Unknown command line flag 'gama'"),
])
def test_mistakes_end_in_one_line(tmp_path, flags, message):
    result = plan(tmp_path, *flags)
    assert result.returncode != 0 and message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())
