"""The losses against NumPy, and what they must not train."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from feast_tf.training import losses


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


def reference_distillation(student, teacher, temperature):
    """The mean over pictures of the sum over classes of -p log q, times T^2."""
    p = np.exp(log_softmax(np.asarray(teacher, np.float64) / temperature))
    q = log_softmax(np.asarray(student, np.float64) / temperature)
    return temperature**2 * np.mean([-np.sum(p[i] * q[i]) for i in range(len(p))])


def test_supervised_loss_by_hand():
    # softmax(ln 1, ln 2, ln 5) = (1, 2, 5) / 8 and softmax(ln 3, ln 1, ln 1) = (3, 1, 1) / 5.
    logits = tf.math.log([[1.0, 2.0, 5.0], [3.0, 1.0, 1.0]])
    loss = losses.supervised_loss(logits, tf.constant([2, 0]), tf.constant([1, 2]), 0.7)
    first = 0.7 * -np.log(5 / 8) + 0.3 * -np.log(2 / 8)
    second = 0.7 * -np.log(3 / 5) + 0.3 * -np.log(1 / 5)
    assert float(loss) == pytest.approx((first + second) / 2, rel=1e-6)


def test_label_smoothing_by_hand():
    logits = tf.math.log([[1.0, 2.0, 5.0]])
    loss = losses.supervised_loss(logits, tf.constant([2]), tf.constant([1]), 0.7, 0.3)
    # 0.7 of (0, 0.3, 0.7) and 0.3 of (1, 1, 1) / 3.
    target = np.array([0.1, 0.31, 0.59])
    assert float(loss) == pytest.approx(-np.sum(target * np.log([1 / 8, 2 / 8, 5 / 8])), rel=1e-6)


def test_lam_1_is_the_cross_entropy_of_the_first_labels():
    logits = tf.constant([[0.5, -1.0, 2.0], [1.5, 0.25, -3.0]])
    loss = losses.supervised_loss(logits, tf.constant([1, 0]), tf.constant([2, 2]), 1.0)
    expected = tf.keras.losses.sparse_categorical_crossentropy(
        tf.constant([1, 0]), logits, from_logits=True)
    assert float(loss) == pytest.approx(float(tf.reduce_mean(expected)), rel=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 4.5])
def test_distillation_loss_of_200_classes(temperature):
    rng = np.random.default_rng(1)
    student, teacher = rng.normal(0, 3, [2, 7, 200]).astype(np.float32)
    targets = losses.soft_targets(teacher, temperature)
    loss = losses.distillation_loss(student, targets, temperature)
    expected = reference_distillation(student, teacher, temperature)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    # Neither the mean over classes nor a missing T^2 would be near.
    assert expected > 3


def test_distillation_loss_by_hand():
    student, teacher = tf.math.log([[1.0, 2.0, 5.0]]), tf.math.log([[4.0, 3.0, 1.0]])
    loss = losses.distillation_loss(student, losses.soft_targets(teacher))
    expected = -(4 * np.log(1 / 8) + 3 * np.log(2 / 8) + 1 * np.log(5 / 8)) / 8
    assert float(loss) == pytest.approx(expected, rel=1e-6)


def test_gradient_of_distillation_keeps_its_scale_at_any_temperature():
    # T^2 undoes the 1/T^2 that soft targets bring: at high T the gradient is (z - t) / classes.
    student = tf.Variable([[0.3, -0.2, 0.5]])
    teacher = tf.constant([[0.1, 0.4, -0.3]])
    with tf.GradientTape() as tape:
        loss = losses.distillation_loss(student, losses.soft_targets(teacher, 1000.0), 1000.0)
    centred = lambda x: x - tf.reduce_mean(x)
    np.testing.assert_allclose(tape.gradient(loss, student),
                               (centred(student) - centred(teacher)) / 3, rtol=2e-3)


def test_teacher_is_detached():
    shared, teacher_only, student_only = (tf.Variable(v) for v in ([[0.3]], [[2.0]], [[0.7]]))
    features = tf.constant([[1.0], [-2.0]])
    weights = tf.constant([[0.5, -1.0, 0.25]])
    with tf.GradientTape(persistent=True) as tape:
        teacher = features * shared * teacher_only * weights
        student = features * shared * student_only * weights
        loss = losses.distillation_loss(student, losses.soft_targets(teacher))
        fixed = losses.distillation_loss(student, tf.nn.softmax(teacher.numpy()))
    assert tape.gradient(loss, teacher_only) is None
    assert tape.gradient(loss, student_only)[0, 0] != 0
    # What both share is trained through the student alone.
    np.testing.assert_array_equal(tape.gradient(loss, shared), tape.gradient(fixed, shared))


def test_a_graph_of_the_first_kind_gives_the_same():
    # TFF traces in such graphs, where `==` on tensors compares identities.
    rng = np.random.default_rng(2)
    student, teacher = rng.normal(size=[2, 5, 4]).astype(np.float32)

    def both(student, teacher):
        targets = losses.soft_targets(tf.constant(teacher), 2.0)
        return (losses.supervised_loss(tf.constant(student), tf.constant([0, 1, 2, 3, 3]),
                                       tf.constant([3, 1, 0, 0, 2]), 0.6, 0.1),
                losses.distillation_loss(tf.constant(student), targets, 2.0))

    with tf.Graph().as_default():
        found = both(student, teacher)
        with tf.compat.v1.Session() as session:
            found = session.run(found)
    np.testing.assert_allclose(found, both(student, teacher), rtol=1e-6)
