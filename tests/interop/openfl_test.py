"""Tests of feast_tf.interop.openfl: its vectors by hand, and rounds of OpenFL's own components."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("openfl", reason="OpenFL has an environment of its own: make test-modern")

from openfl.component import Aggregator, Collaborator
from openfl.component.aggregator.straggler_handling import PercentagePolicy, WaitForAllPolicy
from openfl.component.assigner import RandomGroupedAssigner
from openfl.utilities import LocalTensor

from feast_tf.datasets import Split
from feast_tf.interop.openfl import FeastTaskRunner, HoldersMean, LevelVectors, PictureLoader
from feast_tf.routing import Routing, SliceMap
from feast_tf.space import SupernetSpec, VariantCache
from feast_tf.supernet import initial_weights
from feast_tf.training import SGD, Augmentation, LocalTraining

# Level 1 adds nothing to level 0, and nobody holds the last column of the first array.
SLICES = SliceMap(("kernel", "bias", "scale"), ((2, 4), (2,), ()),
                  (np.array([[1, 2], [1, 2], [2, 3]]), np.array([[0], [0], [2]]), np.zeros((3, 0))))
WEIGHTS = [np.float32([[1, 2, 3, 4], [5, 6, 7, 8]]), np.float32([9, 10]), np.float32(11)]


def test_vectors_hold_what_lower_levels_do_not():
    vectors = LevelVectors(SLICES)
    assert vectors.names == ("level000", "level002")
    assert vectors.held(1) == ["level000"] and vectors.held(2) == ["level000", "level002"]
    whole = vectors.split(SLICES.cut(WEIGHTS, 2), 2)
    assert {name: vector.tolist() for name, vector in whole.items()} == {
        "level000": [1, 2, 11], "level002": [3, 5, 6, 7, 9, 10]}
    small = vectors.split(SLICES.cut(WEIGHTS, 1), 1)
    assert small["level000"].tolist() == [1, 2, 11] and small["level002"].shape == (0,)


@pytest.mark.parametrize("level", range(3))
def test_a_slice_comes_back_from_its_vectors(level):
    vectors = LevelVectors(SLICES)
    whole = vectors.split(SLICES.cut(WEIGHTS, 2), 2)
    held = {name: whole[name] for name in vectors.held(level)}
    for ours, theirs in zip(vectors.join(held, level), SLICES.cut(WEIGHTS, level)):
        np.testing.assert_array_equal(ours, theirs)


def test_the_whole_model_keeps_what_nobody_holds():
    vectors = LevelVectors(SLICES)
    trained = {"level000": np.float32([-1, -2, -11]), "level002": -np.float32([3, 5, 6, 7, 9, 10])}
    kernel, bias, scale = vectors.restore(trained, WEIGHTS)
    np.testing.assert_array_equal(kernel, [[-1, -2, -3, 4], [-5, -6, -7, 8]])
    np.testing.assert_array_equal(bias, [-9, -10])
    assert scale == -11 and WEIGHTS[2] == 11


def test_vectors_of_a_wrong_size_are_refused():
    with pytest.raises(ValueError, match=r"level000 must hold 3 numbers, but is of shape \(2,\)"):
        LevelVectors(SLICES).join({"level000": np.zeros(2, np.float32)}, 0)


def test_levels_must_be_nested():
    crossed = SliceMap(("kernel",), ((2, 3),), (np.array([[1, 3], [2, 2]]),))
    with pytest.raises(ValueError, match="kernel: a level must hold all that lower levels hold"):
        LevelVectors(crossed)


def mean_of(trained, name="level002", weights=None, before=None):
    """`HoldersMean` of what collaborators returned: {collaborator: {vector: value}}."""
    before = before or {"level000": np.float32([1]), "level002": np.float32([10, 20])}
    rows = [{"round": 7, "tensor_name": key, "tags": ("model",), "nparray": value}
            for key, value in before.items()]
    rows.append({"round": 6, "tensor_name": name, "tags": ("model",), "nparray": None})
    rows += [{"round": 7, "tensor_name": key, "tags": tuple(sorted((col, "trained"))),
              "nparray": np.float32(value)}
             for col, values in trained.items() for key, value in values.items()]
    tensors = [LocalTensor(col, np.float32(values[name]), (weights or {}).get(col, 0.5))
               for col, values in trained.items()]
    return HoldersMean()(tensors, iter(rows), name, 7, ("trained",))


def test_a_vector_becomes_the_mean_of_its_holders():
    trained = {"a": [], "b": [14, 20], "c": [10, 28]}
    mean = mean_of({name: {"level002": values} for name, values in trained.items()},
                   weights={"a": 0.2, "b": 0.6, "c": 0.2})
    np.testing.assert_array_equal(mean, np.float32([13, 22]))  # 3/4 and 1/4 of the changes


def test_a_vector_that_nobody_holds_keeps_its_bits():
    mean = mean_of({"a": {"level002": []}}, before={"level002": np.float32([0.1, 1e-30])})
    np.testing.assert_array_equal(mean, np.float32([0.1, 1e-30]))


@pytest.mark.parametrize("bad, reason", [
    ([np.nan], "level000 holds values that are not finite"),
    ([np.inf], "level000 holds values that are not finite"),
    ([1, 2], r"level000 must be of shape \(1,\), but is of shape \(2,\)"),
])
def test_a_collaborator_with_a_bad_vector_is_left_out_whole(bad, reason, caplog):
    trained = {"good": {"level000": [2], "level002": [12, 22]},
               "bad": {"level000": bad, "level002": [99, 99]}}
    np.testing.assert_array_equal(mean_of(trained), np.float32([12, 22]))
    assert caplog.messages == [f"round 7: bad refused: {reason}".replace("\\", "")]


def test_a_vector_must_be_part_of_the_model():
    with pytest.raises(ValueError, match="level009 is not part of the model of round 7"):
        mean_of({"a": {"level009": [1]}}, name="level009")


# OpenFL's aggregator and collaborators, on a network of two variants.

SPEC = SupernetSpec(stem=4, bases=(4, 8), depths=(0, 1), widths=(0.5, 1.0), expansions=(0.5, 1.0),
                    strides=(1, 2), classes=3, image_size=8, divisor=2)
TRAINING = LocalTraining(augmentation=Augmentation.none(), optimizer=SGD(learning_rate=0.05))
TASKS = {"train": {"function": "train_task", "kwargs": {}, "aggregation_type": HoldersMean()}}


class Connection:
    """A collaborator's way to the aggregator, without a network between them."""

    def __init__(self, aggregator, name):
        self.aggregator, self.name, self.sent = aggregator, name, []

    def get_tasks(self):
        return self.aggregator.get_tasks(self.name)

    def get_aggregated_tensor(self, tensor_name, round_number, report, tags, require_lossless):
        self.sent.append(tensor_name)
        return self.aggregator.get_aggregated_tensor(
            tensor_name, round_number, report, tags, require_lossless, self.name)

    def send_local_task_results(self, *results):
        self.aggregator.send_local_task_results(self.name, *results)


@pytest.fixture(scope="module")
def federation():
    """(routing, the pictures of each client, their task runners by name)."""
    routing = Routing(VariantCache(SPEC, [SPEC.smallest(), SPEC.largest()]))
    rng = np.random.default_rng(4)
    pictures = [Split(rng.integers(0, 256, (count, 8, 8, 3), np.uint8),
                      rng.integers(0, 3, count).astype(np.int32)) for count in (5, 3, 2)]
    budgets = [routing.cache.macs[0], routing.cache.macs[1], routing.cache.macs[1] + 1.0]
    runners = {}
    for client, name in enumerate(("phone", "laptop", "workstation")):
        loader = PictureLoader(float(budgets[client]), pictures[client], client)
        runners[name] = FeastTaskRunner(loader, routing=routing, training=TRAINING, total_rounds=4,
                                        batch_size=2, seed=6)
    return routing, pictures, runners


def build_aggregator(runners, tmp_path, policy, rounds):
    assigner = RandomGroupedAssigner(
        [{"name": "learning", "percentage": 1.0, "tasks": ["train"]}], tasks=TASKS,
        authorized_cols=list(runners), rounds_to_train=rounds)
    return Aggregator(
        "aggregator", "federation", list(runners), "", str(tmp_path / "best"),
        str(tmp_path / "last"), assigner, use_delta_updates=False, rounds_to_train=rounds,
        straggler_handling_policy=policy, db_store_rounds=2, persist_checkpoint=False, callbacks=[],
        initial_tensor_dict=runners["phone"].get_tensor_dict())


def train(runners, names, aggregator):
    """One round of the named collaborators; the names of the vectors that each one fetched."""
    sent = {}
    for name in names:
        connection = Connection(aggregator, name)
        collaborator = Collaborator(name, "aggregator", "federation", connection, runners[name],
                                    TASKS, callbacks=[])
        tasks, round_num, _, _ = connection.get_tasks()
        for task in tasks:
            collaborator.do_task(task, round_num)
        sent[name] = connection.sent
    return sent



def first_weights(routing):
    return [weight.numpy() for weight in initial_weights(routing.layout, 6)]


def weights_after(aggregator, routing, runners, round_num):
    tensors = aggregator.tensor_db.get_tensors_by_round_and_tags(round_num, ("model",))
    vectors = {key.tensor_name: value for key, value in tensors.items()}
    return runners["phone"].vectors.restore(vectors, first_weights(routing))


def test_rounds_of_openfl_are_those_of_plain_numpy(federation, rounds_in_numpy, tmp_path):
    routing, pictures, runners = federation
    aggregator = build_aggregator(runners, tmp_path, WaitForAllPolicy, rounds=3)
    for _ in range(2):
        sent = train(runners, runners, aggregator)
    assert sent["phone"] == ["level000"] and sent["laptop"] == ["level000", "level001"]
    ours = weights_after(aggregator, routing, runners, 2)
    expected = rounds_in_numpy(routing, TRAINING, pictures, first_weights(routing),
                               {0: 0, 1: 1, 2: 1}, 2)
    for one, other in zip(ours, expected):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_a_round_ends_without_a_collaborator_that_died(federation, rounds_in_numpy, tmp_path):
    routing, pictures, runners = federation
    policy = lambda: PercentagePolicy(percent_collaborators_needed=0.6, minimum_reporting=2)
    aggregator = build_aggregator(runners, tmp_path, policy, rounds=2)
    train(runners, ("phone", "workstation"), aggregator)
    assert aggregator.round_number == 1
    ours = weights_after(aggregator, routing, runners, 1)
    expected = rounds_in_numpy(routing, TRAINING, pictures, first_weights(routing),
                               {0: 0, 2: 1}, 1)
    for one, other in zip(ours, expected):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
