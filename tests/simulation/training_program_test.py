"""Tests of feast_tf.simulation.training_program: real rounds of a tiny network, in this process."""

from __future__ import annotations

import asyncio
import collections
import csv
import dataclasses
import json
from pathlib import Path
import subprocess
import sys
import types

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from absl import logging

from feast_tf.routing import Routing
from feast_tf.serving import OperatingPoint
from feast_tf.simulation import Checkpoints, outputs, train
from feast_tf.simulation.training_program import (evaluate_anchors, round_metrics, run_round,
                                                  trained_weights)
from feast_tf.space import VariantCache


class Stop(BaseException):
    """What ends a run, as Ctrl-C would."""


class StopsAt(tff.program.ReleaseManager):
    """A release manager that ends the run at one round."""

    def __init__(self, round_num=None):
        self.round_num, self.rows = round_num, {}

    async def release(self, value, key):
        if key == self.round_num:
            raise Stop
        self.rows[key] = value


def start(tiny, folder, *, process=None, evaluator=None, before=None, after=None, **settings):
    """Trains in `folder`; `before` and `after` are release managers around metrics.csv's."""
    config = tiny.experiment.config.copy_and_resolve_references() if settings else None
    experiment = tiny.experiment
    if settings:
        config = type(config)({**config.to_dict(), **settings})
        experiment = dataclasses.replace(experiment, config=config)
    managers = [before, outputs.metrics_manager(folder / "metrics.csv"), after]
    return asyncio.run(train(experiment, process or tiny.process, evaluator or tiny.evaluator,
                             Checkpoints(folder / "checkpoints"),
                             [manager for manager in managers if manager]))


def rows(folder):
    with open(folder / "metrics.csv", newline="") as file:
        found = list(csv.DictReader(file))
    for row in found:
        assert float(row.pop("seconds")) > 0
    return found


def bits(weights):
    return [np.asarray(weight).tobytes() for weight in weights]


def best_weights(folder, state):
    return bits(Checkpoints(folder / "checkpoints").load_best(state.best_round))


@pytest.fixture(scope="module")
def unbroken(tiny, tmp_path_factory):
    """A run of four rounds without a break: its folder and last state."""
    folder = tmp_path_factory.mktemp("unbroken")
    return types.SimpleNamespace(folder=folder, state=start(tiny, folder, checkpoint_every=2))


def test_a_run_by_its_files(tiny, unbroken):
    state, table = unbroken.state, rows(unbroken.folder)
    assert state.round_num == 4 and state.process.client_work == 4
    assert [row["round_num"] for row in table] == ["1", "2", "3", "4"]
    cohorts = [tiny.experiment.cohort_ids(round_num) for round_num in range(4)]
    payload = tiny.experiment.routing.payload[tiny.experiment.levels]
    sent = [int(4 * payload[cohort].sum()) for cohort in cohorts]
    for direction in ("distributor/bytes_down", "aggregator/bytes_up"):
        assert [int(row[direction]) for row in table] == sent
    assert state.bytes_down == state.bytes_up == sum(sent)
    sizes = np.array([client.num_samples for client in tiny.experiment.clients])
    assert [int(row["client_work/train/examples"]) for row in table] == [
        sizes[cohort].sum() for cohort in cohorts]
    anchors = ["0.111M", "0.149M", "0.195M", "0.297M"]
    scores = [np.mean([float(row[f"validation/accuracy_{name}"]) for name in anchors])
              for row in table]
    assert state.best_score == pytest.approx(max(scores), abs=1e-12)
    assert state.best_round == 1 + int(np.argmax(scores))
    assert not any("finalizer" in name for name in table[0])
    initial = tiny.process.initialize().global_model_weights.trainable
    assert bits(trained_weights(state.process)) != bits(initial)


class StoppedProcess:
    """A process that ends the run instead of a round."""

    def __init__(self, process, round_num):
        self._process, self._left = process, round_num - 1

    def initialize(self):
        return self._process.initialize()

    def next(self, state, cohort):
        if not self._left:
            raise Stop
        self._left -= 1
        return self._process.next(state, cohort)


def stop_in_round(number):
    return lambda tiny, folder, patch: start(
        tiny, folder, checkpoint_every=2, process=StoppedProcess(tiny.process, number))


def stop_before_row(number):
    return lambda tiny, folder, patch: start(tiny, folder, checkpoint_every=2,
                                             before=StopsAt(number))


def stop_after_row(number):
    return lambda tiny, folder, patch: start(tiny, folder, checkpoint_every=2,
                                             after=StopsAt(number))


def stop_in_save(number):
    def stopped(tiny, folder, patch):
        saves, original = [], tf.saved_model.save

        def save(module, path, **options):
            saves.append(path)
            original(module, path, **options)
            if len(saves) == number:
                raise Stop

        patch.setattr(tf.saved_model, "save", save)
        start(tiny, folder, checkpoint_every=2)

    return stopped


STOPS = {
    "in round 3": [stop_in_round(3)],
    "before row 2": [stop_before_row(2)],
    "after the last row": [stop_after_row(4)],
    "in a save": [stop_in_save(1)],
    "three times": [stop_after_row(1), stop_after_row(3), stop_before_row(4)],
}


@pytest.mark.parametrize("stops", STOPS)
def test_a_resumed_run_equals_an_unbroken_one(tiny, unbroken, tmp_path, stops):
    for stop in STOPS[stops]:
        with pytest.raises(Stop), pytest.MonkeyPatch.context() as patch:
            stop(tiny, tmp_path, patch)
    state = start(tiny, tmp_path, checkpoint_every=2)
    assert bits(trained_weights(state.process)) == bits(trained_weights(unbroken.state.process))
    assert state[1:-1] == unbroken.state[1:-1]
    assert rows(tmp_path) == rows(unbroken.folder)
    assert best_weights(tmp_path, state) == best_weights(unbroken.folder, unbroken.state)


def test_a_run_goes_on_from_the_state_before_a_damaged_one(tiny, unbroken, tmp_path):
    with pytest.raises(Stop):
        start(tiny, tmp_path, checkpoint_every=1, after=StopsAt(4))
    (tmp_path / "checkpoints" / "round_3" / "saved_model.pb").unlink()
    stopped = StoppedProcess(tiny.process, 2)  # a single round is left if it starts at round 3
    with pytest.raises(Stop):
        start(tiny, tmp_path, checkpoint_every=1, process=stopped)
    assert [row["round_num"] for row in rows(tmp_path)] == ["1", "2", "3"]
    state = start(tiny, tmp_path, checkpoint_every=1)
    assert bits(trained_weights(state.process)) == bits(trained_weights(unbroken.state.process))
    assert rows(tmp_path) == rows(unbroken.folder)


def test_a_run_that_is_done_trains_nothing(tiny, unbroken):
    before = (unbroken.folder / "metrics.csv").read_bytes()
    state = start(tiny, unbroken.folder, checkpoint_every=2,
                  process=StoppedProcess(tiny.process, 1))
    assert state == unbroken.state._replace(process=state.process)
    assert bits(trained_weights(state.process)) == bits(trained_weights(unbroken.state.process))
    assert (unbroken.folder / "metrics.csv").read_bytes() == before


# --- validation


class StubEvaluator:
    """Gives every anchor of the k-th validation the k-th accuracy."""

    def __init__(self, accuracies):
        self.left, self.seen = list(accuracies), []

    def operating_points(self, weights, levels, images, labels, split):
        assert split == "validation" and len(images) == len(labels) == 120
        accuracy = self.left.pop(0)
        self.seen.append(bits(weights))
        return [OperatingPoint(None, 1000 * level, 1, accuracy, split) for level in levels]


def evaluation(**changes):
    return dict(every=1, anchors=(), batch_size=250, recalibrate=True, **changes)


def test_the_first_of_equally_good_rounds_is_the_best(tiny, tmp_path):
    evaluator = StubEvaluator([0.3, 0.7, 0.7, 0.5])
    state = start(tiny, tmp_path, evaluator=evaluator)
    assert (state.best_round, state.best_score) == (2, pytest.approx(0.7, abs=1e-15))
    assert best_weights(tmp_path, state) == evaluator.seen[1]
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("best_*")) == ["best_2.npz"]


def test_so_it_is_after_a_resume(tiny, tmp_path):
    # 0.7 is a little less in float32: a best score stored as one would be beaten by its own like.
    with pytest.raises(Stop):
        start(tiny, tmp_path, evaluator=StubEvaluator([0.3, 0.7, 0.7]), checkpoint_every=1,
              before=StopsAt(3))
    state = start(tiny, tmp_path, evaluator=StubEvaluator([0.7, 0.5]), checkpoint_every=1)
    assert state.best_round == 2


def test_nothing_learnt_at_all_is_still_a_best_round(tiny, tmp_path):
    state = start(tiny, tmp_path, evaluator=StubEvaluator([0.0] * 4))
    assert (state.best_round, state.best_score) == (1, 0.0)


def test_validation_comes_every_few_rounds_and_after_the_last(tiny, tmp_path):
    settings = tiny.experiment.config.to_dict()["evaluation"]
    evaluator, kept = StubEvaluator([0.4, 0.2]), StopsAt()
    state = start(tiny, tmp_path, evaluator=evaluator, after=kept, checkpoint_every=3,
                  evaluation={**settings, "every": 3})
    assert ["validation" in kept.rows[k] for k in (1, 2, 3, 4)] == [False, False, True, True]
    assert [row["validation/accuracy_0M"] for row in rows(tmp_path)] == ["", "", "0.4", "0.2"]
    assert state.best_round == 3 and not evaluator.left
    states = sorted(path.name for path in (tmp_path / "checkpoints").glob("round_*"))
    assert states == ["round_3", "round_4"]


def test_anchors_with_the_same_macs_all_count(tiny):
    spec = tiny.experiment.routing.cache.spec
    variants = [spec.variant(d=(1, 0), e=0.5, w=1.0), spec.variant(d=0, e=0.5, w=0.5),
                spec.variant(d=(1, 0), e=(0.5, 0.5), w=(1.0, 1.0, 0.5))]
    cache = VariantCache(spec, variants)
    cache.macs = np.array([111184, 195232, 195233])  # almost alike
    experiment = dataclasses.replace(tiny.experiment, routing=Routing(cache))

    class Stub:
        def operating_points(self, weights, levels, *_):
            return [OperatingPoint(None, int(cache.macs[level]), 1, (0.2, 0.4, 0.9)[level], "")
                    for level in levels]

    score, accuracies = evaluate_anchors(experiment, Stub(), [])
    assert score == 0.5
    assert accuracies == {"accuracy_0.111M": 0.2, "accuracy_0.195M": 0.4,
                          "accuracy_0.195M_variant_2": 0.9}


# --- rounds that go wrong


class SpoiltProcess:
    """The process, from weights with a NaN in a row of the head.

    The last row belongs to the full width, so clients of level 0 do not receive it.
    """

    def __init__(self, tiny, row):
        self._process, self._row, self.next = tiny.process, row, tiny.process.next
        self._head = tiny.experiment.routing.layout.head_kernel

    def initialize(self):
        state = self._process.initialize()
        weights = [np.array(weight) for weight in state.global_model_weights.trainable]
        weights[self._head][self._row] = np.nan
        return self._process.set_model_weights(
            state, tff.learning.models.ModelWeights(tuple(weights), ()))


@pytest.fixture
def warnings(monkeypatch):
    found = []
    monkeypatch.setattr(logging, "warning", lambda text, *args: found.append(text % args))
    return found


def test_a_round_without_a_finite_update_ends_the_run(tiny, tmp_path, warnings):
    process = SpoiltProcess(tiny, 0)
    for _ in range(2):  # and again when the run is resumed
        with pytest.raises(FloatingPointError) as error:
            start(tiny, tmp_path, process=process)
        assert str(error.value) == ("round 1: no client's update was finite; lower "
                                    "training.learning_rate or training.clip_norm")
    assert rows(tmp_path) == []
    assert asyncio.run(Checkpoints(tmp_path / "checkpoints").load_latest(None)) is None


def test_refused_clients_are_counted_and_the_round_goes_on(tiny, tmp_path, warnings):
    levels = tiny.experiment.levels
    cohorts = [tiny.experiment.cohort_ids(round_num) for round_num in range(30)]
    mixed = next(k for k, cohort in enumerate(cohorts)
                 if 0 < np.count_nonzero(levels[cohort]) < 3)
    process = SpoiltProcess(tiny, -1)
    state = start_state(process)._replace(round_num=mixed)
    refused = int(np.count_nonzero(levels[cohorts[mixed]]))
    after, row = run_round(tiny.experiment, process, state)
    assert warnings == [f"round {mixed + 1}: the updates of {refused} of 3 clients were not finite "
                        "and are left out"]
    assert row["aggregator"]["clients_refused"] == refused
    assert after.round_num == mixed + 1
    # What the healthy clients trained is finite, what nobody covers is as it was.
    head = tiny.experiment.routing.layout.head_kernel
    old, new = trained_weights(state.process)[head], trained_weights(after.process)[head]
    assert np.isfinite(new[:8]).all() and (new[:8] != old[:8]).any()
    assert new[8:].tobytes() == old[8:].tobytes()


def start_state(process):
    from feast_tf.simulation import ProgramState

    return ProgramState(process.initialize(), 0, -1, -1.0, 0, 0, 0.0)


def test_a_rounds_row():
    metrics = collections.OrderedDict(distributor={"bytes_down": 3}, finalizer=())
    row = round_metrics(metrics, 1.5)
    assert row == {"distributor": {"bytes_down": 3}, "seconds": 1.5}
    assert "finalizer" in metrics  # the process' own metrics are left alone


# --- memory

SIXTY_ROUNDS = """
import asyncio, dataclasses, gc, json, pathlib, sys
import numpy as np, psutil
from absl import logging
from configs import digits
from feast_tf import runtime, simulation
from feast_tf.algorithms import build_feast
from feast_tf.simulation import outputs
from feast_tf.training import local

class ChangingCohorts(simulation.Experiment):
    def cohort_ids(self, round_num):
        return np.sort(np.random.default_rng(round_num).choice(8, 2 + round_num % 7, replace=False))

class Watch:
    async def release(self, row, key):
        gc.collect()
        clients = int(row["aggregator"]["clients_with_data"])
        found.append([clients, len(traces), psutil.Process().memory_info().rss])

def traced_gradient(*args, **options):
    traces.append(1)
    return co_train(*args, **options)

found, traces = [], []
co_train, local.cotrain_gradient = local.cotrain_gradient, traced_gradient
folder, settings = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
config = digits.get_config("smoke")
for section in ("space", "population", "evaluation"):
    config[section].update({k: tuple(v) if isinstance(v, list) else v
                            for k, v in settings.pop(section).items()})
config.update(settings)
experiment = simulation.build_experiment(config)
experiment = ChangingCohorts(**{field.name: getattr(experiment, field.name)
                                for field in dataclasses.fields(experiment)})
runtime.use("in_process")
process = build_feast(experiment.routing, experiment.training, total_rounds=60)
evaluator = simulation.make_evaluator(experiment)
asyncio.run(simulation.train(
    experiment, process, evaluator, simulation.Checkpoints(folder / "checkpoints"),
    [outputs.metrics_manager(folder / "metrics.csv"), Watch()]))
runner = evaluator._runner
print(json.dumps([found, runner._record.experimental_get_tracing_count(),
                  runner._predict.experimental_get_tracing_count()]))
"""


@pytest.mark.slow
def test_sixty_rounds_of_changing_cohorts_neither_grow_nor_retrace(make_config, tmp_path):
    config = make_config(rounds=60, checkpoint_every=10).to_dict()
    config["evaluation"]["every"] = 10
    settings = {key: config[key] for key in ("rounds", "checkpoint_every", "cache", "image_size",
                                             "space", "population", "evaluation")}
    result = subprocess.run(
        [sys.executable, "-c", SIXTY_ROUNDS, str(tmp_path), json.dumps(settings)],
        cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    found, record_traces, predict_traces = json.loads(result.stdout)
    clients, traces, sizes = zip(*found)
    assert set(clients) == set(range(2, 9)) and len(clients) == 60
    assert set(traces) == {1} and record_traces == predict_traces == 1
    assert max(sizes[20:]) < 1.05 * sizes[19]
