"""FEAST, JAX, client data and TFF's own programs, in process and in TFF's own worker."""

from __future__ import annotations

import asyncio
import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from feast_tf.runtime import InProcessAsyncContext


def two_rounds(process, clients):
    outputs = [process.next(process.initialize(), clients)]
    outputs.append(process.next(outputs[0].state, clients))
    return [(output.metrics, output.state) for output in outputs]


def test_feast(feast, same_results):
    same_results(lambda: two_rounds(*feast))


def test_feast_repeats_to_the_bit(feast, in_process):
    process, clients = feast
    with tff.framework.get_context_stack().install(in_process):
        state = process.initialize()
        first, second = (process.get_model_weights(process.next(state, clients).state).trainable
                         for _ in range(2))
    for one, other in zip(first, second):
        np.testing.assert_array_equal(one, other)


# --- JAX, which TFF's own worker does not run

_NO_JAX = "can only create values for computations and intrinsics"


def test_jax_alone(same_results):
    import jax.numpy as jnp

    vector = tff.TensorType(np.float32, [3])

    @tff.jax.computation(collections.OrderedDict(x=vector, y=np.float32))
    def scaled(value):
        return collections.OrderedDict(y=jnp.sum(value["x"]) + value["y"], x=value["x"] * value["y"])

    argument = collections.OrderedDict(x=np.array([1, 2, 4], np.float32), y=np.float32(0.5))
    same_results(lambda: scaled(argument), stock_fails=_NO_JAX, expected=collections.OrderedDict(
        y=np.float32(7.5), x=np.array([0.5, 1, 2], np.float32)))
    counted = tff.jax.computation(lambda: jnp.array([1, 2], jnp.int32))
    same_results(counted, stock_fails=_NO_JAX, expected=np.array([1, 2], np.int32))


def test_jax_in_a_federated_computation(same_results):
    import jax.numpy as jnp

    add = tff.jax.computation(lambda a, b: a + b, np.float32, np.float32)

    @tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
    def total(values):
        squares = tff.federated_map(tff.jax.computation(lambda x: x * x, np.float32), values)
        zero = tff.jax.computation(lambda: jnp.float32(0))()
        ten_times = tff.jax.computation(lambda x: 10 * x, np.float32)
        return (tff.federated_aggregate(squares, zero, add, add, ten_times),
                tff.federated_mean(squares), squares)

    same_results(lambda: total([1.0, 2.0, 5.0]), stock_fails=_NO_JAX, expected=(
        np.float32(300), np.float32(10), [np.float32(1), np.float32(4), np.float32(25)]))


# --- client data and programs


@tf.function
def _predict(weights, x, training):
    (kernel,), _ = weights
    return x @ kernel


@tf.function
def _squared_error(output, label, sample_weight=None):
    return tf.reduce_mean(tf.square(output - label))


@pytest.fixture(scope="module")
def client_data():
    rng = np.random.default_rng(0)
    return tff.simulation.datasets.TestClientData({
        f"client {number}": collections.OrderedDict(
            x=rng.normal(size=(size, 2)).astype(np.float32),
            y=rng.normal(size=(size, 1)).astype(np.float32))
        for number, size in enumerate([3, 5, 2, 4])}).preprocess(lambda data: data.batch(2))


@pytest.fixture(scope="module")
def fed_avg(client_data):
    model = tff.learning.models.FunctionalModel(
        initial_weights=((np.array([[0.5], [0.25]], np.float32),), ()),
        predict_on_batch_fn=_predict, loss_fn=_squared_error,
        input_spec=client_data.element_type_structure)
    return tff.learning.algorithms.build_weighted_fed_avg(
        model, tff.learning.optimizers.build_sgdm(0.1))


@pytest.fixture(scope="module")
def fed_avg_by_id(client_data, fed_avg):
    """The same, where a client's value is its id and its data set is made at the client."""
    return tff.simulation.compose_dataset_computation_with_learning_process(
        client_data.dataset_computation, fed_avg)


def test_data_sets_made_from_client_ids(client_data, fed_avg_by_id, same_results):
    same_results(lambda: two_rounds(fed_avg_by_id, client_data.client_ids[:3]))


def test_run_training_process(client_data, fed_avg, same_results):
    asyncio.set_event_loop(asyncio.new_event_loop())  # TFF uses the thread's

    def train():
        released = tff.program.MemoryReleaseManager()
        state = tff.simulation.run_training_process(
            fed_avg, lambda round_num: [client_data.create_tf_dataset_for_client(name)
                                        for name in client_data.client_ids[round_num:]],
            total_rounds=2, metrics_managers=[released])
        metrics = [value["client_work"] for _, value in sorted(released.values().items())]
        return fed_avg.get_model_weights(state), metrics

    same_results(train)


def test_train_model(client_data, fed_avg_by_id, tmp_path, stock_context, in_process, assert_same):
    """TFF's own training program, where values are references to what an asynchronous context gives."""
    ids = client_data.client_ids

    def train(name, context):
        models = tff.program.MemoryReleaseManager()
        native = tff.program.NativeFederatedContext(context)
        with tff.framework.get_context_stack().install(native):
            asyncio.run(tff.learning.programs.train_model(
                train_process=fed_avg_by_id, train_data_source=tff.program.ClientIdDataSource(ids),
                train_per_round_clients=len(ids), train_total_rounds=2,
                program_state_manager=tff.program.FileProgramStateManager(tmp_path / name),
                model_output_manager=models, evaluation_manager=None, evaluation_periodicity=1))
        return models.values()

    expected = train("stock", stock_context(tff.framework.AsyncExecutionContext))
    assert_same(train("in process", InProcessAsyncContext(in_process)), expected)
