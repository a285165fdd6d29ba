"""Supervised and distillation losses (paper 3.4). All are means over the batch."""

from __future__ import annotations

import tensorflow as tf


def supervised_loss(logits: tf.Tensor, labels_a: tf.Tensor, labels_b: tf.Tensor,
                    mix: tf.Tensor, label_smoothing: float = 0.0) -> tf.Tensor:
    """L_sup = lambda CE(z, y_a) + (1 - lambda) CE(z, y_b), the loss of Mixup and CutMix.

    Args:
      logits: float32[batch, classes].
      labels_a, labels_b: int32[batch].
      mix: float32 scalar lambda.
      label_smoothing: share of the target spread over all classes.

    Returns:
      float32 scalar.
    """
    classes = tf.shape(logits)[-1]
    target = (mix * tf.one_hot(labels_a, classes) + (1.0 - mix) * tf.one_hot(labels_b, classes))
    if label_smoothing:
        target = (1.0 - label_smoothing) * target + label_smoothing / tf.cast(classes, tf.float32)
    return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(target, logits))


def soft_targets(logits: tf.Tensor, temperature: float = 1.0) -> tf.Tensor:
    """softmax(sg(z) / T): the teacher's distribution, detached so that no student trains it."""
    return tf.nn.softmax(tf.stop_gradient(logits) / temperature)


def distillation_loss(logits: tf.Tensor, targets: tf.Tensor, temperature: float = 1.0) -> tf.Tensor:
    """L_KD = -sum_c p_c log softmax(z / T)_c, times T^2 so that its gradient keeps its scale.

    Args:
      logits: float32[batch, classes] of the student.
      targets: float32[batch, classes] from `soft_targets` at the same temperature (the paper: 1).

    Returns:
      float32 scalar: the sum over classes, averaged over the batch.
    """
    # A product, whose gradient needs no broadcasting: TensorFlow Lite has no operation for that.
    loss = tf.nn.softmax_cross_entropy_with_logits(targets, logits * (1.0 / temperature))
    return temperature**2 * tf.reduce_mean(loss)
