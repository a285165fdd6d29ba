"""Tests of feast_tf.simulation.stored_run."""

from __future__ import annotations

import asyncio
import json
import shutil

import numpy as np
import pytest

from feast_tf.serving import SavedSupernet, save_supernet, save_weights
from feast_tf.simulation import Checkpoints, ProgramState, load_run, outputs, stored_run
from feast_tf.supernet import initial_weights


def random_weights(tiny, seed):
    return [weight.numpy() for weight in initial_weights(tiny.experiment.routing.layout, seed)]


def equal(one, other):
    return len(one) == len(other) and all(map(np.array_equal, one, other))


@pytest.fixture
def folder(tmp_path, make_config):
    """The folder of a run that was stopped before its first checkpoint."""
    with outputs.claimed(tmp_path / "run", make_config()):
        pass
    return tmp_path / "run"


@pytest.fixture
def finished(folder, tiny):
    """The folder of a finished run whose weights are of seed 2."""
    experiment = tiny.experiment
    save_supernet(folder / "model", SavedSupernet(
        experiment.routing.cache, tuple(random_weights(tiny, 2)), experiment.dataset.classes,
        experiment.training.mean, experiment.training.std))
    outputs.write_summary(folder, {"rounds": 4, "best_round": 3})
    return folder


def test_a_finished_run_is_its_model(finished, tiny):
    save_weights(finished / "checkpoints" / "best_3.npz", random_weights(tiny, 5))  # is not read
    run = load_run(finished)
    assert equal(run.weights, random_weights(tiny, 2))
    assert (run.complete, run.rounds) == (True, 3)
    assert run.source == "the best of 4 rounds in validation, round 3"
    np.testing.assert_array_equal(run.experiment.levels, tiny.experiment.levels)
    np.testing.assert_array_equal(run.experiment.dataset.server.images,
                                  tiny.experiment.dataset.server.images)
    assert run.experiment.config.training == tiny.experiment.config.training


def test_a_finished_run_needs_no_cache_file(finished, tiny_cache, tmp_path, tiny):
    config = json.loads((finished / "config.json").read_text())
    config["cache"] = str(tmp_path / "gone.csv")
    (finished / "config.json").write_text(json.dumps(config))
    np.testing.assert_array_equal(load_run(finished).experiment.routing.cache.dims,
                                  tiny.experiment.routing.cache.dims)


def test_an_interrupted_run_is_its_best_round_so_far(folder, tiny):
    for best, seed in ((2, 3), (10, 4), (9, 5)):
        save_weights(folder / "checkpoints" / f"best_{best}.npz", random_weights(tiny, seed))
    (folder / "checkpoints" / "best_x.npz").write_text("")
    run = load_run(folder)
    assert equal(run.weights, random_weights(tiny, 4))
    assert (run.complete, run.rounds) == (False, 10)
    assert run.source == "the best in validation so far, round 10 of 4"


def test_before_a_validation_it_is_the_newest_checkpoint(folder, tiny):
    state = tiny.process.initialize()
    weights = state.global_model_weights
    state = state._replace(global_model_weights=weights._replace(
        trainable=type(weights.trainable)(random_weights(tiny, 6))))
    checkpoints = Checkpoints(folder / "checkpoints")
    for round_num in (1, 2):
        asyncio.run(checkpoints.save(ProgramState(state, round_num, -1, -1.0, 0, 0, 0.0)))
    run = load_run(folder)
    assert equal(run.weights, random_weights(tiny, 6))
    assert (run.complete, run.rounds) == (False, 2)
    assert run.source == "the newest checkpoint, round 2 of 4"


def test_reading_changes_nothing(finished, folder, tiny):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    load_run(finished)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def message(folder):
    with pytest.raises(ValueError) as error:
        load_run(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_is_no_run(tmp_path, folder):
    assert message(tmp_path / "none") == (
        f"{tmp_path / 'none'} is not the folder of a run: it has no config.json")
    assert message(folder) == f"{folder} has no checkpoint yet; the run saves one every 10 rounds"
    (folder / "config.json").write_text("{}")
    assert message(folder).startswith(f"{folder} was not written by this version of the program (")
    for text in ("{", "[1]", "\x00"):
        (folder / "config.json").write_text(text)
        assert message(folder).startswith(f"{folder / 'config.json'} is damaged (")


def test_damaged_files_are_named(finished, tmp_path):
    (finished / "model" / "weights.npz").write_bytes(b"PK")
    assert message(finished).startswith(f"{finished / 'model' / 'weights.npz'} is damaged (")
    shutil.rmtree(finished / "model")
    assert "spec.json is missing" in message(finished)
    outputs.write_summary(finished, {})
    shutil.rmtree(finished / "checkpoints", ignore_errors=True)
    assert "spec.json is missing" in message(finished)


def test_a_checkpoint_that_cannot_be_read(folder, tiny, monkeypatch):
    monkeypatch.setattr(stored_run, "build_feast", lambda *_, **__: tiny.process)  # traced already
    (folder / "checkpoints" / "round_3").mkdir(parents=True)
    assert message(folder) == f"{folder / 'checkpoints'} has no checkpoint that can be read"


def test_another_data_set_than_the_models_is_refused(finished):
    fields = json.loads((finished / "model" / "spec.json").read_text())
    fields["classes"] = list("abcdefghij")
    (finished / "model" / "spec.json").write_text(json.dumps(fields))
    assert message(finished) == (
        f"{finished / 'model' / 'spec.json'} is of another space, or of other classes, than "
        f"{finished / 'config.json'} and its data set")
