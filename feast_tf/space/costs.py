"""Parameters and multiply-accumulates of a variant, from the index map.

MACs count convolutions and the linear head for one example; batch normalisation, activations and
pooling do not count (the convention of the paper's 25M-600M range).
"""

from __future__ import annotations

import dataclasses
from typing import Union

import numpy as np

from feast_tf.space.layout import Layout, layout_of
from feast_tf.space.spec import SupernetSpec, Variant


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """One row of the per-layer table: kernel shape, pixels per side of the output, and costs."""

    name: str
    kernel: tuple[int, ...]
    output_size: int
    params: int
    macs: int


def _dims(layout: Layout, variant: Union[Variant, np.ndarray]) -> np.ndarray:
    return layout.dims(variant) if isinstance(variant, Variant) else np.asarray(variant)


def params(spec: SupernetSpec, variant: Union[Variant, np.ndarray]) -> Union[int, np.ndarray]:
    """Trainable parameters, batch normalisation's gamma and beta included.

    Args:
      spec: the space.
      variant: a `Variant`, or `dims` int32[..., 1 + 3S] of sub-networks (see `layout`).

    Returns:
      An int, or int64[...] for several.
    """
    layout = layout_of(spec)
    extents = layout.extents(_dims(layout, variant))
    total = sum(np.prod(extent, axis=-1, dtype=np.int64) for extent in extents)
    return int(total) if np.ndim(total) == 0 else total


def macs(spec: SupernetSpec, variant: Union[Variant, np.ndarray]) -> Union[int, np.ndarray]:
    """Multiply-accumulates of one example; arguments and result as in `params`."""
    layout = layout_of(spec)
    extents = layout.extents(_dims(layout, variant))
    total = np.prod(extents[layout.head_kernel], axis=-1, dtype=np.int64)
    for unit, _ in layout.units():
        total = total + (np.prod(extents[unit.kernel], axis=-1, dtype=np.int64)
                         * unit.output_size**2)
    return int(total) if np.ndim(total) == 0 else total


def layer_table(spec: SupernetSpec, variant: Variant) -> list[LayerCost]:
    """One `LayerCost` for each layer that the variant runs; a conv includes its normalisation."""
    layout = layout_of(spec)
    extents = layout.extents(layout.dims(variant))
    rows = []
    for unit, _ in layout.units():
        kernel = tuple(int(size) for size in extents[unit.kernel])
        weights = int(np.prod(kernel))
        if weights:
            rows.append(LayerCost(unit.name, kernel, unit.output_size, weights + 2 * kernel[-1],
                                  weights * unit.output_size**2))
    kernel = tuple(int(size) for size in extents[layout.head_kernel])
    weights = int(np.prod(kernel))
    rows.append(LayerCost("head", kernel, 1, weights + spec.classes, weights))
    return rows
