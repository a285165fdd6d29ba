"""Tests of feast_tf.serving.portable: the numbers of `supernet.forward`, gradients included."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from feast_tf.routing import Routing
from feast_tf.serving import portable
from feast_tf.space import SupernetSpec, VariantCache
from feast_tf.supernet import forward

SPEC = SupernetSpec(stem=4, bases=(4, 8), depths=(0, 1, 2), widths=(0.5, 1.0),
                    expansions=(0.5, 1.0), strides=(1, 2), classes=3, image_size=8, divisor=2)
ROUTING = Routing(VariantCache(SPEC, [
    SPEC.variant(d=0, e=0.5, w=0.5),
    SPEC.variant(d=(0, 1), e=0.5, w=(0.5, 0.5, 1.0)),
    SPEC.variant(d=(1, 0), e=0.5, w=(0.5, 1.0, 0.5)),
    SPEC.variant(d=(1, 2), e=(0.5, 1.0), w=1.0),
]))
LAYOUT, DIMS = ROUTING.layout, ROUTING.variant_dims


def envelope(level):
    rng = np.random.default_rng(5)
    weights = [np.float32((p.kind == "gamma") + rng.normal(0, 0.4, p.shape))
               for p in LAYOUT.parameters]
    return [tf.constant(part) for part in ROUTING.slices.cut(weights, level)]


@pytest.fixture(scope="module")
def gradients():
    """gradients(network, level, variant, images): (logits, a gradient for each weight)."""
    images = tf.TensorSpec([None, 8, 8, 3])
    compiled = {}

    def run(network, level, variant, pictures):
        def step(weights, dims, images):
            with tf.GradientTape() as tape:
                tape.watch(weights)
                logits = network(LAYOUT, weights, dims, images)
                loss = tf.reduce_sum(tf.sin(logits) * [1.0, 2.0, -3.0])
            return logits, tape.gradient(loss, weights,
                                         unconnected_gradients=tf.UnconnectedGradients.ZERO)

        weights = envelope(level)
        if (network, level) not in compiled:
            specs = [tf.TensorSpec(weight.shape) for weight in weights]
            compiled[network, level] = tf.function(step, input_signature=[
                specs, tf.TensorSpec([LAYOUT.num_dims], tf.int32), images])
        return compiled[network, level](weights, tf.constant(DIMS[variant]), pictures)

    return run


@pytest.mark.parametrize("level, variant", [(3, 3), (3, 2), (3, 1), (3, 0), (2, 1), (0, 0)])
def test_logits_and_gradients(gradients, level, variant):
    images = tf.constant(np.random.default_rng(1).normal(size=[5, 8, 8, 3]), tf.float32)
    logits, found = gradients(portable.forward, level, variant, images)
    expected_logits, expected = gradients(forward, level, variant, images)
    np.testing.assert_allclose(logits, expected_logits, atol=2e-6)
    trained = 0
    for parameter, one, other in zip(LAYOUT.parameters, found, expected):
        np.testing.assert_allclose(one, other, atol=2e-5, err_msg=parameter.name)
        trained += np.any(np.asarray(other) != 0)
    # Blocks beyond the depth are not trained, all others are.
    dims = DIMS[variant]
    assert trained == sum(parameter.gate is None or dims[parameter.gate[0]] >= parameter.gate[1]
                          for parameter in LAYOUT.parameters)


def test_a_batch_of_any_size(gradients):
    images = tf.constant(np.random.default_rng(2).normal(size=[1, 8, 8, 3]), tf.float32)
    np.testing.assert_allclose(gradients(portable.forward, 3, 2, images)[0],
                               gradients(forward, 3, 2, images)[0], atol=2e-6)
