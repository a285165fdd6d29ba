"""Which of a client's affordable variants a mini-batch trains (paper 3.4, Table 2)."""

from __future__ import annotations

import dataclasses

import numpy as np

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

    def expected_passes(self, num_levels: int) -> np.ndarray:
        """How often a mini-batch of a client trains each variant, on average.

        Args:
          num_levels: variants in the cache, A.

        Returns:
          float64[A, A]: for a client of each level, the chance of each variant. A row's sum is the
          expected number of forward and backward passes.
        """
        chances = np.zeros((num_levels, num_levels))
        for level, row in enumerate(chances):
            if self.random:  # a draw of what is trained anyway is no further pass
                row[:level + 1] = 1 / (level + 1)
            if self.minimum:
                row[0] = 1
            if self.largest:
                row[level] = 1
        return chances


# The rows of the paper's Table 2.
RULES = {
    "min": TrainingRule(minimum=True),
    "max": TrainingRule(largest=True),
    "min_max": TrainingRule(minimum=True, largest=True),
    "min_max_kd": TrainingRule(minimum=True, largest=True, distill=True),
    "full": TrainingRule(minimum=True, largest=True, random=True, distill=True),
}
