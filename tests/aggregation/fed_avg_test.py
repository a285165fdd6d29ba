"""An existing FedAvg pipeline on a user's Keras model that gets our aggregator and optimiser."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from feast_tf.aggregation import SlicedMeanFactory, hold_unreported
from feast_tf.routing import SliceMap

pytestmark = pytest.mark.usefixtures("in_process")

# A client of level k uses the first k + 1 of three features: the others are 0 in its data.
SLICES = SliceMap(("kernel",), ((3, 1),), (np.array([[1, 1], [2, 1], [3, 1]], np.int32),))
RATE = 0.25


def model():
    return tff.learning.models.from_keras_model(
        tf.keras.Sequential([tf.keras.layers.Dense(
            1, use_bias=False, input_shape=(3,),
            kernel_initializer=tf.constant_initializer([1.0, 2.0, 4.0]))]),
        loss=tf.keras.losses.MeanSquaredError(),
        input_spec=collections.OrderedDict(x=tf.TensorSpec([None, 3]), y=tf.TensorSpec([None, 1])))


def data(features, label, examples=1):
    return tf.data.Dataset.from_tensors(collections.OrderedDict(
        x=np.float32([features] * examples), y=np.float32([[label]] * examples)))


# Prediction 1 of 3: gradient 2 * -2 * x. Prediction 3 of 1: gradient 2 * 2 * x. By rate 1/4, the
# first one's weights go up by 1 and the second one's down by 1, wherever their features are not 0.
FIRST, SECOND = data([1, 0, 0], 3.0), data([1, 1, 0], 1.0, examples=2)


def build(aggregator=None, server_optimizer=None):
    return tff.learning.algorithms.build_weighted_fed_avg(
        model, client_optimizer_fn=tff.learning.optimizers.build_sgdm(RATE),
        server_optimizer_fn=server_optimizer, model_aggregator=aggregator)


def kernel(state):
    return np.ravel(state.global_model_weights.trainable[0])


def test_mean_is_over_those_who_trained_a_position():
    plain, sliced = build(), build(SlicedMeanFactory(SLICES))
    states = [process.next(process.initialize(), [FIRST, SECOND]).state
              for process in (plain, sliced)]
    np.testing.assert_allclose(kernel(states[0]), [1 + (1 - 2) / 3, 2 - 2 / 3, 4], rtol=1e-6)
    np.testing.assert_allclose(kernel(states[1]), [1 + (1 - 2) / 3, 2 - 1, 4], rtol=1e-6)


def test_only_the_aggregator_s_types_differ_from_the_plain_pipeline_s():
    plain, sliced = build(), build(SlicedMeanFactory(SLICES))
    weights = lambda process: process.initialize.type_signature.result.member.global_model_weights
    assert weights(sliced) == weights(plain)
    metrics = sliced.next.type_signature.result.metrics.member
    assert str(metrics.aggregator) == (
        "<bytes_up=int64,clients_with_data=int32,clients_without_data=int32,clients_refused=int32>")
    assert metrics.client_work == plain.next.type_signature.result.metrics.member.client_work


def test_a_client_that_diverges_is_zeroed_by_tff_and_counts_for_nothing():
    process = build(SlicedMeanFactory(SLICES))
    output = process.next(process.initialize(), [FIRST, SECOND, data([1, 1, 1], np.nan)])
    np.testing.assert_allclose(kernel(output.state), [1 - 1 / 3, 1, 4], rtol=1e-6)
    assert output.metrics["aggregator"]["clients_without_data"] == 1


@pytest.mark.parametrize("held", [True, False])
def test_server_momentum_over_two_rounds(held):
    optimizer = tff.learning.optimizers.build_sgdm(1.0, momentum=0.5)
    process = build(SlicedMeanFactory(SLICES), hold_unreported(optimizer) if held else optimizer)
    state = process.next(process.initialize(), [FIRST, SECOND]).state
    first = kernel(state)
    np.testing.assert_allclose(first, [1 - 1 / 3, 1, 4], rtol=1e-6)
    # The first client alone: prediction 2/3 of 3, gradient 2 * -7/3, so an update of -7/6.
    state = process.next(state, [FIRST]).state
    momentum = 0.5 / 3 - 7 / 6
    np.testing.assert_allclose(kernel(state)[0], 2 / 3 - momentum, rtol=1e-6)
    if held:
        assert kernel(state)[1:].tobytes() == first[1:].tobytes()
        np.testing.assert_allclose(np.ravel(state.finalizer["accumulator"][0]),
                                   [momentum, 1, 0], rtol=1e-6)
    else:
        np.testing.assert_allclose(kernel(state)[1], 1 - 0.5, rtol=1e-6)


def test_model_that_is_not_the_map_s():
    other = SliceMap(("kernel",), ((4, 1),), (np.array([[1, 1], [4, 1]], np.int32),))
    with pytest.raises(TypeError, match=r"^value_type must have kernel as float32\[\?,1\] where "
                       r"updates are slices, or as float32\[4,1\] .* has float32\[3,1\]$"):
        build(SlicedMeanFactory(other))
