"""Which leading positions of every array belong to each level: all that routing and aggregation need.

A `Routing` has one (`Routing.slices`) for the elastic ResNet; other models bring their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Optional

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class SliceMap:
    """The arrays of a model and the prefix of each one that clients of each level hold.

    Attributes:
      names: one for each array, for people and error messages; never parsed.
      shapes: of the whole arrays.
      extents: for each array int32[levels, rank], the size of a level's prefix; 0 on some axis where
        the level does not have the array. Levels need not be nested.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    extents: tuple[np.ndarray, ...]

    def __post_init__(self):
        if not (len(self.names) == len(self.shapes) == len(self.extents)) or not self.names:
            raise ValueError(f"a slice map needs a shape and extents for each of its arrays, but has "
                             f"{len(self.names)} names, {len(self.shapes)} shapes and "
                             f"{len(self.extents)} extents")
        for name, shape, extents in zip(self.names, self.shapes, self.extents):
            if np.ndim(extents) != 2 or np.shape(extents) != (self.num_levels, len(shape)):
                raise ValueError(f"{name}: extents must be of shape ({self.num_levels} levels, "
                                 f"{len(shape)} axes), but are of shape {np.shape(extents)}")
            if np.any(extents < 0) or np.any(extents > np.int64(shape)):
                raise ValueError(f"{name}: extents must lie within the shape {shape}")

    @property
    def num_levels(self) -> int:
        return len(self.extents[0])

    @property
    def elastic_shapes(self) -> tuple[tuple[Optional[int], ...], ...]:
        """The static shape that all slices of an array share: None on axes that a level cuts."""
        return tuple(
            tuple(size if np.all(column == size) else None
                  for size, column in zip(shape, extents.T))
            for shape, extents in zip(self.shapes, self.extents))

    @property
    def payload(self) -> np.ndarray:
        """int64[levels]: numbers that a client of each level is sent."""
        return np.sum([np.prod(extents, axis=1, dtype=np.int64) for extents in self.extents], axis=0)

    def check_level(self, level: int) -> int:
        """The level; ValueError where there is none of that number."""
        if not 0 <= level < self.num_levels:
            raise ValueError(f"level must lie in 0..{self.num_levels - 1}, but is {level}")
        return level

    def slice_shapes(self, level: int) -> list[tuple[int, ...]]:
        """Shapes of what a client of `level` holds."""
        self.check_level(level)
        return [tuple(extents[level].tolist()) for extents in self.extents]

    def cut(self, weights: Sequence[np.ndarray], level: int) -> list[np.ndarray]:
        """What a client of `level` is sent of NumPy `weights`: views, in the order of `names`."""
        return [np.asarray(weight)[(*(slice(0, size) for size in shape), ...)]
                for weight, shape in zip(weights, self.slice_shapes(level))]
