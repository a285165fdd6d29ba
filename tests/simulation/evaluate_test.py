"""Tests of feast_tf.simulation.evaluate."""

from __future__ import annotations

import csv
import html
import json
import os
import re

import numpy as np
import pytest

from feast_tf.serving import (OperatingPoint, PostHocGap, Reliability, SavedSupernet,
                              save_supernet)
from feast_tf.simulation import (Evaluation, MeasuredPoint, StoredRun, evaluate, evaluate_run,
                                 outputs)


def random_weights(tiny):
    rng = np.random.default_rng(2)
    return tuple(np.float32((p.kind == "gamma") + rng.normal(0, 0.5, p.shape))
                 for p in tiny.experiment.routing.layout.parameters)


@pytest.fixture
def run(tmp_path, make_config, tiny):
    """The folder of a finished run."""
    folder, experiment = tmp_path / "run", tiny.experiment
    with outputs.claimed(folder, make_config()):
        pass
    save_supernet(folder / "model", SavedSupernet(
        experiment.routing.cache, random_weights(tiny), experiment.dataset.classes,
        experiment.training.mean, experiment.training.std))
    outputs.write_summary(folder, {"rounds": 4, "best_round": 3})
    return folder


@pytest.fixture
def made(tiny):
    """(run, evaluation) with two cached variants and one uncached, by hand."""
    variants = tiny.experiment.routing.cache.variants
    confusions = np.zeros([3, 10, 10], int)
    confusions[0, :3, :3] = [[4, 1, 0], [3, 1, 1], [0, 0, 5]]
    confusions[1, :3, :3] = [[5, 0, 0], [0, 5, 0], [1, 0, 4]]
    confusions[2, :3, :3] = [[5, 0, 0], [0, 2, 3], [0, 0, 5]]
    bins = [Reliability(np.array([0, 15]), np.array([0, confidence]), np.array([0, accuracy]))
            for confidence, accuracy in ((0.8, 10 / 15), (0.9, 14 / 15), (0.85, 12 / 15))]
    points = [MeasuredPoint(OperatingPoint(variant, macs, params, accuracy, "test"), found,
                            confusion, clients)
              for variant, macs, params, accuracy, found, confusion, clients in zip(
                  variants, (1_000_000, 2_000_000, 1_500_000), (1000, 2000, 1800),
                  (10 / 15, 14 / 15, 12 / 15), bins, confusions, (5, 3, None))]
    gap = PostHocGap(np.array([0.8125]), np.array([-0.0125]))
    return (StoredRun(tiny.experiment, (), 7, True, "the seventh round"),
            Evaluation("test", tuple(points[:2]), (points[2],), gap, "random", 11, 0.7654321))


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_json_by_hand(made):
    found = evaluate.to_json(*made)
    first, second, third = found.pop("points")
    assert found == {
        "dataset": "digits", "rule": "full", "seed": 0, "complete": True, "rounds": 7,
        "weights": "the seventh round", "split": "test", "pictures": 15, "recalibrated": True,
        "population_accuracy": 0.7654321, "post_hoc": {
            "variants": 1, "draw": "random", "seed": 11, "mean_absolute_gap": 0.0125,
            "mean_signed_gap": -0.0125}}
    assert (first["cached"], first["clients"], third["cached"], third["clients"]) == (
        True, 5, False, None)
    assert first["ece"] == pytest.approx(0.8 - 10 / 15)
    assert first["reliability"]["count"] == [0, 15]
    assert first["worst_classes"][:2] == [
        {"class": "1", "pictures": 5, "accuracy": 0.2, "taken_for": {"0": 0.6, "2": 0.2}},
        {"class": "0", "pictures": 5, "accuracy": 0.8, "taken_for": {"1": 0.2}}]
    assert "gap" not in second and (third["curve_accuracy"], third["gap"]) == (0.8125, -0.0125)
    json.dumps(found)


def test_tables_by_hand(made, tmp_path):
    evaluate._write_tables(tmp_path, *made)
    points, classes = read(tmp_path / "operating_points.csv"), read(tmp_path / "classes.csv")
    assert [list(row.values())[1:] for row in points] == [
        ["1000000", "1000", "0.666667", "test", "5", "0.133333", "", ""],
        ["2000000", "2000", "0.933333", "test", "3", "0.033333", "", ""],
        ["1500000", "1800", "0.800000", "test", "", "0.050000", "0.812500", "-0.012500"]]
    assert list(classes[0].values())[1:] == ["1000000", "1", "5", "0.200000", "0 0.60, 2 0.20"]
    assert list(classes[3].values())[1:] == ["2000000", "2", "5", "0.800000", "0 0.20"]


def test_page_by_hand(made):
    page = html.unescape(evaluate._page(*made).decode())
    rows = [re.findall("<t[dh]>(.*?)</t[dh]>", row) for row in re.findall("<tr>(.*?)</tr>", page)]
    variants = [str(m.point.variant) for m in (*made[1].cached, *made[1].uncached)]
    assert [variants[0], "1", "1,000", "5", "0.6667", "0.1333", ""] in rows
    assert [variants[2], "1.5", "1,800", "uncached", "0.8000", "0.0500", "-0.0125"] in rows
    assert ["1", "5", "0.2000", "0 0.60, 2 0.20"] in rows
    for text in ("the seventh round", "largest-affordable serving: 0.7654", "0.0125 mean absolute",
                 "worst classes of the smallest variant: 1 0.20 (taken for 0 0.60, 2 0.20); 0 0.80",
                 "worst classes of the largest variant: 2 0.80 (taken for 0 0.20); 0 1.00; 1 1.00",
                 "cached variants", "uncached variants"):
        assert text in page, text
    assert page.count("<svg") == 2


def test_an_interrupted_run_is_said_to_be_one(made):
    stored, evaluation = made
    stored = StoredRun(stored.experiment, (), 7, False, "so far")
    assert "the run is NOT COMPLETE; so far" in evaluate._page(stored, evaluation).decode()
    assert evaluate.to_json(stored, evaluation)["complete"] is False


def test_a_finished_run(run, tiny, capsys):
    test = tiny.experiment.dataset.test
    points = tiny.evaluator.operating_points(random_weights(tiny), range(4), test.images,
                                             test.labels, "test")
    outputs.write_operating_points(run, points)
    found = evaluate_run(run, uncached=2)
    folder = run / "evaluation"
    assert sorted(os.listdir(folder)) == ["classes.csv", "evaluation.html", "evaluation.json",
                                          "operating_points.csv"]
    columns = ("variant", "macs", "params", "accuracy", "split")
    rows = read(folder / "operating_points.csv")
    assert [[row[name] for name in columns] for row in rows[:4]] == [
        [row[name] for name in columns] for row in read(run / "operating_points.csv")]
    assert len(rows) == 6 and rows[4]["variant"] == str(found.uncached[0].point.variant)
    content = json.loads((folder / "evaluation.json").read_text())
    assert content["population_accuracy"] == np.mean(
        [points[level].accuracy for level in tiny.experiment.levels])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"{run}: the best of 4 rounds in validation, round 3"
    assert len(printed) == 1 + 1 + 6 + 1 + 1 + 2 + 1
    assert printed[2].split()[-4:] == [
        f"{points[0].params:,}", str(list(tiny.experiment.levels).count(0)),
        f"{points[0].accuracy:.4f}", f"{found.cached[0].reliability.error:.4f}"]
    assert printed[-1] == f"report: {folder / 'evaluation.html'}"


def test_the_same_command_gives_the_same_bytes_and_cleans_up(run, tmp_path, monkeypatch, tiny):
    monkeypatch.setattr("feast_tf.simulation.measured.make_evaluator", lambda _: tiny.evaluator)
    one, other = tmp_path / "one", tmp_path / "other"
    evaluate_run(run, uncached=2, output_dir=one)
    other.mkdir()
    (other / ".classes.csv.123").write_text("half")  # of an evaluation that was killed
    (other / "evaluation.json").write_text("of an earlier evaluation")
    evaluate_run(run, uncached=2, output_dir=other)
    assert {path.name: path.read_bytes() for path in one.iterdir()} == {
        path.name: path.read_bytes() for path in other.iterdir()}


def test_what_fails_leaves_no_whole_evaluation(run, monkeypatch, tiny):
    monkeypatch.setattr("feast_tf.simulation.measured.make_evaluator", lambda _: tiny.evaluator)
    evaluate_run(run)

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(evaluate, "_page", full_disk)
    with pytest.raises(OSError, match="No space left"):
        evaluate_run(run)
    assert sorted(os.listdir(run / "evaluation")) == ["classes.csv", "evaluation.html",
                                                      "operating_points.csv"]


def test_a_file_is_no_folder(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file; --output_dir must be a folder"):
        evaluate_run(run, output_dir=tmp_path / "file")
