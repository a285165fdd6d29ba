"""Tests of tff_programs.export, as a user runs it."""

from __future__ import annotations

import json
import os
from pathlib import Path
import resource
import subprocess
import sys
import time

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
# Without what the tests themselves set for TensorFlow.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
ENVIRONMENT["PYTHONPATH"] = str(ROOT)


def start(folder, *arguments, **options):
    """Starts the program with its messages in files."""
    return subprocess.Popen(
        [sys.executable, "-m", "tff_programs.export", *arguments], cwd=folder, env=ENVIRONMENT,
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


def program(folder, *arguments, **options):
    return finish(start(folder, *arguments, **options), folder)


def test_networks_for_two_budgets(trained_run, tmp_path):
    code, printed, errors = program(
        tmp_path, f"--run={trained_run}", "--budget=2e5", "--budgets=800000", "--output_dir=out",
        "--formats=tflite_int8", "--batch=dynamic", "--int8_input=float32", "--license=MIT")
    assert (code, errors) == (0, [])
    records = json.loads((tmp_path / "out" / "export.json").read_text())
    assert [(record["macs"], record["format"]) for record in records] == [
        (macs, "tflite_int8") for macs in (162976, 724208)]
    assert json.loads((tmp_path / "out" / "digits_0.724208M.json").read_text())["license"] == "MIT"
    assert [line.split()[0] for line in printed.splitlines()] == [
        "file", *(record["path"] for record in records), "files:"]
    assert "exporting d=1,0 e=1,1 w=1,1,1: largest cached within 800,000 MACs" in (
        tmp_path / "stderr").read_text()


@pytest.mark.parametrize("arguments, message", [
    (["--budget=1000", "--formats=tflite"],
     "export: no network keeps 1,000 MACs: the smallest cached one has "),
    pytest.param(["--levels=0,b"], "export: --levels must be a list of numbers: ",
                 marks=pytest.mark.slow)])
def test_a_mistake_is_one_line(trained_run, tmp_path, arguments, message):
    code, printed, errors = program(tmp_path, f"--run={trained_run}", "--output_dir=out",
                                    *arguments)
    assert code == 1 and printed == "" and len(errors) == 1 and errors[0].startswith(message)
    assert sorted(os.listdir(tmp_path)) == ["stderr", "stdout"]


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_leaves_nothing(trained_run, tmp_path):
    # A limit on the size of files fails as a full disk does: here in Keras' file, which other code
    # than ours writes.
    limit = 60_000
    code, printed, errors = program(
        tmp_path, f"--run={trained_run}", "--levels=0", "--formats=tflite_int8,keras",
        "--test_pictures=100", "--output_dir=out",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert code == 1 and printed == "" and len(errors) == 1, errors
    assert errors[0].startswith("export: ")
    assert sorted(os.listdir(tmp_path)) == ["stderr", "stdout"]


@pytest.mark.slow
def test_a_killed_export_leaves_no_process_and_no_file(trained_run, tmp_path):
    process = start(tmp_path, f"--run={trained_run}", "--formats=tflite", "--test_pictures=5",
                    "--output_dir=out")
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("out/.export.*/*.tflite")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.3)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    assert finish(process, tmp_path, 60)[::2] == (-9, [])
    # The process that others are forked from imports TensorFlow before it looks for its parent.
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    assert [path.name for path in (tmp_path / "out").iterdir()] == [f".export.{process.pid}"]
