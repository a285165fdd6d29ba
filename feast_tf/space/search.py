"""Exact offline search: the fittest architecture under a cost limit (paper 3.2, supplement B).

The fitness (see `fitness`) is a sum over the chain stem -> stage -> ... -> stage, but for two terms
that depend on sums over it: the depth variance on the depths, and rho, a convex function of the
total log fan-in G. So for given depths

    max F  <=  min over l, m >= 0 of  max over the chain of (F without rho - m G - l cost)
                                      + max over G of (1000 rho(G) + m G)  +  l limit,

and the inner maximum over the chain is dynamic programming over the widths. That bounds all depths
at once, more tightly for each part of the range of G by itself. Pairs of depths and part are then
opened in the order of their bounds. A label-setting search along the chain keeps only the partial
architectures whose own bound reaches a threshold, which is lowered until it finds something; what
it finds first is the best of the pair. Pairs whose bound is not above the best architecture so far
cannot hold a better one, so the result is a proven optimum. Nothing is drawn at random.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Optional

import numpy as np

from feast_tf.space.fitness import (Architecture, FitnessSettings, Score, block_tables,
                                    depth_penalty, num_convolutions, score)
from feast_tf.space.spec import SupernetSpec

COSTS = ("macs", "params")
EXPANSIONS = ("stage", "block")

_COST_PRICES = 40  # values of l for the bounds
_FAN_IN_PRICES = 9  # values of m
_SEGMENTS = 16  # parts of the range of G, so that rho is nearly a line in each
_REFINEMENTS = 12  # halvings of the interval of l for what is opened
_FIRST_GAP = 0.25  # how far under its bound an optimum is looked for first, in units of F
_WIDEST_GAP = 1e5
# Float sums in other orders differ by less; bounds give way by this much.
_SLACK = 1e-6


@dataclasses.dataclass(frozen=True)
class Found:
    """The fittest architecture for one limit."""

    architecture: Architecture
    score: Score


@dataclasses.dataclass(frozen=True)
class _Options:
    """Ways to fill one stage of given depth; arrays [W_in, W_out, O].

    Attributes:
      first: int[O], expansion of the first block.
      counts: int[O, E], how many of the further blocks have each expansion.
      value: contribution to F without rho and penalty of depths; -inf for a way that only repeats
        another.
      log_fan_in, cost: contributions to G and to the cost.
    """

    first: np.ndarray
    counts: np.ndarray
    value: np.ndarray
    log_fan_in: np.ndarray
    cost: np.ndarray

    def usable(self, weigh: Callable[["_Options"], np.ndarray]) -> np.ndarray:
        """`weigh(self)`, with -inf for ways that only repeat others."""
        return np.where(np.isfinite(self.value), weigh(self), -np.inf)


@dataclasses.dataclass(frozen=True)
class _Labels:
    """Partial architectures, from the stem to some stage; arrays [M].

    Attributes:
      width: index of the last width.
      value, log_fan_in, cost: sums so far.
      path: int[M, 1 + 2 * stages so far]: the stem's width, then width and option of each stage.
    """

    width: np.ndarray
    value: np.ndarray
    log_fan_in: np.ndarray
    cost: np.ndarray
    path: np.ndarray

    def take(self, places: np.ndarray) -> "_Labels":
        return _Labels(*(getattr(self, field.name)[places] for field in dataclasses.fields(self)))


class Search:
    """Finds the fittest architectures of a space.

    Attributes:
      spec: the space.
      cost: what is limited, "macs" or "params".
      expansion: "stage" (one expansion a stage, as the supernet trains) or "block".
      settings: the constants of the fitness.
      cheapest, dearest: the least and the largest cost in the space.
    """

    def __init__(self, spec: SupernetSpec, *, cost: str = "macs", expansion: str = "stage",
                 settings: FitnessSettings = FitnessSettings()):
        for name, value, allowed in (("cost", cost, COSTS), ("expansion", expansion, EXPANSIONS)):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, but is {value!r}")
        self.spec, self.cost, self.expansion, self.settings = spec, cost, expansion, settings
        tables = block_tables(spec)
        # Of widths and expansions that round to the same channels only the first is used.
        self.usable_stem = _firsts(tables.stem_out)
        self.stem = tables.stem
        self.stem_cost, self.head_cost = getattr(tables.stem, cost), getattr(tables.head, cost)
        self._stages = [[self._options(stage, 1 + d) for d in spec.depths]
                        for stage in range(spec.num_stages)]
        self._depths = np.array(list(itertools.product(range(len(spec.depths)),
                                                       repeat=spec.num_stages)))
        d = np.array(spec.depths)[self._depths]
        self._convolutions = num_convolutions(d)
        self._depth_penalty = depth_penalty(d, settings)
        # Of each combination of depths: ranges of the cost and of G, where rho <= rho0 limits G.
        nothing = np.zeros(len(spec.widths))
        self._least_fan_in = self._convolutions * np.log(self._convolutions / settings.max_rho)
        self._most_fan_in = self._chains(lambda o: o.log_fan_in, self.stem.log_fan_in, nothing)
        self._least_cost = -self._chains(lambda o: -o.cost, -self.stem_cost, -self.head_cost)
        self._most_cost = self._chains(lambda o: o.cost, self.stem_cost, self.head_cost)
        self.cheapest, self.dearest = int(self._least_cost.min()), int(self._most_cost.max())
        most = tables.log_volume.max() * self._most_fan_in.max()  # no H is larger
        self._cost_prices = np.array(
            [0.0, *np.geomspace(0.01 * most / self.dearest, 10 * most / self.cheapest,
                                _COST_PRICES)])
        self._fan_in_prices = np.linspace(0, 1.2 * tables.log_volume.max(), _FAN_IN_PRICES)
        # [l, m, depths]: the largest F without rho and penalty of depths, less both prices.
        self._reduced = np.array([[self._chains(
            lambda o: o.value - m * o.log_fan_in - l * o.cost,
            -m * self.stem.log_fan_in - l * self.stem_cost, -l * self.head_cost)
            for m in self._fan_in_prices] for l in self._cost_prices])

    def _options(self, stage: int, blocks: int) -> _Options:
        tables, count = block_tables(self.spec), len(self.spec.expansions)
        if self.expansion == "stage" or blocks == 1:
            first, counts = np.arange(count), (blocks - 1) * np.eye(count, dtype=int)
        else:  # the order of the further blocks changes neither fitness nor cost
            mixes = [np.bincount(mix, minlength=count) for mix in
                     itertools.combinations_with_replacement(range(count), blocks - 1)]
            first = np.repeat(np.arange(count), len(mixes))
            counts = np.tile(np.array(mixes), (count, 1))

        def total(name):
            result = getattr(tables.first[stage], name)[:, :, first]
            return result if blocks == 1 else result + getattr(tables.later[stage], name) @ counts.T

        fan_in = total("log_fan_in")
        value = tables.log_volume[stage][:, None] * fan_in
        if stage:
            narrower = tables.out[stage - 1][:, None] - tables.out[stage]
            value = value - self.settings.narrowing * np.maximum(0, narrower)[:, :, None]
        repeated = ~_firsts(tables.mid[stage])  # [W_out, E]
        invalid = (repeated[:, first] | (repeated @ counts.T > 0)
                   | ~_firsts(tables.out[stage])[:, None])
        return _Options(first, counts, np.where(invalid, -np.inf, value), fan_in,
                        total(self.cost))

    def _chains(self, weigh, stem: np.ndarray, head: np.ndarray) -> np.ndarray:
        """Largest sum of `weigh(options)` along the chain, for every combination of depths."""
        best = np.where(self.usable_stem, stem, -np.inf)[None]
        for stage in self._stages:
            steps = [options.usable(weigh).max(axis=-1) for options in stage]
            best = np.stack([(best[:, :, None] + step).max(axis=1) for step in steps], axis=1)
            best = best.reshape(-1, best.shape[-1])
        return (best + head).max(axis=-1)

    def _rho_term(self, fan_in: np.ndarray, convolutions: np.ndarray) -> np.ndarray:
        return self.settings.effectiveness * convolutions * np.exp(-fan_in / convolutions)

    def _segment(self, segment: int) -> np.ndarray:
        """The ends of a part of the range of G: float64[2, depths]."""
        share = np.array([[segment], [segment + 1]]) / _SEGMENTS
        return self._least_fan_in + share * (self._most_fan_in - self._least_fan_in)

    def fittest(self, limit: float, *, above: float = -math.inf,
                floor: Optional[Found] = None) -> Optional[Found]:
        """The architecture of the largest fitness with above < cost <= limit and rho <= rho0.

        Args:
          limit: the largest cost.
          above: what the cost must exceed.
          floor: an architecture within the limits that is known; saves time.

        Returns:
          The proven optimum (to 1e-6; of equals the one found first, in an order that does not
          change), or None where there is none.
        """
        by_fan_in_price = (self._reduced + (self._cost_prices * limit)[:, None, None]).min(axis=0)
        bounds = np.stack([
            (by_fan_in_price + self._largest_rho_term(segment)).min(axis=0)
            for segment in range(_SEGMENTS)]) - self._depth_penalty
        bounds[:, (self._most_fan_in < self._least_fan_in) | (self._least_cost > limit)
               | (self._most_cost <= above)] = -np.inf
        best, best_fitness = floor, -np.inf if floor is None else floor.score.fitness
        for place in np.argsort(-bounds, axis=None, kind="stable"):
            segment, depths = np.unravel_index(place, bounds.shape)
            if not bounds[segment, depths] > best_fitness + _SLACK:
                break
            by_price = (by_fan_in_price + self._largest_rho_term(segment))[:, depths]
            found = self._open(depths, segment, int(by_price.argmin()), limit, above, best_fitness)
            if found is not None:
                best, best_fitness = found, found.score.fitness
        return best

    def _largest_rho_term(self, segment: int) -> np.ndarray:
        """Bound on 1000 rho + m G over a part of the range of G: float64[m, depths].

        Convex in G, so largest at an end.
        """
        ends = self._segment(segment)
        return (self._rho_term(ends, self._convolutions)
                + self._fan_in_prices[:, None, None] * ends).max(axis=1)

    def _open(self, depths: int, segment: int, fan_in_price: int, limit: float, above: float,
              known: float) -> Optional[Found]:
        """The best architecture of some depths and part of G's range, if fitter than `known`."""
        stages = [stage[d] for stage, d in zip(self._stages, self._depths[depths])]
        chain = self._refined_chain(stages, depths, fan_in_price, limit)
        convolutions, fan_in = self._convolutions[depths], self._segment(segment)[:, depths]
        constant = (chain.cost_price * limit - self._depth_penalty[depths]
                    + self._largest_rho_term(segment)[fan_in_price, depths])
        gap = _FIRST_GAP
        while chain.bound + constant > known + _SLACK:
            threshold = max(chain.bound + constant - gap, known + _SLACK)
            labels = chain.labels(threshold - constant - _SLACK, limit=limit, above=above,
                                  fan_in=fan_in)
            fitness = np.where(
                labels.log_fan_in >= self._least_fan_in[depths],
                labels.value + self._rho_term(labels.log_fan_in, convolutions)
                - self._depth_penalty[depths], -np.inf)
            if fitness.size and fitness.max() >= threshold:
                architecture = self._architecture(stages, depths, labels.path[fitness.argmax()])
                return Found(architecture, score(self.spec, architecture, self.settings))
            if threshold == known + _SLACK or gap == np.inf:
                break
            gap = 2 * gap if gap < _WIDEST_GAP else np.inf
        return None

    def _refined_chain(self, stages, depths: int, fan_in_price: int, limit: float) -> "_Chain":
        """The chain at the l of the least bound, found by golden section (the bound is convex)."""
        m = self._fan_in_prices[fan_in_price]
        nearest = int((self._reduced[:, fan_in_price, depths] + self._cost_prices * limit).argmin())
        low, high = self._cost_prices[[max(nearest - 1, 0),
                                       min(nearest + 1, len(self._cost_prices) - 1)]]
        bound = lambda chain: chain.bound + chain.cost_price * limit
        chains = [_Chain(self, stages, self._cost_prices[nearest], m)]
        for _ in range(_REFINEMENTS):
            left, right = (_Chain(self, stages, low + share * (high - low), m)
                           for share in (0.382, 0.618))
            if bound(left) < bound(right):
                high = right.cost_price
            else:
                low = left.cost_price
            chains += [left, right]
        return min(chains, key=bound)

    def _architecture(self, stages, depths: int, path: np.ndarray) -> Architecture:
        expansions = self.spec.expansions
        e = tuple(
            (expansions[options.first[option]],
             *np.repeat(expansions, options.counts[option]).tolist()[::-1])
            for options, option in zip(stages, path[2::2]))
        return Architecture(tuple(self.spec.depths[d] for d in self._depths[depths]), e,
                            tuple(self.spec.widths[w] for w in (path[0], *path[1::2])))


class _Chain:
    """Bound and label-setting search along the stages, for given depths and prices.

    Attributes:
      cost_price: l.
      bound: the largest reduced value, which is F without its two non-additive terms, less m G and
        l cost.
    """

    def __init__(self, search: Search, stages: list[_Options], cost_price: float,
                 fan_in_price: float):
        self.cost_price, self._fan_in_price = cost_price, fan_in_price
        self._stages, self._head_cost = stages, search.head_cost
        self._rest = self._completions(
            lambda o: o.value - fan_in_price * o.log_fan_in - cost_price * o.cost,
            -cost_price * self._head_cost)
        widths = np.flatnonzero(search.usable_stem)
        self._stems = _Labels(widths, np.zeros(len(widths)), search.stem.log_fan_in[widths],
                              search.stem_cost[widths], widths[:, None])
        self.bound = float((self._reduce(self._stems) + self._rest[0][widths]).max())

    def _completions(self, weigh, last: np.ndarray) -> list[np.ndarray]:
        """The largest sum of `weigh(options)` over what follows each stage, for its widths."""
        sums = [last]
        for options in self._stages[::-1]:
            sums.append((options.usable(weigh) + sums[-1][:, None]).max(axis=(1, 2)))
        return sums[::-1]

    def _reduce(self, labels: _Labels) -> np.ndarray:
        return labels.value - self._fan_in_price * labels.log_fan_in - self.cost_price * labels.cost

    def labels(self, threshold: float, *, limit: float, above: float,
               fan_in: np.ndarray) -> _Labels:
        """All whole architectures within the limits whose reduced value is at least `threshold`.

        Args:
          threshold: of the reduced value.
          limit, above: above < cost <= limit.
          fan_in: float64[2], the ends of the range of G.
        """
        head = self._head_cost
        most_fan_in = self._completions(lambda o: o.log_fan_in, 0 * head)
        least_fan_in = self._completions(lambda o: -o.log_fan_in, 0 * head)
        most_cost = self._completions(lambda o: o.cost, head)
        least_cost = self._completions(lambda o: -o.cost, -head)
        labels = self._stems
        for stage, options in enumerate(self._stages, start=1):
            if not labels.width.size:
                return labels
            labels = self._grow(labels, options, self._rest[stage], threshold)
            out = labels.width
            labels = labels.take(
                (labels.cost - least_cost[stage][out] <= limit)
                & (labels.cost + most_cost[stage][out] > above)
                & (labels.log_fan_in + most_fan_in[stage][out] >= fan_in[0] - _SLACK)
                & (labels.log_fan_in - least_fan_in[stage][out] <= fan_in[1] + _SLACK))
        return labels

    def _grow(self, labels: _Labels, options: _Options, rest: np.ndarray,
              threshold: float) -> _Labels:
        """The labels with one more stage, as far as they can still reach the threshold."""
        reduced = self._reduce(labels)
        reached = (options.value - self._fan_in_price * options.log_fan_in
                   - self.cost_price * options.cost + rest[:, None])
        grown = []
        for width in np.unique(labels.width):
            own = np.flatnonzero(labels.width == width)
            # Ways that not even the best of these labels can use are dropped first.
            ways = np.argwhere(reached[width] + reduced[own].max() >= threshold)
            gain = reached[width][tuple(ways.T)]
            parent, way = np.nonzero(reduced[own][:, None] + gain >= threshold)
            parent, place = own[parent], (width, *ways[way].T)
            grown.append(_Labels(
                place[1], labels.value[parent] + options.value[place],
                labels.log_fan_in[parent] + options.log_fan_in[place],
                labels.cost[parent] + options.cost[place],
                np.column_stack([labels.path[parent], *place[1:]])))
        return _Labels(*(np.concatenate([getattr(part, field.name) for part in grown])
                         for field in dataclasses.fields(labels)))


def _firsts(values: np.ndarray) -> np.ndarray:
    """True where a value is the first of its kind along the last (ascending) axis."""
    return np.diff(values, axis=-1, prepend=-1) > 0
