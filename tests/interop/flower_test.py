"""Tests of feast_tf.interop.flower, over a grid that calls the nodes' apps in this process."""

from __future__ import annotations

import dataclasses
from typing import Callable

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower has an environment of its own: make test-modern")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord
from flwr.app import RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from feast_tf.datasets import Split
from feast_tf.interop.flower import FeastStrategy, feast_client
from feast_tf.routing import Routing, SliceMap
from feast_tf.space import SupernetSpec, VariantCache
from feast_tf.supernet import initial_weights
from feast_tf.training import SGD, Augmentation, LocalTraining

# Two arrays; level 0 lacks the second one.
SLICES = SliceMap(("kernel", "bias"), ((2, 3), (2,)),
                  (np.array([[1, 2], [2, 3]]), np.array([[0], [2]])))
WEIGHTS = [np.float32([[1, 2, 3], [4, 5, 6]]), np.float32([7, 8])]


@pytest.fixture(autouse=True, scope="module")
def server():
    """Makes this process the server of a run; Flower's own processes are told that they are."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1


def reply(message, arrays=(), metrics=None):
    records = {"arrays": ArrayRecord(list(arrays)), "metrics": MetricRecord(metrics or {})}
    return Message(RecordDict(records), reply_to=message)


def lost(message):
    """The SuperLink's own answer in place of a node that is gone."""
    answer = Message(Error(5, "Node unavailable"), reply_to=message)
    answer.metadata.__dict__["_src_node_id"] = 1
    return answer


@dataclasses.dataclass
class Node:
    """A client whose answer to a train message is given."""

    level: object
    train: Callable = lambda message: reply(message)
    seen: list = dataclasses.field(default_factory=list)

    def __call__(self, message, context):
        self.seen.append(message)
        if message.metadata.message_type == "query.level":
            return reply(message, metrics={} if self.level is None else {"level": self.level})
        return self.train(message)


class LocalGrid(Grid):
    """Calls the nodes one after the other, as a SuperLink would through their SuperNodes.

    What an app raises becomes an error reply; an app that returns None never answers.
    """

    def __init__(self, nodes):
        self.nodes = nodes

    def send_and_receive(self, messages, *, timeout=None):
        for message in messages:
            node = message.metadata.dst_node_id
            context = Context(1, node, {"partition-id": node - 100}, RecordDict(), {})
            try:
                answer = self.nodes[node](message, context)
            except Exception as error:
                answer = Message(Error(0, str(error)), reply_to=message)
            if answer is not None:
                yield answer

    def get_node_ids(self):
        return list(self.nodes)

    def create_message(self, *_, **__):
        raise NotImplementedError

    run, set_run, push_messages, pull_messages = property(create_message), *[create_message] * 3


def updates(scale, examples, level=1, **metrics):
    """A well-formed result: a constant for each array."""
    shapes = SLICES.slice_shapes(level)
    arrays = [np.full(shape, scale * (place + 1), np.float32) for place, shape in enumerate(shapes)]
    return lambda message: reply(message, arrays, {"num-examples": examples, **metrics})


def one_round(nodes, **settings):
    grid = LocalGrid({100 + number: node for number, node in enumerate(nodes)})
    strategy = FeastStrategy(SLICES, total_rounds=5, seed=3, min_train_nodes=len(nodes), **settings)
    result = strategy.start(grid, ArrayRecord(WEIGHTS), num_rounds=1)
    return result.arrays.to_numpy_ndarrays(), result.train_metrics_clientapp[1]


def test_a_node_is_sent_the_slice_of_its_level():
    small, large = Node(0, updates(1.0, 1, level=0)), Node(1, updates(1.0, 1))
    one_round([small, large])
    shapes = lambda node: [a.shape for a in node.seen[1].content["arrays"].to_numpy_ndarrays()]
    assert shapes(small) == [(1, 2), (0,)] and shapes(large) == [(2, 3), (2,)]
    sent = large.seen[1].content["arrays"].to_numpy_ndarrays()
    np.testing.assert_array_equal(sent[0], WEIGHTS[0])
    assert dict(small.seen[1].content["config"]) == {
        "server-round": 1, "total-rounds": 5, "seed": 3, "level": 0}


def test_positions_become_the_mean_of_those_that_hold_them():
    weights, metrics = one_round([
        Node(0, updates(1.0, 3, level=0, loss=2.0, odd=np.nan)),
        Node(1, updates(-2.0, 1, loss=4.0, odd=1.0, extra=1.0))])
    # (3 * 1 - 1 * 2) / 4 where both report, -2 where the second does alone.
    np.testing.assert_allclose(weights[0], [[1.25, 2.25, 1], [2, 3, 4]])
    np.testing.assert_allclose(weights[1], [3, 4])
    assert metrics["loss"] == 2.5 and "extra" not in metrics and "odd" not in metrics
    assert metrics["num-examples"] == 4
    assert metrics["bytes-down"] == metrics["bytes-up"] == 4 * (2 + 8)


@pytest.mark.parametrize("train, kind", [
    pytest.param(lambda message: 1 / 0, "failed", id="error"),
    pytest.param(lambda message: None, "missing", id="dies"),
    pytest.param(lambda message: lost(message), "missing", id="dies and the SuperLink says so"),
    pytest.param(updates(np.nan, 5), "refused", id="nan"),
    pytest.param(updates(1.0, 5, level=0), "refused", id="shapes of another level"),
    pytest.param(lambda message: reply(message, [], {"num-examples": 5}), "refused",
                 id="no arrays"),
    pytest.param(lambda message: reply(message, WEIGHTS), "refused", id="no examples"),
    pytest.param(updates(1.0, -5), "refused", id="negative examples"),
    pytest.param(updates(1.0, 2.5), "refused", id="half examples"),
    pytest.param(updates(1.0, 0), "without-data", id="without data"),
    pytest.param(lambda message: Message(RecordDict({
        "arrays": ArrayRecord({"0": Array("float32", (2, 3), "numpy.ndarray", b"junk"),
                               "1": Array(WEIGHTS[1])}),
        "metrics": MetricRecord({"num-examples": 5})}), reply_to=message), "refused", id="junk"),
])
def test_what_cannot_be_used_is_counted_and_leaves_no_trace(train, kind):
    weights, metrics = one_round([Node(0, updates(1.0, 3, level=0)), Node(1, train)])
    np.testing.assert_allclose(weights[0], [[2, 3, 3], [4, 5, 6]])
    np.testing.assert_array_equal(weights[1], WEIGHTS[1])
    counts = {key: value for key, value in metrics.items() if key.startswith("clients-") and value}
    assert counts == {"clients-with-data": 1, f"clients-{kind}": 1}


@pytest.mark.parametrize("level", [None, -1, 2, 0.0])
def test_a_node_without_a_level_is_left_out_and_asked_again(level):
    node = Node(level, updates(9.0, 9))
    grid = LocalGrid({100: Node(0, updates(1.0, 3, level=0)), 101: node})
    strategy = FeastStrategy(SLICES, total_rounds=5)
    result = strategy.start(grid, ArrayRecord(WEIGHTS), num_rounds=2)
    np.testing.assert_allclose(result.arrays.to_numpy_ndarrays()[0], [[3, 4, 3], [4, 5, 6]])
    assert result.train_metrics_clientapp[2]["clients-without-level"] == 1
    assert [m.metadata.message_type for m in node.seen] == ["query.level"] * 2
    assert len(grid.nodes[100].seen) == 3  # asked once, trained twice


def test_a_round_without_clients_leaves_the_model():
    weights, metrics = one_round([Node(None), Node(None)])
    assert metrics == {"clients-without-level": 2}
    assert weights == []  # Flower's own result when no round yields a model


def test_keys_of_the_initial_arrays_are_kept():
    grid = LocalGrid({100: Node(1, updates(1.0, 3)), 101: Node(1, updates(2.0, 3))})
    arrays = ArrayRecord({name: Array(weight) for name, weight in zip(SLICES.names, WEIGHTS)})
    result = FeastStrategy(SLICES, total_rounds=5).start(grid, arrays, num_rounds=1)
    assert list(result.arrays) == ["kernel", "bias"]


def test_evaluation_sends_slices_too():
    answer = lambda message: reply(message, metrics={"num-examples": 2, "accuracy": 0.5})
    nodes = [Node(level, answer) for level in (0, 1)]
    strategy = FeastStrategy(SLICES, total_rounds=5, fraction_train=0.0, fraction_evaluate=1.0)
    grid = LocalGrid({100 + number: node for number, node in enumerate(nodes)})
    result = strategy.start(grid, ArrayRecord(WEIGHTS), num_rounds=1)
    assert nodes[0].seen[1].content["arrays"].to_numpy_ndarrays()[0].shape == (1, 2)
    assert result.evaluate_metrics_clientapp[1]["accuracy"] == 0.5


def test_a_strategy_needs_a_schedule():
    with pytest.raises(ValueError, match="total_rounds must be at least 1, but is 0"):
        FeastStrategy(SLICES, total_rounds=0)


# The client, on a network of two variants.

SPEC = SupernetSpec(stem=4, bases=(4, 8), depths=(0, 1), widths=(0.5, 1.0), expansions=(0.5, 1.0),
                    strides=(1, 2), classes=3, image_size=8, divisor=2)
TRAINING = LocalTraining(augmentation=Augmentation.none(), optimizer=SGD(learning_rate=0.05))


@pytest.fixture(scope="module")
def federation():
    """(routing, pictures of each node, app, context without run configuration)."""
    routing = Routing(VariantCache(SPEC, [SPEC.smallest(), SPEC.largest()]))
    rng = np.random.default_rng(4)
    pictures = [Split(rng.integers(0, 256, (count, 8, 8, 3), np.uint8),
                      rng.integers(0, 3, count).astype(np.int32)) for count in (5, 3, 0, 4)]
    small, large = routing.cache.macs
    budgets = [small, large + 1.0, large, small / 2]
    app = feast_client(routing, TRAINING, budget=lambda c: budgets[c.node_config["partition-id"]],
                       data=lambda c: pictures[c.node_config["partition-id"]], batch_size=2)
    return routing, pictures, app


def test_rounds_of_clients_are_those_of_plain_numpy(federation, rounds_in_numpy):
    routing, pictures, app = federation
    grid = LocalGrid({100 + number: app for number in range(4)})
    initial = [np.asarray(weight) for weight in initial_weights(routing.layout, 0)]
    strategy = FeastStrategy(routing.slices, total_rounds=4, seed=6, min_train_nodes=4)
    result = strategy.start(grid, ArrayRecord(initial), num_rounds=2)

    cohort = {0: 0, 1: 1, 2: 1}  # the fourth affords nothing
    weights = rounds_in_numpy(routing, TRAINING, pictures, initial, cohort, 2)
    for ours, theirs in zip(result.arrays.to_numpy_ndarrays(), weights):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-7)
    metrics = result.train_metrics_clientapp[2]
    assert (metrics["clients-with-data"], metrics["clients-without-data"],
            metrics["clients-without-level"], metrics["num-examples"]) == (2, 1, 1, 8)
    assert 0 < metrics["loss"] < 5 and 0 <= metrics["accuracy"] <= 1
    assert metrics["bytes-down"] == 4 * (routing.payload[0] + 2 * routing.payload[1])


def test_a_client_refuses_the_slice_of_another_level(federation):
    routing, _, app = federation
    initial = [np.asarray(weight) for weight in initial_weights(routing.layout, 0)]
    message = Message(RecordDict({
        "arrays": ArrayRecord(initial),
        "config": ConfigRecord({"server-round": 1, "total-rounds": 4, "seed": 0, "level": 0})}),
        message_type="train", dst_node_id=100)
    answer, = LocalGrid({100: app}).send_and_receive([message])
    assert "client 0: the weights are not the slice of level 0" in answer.error.reason
