"""The elastic search space: what can be built (paper 3.2).

A `SupernetSpec` says which depths, widths and expansions exist; a `Variant` picks one of each.
Every channel count comes from `round_channels`, so that the cost code and the networks agree.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


def round_channels(value: float, divisor: int = 8) -> int:
    """Rounds a channel count to the nearest multiple of `divisor` (half up), never below `divisor`.

    As in the OFA line, one more `divisor` is added where rounding down would lose over a tenth.
    """
    rounded = max(divisor, math.floor(value / divisor + 0.5) * divisor)
    return rounded + divisor if rounded < 0.9 * value else rounded


def number_text(value: float) -> str:
    """The shortest text that reads back as the same number; whole numbers have no point."""
    return repr(value).removesuffix(".0")


def _numbers(name: str, values: Any, kind: type) -> tuple:
    try:
        values = list(values)
    except TypeError as error:
        raise ValueError(f"{name} must be a sequence of numbers, but is {values!r}") from error
    result = []
    for value in values:
        wanted = numbers.Integral if kind is int else numbers.Real
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise ValueError(f"{name} must hold {kind.__name__}s only, but holds {value!r}")
        result.append(kind(value))
    return tuple(result)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One architecture a = (d, e, w) of the space.

    Attributes:
      d: extra blocks of each stage (S integers); a stage with d runs its first 1 + d blocks.
      e: expansion ratio of each stage (S floats): middle width of a block over its outer width.
      w: width multipliers (1 + S floats): the stem's first, then each stage's.
    """

    d: tuple[int, ...]
    e: tuple[float, ...]
    w: tuple[float, ...]

    def __post_init__(self):
        object.__setattr__(self, "d", _numbers("d", self.d, int))
        object.__setattr__(self, "e", _numbers("e", self.e, float))
        object.__setattr__(self, "w", _numbers("w", self.w, float))

    def __str__(self) -> str:
        join = lambda values: ",".join(map(number_text, values))
        return f"d={join(self.d)} e={join(self.e)} w={join(self.w)}"


@dataclasses.dataclass(frozen=True)
class SupernetSpec:
    """The space of an elastic ResNet.

    Attributes:
      stem: channels of the 3x3 stem convolution at width 1.
      bases: channels of each stage at width 1 (S integers).
      depths: allowed numbers of extra blocks.
      widths: allowed width multipliers, each in (0, 1].
      expansions: allowed expansion ratios; envelopes are routed at the largest (paper 3.3).
      strides: stride of the first block of each stage (S integers).
      classes: classes of the linear head.
      image_size: height and width of the square RGB input in pixels.
      divisor: channel counts are multiples of this.
    """

    stem: int
    bases: tuple[int, ...]
    depths: tuple[int, ...]
    widths: tuple[float, ...]
    expansions: tuple[float, ...]
    strides: tuple[int, ...]
    classes: int
    image_size: int
    divisor: int = 8

    def __post_init__(self):
        for name, kind in (("bases", int), ("depths", int), ("widths", float),
                           ("expansions", float), ("strides", int)):
            values = _numbers(name, getattr(self, name), kind)
            if not values:
                raise ValueError(f"{name} must not be empty")
            if name in ("depths", "widths", "expansions"):
                values = tuple(sorted(set(values)))
            object.__setattr__(self, name, values)
        if len(self.strides) != len(self.bases):
            raise ValueError(f"strides must have one value a stage ({len(self.bases)}), but has "
                             f"{len(self.strides)}")
        for name in ("stem", "classes", "image_size", "divisor"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
                raise ValueError(f"{name} must be a positive integer, but is {value!r}")
            object.__setattr__(self, name, int(value))
        if min(self.depths) < 0:
            raise ValueError(f"depths must not be negative, but hold {min(self.depths)}")
        if min(self.bases + self.strides) < 1:
            raise ValueError("bases and strides must be positive")
        for name in ("widths", "expansions"):
            if not all(0 < value <= 1 for value in getattr(self, name)):
                raise ValueError(f"{name} must lie in (0, 1], but are {getattr(self, name)}")
        if self.image_size % math.prod(self.strides):
            raise ValueError(f"image_size must be a multiple of {math.prod(self.strides)}, the "
                             f"product of the strides, but is {self.image_size}")

    @property
    def num_stages(self) -> int:
        return len(self.bases)

    @property
    def max_depth(self) -> int:
        return max(self.depths)

    def variant(self, *, d: Any, e: Any, w: Any) -> Variant:
        """A validated variant; a single number stands for the same value in every place."""
        fill = lambda value, count: value if isinstance(value, Iterable) else (value,) * count
        variant = Variant(fill(d, self.num_stages), fill(e, self.num_stages),
                          fill(w, self.num_stages + 1))
        self.validate(variant)
        return variant

    def smallest(self) -> Variant:
        return self.variant(d=self.depths[0], e=self.expansions[0], w=self.widths[0])

    def largest(self) -> Variant:
        return self.variant(d=self.depths[-1], e=self.expansions[-1], w=self.widths[-1])

    def random(self, rng: np.random.Generator) -> Variant:
        """A variant with every d, e and w drawn uniformly and independently."""
        stages = self.num_stages
        return self.variant(d=rng.choice(self.depths, stages).tolist(),
                            e=rng.choice(self.expansions, stages).tolist(),
                            w=rng.choice(self.widths, stages + 1).tolist())

    def validate(self, variant: Variant) -> None:
        """Raises ValueError, naming the field and its allowed values, for a foreign variant."""
        for name, allowed, count in (("d", self.depths, self.num_stages),
                                     ("e", self.expansions, self.num_stages),
                                     ("w", self.widths, self.num_stages + 1)):
            values: Sequence = getattr(variant, name)
            if len(values) != count:
                raise ValueError(f"{name} must have {count} values, but has {len(values)}")
            for place, value in enumerate(values):
                if value not in allowed:
                    raise ValueError(f"{name}[{place}] = {number_text(value)} is not in the space; "
                                     f"allowed: {', '.join(map(number_text, allowed))}")

    def fingerprint(self) -> str:
        """Identifies the set of variants; classes and image size change costs only: left out."""
        fields = dataclasses.asdict(self)
        del fields["classes"], fields["image_size"]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]


def paper_spec(classes: int = 100, image_size: int = 32) -> SupernetSpec:
    """The paper's space: 55,682,916 parameters and 2,677,837,824 MACs at most with 100 classes."""
    return SupernetSpec(stem=64, bases=(128, 256, 512, 1024), depths=tuple(range(9)),
                        widths=tuple(tenth / 10 for tenth in range(1, 11)),
                        expansions=(0.10, 0.14, 0.18, 0.22, 0.25), strides=(1, 2, 2, 2),
                        classes=classes, image_size=image_size)
