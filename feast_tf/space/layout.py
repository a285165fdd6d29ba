"""The one index map: which positions of which parameter belong to a variant or an envelope.

Everything elastic is a *prefix*. A sub-network is described by its `dims`, an int32 vector

    [stem | out of each stage | middle width of each stage | extra blocks of each stage]

of length 1 + 3S, and a parameter's axis is cut to the `dims` entry that it names. Blocks beyond the
depth of their stage have extent 0 on their elastic axes. Slicing, scattering, costs, payloads,
batch normalisation and extraction all read `Layout.parameters` and `extents`; nothing looks at
parameter names.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Optional

import numpy as np

from feast_tf.space.spec import SupernetSpec, Variant, round_channels


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One tensor of the supernet.

    Attributes:
      name: for people, e.g. "stage2/block1/conv1/kernel"; never parsed.
      kind: "kernel", "gamma", "beta", "head_kernel" or "head_bias".
      shape: full shape, kernels as [h, w, c_in, c_out].
      axes: for each axis the position in `dims` that limits it, or None for a whole axis.
      gate: (position in `dims`, least value) that must hold for the tensor to exist, or None.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    axes: tuple[Optional[int], ...]
    gate: Optional[tuple[int, int]]

    @property
    def elastic_shape(self) -> tuple[Optional[int], ...]:
        """The static shape that all slices share: None on elastic axes."""
        return tuple(size if axis is None else None for size, axis in zip(self.shape, self.axes))


@dataclasses.dataclass(frozen=True)
class ConvUnit:
    """A convolution with its batch normalisation.

    Attributes:
      name: for people, e.g. "stage2/block1/conv1"; never parsed.
      kernel, gamma, beta: places in `Layout.parameters`.
      norm: number of the batch normalisation, 0 .. `Layout.num_norms` - 1.
      stride: of the convolution (of the pooling before it, for a shortcut).
      output_size: height and width of the output in pixels.
    """

    name: str
    kernel: int
    gamma: int
    beta: int
    norm: int
    stride: int
    output_size: int


@dataclasses.dataclass(frozen=True)
class Block:
    """conv1 -> conv2 plus shortcut; `shortcut` is None for the identity.

    `gate` is None for a stage's first block, else (position of the stage's depth in `dims`, number
    of this block): the block runs where dims[position] >= number.
    """

    conv1: ConvUnit
    conv2: ConvUnit
    shortcut: Optional[ConvUnit]
    gate: Optional[tuple[int, int]]


class Layout:
    """The parameters of a supernet and how they hang together.

    Attributes:
      spec: the `SupernetSpec`.
      parameters: tuple of `Parameter`, in the order in which weights are always listed.
      stem: `ConvUnit`.
      stages: tuple (stages) of tuples (all 1 + max_depth slots) of `Block`.
      head_kernel, head_bias: places of the linear head in `parameters`.
    """

    def __init__(self, spec: SupernetSpec):
        self.spec = spec
        stages = spec.num_stages
        self._out = lambda stage: 1 + stage
        self._mid = lambda stage: 1 + stages + stage
        self._depth = lambda stage: 1 + 2 * stages + stage
        full = self.dims(spec.largest())
        parameters: list[Parameter] = []
        norms = itertools.count()

        def add(name, kind, window, axes, gate):
            shape = window + tuple(int(full[axis]) for axis in axes)
            parameters.append(Parameter(name, kind, shape, (None,) * len(window) + axes, gate))
            return len(parameters) - 1

        def unit(name, window, axes, gate, stride, size):
            if axes[0] is None:  # the stem reads RGB
                kernel = len(parameters)
                shape = (window, window, 3, int(full[axes[1]]))
                parameters.append(Parameter(f"{name}/kernel", "kernel", shape,
                                            (None, None, None, axes[1]), gate))
            else:
                kernel = add(f"{name}/kernel", "kernel", (window, window), axes, gate)
            gamma = add(f"{name}/gamma", "gamma", (), axes[1:], gate)
            beta = add(f"{name}/beta", "beta", (), axes[1:], gate)
            return ConvUnit(name, kernel, gamma, beta, next(norms), stride, size)

        size, previous = spec.image_size, 0
        self.stem = unit("stem", 3, (None, 0), None, 1, size)
        built = []
        for stage, stride in enumerate(spec.strides):
            size //= stride
            out, mid = self._out(stage), self._mid(stage)
            blocks = []
            for slot in range(1 + spec.max_depth):
                name = f"stage{stage}/block{slot}"
                gate = (self._depth(stage), slot) if slot else None
                first = slot == 0
                blocks.append(Block(
                    conv1=unit(f"{name}/conv1", 3, (previous if first else out, mid), gate,
                               stride if first else 1, size),
                    conv2=unit(f"{name}/conv2", 3, (mid, out), gate, 1, size),
                    shortcut=unit(f"{name}/shortcut", 1, (previous, out), gate, stride, size)
                    if first else None,
                    gate=gate))
            built.append(tuple(blocks))
            previous = out
        self.stages = tuple(built)
        self.head_kernel = len(parameters)
        parameters.append(Parameter("head/kernel", "head_kernel",
                                    (int(full[previous]), spec.classes), (previous, None), None))
        self.head_bias = len(parameters)
        parameters.append(Parameter("head/bias", "head_bias", (spec.classes,), (None,), None))
        self.parameters = tuple(parameters)
        self.num_norms = next(norms)

    @property
    def num_dims(self) -> int:
        return 1 + 3 * self.spec.num_stages

    @property
    def full_dims(self) -> np.ndarray:
        """`dims` of the whole supernet."""
        return self.dims(self.spec.largest())

    def dims(self, variant: Variant) -> np.ndarray:
        """The int32[1 + 3S] vector of a validated variant."""
        spec = self.spec
        spec.validate(variant)
        stem = round_channels(spec.stem * variant.w[0], spec.divisor)
        out = [round_channels(base * w, spec.divisor) for base, w in zip(spec.bases, variant.w[1:])]
        mid = [round_channels(c * e, spec.divisor) for c, e in zip(out, variant.e)]
        return np.array([stem, *out, *mid, *variant.d], np.int32)

    def units(self):
        """Yields (unit, gate) for every convolution, in the order of `norm`."""
        yield self.stem, None
        for blocks in self.stages:
            for block in blocks:
                for unit in (block.conv1, block.conv2, block.shortcut):
                    if unit is not None:
                        yield unit, block.gate

    def extents(self, dims: np.ndarray) -> list[np.ndarray]:
        """Size of the prefix that sub-networks keep of every parameter.

        Args:
          dims: int32[..., 1 + 3S], one or many sub-networks.

        Returns:
          A list over `parameters` of int32[..., rank]; the elastic axes are 0 where the tensor does
          not exist.
        """
        dims = np.asarray(dims, np.int32)
        result = []
        for parameter in self.parameters:
            exists = np.int32(1)
            if parameter.gate is not None:
                position, least = parameter.gate
                exists = (dims[..., position] >= least).astype(np.int32)
            sizes = [np.full(dims.shape[:-1], full, np.int32) if axis is None
                     else dims[..., axis] * exists
                     for full, axis in zip(parameter.shape, parameter.axes)]
            result.append(np.stack(sizes, axis=-1))
        return result

    def prefix(self, parameter: int, dims: np.ndarray) -> tuple[slice, ...]:
        """The index of one sub-network's part of a NumPy array of shape `parameters[parameter]`."""
        return tuple(slice(0, int(size)) for size in self.extents(dims)[parameter])

    def cut(self, weights, dims: np.ndarray) -> list[np.ndarray]:
        """The parts of NumPy `weights` (in `parameters` order) that belong to one sub-network."""
        return [np.asarray(weight)[tuple(slice(0, int(size)) for size in extent)]
                for weight, extent in zip(weights, self.extents(dims))]


@functools.lru_cache(maxsize=None)
def layout_of(spec: SupernetSpec) -> Layout:
    """The layout of `spec`, built once."""
    return Layout(spec)
