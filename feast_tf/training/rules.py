"""Draws the variants that a mini-batch trains, by a rule of `routing.rules` (paper 3.4)."""

from __future__ import annotations

import tensorflow as tf

from feast_tf.routing import ROLES, RULES, TrainingRule  # noqa: F401  (part of this package's API)


def draw_variants(rule: TrainingRule, level: tf.Tensor,
                  seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Draws the variants of one mini-batch.

    Args:
      rule: the training rule.
      level: int32 scalar, place of the client's largest affordable variant in the cache.
      seed: int32[2] stateless seed of this mini-batch.

    Returns:
      (places, roles): int32[V] places in the cache and int32[V] indices into `ROLES`, 1 <= V <= 3,
      each place once, the largest variant first wherever the rule trains it. At level 0 the largest
      variant is the minimum; it is trained once.
    """
    return trained_variants(rule, level, tf.random.stateless_uniform(
        [], seed, minval=0, maxval=level + 1, dtype=tf.int32))


def trained_variants(rule: TrainingRule, level: tf.Tensor,
                     drawn: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The result of `draw_variants` for the int32 scalar `drawn`, uniform over 0 .. level."""
    keep = tf.stack([
        tf.constant(rule.largest),
        tf.logical_and(rule.minimum, level > 0 if rule.largest else True),
        tf.logical_and(rule.random, tf.logical_and(drawn > 0 if rule.minimum else True,
                                                   drawn < level if rule.largest else True)),
    ])
    places = tf.stack([level, 0, drawn])
    return tf.boolean_mask(places, keep), tf.boolean_mask(tf.range(3), keep)
