"""Which variants a mini-batch trains (paper 3.4, Table 2)."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

# What a variant is to a client; the rows of the training metrics.
ROLES = ("largest", "minimum", "random")


@dataclasses.dataclass(frozen=True)
class TrainingRule:
    """Which roles are trained on every mini-batch.

    Attributes:
      largest: the client's largest affordable cached variant (the teacher, where there is one).
      minimum: the smallest variant of the whole cache.
      random: a uniform draw from all affordable variants; no pass of its own when it hits one that
        is trained anyway.
      distill: the largest variant's detached soft targets teach the others.
    """

    largest: bool = False
    minimum: bool = False
    random: bool = False
    distill: bool = False

    def __post_init__(self):
        if not (self.largest or self.minimum):
            raise ValueError("a training rule needs the largest or the minimum variant")
        if self.distill and not (self.largest and self.minimum):
            raise ValueError("distillation needs the largest variant as teacher and a student")

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that this rule trains, in the order of `ROLES`."""
        return tuple(role for role in ROLES if getattr(self, role))


# The rows of the paper's Table 2.
RULES = {
    "min": TrainingRule(minimum=True),
    "max": TrainingRule(largest=True),
    "min_max": TrainingRule(minimum=True, largest=True),
    "min_max_kd": TrainingRule(minimum=True, largest=True, distill=True),
    "full": TrainingRule(minimum=True, largest=True, random=True, distill=True),
}


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
    drawn = tf.random.stateless_uniform([], seed, minval=0, maxval=level + 1, dtype=tf.int32)
    keep = tf.stack([
        tf.constant(rule.largest),
        tf.logical_and(rule.minimum, level > 0 if rule.largest else True),
        tf.logical_and(rule.random, tf.logical_and(drawn > 0 if rule.minimum else True,
                                                   drawn < level if rule.largest else True)),
    ])
    places = tf.stack([level, 0, drawn])
    return tf.boolean_mask(places, keep), tf.boolean_mask(tf.range(3), keep)
