"""Structural exposure: which parameters the population reaches, and how often (paper 3.4).

A parameter's positions are cut into *cells*: boxes that every cached variant and every envelope
either contains or misses. r_i(u) and h_i(u) are constant on a cell, so sums over tens of millions
of positions are sums over some ten thousand cells, and exact.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from feast_tf.routing.envelopes import Routing
from feast_tf.routing.rules import TrainingRule


@dataclasses.dataclass(frozen=True)
class GroupExposure:
    """Exposure of the positions of one parameter group; shares of a round's samples.

    Attributes:
      name: "stem", "stage<l>/block<b>" or "head".
      params: positions of the supernet.
      routed: mean over positions of the share of samples whose clients receive the position.
      activation: mean over positions of the expected passes that train the position, per sample.
      least_activation: the smallest over served positions (0 where none is served).
      served: share of the positions that belong to some cached variant.
      reach: for each level, mean over positions of r, whether its clients receive the position.
      passes: for each level, mean over positions of h, the expected passes that train it.
    """

    name: str
    params: int
    routed: float
    activation: float
    least_activation: float
    served: float
    reach: tuple[float, ...]
    passes: tuple[float, ...]


class Exposure:
    """r_i(u) and h_i(u) for all levels of a cache and all positions of the supernet.

    Attributes:
      groups: names of the parameter groups, from the stem to the head.
      group: int[C], place in `groups` of each cell.
      size: int64[C], positions in each cell.
      reached: bool[C, A], r: whether the envelope of each level holds the cell.
      passes: float64[C, A], h: expected passes of a mini-batch that activate the cell.
      served: bool[C], whether any cached variant holds the cell.
    """

    def __init__(self, routing: Routing, rule: TrainingRule):
        layout = routing.layout
        names, places = ["stem"], {}
        for unit in (layout.stem,):
            places.update(dict.fromkeys((unit.kernel, unit.gamma, unit.beta), 0))
        for stage, blocks in enumerate(layout.stages):
            for slot, block in enumerate(blocks):
                for unit in (block.conv1, block.conv2, block.shortcut):
                    if unit is not None:
                        places.update(dict.fromkeys((unit.kernel, unit.gamma, unit.beta),
                                                    len(names)))
                names.append(f"stage{stage}/block{slot}")
        places.update(dict.fromkeys((layout.head_kernel, layout.head_bias), len(names)))
        names.append("head")
        variants = layout.extents(routing.variant_dims)
        sizes, inside, reached, group = [], [], [], []
        for place, parameter in enumerate(layout.parameters):
            for size, held in _cells(parameter.shape, np.concatenate(
                    [variants[place], routing.extents[place]])):
                sizes.append(size)
                inside.append(held[:routing.num_levels])
                reached.append(held[routing.num_levels:])
                group.append(places[place])
        self.groups, self.group = tuple(names), np.array(group)
        self.size = np.array(sizes, np.int64)
        self.reached, inside = np.array(reached), np.array(inside)
        self.served = inside.any(axis=1)
        self.passes = inside @ rule.expected_passes(routing.num_levels).T

    def routed_share(self, share: np.ndarray) -> np.ndarray:
        """E[M_route(u)] of each cell over a round's expected samples, m/N sum_i n_i.

        Args:
          share: float64[A], share of the training samples that clients of each level hold.

        Returns:
          float64[C] in [0, 1].
        """
        return self.reached @ share

    def activation_share(self, share: np.ndarray) -> np.ndarray:
        """E[M_exp(u)] of each cell over a round's expected samples; as `routed_share`, up to 3."""
        return self.passes @ share

    def psi_min(self, share: np.ndarray) -> float:
        """The least activation share over all served positions."""
        return float(self.activation_share(share)[self.served].min())

    def by_group(self, share: np.ndarray) -> list[GroupExposure]:
        """The exposure of each parameter group, from the stem to the head."""
        routed, activation = self.routed_share(share), self.activation_share(share)
        result = []
        for place, name in enumerate(self.groups):
            own = self.group == place
            size, served = self.size[own], self.served[own]
            mean = lambda values: np.average(values[own], weights=size, axis=0).tolist()
            result.append(GroupExposure(
                name, int(size.sum()), mean(routed), mean(activation),
                float(activation[own][served].min()) if served.any() else 0.0,
                mean(self.served), tuple(mean(self.reached)), tuple(mean(self.passes))))
        return result


def _cells(shape: tuple[int, ...], extents: np.ndarray):
    """Yields (positions, bool[K]: held by each of K prefixes) for boxes that cover a tensor.

    Args:
      shape: of the tensor.
      extents: int[K, rank], the size of each prefix.
    """
    exists = (extents > 0).all(axis=1)
    edges = [np.unique([0, full, *extents[exists, axis]]) for axis, full in enumerate(shape)]
    for corner in itertools.product(*(range(len(edge) - 1) for edge in edges)):
        start = np.array([edge[place] for edge, place in zip(edges, corner)])
        end = np.array([edge[place + 1] for edge, place in zip(edges, corner)])
        yield int(np.prod(end - start)), exists & (extents > start).all(axis=1)
