"""Tests of tff_programs.run, as a user runs it: whole runs, kills, signals, full disks."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from feast_tf.space import SupernetSpec, VariantCache

ROOT = Path(__file__).resolve().parents[2]
# Without what the tests themselves set for TensorFlow.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
ENVIRONMENT["PYTHONPATH"] = str(ROOT)
SPACE = dict(stem=8, bases=(8, 16), depths=(0, 1), widths=(0.5, 1.0), expansions=(0.5, 1.0),
             strides=(1, 2))


@pytest.fixture(scope="session")
def flags(tmp_path_factory):
    """Flags of a run of digits at 8x8 on 8 clients, with a network of 11,202 parameters."""
    spec = SupernetSpec(classes=10, image_size=8, **SPACE)
    cache = tmp_path_factory.mktemp("cache") / "tiny.csv"
    VariantCache(spec, [spec.variant(d=0, e=0.5, w=0.5), spec.variant(d=(1, 0), e=0.5, w=1.0),
                        spec.variant(d=1, e=1.0, w=1.0)]).save(cache)
    return [f"--config={ROOT / 'configs' / 'digits.py'}:smoke", f"--config.cache={cache}",
            "--config.image_size=8", *(f"--config.space.{key}={value}"
                                       for key, value in SPACE.items()),
            "--config.population.num_clients=8", "--config.population.cohort_size=3",
            "--config.population.budgets=120e3,200e3,400e3"]


def start(folder, *arguments, **options):
    """Starts the program with its messages in a file."""
    return subprocess.Popen(
        [sys.executable, "-m", "tff_programs.run", *arguments], cwd=folder, env=ENVIRONMENT,
        stdin=subprocess.DEVNULL, stdout=open(folder / "stdout", "w"),
        stderr=open(folder / "stderr", "w"), **options)


def finish(process, folder, seconds=180):
    """(exit code, printed text, lines on stderr that are no log lines) of a started program."""
    try:
        code = process.wait(seconds)
    finally:
        process.kill()
        process.wait()
    lines = (folder / "stderr").read_text().splitlines()
    return code, (folder / "stdout").read_text(), [
        line for line in lines if not line.startswith(("I", "W"))]


def program(folder, *arguments, seconds=180, **options):
    return finish(start(folder, *arguments, **options), folder, seconds)


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def rounds(folder):
    found = read(folder / "metrics.csv")
    for row in found:
        assert float(row.pop("seconds")) > 0
    return found


def summary(folder):
    found = json.loads((folder / "summary.json").read_text())
    assert found.pop("seconds") > 0
    return found


def unfinished(folder):
    return [str(path) for path in folder.rglob("*") if "_temp" in path.name
            or (path.name.startswith(".") and path.name != ".lock")]


def wait_for_round(process, folder, number, seconds=120):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        path = folder / "metrics.csv"
        if path.exists() and len(path.read_text().splitlines()) > number:
            return
        time.sleep(0.02)
    process.kill()
    pytest.fail(f"round {number} was not reached: {process.wait()}")


@pytest.fixture(scope="module")
def done(flags, tmp_path_factory):
    """(folder, result) of a whole run of two rounds."""
    folder = tmp_path_factory.mktemp("done")
    return folder, program(folder, *flags, "--output_dir=out", "--seed=4")


def test_two_rounds_from_end_to_end(done):
    folder, (code, printed, errors) = done
    assert (code, errors) == (0, [])
    out = folder / "out"
    assert sorted(os.listdir(out)) == [
        ".lock", "checkpoints", "clients.csv", "config.json", "logdir", "metrics.csv", "model",
        "operating_points.csv", "report.html", "summary.json"]
    points = read(out / "operating_points.csv")
    assert list(points[0]) == ["variant", "macs", "params", "accuracy", "split"]
    assert [point["split"] for point in points] == ["test"] * 3 + ["validation"] * 3
    assert points[2]["params"] == "11202" and int(points[0]["macs"]) < int(points[1]["macs"])
    assert len({tuple(point.values())[:3] for point in points}) == 3
    assert list(read(out / "clients.csv")[0]) == [
        "client", "budget_macs", "num_samples", "served_variant", "served_macs", "accuracy",
        "payload_params", "payload_bytes"]
    assert len(read(out / "clients.csv")) == 8
    table = rounds(out)
    assert [row["round_num"] for row in table] == ["1", "2"]
    assert {name.rpartition("/")[0] for name in table[0]} == {
        "", "distributor", "client_work/train", "aggregator", "validation"}
    found = json.loads((out / "summary.json").read_text())
    assert found["rounds"] == 2 and found["seed"] == 4 and found["dataset"] == "digits"
    assert 0 <= found["population_accuracy"] <= 1 and found["seconds"] > 0
    assert found["bytes_down"] == found["bytes_up"] == sum(
        int(row["distributor/bytes_down"]) for row in table)
    config = json.loads((out / "config.json").read_text())
    assert config["seed"] == 4 and config["space"]["bases"] == [8, 16]
    # The last table: a row for each budget, and the population's average.
    assert printed.startswith("data: digits, 1,120 train")
    assert [line.split()[0] for line in printed.splitlines()[4:7]] == ["0.12", "0.2", "0.4"]
    assert f"{found['population_accuracy']:.4f}" in printed.splitlines()[7]
    log = (folder / "stderr").read_text()
    for said in ("oneDNN is on", "evaluation runs in this process, on the CPU", "clients run on",
                 "metrics go to out/metrics.csv", "round 2 of 2"):
        assert said in log


@pytest.mark.slow
def test_a_finished_run_says_so(done, flags):
    folder, _ = done
    before = {path: path.stat().st_mtime_ns for path in (folder / "out").rglob("*")}
    code, printed, errors = program(folder, *flags, "--output_dir=out", "--seed=4")
    assert (code, errors) == (0, [])
    assert printed.startswith("out: complete after 2 rounds, population-averaged test accuracy ")
    assert {path: path.stat().st_mtime_ns for path in (folder / "out").rglob("*")} == before


MISTAKES = {
    "other settings": (["--output_dir=out", "--seed=5"],
                       "run: out holds a run with other settings (seed is 4 there, 5 here); choose "
                       "another --output_dir"),
    "a file": (["--output_dir=stdout"], "run: stdout is a file; --output_dir must be a folder"),
    "a folder that cannot be made": (["--output_dir=/proc/runs"], "/proc/runs"),
    "a bad value": (["--config.training.rule=maximum"],
                    "run: rule must be one of min, max, min_max, min_max_kd, full, but is "),
    "missing data": (["--config=" + str(ROOT / "configs" / "cifar10.py"), "--data_dir=/missing"],
                     "run: data_dir /missing does not exist; name a folder or an archive"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(done, flags, mistake):
    folder, _ = done
    arguments, message = MISTAKES[mistake]
    before = sorted(map(str, folder.rglob("*")))
    given = arguments if "data" in mistake else [*flags, *arguments]
    code, _, errors = program(folder, *given)
    assert code == 1 and len(errors) == 1 and message in errors[0]
    assert sorted(map(str, folder.rglob("*"))) == before


@pytest.mark.slow
def test_a_dry_run_writes_nothing(flags, tmp_path):
    code, printed, errors = program(tmp_path, *flags, "--dry_run")
    assert (code, errors, len(printed.splitlines())) == (0, [], 3)
    assert sorted(os.listdir(tmp_path)) == ["stderr", "stdout"]


# How often a run is killed; more take minutes.
KILLS = int(os.environ.get("FEAST_TF_KILLS", 2))


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["in_process", pytest.param("tff_worker", marks=[
    pytest.mark.skipif("FEAST_TF_KILLS" not in os.environ, reason="set FEAST_TF_KILLS=20")])])
def test_a_killed_run_goes_on_to_the_numbers_of_an_unbroken_one(flags, tmp_path, runtime):
    long = [*flags, f"--rounds={6 * KILLS}", "--config.checkpoint_every=3",
            "--config.evaluation.every=2", "--output_dir=out", f"--runtime={runtime}"]
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    broken.mkdir(), whole.mkdir()
    random = np.random.default_rng()
    metrics = broken / "out" / "metrics.csv"
    for kill in range(KILLS):
        process = start(broken, *long)
        if kill % 4 == 3:  # also while it starts
            time.sleep(random.uniform(0, 8))
        else:
            known = len(read(metrics)) if metrics.exists() else 0
            # Rounds since the checkpoint are trained again: at most two.
            wait_for_round(process, broken / "out", min(known + 1, 6 * KILLS - 2))
            time.sleep(random.uniform(0, 0.7))
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        assert psutil.wait_procs(children, timeout=5)[1] == []
    code, _, errors = program(broken, *long, seconds=600)
    assert (code, errors) == (0, [])
    assert program(whole, *long, seconds=600)[0] == 0
    for name in ("model/weights.npz", "model/cache.csv", "operating_points.csv", "clients.csv",
                 "config.json"):
        assert (broken / "out" / name).read_bytes() == (whole / "out" / name).read_bytes()
    assert rounds(broken / "out") == rounds(whole / "out")
    assert summary(broken / "out") == summary(whole / "out")
    assert unfinished(broken) == []


def stop(flags, folder, number, runtime):
    """Sends a signal in the middle of a run; checks that its child processes end."""
    process = start(folder, *flags, "--rounds=1000", "--config.checkpoint_every=1",
                    f"--runtime={runtime}", "--output_dir=out")
    wait_for_round(process, folder / "out", 2)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    code, _, errors = finish(process, folder, 60)
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    assert [child for child in children if child.pid] if runtime == "tff_worker" else not children
    return code, errors


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["in_process", "tff_worker"])
@pytest.mark.parametrize("number, code, message", [
    (signal.SIGINT, 130, ["interrupted; the same command goes on from the last checkpoint"]),
    (signal.SIGTERM, 143, []), (signal.SIGKILL, -9, [])], ids=["SIGINT", "SIGTERM", "SIGKILL"])
def test_signals(flags, tmp_path, runtime, number, code, message):
    assert stop(flags, tmp_path, number, runtime) == (code, message)
    if number == signal.SIGKILL:
        return
    assert unfinished(tmp_path) == []
    states = sorted((tmp_path / "out" / "checkpoints").glob("round_*"))
    for state in states:
        assert (state / "saved_model.pb").stat().st_size > 0


@pytest.mark.slow
def test_an_interrupted_run_resumes(flags, tmp_path):
    assert stop(flags, tmp_path, signal.SIGINT, "in_process")[0] == 130
    before = len(read(tmp_path / "out" / "metrics.csv"))
    process = start(tmp_path, *flags, "--rounds=1000", "--config.checkpoint_every=1",
                    "--output_dir=out")
    wait_for_round(process, tmp_path / "out", before + 1)
    process.kill()
    process.wait()
    table = read(tmp_path / "out" / "metrics.csv")
    assert [int(row["round_num"]) for row in table] == list(range(1, len(table) + 1))
    assert f"resuming after round {before} of 1000" in (tmp_path / "stderr").read_text() or (
        f"resuming after round {before - 1} of 1000" in (tmp_path / "stderr").read_text())


@pytest.mark.slow
def test_tffs_own_worker_ends_with_the_program(flags, tmp_path):
    process = start(tmp_path, *flags, "--runtime=tff_worker", "--output_dir=out")
    wait_for_round(process, tmp_path / "out", 1)
    children = psutil.Process(process.pid).children(recursive=True)
    assert "worker_binary" in [child.name() for child in children]
    code, printed, errors = finish(process, tmp_path)
    assert (code, errors) == (0, []) and "report: out/report.html" in printed
    assert psutil.wait_procs(children, timeout=5)[1] == []


@pytest.mark.slow
def test_two_runs_in_one_folder(flags, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    arguments = [*flags, "--rounds=1000", f"--output_dir={tmp_path / 'out'}"]
    process = start(first, *arguments)
    wait_for_round(process, tmp_path / "out", 1)
    code, _, errors = program(second, *arguments)
    assert code == 1 and errors == [
        f"run: another run is at work in {tmp_path / 'out'}; wait for it, or choose another "
        "--output_dir"]
    assert process.poll() is None
    process.kill()
    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("limit", [400, 15_000, 40_000])
def test_a_full_disk_is_one_line_and_leaves_nothing_by_halves(done, flags, tmp_path, limit):
    # A limit on the size of files fails as a full disk does: in config.json, in the first
    # checkpoint, and in its weights.
    arguments = [*flags, "--seed=4", "--output_dir=out"]
    code, _, errors = program(
        tmp_path, *arguments,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert code == 1 and len(errors) <= 1, errors
    assert unfinished(tmp_path) == []
    assert not (tmp_path / "out" / "summary.json").exists()
    code, _, errors = program(tmp_path, *arguments)
    assert (code, errors) == (0, [])
    assert (tmp_path / "out" / "model" / "weights.npz").read_bytes() == (
        done[0] / "out" / "model" / "weights.npz").read_bytes()


@pytest.mark.slow
def test_another_seed_gives_other_numbers(done, flags, tmp_path):
    code, _, _ = program(tmp_path, *flags, "--output_dir=out", "--seed=5")
    assert code == 0
    one, other = rounds(done[0] / "out"), rounds(tmp_path / "out")
    assert one[0]["client_work/train/loss_largest"] != other[0]["client_work/train/loss_largest"]
    weights = [np.load(folder / "out" / "model" / "weights.npz")["0000"]
               for folder in (done[0], tmp_path)]
    assert not np.array_equal(*weights)


CALL = """
import contextlib, io, sys
from tff_programs import environment, flags
flags.flags.FLAGS(["x", *sys.argv[1:]])
sys.argv = ["x", *sys.argv[1:]]
from feast_tf import simulation
with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.redirect_stderr(io.StringIO()):
    found = simulation.run(flags.CONFIG.value, "out", runtime_name="tff_worker")
assert f"{found['population_accuracy']:.4f}" in text.getvalue()
sys.__stdout__.write("done")
"""


@pytest.mark.slow
def test_as_a_library_with_streams_that_are_no_files(flags, tmp_path):
    # As in a notebook; TFF's own runtime fails there.
    result = subprocess.run([sys.executable, "-c", CALL, *flags], cwd=tmp_path, env=ENVIRONMENT,
                            capture_output=True, text=True, timeout=180)
    assert (result.returncode, result.stdout) == (0, "done"), result.stderr
