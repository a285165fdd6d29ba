"""tff.learning: every algorithm of TFF 0.87 gives the same numbers in process as in TFF's own worker."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

_algorithms = tff.learning.algorithms
_SGD = tff.learning.optimizers.build_sgdm(0.1, momentum=0.9)
_ELEMENT = collections.OrderedDict(x=tf.TensorSpec([None, 2], tf.float32),
                                   y=tf.TensorSpec([None, 1], tf.float32))


def client_data(seed: int, examples: int) -> tf.data.Dataset:
    x = np.random.default_rng(seed).normal(size=(examples, 2)).astype(np.float32)
    y = x @ np.array([[2], [-3]], np.float32) + 1
    return tf.data.Dataset.from_tensor_slices(collections.OrderedDict(x=x, y=y)).batch(4)


def cohort() -> list[tf.data.Dataset]:
    return [client_data(0, 5), client_data(1, 8), client_data(2, 3)]


def network() -> tf.keras.Sequential:
    kernel = tf.constant_initializer([[0.1, 0.2, 0.3], [0.3, -0.2, 0.1]])
    return tf.keras.Sequential([
        tf.keras.layers.InputLayer([2]),
        tf.keras.layers.Dense(3, tf.nn.tanh, kernel_initializer=kernel),
        tf.keras.layers.Dense(1, kernel_initializer=tf.constant_initializer([0.2, 0.3, -0.1]))])


def keras_model() -> tff.learning.models.VariableModel:
    return tff.learning.models.from_keras_model(
        network(), loss=tf.keras.losses.MeanSquaredError(), input_spec=_ELEMENT,
        metrics=[tf.keras.metrics.MeanAbsoluteError()])


def reconstruction_model() -> tff.learning.models.ReconstructionModel:
    net = network()
    return tff.learning.models.ReconstructionModel.from_keras_model_and_layers(
        net, global_layers=net.layers[:1], local_layers=net.layers[1:], input_spec=_ELEMENT)


@tf.function
def _predict(weights, x, training):
    (kernel, bias), _ = weights
    return x @ kernel + bias


@tf.function
def _squared_error(output, label, sample_weight=None):
    return tf.reduce_mean(tf.square(output - label))


LINEAR = tff.learning.models.FunctionalModel(
    initial_weights=((np.array([[0.5], [0.25]], np.float32), np.array([0.1], np.float32)), ()),
    predict_on_batch_fn=_predict, loss_fn=_squared_error, input_spec=_ELEMENT)

RECONSTRUCTION = dict(model_fn=reconstruction_model, loss_fn=tf.keras.losses.MeanSquaredError,
                      metrics_fn=lambda: [tf.keras.metrics.MeanAbsoluteError()])

PROCESSES = {
    "weighted FedAvg": lambda: _algorithms.build_weighted_fed_avg(keras_model, _SGD),
    "unweighted FedAvg": lambda: _algorithms.build_unweighted_fed_avg(LINEAR, _SGD),
    "FedAvg, loop over batches": lambda: _algorithms.build_weighted_fed_avg(
        LINEAR, _SGD, tff.learning.optimizers.build_adam(0.1),
        loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR),
    "scheduled FedAvg": lambda: _algorithms.build_weighted_fed_avg_with_optimizer_schedule(
        LINEAR, lambda number: 0.1 / tf.cast(number + 1, tf.float32),
        tff.learning.optimizers.build_sgdm),
    "weighted FedProx": lambda: _algorithms.build_weighted_fed_prox(keras_model, 0.5, _SGD),
    "unweighted FedProx": lambda: _algorithms.build_unweighted_fed_prox(LINEAR, 0.5, _SGD),
    "FedSGD": lambda: _algorithms.build_fed_sgd(
        keras_model, tff.learning.optimizers.build_sgdm(0.1)),
    "weighted MIME-lite": lambda: _algorithms.build_weighted_mime_lite(LINEAR, _SGD),
    "unweighted MIME-lite": lambda: _algorithms.build_unweighted_mime_lite(keras_model, _SGD),
    "scheduled MIME-lite": lambda: _algorithms.build_mime_lite_with_optimizer_schedule(
        LINEAR, lambda number: 0.1 / tf.cast(number + 1, tf.float32), _SGD),
    "FedRecon": lambda: _algorithms.build_fed_recon(**RECONSTRUCTION),
    "FedRecon evaluation": lambda: _algorithms.build_fed_recon_eval(**RECONSTRUCTION),
    "evaluation": lambda: _algorithms.build_fed_eval(keras_model),
}


def rounds(process, clients, count: int = 2):
    state, outputs = process.initialize(), []
    for _ in range(count):
        outputs.append(process.next(state, clients))
        state = outputs[-1].state
    return [(output.state, output.metrics) for output in outputs]


@pytest.mark.parametrize("name", PROCESSES)
def test_two_rounds(name, same_results):
    process = PROCESSES[name]()
    results = same_results(lambda: rounds(process, cohort()))
    assert len(results) == 2


def test_k_means(same_results):
    process = _algorithms.build_fed_kmeans(2, (2,), random_seed=(3, 4))
    clients = [tf.data.Dataset.from_tensor_slices(np.random.default_rng(seed).normal(
        size=(6, 2)).astype(np.float32)) for seed in range(3)]
    same_results(lambda: rounds(process, clients))


def test_personalization(same_results):
    @tf.function
    def evaluate(model, data):
        total = tf.constant(0.0)
        for batch in iter(data.batch(2)):
            total += model.forward_pass(batch, training=False).loss
        return collections.OrderedDict(loss=total)

    def build_personalize():
        variable = []

        @tf.function
        def personalize(model, train, test):
            for batch in iter(train.batch(2)):
                with tf.GradientTape() as tape:
                    loss = model.forward_pass(batch).loss
                weights = model.trainable_variables
                for weight, gradient in zip(weights, tape.gradient(loss, weights)):
                    weight.assign_sub(0.1 * gradient)
            return evaluate(model, test)

        return personalize

    computation = _algorithms.build_personalization_eval_computation(
        keras_model, collections.OrderedDict(sgd=build_personalize), evaluate)
    weights = tff.learning.models.ModelWeights.from_model(keras_model())
    weights = tff.learning.models.ModelWeights(
        [variable.numpy() for variable in weights.trainable], [])
    clients = [collections.OrderedDict(train_data=client_data(seed, 6).unbatch(),
                                       test_data=client_data(seed, 4).unbatch())
               for seed in range(3)]

    def evaluated():
        metrics = computation(weights, clients)
        # The order of the sampled clients is random.
        return {name: np.sort(list(value.values())) for name, value in metrics.items()}

    same_results(evaluated)
