"""The sparse sample-weighted mean as a fold, in TensorFlow (paper 3.3).

`accumulate` adds n_i * update_i at the leading positions that a client covers. Which these are is
one of a few levels, so the position-wise denominator is carried as one count for each level and
expanded once, at the end.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from feast_tf.routing import SliceMap


class Accumulator(NamedTuple):
    """The running sums of one round.

    Attributes:
      numerator: tuple of float32 tensors of the arrays' full shapes, sum of n_i * update_i.
      mass: float32[levels], sum of n_i of each level (exact below 2^24 examples a round).
      bytes_up: int64 scalar, size of the tensors of all updates.
      clients_with_data: int32 scalar, clients that were added.
      clients_without_data: int32 scalar, clients with n_i = 0, which change nothing.
      clients_refused: int32 scalar, clients that would have made a sum infinite or NaN, left out
        whole.
    """

    numerator: tuple[tf.Tensor, ...]
    mass: tf.Tensor
    bytes_up: tf.Tensor
    clients_with_data: tf.Tensor
    clients_without_data: tf.Tensor
    clients_refused: tf.Tensor


def zero(slices: SliceMap) -> Accumulator:
    """The accumulator before the first client."""
    return Accumulator(tuple(tf.zeros(shape) for shape in slices.shapes),
                       tf.zeros([slices.num_levels]), tf.constant(0, tf.int64),
                       tf.constant(0), tf.constant(0), tf.constant(0))


def pad(part: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """`part` in the leading positions of a tensor of the given static shape, 0 elsewhere."""
    missing = tf.constant(list(shape), tf.int32) - tf.shape(part)
    padded = tf.pad(part, tf.stack([tf.zeros_like(missing), missing], axis=1))
    return tf.ensure_shape(padded, shape)


def all_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Whether no value is NaN or infinite."""
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors])


def accumulate(accumulator: Accumulator, update: Sequence[tf.Tensor], weight: tf.Tensor,
               level: tf.Tensor) -> Accumulator:
    """Adds one client.

    Args:
      accumulator: the sums so far.
      update: float32 tensors, each of which covers the leading positions of an array.
      weight: float32 scalar n_i; 0 adds nothing.
      level: int32 scalar, the level whose positions `update` covers.

    Returns:
      The new sums. An update with NaN or infinity anywhere, or one that overflows when it is
      weighted and added, is counted and touches no other sum.
    """
    # Padding writes whole tensors, and is still seven times faster than TensorStridedSliceUpdate.
    sums = tuple(total + pad(weight * part, total.shape)
                 for total, part in zip(accumulator.numerator, update))
    mass = accumulator.mass + weight * tf.one_hot(level, accumulator.mass.shape[0])
    has_data, finite = weight > 0, all_finite((*sums, mass))
    used = tf.logical_and(has_data, finite)
    numerator, mass = tf.cond(used, lambda: (sums, mass),
                              lambda: (accumulator.numerator, accumulator.mass))
    size = tf.add_n([tf.size(part, tf.int64) * part.dtype.size for part in update])
    one_if = lambda condition: tf.cast(condition, tf.int32)
    refused = tf.logical_not(finite)
    return Accumulator(
        numerator, mass, accumulator.bytes_up + size,
        accumulator.clients_with_data + one_if(used),
        accumulator.clients_without_data
        + one_if(tf.logical_not(tf.logical_or(has_data, refused))),
        accumulator.clients_refused + one_if(refused))


def merge(one: Accumulator, other: Accumulator) -> Accumulator:
    """The sums of two disjoint groups of clients."""
    return Accumulator(tuple(a + b for a, b in zip(one.numerator, other.numerator)),
                       *(a + b for a, b in zip(one[1:], other[1:])))


def expand_mass(shape: Sequence[int], extents: np.ndarray, mass: tf.Tensor) -> tf.Tensor:
    """The position-wise denominator of one array.

    Args:
      shape: of the array.
      extents: int32[levels, rank], its prefix at each level.
      mass: float32[levels], sum of n_i of each level.

    Returns:
      float32 of the array's rank that broadcasts to its shape (1 on axes that no level cuts).
    """
    elastic = [axis for axis, size in enumerate(shape) if np.any(extents[:, axis] != size)]
    masks = [tf.sequence_mask(extents[:, axis], shape[axis], tf.float32) for axis in elastic]
    level, letters = "Z", string.ascii_lowercase[: len(elastic)]
    expanded = tf.einsum(",".join([level, *(level + letter for letter in letters)])
                         + "->" + letters, mass, *masks)
    return tf.reshape(expanded, [size if axis in elastic else 1 for axis, size in enumerate(shape)])


def mean(slices: SliceMap, numerator: Sequence[tf.Tensor], mass: tf.Tensor
         ) -> tuple[tf.Tensor, ...]:
    """numerator / mass, position by position; exactly 0 where nobody reports a position."""
    return tuple(
        tf.math.divide_no_nan(total, expand_mass(shape, extents, mass))
        for total, shape, extents in zip(numerator, slices.shapes, slices.extents))
