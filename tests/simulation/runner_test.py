"""Tests of feast_tf.simulation.runner: whole runs of a tiny network, in this process."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import shutil

import numpy as np
import pytest
import tensorflow_federated as tff

from feast_tf.serving import OperatingPoint, load_supernet
from feast_tf.simulation import outputs, report, run, runner
from feast_tf.simulation.runner import describe

OUTPUTS = [".lock", "checkpoints", "clients.csv", "config.json", "logdir", "metrics.csv", "model",
           "operating_points.csv", "report.html", "summary.json"]
RESULTS = ["clients.csv", "model/cache.csv", "model/spec.json", "model/weights.npz",
           "operating_points.csv", "report.html", "summary.json"]


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def contents(folder):
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
            for path in folder.rglob("*") if path.is_file()}


def text_of(function, *args, **options):
    """What a call returns and prints, to a stream without a file descriptor, as in notebooks."""
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        return function(*args, **options), stream.getvalue()


@pytest.fixture(scope="module")
def settings(make_config):
    return make_config(rounds=3)


@pytest.fixture(scope="module")
def done(settings, tmp_path_factory):
    """(folder, summary, printed text) of a finished run of three rounds."""
    folder = tmp_path_factory.mktemp("done") / "run"
    return (folder, *text_of(run, settings, folder))


@pytest.fixture
def copy(done, tmp_path):
    return shutil.copytree(done[0], tmp_path / "copy")


def test_the_files_of_a_run(done):
    folder, summary, _ = done
    assert sorted(os.listdir(folder)) == OUTPUTS
    assert sorted(os.listdir(folder / "model")) == ["cache.csv", "spec.json", "weights.npz"]
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert set(summary) >= {"population_accuracy", "rounds", "bytes_down", "bytes_up", "seconds"}
    assert any(name.startswith("events.out") for name in os.listdir(folder / "logdir"))


def test_the_figures_of_a_run_agree(done, tiny):
    folder, summary, printed = done
    cache, levels = tiny.experiment.routing.cache, tiny.experiment.levels
    points = read(folder / "operating_points.csv")
    assert [(row["variant"], row["macs"], row["params"]) for row in points] == 2 * [
        (str(v), str(m), str(p)) for v, m, p in zip(cache.variants, cache.macs, cache.params)]
    assert [row["split"] for row in points] == ["test"] * 4 + ["validation"] * 4
    accuracies = np.array([float(row["accuracy"]) for row in points[:4]])
    assert summary["population_accuracy"] == pytest.approx(accuracies[levels].mean(), abs=1e-6)
    clients = read(folder / "clients.csv")
    assert [float(row["accuracy"]) for row in clients] == accuracies[levels].tolist()

    rounds = read(folder / "metrics.csv")
    assert [row["round_num"] for row in rounds] == ["1", "2", "3"] and summary["rounds"] == 3
    for key, column in (("bytes_down", "distributor/bytes_down"),
                        ("bytes_up", "aggregator/bytes_up")):
        assert summary[key] == sum(int(row[column]) for row in rounds)
    assert summary["seconds"] == pytest.approx(sum(float(r["seconds"]) for r in rounds), abs=1e-3)
    # The best round's validation accuracies are those of the saved weights.
    best = rounds[summary["best_round"] - 1]
    assert [float(row["accuracy"]) for row in points[4:]] == pytest.approx(
        [float(value) for name, value in best.items() if name.startswith("validation/")], abs=1e-6)
    assert f"serving: {summary['population_accuracy']:.4f}" in printed
    assert f"report: {folder / 'report.html'}" in printed.splitlines()[-1]
    assert printed.startswith(describe(tiny.experiment))


def test_the_saved_model_is_the_best_rounds(done, tiny):
    folder, summary, _ = done
    saved = load_supernet(folder / "model")
    with np.load(folder / "checkpoints" / f"best_{summary['best_round']}.npz") as best:
        assert [w.tobytes() for w in saved.weights] == [best[k].tobytes() for k in sorted(best)]
    assert saved.cache.variants == tiny.experiment.routing.cache.variants
    assert saved.mean == tiny.experiment.training.mean and len(saved.classes) == 10
    points = tiny.evaluator.operating_points(
        saved.weights, [3], tiny.experiment.dataset.test.images,
        tiny.experiment.dataset.test.labels, "test")
    assert f"{points[0].accuracy:.6f}" == read(folder / "operating_points.csv")[3]["accuracy"]


def test_a_finished_run_does_nothing(done, settings, monkeypatch):
    folder, summary, _ = done
    monkeypatch.setattr(runner, "build_experiment", None)
    before = contents(folder)
    again, printed = text_of(run, settings, folder)
    assert again == summary and contents(folder) == before
    assert printed == (f"{folder}: complete after 3 rounds, population-averaged test accuracy "
                       f"{summary['population_accuracy']:.4f}; nothing to do\n")


def test_a_run_that_was_killed_before_its_results_only_measures(copy, settings, monkeypatch):
    before = contents(copy)
    for name in RESULTS:
        (copy / name).unlink()
    # Half of an earlier try.
    (copy / "model" / ".weights.npz.4242").write_bytes(b"half")
    monkeypatch.setattr(tff.learning.templates.LearningProcess, "next", None)
    text_of(run, settings, copy)
    after = contents(copy)
    assert {name for name in after if "events" not in name} == {
        name for name in before if "events" not in name}
    assert [name for name in RESULTS if after[name][1] != before[name][1]] == []
    assert after["metrics.csv"] == before["metrics.csv"]


def test_other_settings_are_refused_before_data_are_read(done, make_config, monkeypatch):
    folder, before = done[0], contents(done[0])
    monkeypatch.setattr(runner, "build_experiment", None)
    for rounds in (3, 4):
        with pytest.raises(ValueError, match="other settings"):
            run(make_config(rounds=rounds, seed=1), folder)
    assert contents(folder) == before


def test_a_dry_run_writes_nothing(done, settings, tmp_path, tiny):
    for folder in (tmp_path / "new", done[0]):
        before = contents(done[0])
        result, printed = text_of(run, settings, folder, dry_run=True)
        assert result is None and printed == describe(tiny.experiment) + "\n"
        assert contents(done[0]) == before and not (tmp_path / "new").exists()


def test_what_will_be_run_is_said_in_three_lines(tiny):
    data, network, clients = describe(tiny.experiment).splitlines()
    assert data == ("data: digits, 1,120 train, 120 validation, 160 server, 397 test pictures of "
                    "8x8, 10 classes")
    assert network == "network: 4 cached variants of 0.1112M to 0.2966M MACs"
    sizes = [client.num_samples for client in tiny.experiment.clients]
    payload = tiny.experiment.routing.payload[tiny.experiment.levels].mean() / 1e6
    assert clients == (
        f"clients: 8 on 3 levels, {min(sizes)} to {max(sizes)} pictures each; 3 a round, mean "
        f"payload {payload:.4g}M of 0.0112M parameters")


def test_a_folder_is_one_runs_at_a_time(settings, tmp_path):
    with outputs.claimed(tmp_path, settings):
        with pytest.raises(ValueError, match="another run is at work in"):
            text_of(run, settings, tmp_path)


@pytest.mark.parametrize("options", [{"runtime_name": "tff_workers"}, {"workers": ["host:1"]},
                                     {"runtime_name": "tff_worker", "workers": ["host:1"]}])
def test_addresses_go_with_the_runtime_of_several_workers(settings, tmp_path, options):
    with pytest.raises(ValueError, match=r"\(--workers\) go with the runtime tff_workers"):
        run(settings, tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_lanes_go_with_the_runtime_in_process(settings, tmp_path):
    with pytest.raises(ValueError, match=r"\(--lanes\) go with the runtime in_process, not tff_wor"):
        run(settings, tmp_path / "new", runtime_name="tff_worker", lanes=2)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("module, name", [(runner, "save_supernet"), (report, "write_report")])
def test_a_run_whose_results_cannot_be_written_is_not_finished(copy, settings, tiny, monkeypatch,
                                                               module, name):
    (copy / "summary.json").unlink()
    points = [OperatingPoint(variant, int(macs), 1, 0.5, "test") for variant, macs in zip(
        tiny.experiment.routing.cache.variants, tiny.experiment.routing.cache.macs)]

    def full_disk(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(runner, "measure", lambda *_: (points, []))
    monkeypatch.setattr(module, name, full_disk)
    with pytest.raises(OSError, match="No space left"):
        text_of(run, settings, copy)
    assert outputs.read_summary(copy) is None


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["min", "max", "min_max", "min_max_kd", "full"])
def test_every_training_rule_runs(make_config, tmp_path, rule):
    summary, _ = text_of(run, make_config(rounds=1, **{"training.rule": rule}), tmp_path)
    assert summary["rule"] == rule and summary["rounds"] == 1
    (row,) = read(tmp_path / "metrics.csv")
    losses = {name.rpartition("_")[2] for name in row if "/loss_" in name}
    assert losses == {"min": {"minimum"}, "max": {"largest"},
                      "full": {"largest", "minimum", "random"}}.get(rule, {"largest", "minimum"})
    assert any("distillation" in name for name in row) == (rule in ("min_max_kd", "full"))
    assert all(np.isfinite(float(value)) for value in row.values())
