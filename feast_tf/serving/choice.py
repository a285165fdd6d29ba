"""Which variants to export: the largest within a budget of any unit, or variants that are named.

"Largest" is always by MACs, the order in which a federation trains and serves its cache. Any
variant of the space can be extracted, but only cached ones were trained as such (paper 4.2,
"Post-hoc extraction").
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Optional

import numpy as np

from feast_tf.serving.evaluation import anchor_levels
from feast_tf.space import (FitnessSettings, Search, SupernetSpec, Variant, VariantCache, costs,
                            layout_of)
from feast_tf.space.path import parse_pin

_UNITS = {"budgets": "--budget", "levels": "--levels", "variants": "--variant",
          "params": "--params", "bytes": "--bytes", "latency_ms": "--latency_ms"}
_ANY_RHO = 1e3


@dataclasses.dataclass(frozen=True)
class Choice:
    """A variant to export.

    Attributes:
      variant: the architecture.
      level: its place in the cache, None if it is not cached.
      reason: what it was chosen for, for people.
    """

    variant: Variant
    level: Optional[int]
    reason: str


@dataclasses.dataclass(frozen=True)
class ExportRequest:
    """What a user asks for, in one unit; in none, five variants spread evenly over the cache.

    Attributes:
      budgets: limits in MACs, a variant for each.
      levels: places in the cache.
      variants: texts such as "d=1,0;e=0.5;w=1".
      params: limit on the parameters.
      bytes: limit on the size of the file.
      latency_ms: limit on the latency of one picture, in milliseconds.
      post_hoc: takes the fittest variant, cached or not, between the smallest and the largest
        depths, expansions and widths of the cache; for budgets and params.

    Raises:
      ValueError: several units, a limit that is not positive, or `post_hoc` with another unit.
    """

    budgets: tuple[float, ...] = ()
    levels: tuple[int, ...] = ()
    variants: tuple[str, ...] = ()
    params: Optional[float] = None
    bytes: Optional[float] = None
    latency_ms: Optional[float] = None
    post_hoc: bool = False

    def __post_init__(self):
        given = [name for name in _UNITS if getattr(self, name) not in ((), None)]
        if len(given) > 1:
            raise ValueError("give the sizes in one unit only, not in "
                             + " and ".join(_UNITS[name] for name in given))
        if self.post_hoc and given not in (["budgets"], ["params"]):
            raise ValueError("--post_hoc goes with --budget or --params only")
        for name in ("budgets", "params", "bytes", "latency_ms"):
            value = getattr(self, name)
            for limit in value if isinstance(value, tuple) else () if value is None else (value,):
                if not 0 < limit < math.inf:
                    raise ValueError(f"{_UNITS[name]} must be positive, but is {limit:g}")


@dataclasses.dataclass(frozen=True)
class Trials:
    """How the files of candidates are made and measured.

    Attributes:
      description: of the files, for people, such as "tflite, 1 thread".
      bytes_per_weight: no file has fewer bytes for each weight of its kernels.
      size: returns the bytes of a variant's file.
      latency_ms: returns the median latency of a variant's file.
    """

    description: str
    bytes_per_weight: int
    size: Callable[[Variant], int]
    latency_ms: Callable[[Variant], float]


def choose(cache: VariantCache, request: ExportRequest, trials: Trials) -> list[Choice]:
    """The variants that a request asks for, each network once, in the order of the request.

    Raises:
      ValueError: nothing fits, or a level or variant does not exist; the message says what does.
    """
    if request.budgets:
        found = [_within_cost(cache, "macs", limit, request.post_hoc) for limit in request.budgets]
    elif request.variants:
        found = [_choice(cache, parse_pin(text, cache.spec, name="variant"), "named")
                 for text in request.variants]
    elif request.params is not None:
        found = [_within_cost(cache, "params", request.params, request.post_hoc)]
    elif request.bytes is not None:
        found = [_within_bytes(cache, request.bytes, trials)]
    elif request.latency_ms is not None:
        found = [_within_latency(cache, request.latency_ms, trials)]
    else:
        levels = request.levels or anchor_levels(cache.macs, ())
        found = [_at_level(cache, level, f"level {level} of 0..{len(cache) - 1}")
                 for level in levels]
    layout, networks = layout_of(cache.spec), {}
    for choice in found:
        networks.setdefault(layout.dims(choice.variant).tobytes(), choice)
    return list(networks.values())


def _choice(cache: VariantCache, variant: Variant, reason: str) -> Choice:
    same = np.flatnonzero((cache.dims == layout_of(cache.spec).dims(variant)).all(axis=1))
    return Choice(variant, int(same[0]) if same.size else None, reason)


def _at_level(cache: VariantCache, level: int, reason: str) -> Choice:
    if not 0 <= level < len(cache):
        raise ValueError(f"level {level} is not in the cache; its levels are 0 to "
                         f"{len(cache) - 1}")
    return Choice(cache.variants[level], level, reason)


def _within_cost(cache: VariantCache, cost: str, limit: float, post_hoc: bool) -> Choice:
    """The largest cached variant within the limit; below all of them, the fittest uncached one."""
    name = {"macs": "MACs", "params": "parameters"}[cost]
    own = getattr(cache, cost)
    fitting = np.flatnonzero(own <= limit)
    if fitting.size and not post_hoc:
        return _at_level(cache, int(fitting[-1]), f"largest cached within {limit:,.0f} {name}")
    # Where the limit on the depth-to-width ratio leaves nothing, anything is better than that.
    for settings in (FitnessSettings(), FitnessSettings(max_rho=_ANY_RHO)):
        search = Search(_trained_range(cache), cost=cost, settings=settings)
        found = search.fittest(limit)
        if found is not None:
            break
    else:
        raise ValueError(f"no network keeps {limit:,.0f} {name}: the smallest cached one has "
                         f"{own.min():,}, the smallest in the cache's range of d, e and w "
                         f"{search.cheapest:,}")
    return _choice(cache, found.architecture.variant(),
                   f"fittest in the cache's range within {limit:,.0f} {name}")


def _trained_range(cache: VariantCache) -> SupernetSpec:
    """The space without what is smaller or larger than all cached variants.

    A prefix narrower than all that were trained was never asked for an answer: on digits, half the
    smallest cached width classifies 14 % of the pictures right.
    """
    def kept(allowed, field):
        used = [value for variant in cache.variants for value in getattr(variant, field)]
        return tuple(value for value in allowed if min(used) <= value <= max(used))

    spec = cache.spec
    return dataclasses.replace(spec, depths=kept(spec.depths, "d"), widths=kept(spec.widths, "w"),
                               expansions=kept(spec.expansions, "e"))


def _within_bytes(cache: VariantCache, limit: float, trials: Trials) -> Choice:
    """The largest cached variant whose file keeps the limit: makes as few files as it can."""
    for level in reversed(range(len(cache))):
        weights = sum(math.prod(row.kernel)
                      for row in costs.layer_table(cache.spec, cache.variants[level]))
        if trials.bytes_per_weight * weights > limit:
            continue
        size = trials.size(cache.variants[level])
        if size <= limit:
            return _at_level(cache, level, f"largest cached within {limit:,.0f} bytes: {size:,} "
                                           f"({trials.description})")
    smallest = trials.size(cache.variants[int(np.argmin(cache.params))])
    raise ValueError(f"no cached variant's file keeps {limit:,.0f} bytes: the smallest has "
                     f"{smallest:,} ({trials.description})")


def _within_latency(cache: VariantCache, limit: float, trials: Trials) -> Choice:
    """The largest cached variant that keeps the limit, by bisection: latency grows with MACs."""
    measured: dict[int, float] = {}
    fits, exceeds = -1, len(cache)
    while exceeds - fits > 1:
        level = (fits + exceeds) // 2
        measured[level] = trials.latency_ms(cache.variants[level])
        if measured[level] <= limit:
            fits = level
        else:
            exceeds = level
    found = ", ".join(f"{latency:.3g} ms at {cache.macs[level] / 1e6:.4g}M MACs"
                      for level, latency in sorted(measured.items()))
    if fits < 0:
        raise ValueError(f"no cached variant keeps {limit:g} ms; measured: {found} "
                         f"({trials.description})")
    return _at_level(cache, fits, f"largest cached within {limit:g} ms; measured: {found} "
                                  f"({trials.description})")
