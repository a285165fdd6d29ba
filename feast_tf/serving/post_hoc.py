"""Variants that were not trained by name, held against the cached ones.

The trained tensor serves any variant of the space after recalibration, without further training
(paper 3.2). The paper's measure (4.2) is the gap from the cached curve.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from feast_tf.space import Search, Variant, VariantCache, costs, layout_of
from feast_tf.space.path import search_path

_DRAWS_AT_ONCE = 500
# Where so many draws in a row bring nothing new, the space is taken to hold no more. A single
# network that is left is missed with a chance of e^-20 if it is one in a thousand of the draws.
_FUTILE_DRAWS = 20_000


@dataclasses.dataclass(frozen=True, eq=False)
class PostHocGap:
    """How uncached variants compare with the cached curve; accuracies are shares, 0..1.

    Attributes:
      curve: float64[K], accuracy of the cached curve at the uncached variants' MACs.
      gap: float64[K], accuracy less curve.
    """

    curve: np.ndarray
    gap: np.ndarray

    @property
    def mean_absolute(self) -> float:
        """The paper's measure: the mean of |accuracy - curve|."""
        return float(np.mean(np.abs(self.gap)))

    @property
    def mean_signed(self) -> float:
        """The mean of accuracy - curve: below 0 where uncached variants are worse."""
        return float(np.mean(self.gap))


def uncached_variants(cache: VariantCache, count: int, rng: np.random.Generator) -> list[Variant]:
    """Draws different networks of the space that are not in the cache, within its range of MACs.

    Every d, e and w is drawn uniformly and independently (`SupernetSpec.random`); draws outside the
    range, in the cache or drawn before are dropped.

    Args:
      cache: the cached variants.
      count: how many to draw.
      rng: the source of randomness.

    Returns:
      `count` variants, ascending in MACs.

    Raises:
      ValueError: the space holds fewer; the message says how many were found.
    """
    spec, layout = cache.spec, layout_of(cache.spec)
    known = {row.tobytes() for row in cache.dims}
    found: list[tuple[int, Variant]] = []
    futile = 0
    while len(found) < count and futile < _FUTILE_DRAWS:
        drawn = [spec.random(rng) for _ in range(_DRAWS_AT_ONCE)]
        dims = np.stack([layout.dims(variant) for variant in drawn])
        macs = costs.macs(spec, dims)
        futile += len(drawn)
        for place in np.flatnonzero((macs >= cache.macs[0]) & (macs <= cache.macs[-1])):
            key = dims[place].tobytes()
            if key not in known:
                known.add(key)
                found.append((int(macs[place]), drawn[place]))
                futile = 0
    if len(found) < count:
        raise ValueError(
            f"{count} uncached variants were asked for, but the space has {len(found)} between the "
            f"{cache.macs[0]:,} and {cache.macs[-1]:,} MACs of the cache")
    return [variant for _, variant in sorted(found[:count], key=lambda pair: pair[0])]


def fittest_variants(cache: VariantCache, count: int) -> list[Variant]:
    """Searches the fittest networks under limits between the cached ones: what one would deploy.

    Args:
      cache: the cached variants.
      count: how many limits, in the middle of as many equal parts of the cache's range of MACs.

    Returns:
      At most `count` variants that are not in the cache, ascending in MACs: where the fittest is
      cached, the fittest above the previous limit is taken, and nothing where that is cached too.

    Raises:
      ValueError: there is none at all.
    """
    low, high = cache.macs[0], cache.macs[-1]
    limits = low + (high - low) * (np.arange(count) + 0.5) / count
    layout, known = layout_of(cache.spec), {row.tobytes() for row in cache.dims}
    rows = search_path(Search(cache.spec), limits)
    found = [row.architecture.variant() for row in rows if row.score.macs >= low]
    found = [variant for variant in found if layout.dims(variant).tobytes() not in known]
    if not found:
        raise ValueError(f"the fittest networks under {count} limits between {low:,} and {high:,} "
                         "MACs are all in the cache; ask for more, or for random ones")
    return found


def post_hoc_gap(macs: Sequence[int], accuracies: Sequence[float], cached_macs: Sequence[int],
                 cached_accuracies: Sequence[float]) -> PostHocGap:
    """Holds uncached variants against the cached accuracy-MACs curve, which is linear in between.

    Args:
      macs, accuracies: of the uncached variants.
      cached_macs, cached_accuracies: of the cached ones, ascending in MACs. Several variants of the
        same MACs count as one of their mean accuracy.
    """
    corners, which = np.unique(cached_macs, return_inverse=True)
    heights = np.bincount(which, cached_accuracies) / np.bincount(which)
    curve = np.interp(macs, corners, heights)
    return PostHocGap(curve, np.asarray(accuracies, np.float64) - curve)
