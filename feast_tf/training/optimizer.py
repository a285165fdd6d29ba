"""SGD on one vector of all weights, and its schedule over rounds.

The order is that of the compared systems: clip the raw gradient by its global norm, add the coupled
weight decay, then momentum, then the step. Momentum starts afresh in every round on every client.
"""

from __future__ import annotations

import dataclasses
import math

import tensorflow as tf

SCHEDULES = ("cosine", "constant")


@dataclasses.dataclass(frozen=True)
class SGD:
    """Hyperparameters of the local optimiser.

    Attributes:
      learning_rate: at round 0.
      momentum: v = momentum * v + g; w = w - learning_rate * v.
      weight_decay: added to the gradient as weight_decay * w, for every parameter.
      clip_norm: largest global norm of the gradient; 0 does not clip.
      schedule: "cosine" (to 0 over the rounds of the run) or "constant".
    """

    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    clip_norm: float = 10.0
    schedule: str = "cosine"

    def __post_init__(self):
        for name in ("learning_rate", "weight_decay", "clip_norm"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and not negative, but is {value}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), but is {self.momentum}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, but is "
                             f"{self.schedule!r}")

    def rate(self, round_num: tf.Tensor, total_rounds: int) -> tf.Tensor:
        """Learning rate (float32 scalar) of a round, an int32 scalar counted from 0."""
        if self.schedule == "constant":
            return tf.constant(self.learning_rate, tf.float32)
        progress = tf.cast(round_num, tf.float32) / float(total_rounds)
        return self.learning_rate * 0.5 * (1.0 + tf.cos(math.pi * tf.minimum(progress, 1.0)))

    def apply(self, gradient: tf.Tensor, weights: tf.Tensor, velocity: tf.Tensor,
              rate: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """One step on float32 tensors of one shape; returns the new (weights, velocity)."""
        if self.clip_norm:
            norm = tf.norm(gradient)
            gradient *= tf.minimum(1.0, self.clip_norm / (norm + 1e-6))
        if self.weight_decay:
            gradient += self.weight_decay * weights
        velocity = self.momentum * velocity + gradient
        return weights - rate * velocity, velocity
