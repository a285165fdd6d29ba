"""Plain NumPy rounds with `training.local_update` give the weights of FEAST's TFF process."""

from __future__ import annotations

import collections

import numpy as np
import pytest

tff = pytest.importorskip("tensorflow_federated")

import tensorflow as tf

from feast_tf import runtime
from feast_tf.aggregation import sparse_mean
from feast_tf.algorithms import build_feast
from feast_tf.interop.rounds import merge, plan_round
from feast_tf.routing import Routing
from feast_tf.seeding import stateless_seed
from feast_tf.space import SupernetSpec, VariantCache
from feast_tf.training import LocalTraining, local_update

SPEC = SupernetSpec(stem=4, bases=(4,), depths=(0, 1), widths=(0.5, 1.0), expansions=(0.5, 1.0),
                    strides=(1,), classes=3, image_size=8, divisor=2)
ROUTING = Routing(VariantCache(SPEC, [SPEC.variant(d=0, e=0.5, w=0.5),
                                      SPEC.variant(d=0, e=0.5, w=1), SPEC.variant(d=1, e=1, w=1)]))
TRAINING, SEED, ROUNDS = LocalTraining(), 23, 2
# client: (level, pictures); the third one has none, the fourth one dies in every round.
CLIENTS = {7: (0, 5), 4: (2, 6), 9: (1, 0), 2: (1, 3), 5: (1, 4)}
DEAD = 2


def pictures(client: int, count: int) -> tf.data.Dataset:
    rng = np.random.default_rng(client)
    return tf.data.Dataset.from_tensor_slices(collections.OrderedDict(
        x=rng.integers(0, 256, [count, 8, 8, 3], np.uint8),
        y=rng.integers(0, SPEC.classes, count, np.int32))).batch(4)


@pytest.fixture(scope="module")
def train():
    """A client's local work as one graph of its own, without TFF."""
    @tf.function(reduce_retracing=True)
    def run(slices, client, level, dataset, round_num):
        stream = tf.constant(stateless_seed(SEED, "local training"))
        for part in (round_num, client):
            stream = tf.random.experimental.stateless_fold_in(stream, part)
        return local_update(ROUTING.layout, TRAINING, tf.constant(ROUTING.variant_dims), slices,
                            level, dataset, stream, TRAINING.optimizer.rate(round_num, ROUNDS))

    return run


def plain_round(train, weights, round_num):
    cohort = {client: level for client, (level, _) in CLIENTS.items()}

    def results():
        for client, received in plan_round(ROUTING.slices, weights, cohort).items():
            level, count = CLIENTS[client]
            if client != DEAD:
                result = train(tuple(map(tf.constant, received)), tf.constant(client),
                               tf.constant(level), pictures(client, count), tf.constant(round_num))
                yield client, [old + part.numpy() for old, part in zip(received, result.update)
                               ], int(result.num_examples)

    return merge(ROUTING.slices, weights, cohort, results())


def test_two_rounds_give_the_same_weights(train):
    runtime.use("in_process")
    process = build_feast(ROUTING, TRAINING, total_rounds=ROUNDS, seed=SEED)
    state = process.initialize()
    weights = [np.array(weight) for weight in state.global_model_weights.trainable]
    cohort = [collections.OrderedDict(client=np.int32(client), level=np.int32(level),
                                      data=pictures(client, count))
              for client, (level, count) in CLIENTS.items() if client != DEAD]
    for round_num in range(ROUNDS):
        output = process.next(state, cohort)
        state = output.state
        weights, summary = plain_round(train, weights, round_num)
        for name, ours, theirs in zip(ROUTING.slices.names, weights,
                                      state.global_model_weights.trainable):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6, err_msg=name)
    assert (summary["without_data"], summary["missing"]) == ([9], [DEAD])
    payload = ROUTING.payload
    assert output.metrics["aggregator"]["bytes_up"] == summary["bytes_up"]
    assert summary["bytes_down"] == 4 * (payload[0] + payload[2] + 3 * payload[1])


def test_the_mean_is_that_of_the_reference():
    rng = np.random.default_rng(4)
    slices = ROUTING.slices
    weights = [rng.normal(size=shape).astype(np.float32) for shape in slices.shapes]
    cohort = {client: level for client, (level, _) in CLIENTS.items()}
    updates = [(client, [rng.normal(0, 0.1, shape).astype(np.float32)
                         for shape in slices.slice_shapes(cohort[client])], count)
               for client, (_, count) in CLIENTS.items()]
    ours, _ = merge(slices, weights, cohort, updates, returns="updates")
    theirs = sparse_mean(weights, [(count, update) for _, update, count in updates])
    for name, one, other in zip(slices.names, ours, theirs):
        np.testing.assert_allclose(one, other, rtol=2e-7, atol=1e-7, err_msg=name)
