"""DeepFedNAS's fitness of an architecture, which ranks networks without training (supplement B).

    F = H - 10 exp(Var(blocks per stage)) + 1000 rho - sum of decreases of consecutive stage widths

    H   = sum over stages of ln(h^2 c) * sum of ln(fan-in) over the stage's convolutions
    rho = L / exp(mean of ln(fan-in)) over all L convolutions, at most rho0

h is the side of the stage's output in pixels and c its width; fan-in is 9 or 1 times the input
channels. H leaves the stem out, rho does not; the head counts in neither. Unlike a `Variant`, an
`Architecture` may give every block an expansion of its own, as DeepFedNAS does.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from feast_tf.space.layout import Block, ConvUnit, Layout, layout_of
from feast_tf.space.spec import SupernetSpec, Variant


@dataclasses.dataclass(frozen=True)
class FitnessSettings:
    """The constants of the fitness; the defaults are DeepFedNAS's.

    Attributes:
      depth_variance: factor of exp(population variance of the blocks per stage).
      effectiveness: factor of rho.
      narrowing: factor of the channels by which a stage is narrower than the one before it.
      max_rho: rho0, the largest rho that is allowed.
    """

    depth_variance: float = 10.0
    effectiveness: float = 1000.0
    narrowing: float = 1.0
    max_rho: float = 0.51

    def __post_init__(self):
        if not 0 < self.max_rho < math.inf:
            raise ValueError(f"max_rho must be positive and finite, but is {self.max_rho}")
        if not 0 <= self.effectiveness < math.inf:
            raise ValueError("effectiveness must be finite and not negative, but is "
                             f"{self.effectiveness}")


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One network of the space, expansions block by block.

    Attributes:
      d: extra blocks of each stage.
      e: for each stage the expansion ratios of the 1 + d blocks that run.
      w: width multipliers, the stem's first.
    """

    d: tuple[int, ...]
    e: tuple[tuple[float, ...], ...]
    w: tuple[float, ...]

    @classmethod
    def of(cls, variant: Variant) -> "Architecture":
        """The architecture of a variant: all blocks of a stage share its expansion."""
        return cls(variant.d, tuple((e,) * (1 + d) for d, e in zip(variant.d, variant.e)),
                   variant.w)

    def variant(self) -> Variant:
        """The variant that the supernet can train.

        Raises:
          ValueError: blocks of one stage differ in expansion.
        """
        for stage, expansions in enumerate(self.e):
            if len(set(expansions)) > 1:
                raise ValueError(f"stage {stage} has blocks of expansions {expansions}, but a "
                                 "variant has one expansion a stage")
        return Variant(self.d, [expansions[0] for expansions in self.e], self.w)

    def __str__(self) -> str:
        join = lambda values: ",".join(f"{value:g}" for value in values)
        if all(len(set(expansions)) == 1 for expansions in self.e):
            return str(self.variant())
        return f"d={join(self.d)} e={'|'.join(map(join, self.e))} w={join(self.w)}"


@dataclasses.dataclass(frozen=True)
class Score:
    """What the fitness says of an architecture, with its costs."""

    fitness: float
    entropy: float
    rho: float
    macs: int
    params: int


@dataclasses.dataclass(frozen=True)
class BlockTable:
    """Additive quantities of a block for all choices of its widths and expansion.

    Attributes:
      macs, params: float64 arrays, whole numbers.
      log_fan_in: float64 array, sum of ln(fan-in) over the block's convolutions.
    """

    macs: np.ndarray
    params: np.ndarray
    log_fan_in: np.ndarray


class BlockTables:
    """All blocks that a space can build, read off the index map.

    Axes run over `spec.widths` (W, of the block's input, then of its output) and
    `spec.expansions` (E).

    Attributes:
      spec: the space.
      stem: `BlockTable` of [W] arrays.
      first: for each stage, its first block; a `BlockTable` of [W, W, E] arrays.
      later: for each stage, any further block; a `BlockTable` of [W, E] arrays, or None where the
        space has none.
      head: `BlockTable` of [W] arrays; its fan-in does not count.
      out: int[S, W], channels of each stage.
      mid: int[S, W, E], middle channels of each stage's blocks.
      stem_out: int[W], channels of the stem.
      log_volume: float64[S, W], ln(h^2 c) of each stage.
    """

    def __init__(self, spec: SupernetSpec):
        self.spec = spec
        layout = layout_of(spec)
        stages, count, expansions = spec.num_stages, len(spec.widths), len(spec.expansions)
        # `dims` with the same width and expansion everywhere; blocks mix their entries.
        same = np.array([[layout.dims(spec.variant(d=spec.max_depth, e=e, w=w))
                          for e in spec.expansions] for w in spec.widths])
        self.stem_out = same[:, 0, 0]
        self.out = same[:, 0, 1:1 + stages].T
        self.mid = np.moveaxis(same[:, :, 1 + stages:1 + 2 * stages], -1, 0)
        self.stem = _table(layout, (layout.stem,), same[:, 0])
        self.head = _head_table(layout, same[:, 0])
        self.first, self.later, volumes = [], [], []
        for stage, blocks in enumerate(layout.stages):
            dims = np.broadcast_to(same[0, 0], (count, count, expansions, layout.num_dims)).copy()
            dims[..., stage] = same[:, 0, stage][:, None, None]  # what the stage reads
            dims[..., 1 + stage] = self.out[stage][:, None]
            dims[..., 1 + stages + stage] = self.mid[stage]
            self.first.append(_table(layout, _units(blocks[0]), dims))
            self.later.append(
                _table(layout, _units(blocks[1]), dims[0]) if spec.max_depth else None)
            size = blocks[0].conv2.output_size
            volumes.append(np.log(size**2 * self.out[stage].astype(np.float64)))
        self.log_volume = np.stack(volumes)


def _units(block: Block) -> tuple[ConvUnit, ...]:
    return tuple(unit for unit in (block.conv1, block.conv2, block.shortcut) if unit is not None)


def _table(layout: Layout, units: tuple[ConvUnit, ...], dims: np.ndarray) -> BlockTable:
    extents = layout.extents(dims)
    size = lambda place: np.prod(extents[place], axis=-1, dtype=np.float64)
    macs = sum(size(unit.kernel) * unit.output_size**2 for unit in units)
    params = sum(size(unit.kernel) + size(unit.gamma) + size(unit.beta) for unit in units)
    fan_in = sum(np.log(np.prod(extents[unit.kernel][..., :-1], axis=-1, dtype=np.float64))
                 for unit in units)
    return BlockTable(macs, params, fan_in)


def _head_table(layout: Layout, dims: np.ndarray) -> BlockTable:
    extents = layout.extents(dims)
    weights, bias = (np.prod(extents[place], axis=-1, dtype=np.float64)
                     for place in (layout.head_kernel, layout.head_bias))
    return BlockTable(weights, weights + bias, np.zeros_like(weights))


@functools.lru_cache(maxsize=None)
def block_tables(spec: SupernetSpec) -> BlockTables:
    """The tables of `spec`, built once."""
    return BlockTables(spec)


def num_convolutions(d: np.ndarray) -> np.ndarray:
    """L: stem, two in each block, and a projection a stage, for extra blocks int[..., S]."""
    d = np.asarray(d)
    return 1 + d.shape[-1] + 2 * (d + 1).sum(axis=-1)


def depth_penalty(d: np.ndarray, settings: FitnessSettings) -> np.ndarray:
    """The term of the fitness that punishes stages of unequal depth, for int[..., S]."""
    # Capped where exp would overflow; nothing of such depths is fit.
    return settings.depth_variance * np.exp(np.minimum(np.var(np.asarray(d), axis=-1), 700))


def score(spec: SupernetSpec, architecture: Architecture | Variant,
          settings: FitnessSettings = FitnessSettings()) -> Score:
    """Fitness and costs of one architecture; `settings.max_rho` is for the caller to hold.

    Raises:
      ValueError: the architecture is not in the space; the message names the field.
    """
    if isinstance(architecture, Variant):
        architecture = Architecture.of(architecture)
    _check(spec, architecture)
    tables = block_tables(spec)
    widths = [spec.widths.index(w) for w in architecture.w]
    blocks = [(tables.stem, widths[0])]
    entropy = narrowing = 0.0
    for stage, expansions in enumerate(architecture.e):
        before, width = widths[stage:stage + 2]
        first, *later = (spec.expansions.index(e) for e in expansions)
        own = [(tables.first[stage], (before, width, first)),
               *((tables.later[stage], (width, e)) for e in later)]
        entropy += tables.log_volume[stage, width] * sum(
            table.log_fan_in[place] for table, place in own)
        if stage:
            narrowing += max(0, tables.out[stage - 1, before] - tables.out[stage, width])
        blocks += own
    convolutions = num_convolutions(np.array(architecture.d))
    rho = convolutions / math.exp(
        sum(table.log_fan_in[place] for table, place in blocks) / convolutions)
    blocks.append((tables.head, widths[-1]))
    fitness = (entropy - depth_penalty(architecture.d, settings) + settings.effectiveness * rho
               - settings.narrowing * narrowing)
    return Score(float(fitness), float(entropy), float(rho),
                 int(sum(table.macs[place] for table, place in blocks)),
                 int(sum(table.params[place] for table, place in blocks)))


def channels(spec: SupernetSpec, architecture: Architecture) -> tuple:
    """What the network consists of; equal for architectures that round to the same channels."""
    tables = block_tables(spec)
    stem, *widths = (spec.widths.index(w) for w in architecture.w)
    return (int(tables.stem_out[stem]), *(
        (int(tables.out[stage, width]),
         *(int(tables.mid[stage, width, spec.expansions.index(e)]) for e in expansions))
        for stage, (width, expansions) in enumerate(zip(widths, architecture.e))))


def _check(spec: SupernetSpec, architecture: Architecture) -> None:
    if any(len(e) != 1 + d for d, e in zip(architecture.d, architecture.e)):
        raise ValueError(f"e must have 1 + d values for each stage, but is {architecture.e} at "
                         f"d={architecture.d}")
    longest = max(map(len, architecture.e), default=0)
    for block in range(longest):  # a variant of each slot's expansions checks all of them
        spec.validate(Variant(architecture.d, [e[min(block, len(e) - 1)] for e in architecture.e],
                              architecture.w))
