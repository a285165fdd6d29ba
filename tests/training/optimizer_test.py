"""SGD worked out by hand, its schedule, and what it refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

from feast_tf.training import SGD


def test_clip_then_decay_then_momentum_then_step():
    sgd = SGD(momentum=0.5, weight_decay=0.1, clip_norm=1.0)
    weights, velocity = tf.constant([2.0, -1.0, 4.0]), tf.zeros([3])
    rate = tf.constant(0.25)

    # (3, 4, 12) has norm 13.
    weights, velocity = sgd.apply(tf.constant([3.0, 4.0, 12.0]), weights, velocity, rate)
    v = np.array([3 / 13 + 0.1 * 2, 4 / 13 + 0.1 * -1, 12 / 13 + 0.1 * 4])
    w = np.array([2, -1, 4]) - 0.25 * v
    np.testing.assert_allclose(velocity, v, rtol=1e-5)
    np.testing.assert_allclose(weights, w, rtol=1e-5)

    # (0.3, -0.4, 0) has norm 0.5: not clipped, and not scaled up.
    weights, velocity = sgd.apply(tf.constant([0.3, -0.4, 0.0]), weights, velocity, rate)
    v = 0.5 * v + [0.3, -0.4, 0] + 0.1 * w
    w = w - 0.25 * v
    np.testing.assert_allclose(velocity, v, rtol=1e-5)
    np.testing.assert_allclose(weights, w, rtol=1e-5)


def test_without_clipping_decay_and_momentum_it_is_plain():
    sgd = SGD(momentum=0.0, weight_decay=0.0, clip_norm=0.0)
    weights, _ = sgd.apply(tf.constant([300.0]), tf.constant([7.0]), tf.constant([50.0]),
                           tf.constant(0.01))
    assert float(weights[0]) == pytest.approx(7 - 0.01 * 300)


def test_rate_0_changes_no_weight():
    weights = tf.constant([3.7, -0.0, 1e-30])
    after, _ = SGD().apply(tf.constant([1.0, -2.0, 5.0]), weights, tf.zeros(3), tf.constant(0.0))
    np.testing.assert_array_equal(after, weights)


def test_infinite_gradient_gives_an_update_that_is_not_finite():
    # Clipping must not turn a diverged client into one that looks sane.
    after, _ = SGD().apply(tf.constant([1.0, np.inf]), tf.ones(2), tf.zeros(2), tf.constant(0.1))
    assert not np.all(np.isfinite(after))


def test_works_without_elements():
    after, velocity = SGD().apply(tf.zeros([0]), tf.zeros([0]), tf.zeros([0]), tf.constant(0.1))
    assert after.shape == velocity.shape == [0]


@pytest.mark.parametrize(
    "round_num, share",
    [(0, 1.0), (10, (1 + math.cos(math.pi / 4)) / 2), (20, 0.5), (40, 0.0), (41, 0.0)],
)
def test_cosine_ends_at_0_after_the_last_round(round_num, share):
    rate = SGD(learning_rate=0.3).rate(tf.constant(round_num), 40)
    assert rate.dtype == tf.float32
    assert float(rate) == pytest.approx(0.3 * share, abs=1e-7)


def test_constant_schedule_stays():
    sgd = SGD(learning_rate=0.3, schedule="constant")
    assert [float(sgd.rate(tf.constant(t), 40)) for t in (0, 20, 40)] == pytest.approx([0.3] * 3)


def test_a_graph_of_the_first_kind_gives_the_same():
    # TFF traces in such graphs, where `==` on tensors compares identities.
    sgd = SGD(clip_norm=1.5)

    def step():
        rate = sgd.rate(tf.constant(3), 7)
        return sgd.apply(tf.constant([3.0, 4.0]), tf.constant([5.0, -6.0]),
                         tf.constant([0.5, 0.25]), rate)

    with tf.Graph().as_default():
        found = step()
        with tf.compat.v1.Session() as session:
            found = session.run(found)
    np.testing.assert_allclose(found, step(), rtol=1e-6)


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", "clip_norm"])
def test_strengths_must_be_finite_and_not_negative(name, value):
    with pytest.raises(ValueError, match=f"{name} must be finite and not negative, but is {value}"):
        SGD(**{name: value})


@pytest.mark.parametrize("value", [-0.1, 1.0, math.nan])
def test_momentum_below_1(value):
    with pytest.raises(ValueError, match=rf"^momentum must lie in \[0, 1\), but is {value}$"):
        SGD(momentum=value)


def test_schedule_is_a_known_one():
    with pytest.raises(ValueError,
                       match="^schedule must be one of cosine, constant, but is 'linear'$"):
        SGD(schedule="linear")
