"""Tests of feast_tf.simulation.export: one run exported in this process, mistakes, full disks."""

from __future__ import annotations

import errno
import json
import os
import shutil

import numpy as np
import pytest
import tensorflow as tf

from feast_tf.routing import Routing
from feast_tf.serving import ExportRequest, ExportSettings, from_vector, load_supernet
from feast_tf.serving import export as export_module
from feast_tf.simulation import export, export_run

FAST = ExportSettings(formats=("tflite", "savedmodel"), test_pictures=5)
SMALLEST = ExportRequest(levels=(0,))
FILES = ["digits_0.162976M.json", "digits_0.162976M.tflite", "digits_0.162976M_savedmodel",
         "export.html", "export.json"]


@pytest.fixture(scope="module")
def done(trained_run, tmp_path_factory):
    """(folder, records) of the smallest network's export."""
    folder = tmp_path_factory.mktemp("done") / "new" / "export"
    return folder, export_run(trained_run, SMALLEST, FAST, output_dir=folder)


@pytest.fixture
def run(trained_run, tmp_path):
    """A copy of the run, to spoil."""
    return shutil.copytree(trained_run, tmp_path / "run")


def content(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*") if path.is_file()}


def test_the_files_and_their_records(done):
    folder, records = done
    assert sorted(os.listdir(folder)) == FILES
    found = json.loads((folder / "export.json").read_text())
    assert [record["path"] for record in found] == FILES[1:3] == [r.path for r in records]
    for record in found:
        assert {"format", "macs", "params", "bytes", "max_logit_difference", "accuracy",
                "keras_accuracy", "latency_ms_median", "variant", "latency_ms_p90", "threads",
                "peak_memory_bytes", "path", "sha256"} <= set(record)
        assert record["macs"] == 162976 and record["test_pictures"] == 5
    page = (folder / "export.html").read_text()
    assert page.count("<svg ") == 2 and "level 0 of 0..3" in page
    assert "digits_0.162976M.tflite" in page


def test_the_table_is_printed_and_other_files_stay(trained_run, done, capsys):
    folder, _ = done
    (folder / "mine.txt").write_text("stays")
    # What an export that was killed left; no process has so large a number.
    (folder / ".export.99999999").mkdir()
    (folder / ".export.99999999" / "half").write_text("x")
    before = content(folder)
    export_run(trained_run, SMALLEST, FAST, output_dir=folder)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ("file format M MACs params bytes accuracy of Keras logits differ "
                                  "ms median ms p90 peak MB").split()
    assert printed[1].split()[:5] == [FILES[1], "tflite", "0.163", "3,602",
                                      f"{len(before[FILES[1]]):,}"]
    assert printed[3].startswith(f"files: {folder}, records: {folder / 'export.json'}")
    after = content(folder)
    assert ".export.99999999/half" not in after and after["mine.txt"] == b"stays"
    assert after[FILES[1]] == before[FILES[1]]
    (folder / "mine.txt").unlink()


def test_the_default_folder_is_in_the_run(run):
    export_run(run, ExportRequest(variants=("d=0;e=1;w=0.5,1,0.5",)),
               ExportSettings(formats=("tflite",), test_pictures=5))
    record, = json.loads((run / "export" / "export.json").read_text())
    assert record["level"] is None and record["variant"] == "d=0,0 e=1,1 w=0.5,1,0.5"
    assert (run / "export" / record["path"]).is_file()


def test_a_file_that_trains(trained_run, tmp_path):
    export_run(trained_run, SMALLEST, FAST, trainable=True, output_dir=tmp_path / "new")
    assert sorted(os.listdir(tmp_path / "new")) == [*FILES, "level_0_train.tflite"]
    interpreter = tf.lite.Interpreter(str(tmp_path / "new" / "level_0_train.tflite"))
    weights = interpreter.get_signature_runner("get_weights")()["weights"]
    saved = load_supernet(trained_run / "model")
    slices = Routing(saved.cache).slices
    for ours, theirs in zip(from_vector(slices, 0, weights), slices.cut(saved.weights, 0)):
        np.testing.assert_array_equal(ours, theirs)


def test_only_cached_networks_have_clients_that_train_them(trained_run, tmp_path):
    request = ExportRequest(variants=("d=0;e=1;w=0.5,1,0.5",))
    with pytest.raises(ValueError, match="is not in the run's cache, so no client trains it"):
        export_run(trained_run, request, FAST, trainable=True, output_dir=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_size_in_bytes_is_tried_with_files(trained_run, done, tmp_path):
    # What the smallest needs is too little for the second.
    records = export_run(trained_run, ExportRequest(bytes=done[1][0].bytes + 10), FAST,
                         output_dir=tmp_path)
    assert [record.level for record in records] == [0, 0]
    assert records[0].bytes <= done[1][0].bytes + 10
    assert f"within {done[1][0].bytes + 10:,} bytes" in records[0].reason
    assert sorted(os.listdir(tmp_path)) == FILES  # and no trial


def test_a_file_beyond_its_bound_is_named_after_all_is_written(trained_run, tmp_path, monkeypatch):
    bad = export_module.Format("_fp16.tflite", "float16", 2, export_module.check.Bound(1e-9, 0.0))
    monkeypatch.setitem(export_module.FORMATS, "tflite_fp16", bad)
    settings = ExportSettings(formats=("tflite_fp16",), test_pictures=5)
    with pytest.raises(ValueError, match="^digits_0.162976M_fp16.tflite: logits differ by "):
        export_run(trained_run, SMALLEST, settings, output_dir=tmp_path / "out")
    record, = json.loads((tmp_path / "out" / "export.json").read_text())
    assert record["problem"].startswith("logits differ by ")
    assert (tmp_path / "out" / record["path"]).is_file()


def unfinished(run):
    (run / "summary.json").unlink()


def no_model(run):
    shutil.rmtree(run / "model")


def other_pictures(run):
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "seed": 1}))


MISTAKES = {
    "no folder": (shutil.rmtree, SMALLEST, "there is no run .*run$"),
    "no run": (lambda run: (run / "config.json").unlink(), SMALLEST, "has no config.json"),
    "unfinished": (unfinished, SMALLEST, "run is not finished: it has no summary.json"),
    "no model": (no_model, SMALLEST, "spec.json is missing: not the model folder"),
    "other pictures": (other_pictures, SMALLEST, "the pictures of digits are not those that the "
                       "run was trained on"),
    "too small": (None, ExportRequest(budgets=(1000.0,)), "no network keeps 1,000 MACs: the "
                  "smallest cached one has 162,976, the smallest in the cache's range"),
    "no such level": (None, ExportRequest(levels=(4,)), "level 4 is not in the cache"),
    "foreign": (None, ExportRequest(variants=("d=7;e=1;w=1",)), r"d\[0\] = 7 is not in the space"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(run, tmp_path, mistake):
    spoil, request, message = MISTAKES[mistake]
    if spoil:
        spoil(run)
    with pytest.raises(ValueError, match=message) as error:
        export_run(run, request, FAST, output_dir=tmp_path / "deep" / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "deep" / "out").exists() and not (run / "export").exists()


def test_a_data_set_that_is_gone(run, tmp_path):
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "dataset": "cifar10"}))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        export_run(run, SMALLEST, FAST, output_dir=tmp_path / "out", data_dir=tmp_path / "nowhere")
    assert not (tmp_path / "out").exists()


def test_a_file_where_the_folder_should_be(trained_run, tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match="out is a file; --output_dir must be a folder"):
        export_run(trained_run, SMALLEST, FAST, output_dir=tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("file_number", [0, 1, 2])
def test_a_full_disk_leaves_what_was_there(trained_run, done, monkeypatch, file_number):
    folder, calls = done[0], []
    before = content(folder)

    def full_disk(descriptor):
        calls.append(descriptor)
        if len(calls) > file_number:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    settings = ExportSettings(formats=("tflite",), test_pictures=5)
    with pytest.raises(OSError, match="No space left"):
        export_run(trained_run, SMALLEST, settings, output_dir=folder)
    assert content(folder) == before


def test_a_folder_is_moved_only_when_whole(tmp_path):
    with pytest.raises(KeyError):
        with export._staged(tmp_path / "a" / "b") as stage:
            (stage / "one").write_text("1")
            raise KeyError
    assert not (tmp_path / "a" / "b").exists()
    with export._staged(tmp_path / "a" / "b") as stage:
        assert os.listdir(tmp_path / "a" / "b") == [f".export.{os.getpid()}"]
        (stage / "one").write_text("1")
        (stage / "folder").mkdir()
        (stage / "folder" / "two").write_text("2")
    with export._staged(tmp_path / "a" / "b") as stage:
        (stage / "folder").mkdir()
        (stage / "folder" / "three").write_text("3")
    assert content(tmp_path / "a" / "b") == {"one": b"1", "folder/three": b"3"}
