"""What TFF's documentation teaches, in both runtimes: its tutorials' computations, written anew."""

from __future__ import annotations

import collections

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

at_clients = lambda kind: tff.FederatedType(kind, tff.CLIENTS)
at_server = lambda kind: tff.FederatedType(kind, tff.SERVER)

READINGS = tff.SequenceType(np.float32)
BATCH = tff.StructWithPythonType(
    [("x", tff.TensorType(np.float32, [None, 3])), ("y", tff.TensorType(np.int32, [None]))],
    collections.OrderedDict)
MODEL = tff.StructWithPythonType(
    [("weights", tff.TensorType(np.float32, [3, 2])), ("bias", tff.TensorType(np.float32, [2]))],
    collections.OrderedDict)


def model() -> dict:
    return collections.OrderedDict(weights=np.float32([[0.5, -0.25], [0.0, 1.0], [0.75, 0.125]]),
                                   bias=np.float32([0.25, -0.5]))


def batches(seed: int, sizes=(4, 3)) -> list:
    rng = np.random.default_rng(seed)
    return [collections.OrderedDict(x=rng.normal(size=(size, 3)).astype(np.float32),
                                    y=rng.integers(0, 2, size, dtype=np.int32)) for size in sizes]


def loss_of(weights, bias, batch):
    logits = tf.matmul(batch["x"], weights) + bias
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=batch["y"], logits=logits))


def step(weights, bias, batch, rate):
    with tf.GradientTape() as tape:
        tape.watch([weights, bias])
        loss = loss_of(weights, bias, batch)
    slopes = tape.gradient(loss, [weights, bias])
    return weights - rate * slopes[0], bias - rate * slopes[1]


def test_share_of_sensors_above_a_threshold(same_results):
    """Custom federated algorithms, part 1."""
    above = tff.tensorflow.computation(
        lambda readings, threshold: tf.cast(readings.reduce(
            -np.inf, lambda most, reading: tf.maximum(most, reading)) > threshold, tf.float32),
        (READINGS, np.float32))

    @tff.federated_computation(at_clients(READINGS), at_server(np.float32))
    def share(readings, threshold):
        return tff.federated_mean(
            tff.federated_map(above, [readings, tff.federated_broadcast(threshold)]))

    sensors = [[68.5, 70.25], [75.0], [60.5, 71.0, 69.0], [80.25]]
    assert same_results(lambda: share(sensors, 70.5)) == 0.75


def test_training_as_a_reduction(same_results, assert_same):
    """Custom federated algorithms, part 2: local training is a `sequence_reduce`."""
    batch_step = tff.tensorflow.computation(
        lambda model, batch: collections.OrderedDict(zip(
            ("weights", "bias"), step(model["weights"], model["bias"], batch, 0.5))),
        MODEL, BATCH)
    local = tff.federated_computation(
        lambda model, data: tff.sequence_reduce(data, model, batch_step),
        MODEL, tff.SequenceType(BATCH))

    @tff.federated_computation(at_server(MODEL), at_clients(tff.SequenceType(BATCH)))
    def train(model, data):
        return tff.federated_mean(
            tff.federated_map(local, [tff.federated_broadcast(model), data]))

    data = [batches(1), batches(2, (5,))]
    trained = []
    for client in data:
        weights, bias = (tf.constant(part) for part in model().values())
        for batch in client:
            weights, bias = step(weights, bias, batch, 0.5)
        trained.append((weights.numpy(), bias.numpy()))
    expected = collections.OrderedDict(
        (name, np.mean([client[place] for client in trained], axis=0, dtype=np.float32))
        for place, name in enumerate(("weights", "bias")))
    assert_same(same_results(lambda: train(model(), data)), expected)


def test_an_algorithm_of_ones_own(same_results):
    """Building your own federated learning algorithm: the four steps of a round."""
    @tff.tensorflow.computation(tff.SequenceType(BATCH), MODEL)
    def client_update(data, received):
        trained = data.reduce(
            (received["weights"], received["bias"]),
            lambda parts, batch: step(*parts, batch, 0.25))
        return collections.OrderedDict(weights=trained[0], bias=trained[1])

    initialize = tff.federated_computation(lambda: tff.federated_eval(
        tff.tensorflow.computation(lambda: collections.OrderedDict(
            (name, tf.constant(part)) for name, part in model().items())), tff.SERVER))

    @tff.federated_computation(at_server(MODEL), at_clients(tff.SequenceType(BATCH)))
    def next_round(state, data):
        trained = tff.federated_map(client_update, (data, tff.federated_broadcast(state)))
        return tff.federated_mean(trained)

    process = tff.templates.IterativeProcess(initialize, next_round)

    def two_rounds():
        state = process.initialize()
        for _ in range(2):
            state = process.next(state, [batches(3), batches(4), batches(5, (2,))])
        return state

    same_results(two_rounds)


def test_rows_for_the_words_that_a_client_has(same_results):
    """Federated select: clients get the rows they need and send back what changed."""
    rows = 6
    table_type = tff.TensorType(np.float32, [rows, 2])
    pick = tff.tensorflow.computation(lambda table, row: tf.gather(table, row),
                                      table_type, np.int32)

    @tff.tensorflow.computation(tff.SequenceType(tff.TensorType(np.float32, [2])),
                                tff.TensorType(np.int32, [2]))
    def scaled(slices, keys):
        values = slices.batch(2).get_single_element() * 10.0
        place = tf.expand_dims(keys, 1)
        return (tf.scatter_nd(place, values, [rows, 2]),
                tf.scatter_nd(place, tf.ones([2, 1]), [rows, 1]))

    mean = tff.tensorflow.computation(lambda x, y: tf.math.divide_no_nan(x, y), table_type,
                                      tff.TensorType(np.float32, [rows, 1]))

    @tff.federated_computation(at_server(table_type), at_clients(tff.TensorType(np.int32, [2])))
    def update(table, keys):
        sent = tff.federated_select(keys, tff.federated_value(np.int32(rows), tff.SERVER), table,
                                    pick)
        sums, counts = tff.federated_sum(tff.federated_map(scaled, (sent, keys)))
        return tff.federated_map(mean, (sums, counts))

    table = np.arange(12, dtype=np.float32).reshape(rows, 2)
    found = same_results(lambda: update(table, [np.int32([1, 4]), np.int32([4, 0])]))
    assert found.tolist() == [[0, 10], [20, 30], [0, 0], [0, 0], [80, 90], [0, 0]]


def test_an_aggregator_with_a_state(same_results):
    """Implementing custom aggregations: clipped sums that count how often they clipped."""
    clip = tff.tensorflow.computation(
        lambda value, bound: (tf.clip_by_value(value, -bound, bound),
                              tf.cast(tf.reduce_any(tf.abs(value) > bound), tf.int32)),
        (tff.TensorType(np.float32, [2]), np.float32))
    count = tff.tensorflow.computation(lambda state, more: state + more, np.int32, np.int32)

    @tff.federated_computation(at_server(np.int32),
                               at_clients(tff.TensorType(np.float32, [2])))
    def next_fn(state, values):
        bound = tff.federated_broadcast(tff.federated_value(np.float32(2.0), tff.SERVER))
        clipped, hits = tff.federated_map(clip, (values, bound))
        state = tff.federated_map(count, (state, tff.federated_sum(hits)))
        return tff.templates.MeasuredProcessOutput(state, tff.federated_sum(clipped), state)

    process = tff.templates.AggregationProcess(
        tff.federated_computation(lambda: tff.federated_value(np.int32(0), tff.SERVER)), next_fn)

    def two_rounds():
        state = process.initialize()
        for values in ([[1, 5], [-3, 0.5]], [[2, -2], [9, 9]]):
            output = process.next(state, [np.float32(value) for value in values])
            state = output.state
        return output

    found = same_results(two_rounds)
    assert (found.state, found.result.tolist()) == (3, [4.0, 0.0])
