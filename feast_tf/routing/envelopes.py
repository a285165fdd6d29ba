"""Budget-tailored routing: the envelope that spans a client's affordable variants (paper 3.3).

d*_{i,l} = max over A_i of d_l(a), w*_{i,j} = max over A_i of w_j(a), at the largest expansion of
the space. Affordable sets are prefixes of the cache, so there is one envelope for each cached
variant (*level*), and the envelope of a higher level contains that of a lower one.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from feast_tf.routing.slices import SliceMap
from feast_tf.space import Variant, VariantCache, costs, layout_of

BYTES_PER_PARAMETER = 4  # float32 in both directions


@dataclasses.dataclass(frozen=True)
class Envelope:
    """What a client of one level receives and returns.

    Attributes:
      level: place of the largest affordable variant in the cache.
      d: largest number of extra blocks of each stage.
      w: largest width multiplier of the stem and of each stage.
      payload: parameters sent in one direction.
    """

    level: int
    d: tuple[int, ...]
    w: tuple[float, ...]
    payload: int

    @property
    def payload_bytes(self) -> int:
        """Bytes sent in one direction (float32, metadata not counted)."""
        return self.payload * BYTES_PER_PARAMETER


class Routing:
    """The envelopes of a cache and the tables that slice and scatter them.

    Attributes:
      cache: the `VariantCache`.
      layout: the supernet's `Layout`.
      variant_dims: int32[A, 1 + 3S], `dims` of the cached variants.
      envelope_dims: int32[A, 1 + 3S], `dims` of the envelope of each level.
      slices: the `SliceMap`: the prefix of each parameter that a level's client receives.
      extents: its table, for each parameter int32[A, rank].
      payload: int64[A], parameters of each envelope.
    """

    def __init__(self, cache: VariantCache):
        self.cache = cache
        self.layout = layout_of(cache.spec)
        spec = cache.spec
        self._depths = np.maximum.accumulate([variant.d for variant in cache.variants])
        self._widths = np.maximum.accumulate([variant.w for variant in cache.variants])
        full = (spec.expansions[-1],) * spec.num_stages
        self.variant_dims = cache.dims
        self.envelope_dims = np.stack([
            self.layout.dims(Variant(d.tolist(), full, w.tolist()))
            for d, w in zip(self._depths, self._widths)])
        self.slices = SliceMap(tuple(p.name for p in self.layout.parameters),
                               tuple(p.shape for p in self.layout.parameters),
                               tuple(self.layout.extents(self.envelope_dims)))
        self.extents = self.slices.extents
        self.payload = np.atleast_1d(costs.params(spec, self.envelope_dims))

    @property
    def num_levels(self) -> int:
        return len(self.cache)

    def envelope(self, level: int) -> Envelope:
        """The envelope of one level.

        Raises:
          ValueError: there is no such level.
        """
        self.slices.check_level(level)
        return Envelope(level, tuple(self._depths[level].tolist()),
                        tuple(self._widths[level].tolist()), int(self.payload[level]))

    def envelope_for(self, budget: float) -> Envelope:
        """The envelope of a client with `budget` MACs; ValueError where it affords nothing."""
        return self.envelope(self.cache.level(budget))
