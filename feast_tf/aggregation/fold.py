"""The sparse sample-weighted mean as a fold, in TensorFlow (paper 3.3).

`accumulate` adds n_i * update_i at the leading positions that a client covers. Envelopes are
nested, so the position-wise denominator is carried as one count for each envelope and expanded
once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from feast_tf.routing import Routing
from feast_tf.space import Parameter


class Accumulator(NamedTuple):
    """The running sums of one round.

    Attributes:
      numerator: tuple of float32 tensors of the supernet's full shapes, sum of n_i * update_i.
      mass: float32[A], sum of n_i of each envelope level (exact below 2^24 examples a round).
      clients_with_data: int32 scalar, clients that were added.
      clients_without_data: int32 scalar, clients with n_i = 0, which change nothing.
      clients_refused: int32 scalar, clients that would have made a sum infinite or NaN, left out
        whole.
    """

    numerator: tuple[tf.Tensor, ...]
    mass: tf.Tensor
    clients_with_data: tf.Tensor
    clients_without_data: tf.Tensor
    clients_refused: tf.Tensor


def zero(routing: Routing) -> Accumulator:
    """The accumulator before the first client."""
    return Accumulator(tuple(tf.zeros(parameter.shape) for parameter in routing.layout.parameters),
                       tf.zeros([routing.num_levels]), tf.constant(0), tf.constant(0),
                       tf.constant(0))


def accumulate(accumulator: Accumulator, update: Sequence[tf.Tensor], weight: tf.Tensor,
               level: tf.Tensor) -> Accumulator:
    """Adds one client.

    Args:
      accumulator: the sums so far.
      update: tensors of the client's envelope, new minus old weights.
      weight: float32 scalar n_i; 0 adds nothing.
      level: int32 scalar, the client's envelope.

    Returns:
      The new sums. An update with NaN or infinity anywhere, or one that overflows when it is
      weighted and added, is counted and touches nothing else.
    """
    # Padding writes whole tensors, and is still seven times faster than TensorStridedSliceUpdate.
    sums = []
    for total, part in zip(accumulator.numerator, update):
        missing = total.shape - tf.shape(part)
        padded = tf.pad(weight * part, tf.stack([tf.zeros_like(missing), missing], axis=1))
        sums.append(total + tf.ensure_shape(padded, total.shape))
    sums = tuple(sums)
    has_data = weight > 0
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(total)) for total in sums])
    used = tf.logical_and(has_data, finite)
    mass = accumulator.mass + weight * tf.one_hot(level, accumulator.mass.shape[0])
    numerator, mass = tf.cond(used, lambda: (sums, mass),
                              lambda: (accumulator.numerator, accumulator.mass))
    one_if = lambda condition: tf.cast(condition, tf.int32)
    refused = tf.logical_not(finite)
    return Accumulator(
        numerator, mass, accumulator.clients_with_data + one_if(used),
        accumulator.clients_without_data
        + one_if(tf.logical_not(tf.logical_or(has_data, refused))),
        accumulator.clients_refused + one_if(refused))


def merge(one: Accumulator, other: Accumulator) -> Accumulator:
    """The sums of two disjoint groups of clients."""
    return Accumulator(tuple(a + b for a, b in zip(one.numerator, other.numerator)),
                       *(a + b for a, b in zip(one[1:], other[1:])))


def expand_mass(parameter: Parameter, extents: np.ndarray, mass: tf.Tensor) -> tf.Tensor:
    """The position-wise denominator of one parameter.

    Args:
      parameter: the parameter.
      extents: int32[A, rank], its prefix in the envelope of each level.
      mass: float32[A], sum of n_i of each level.

    Returns:
      float32 of the parameter's rank that broadcasts to its shape (1 on axes that are always
      whole).
    """
    elastic = [axis for axis, dim in enumerate(parameter.axes) if dim is not None]
    masks = [tf.sequence_mask(extents[:, axis], parameter.shape[axis], tf.float32)
             for axis in elastic]
    letters = "xy"[: len(elastic)]
    expanded = tf.einsum(",".join(["l", *(f"l{letter}" for letter in letters)]) + "->" + letters,
                         mass, *masks)
    return tf.reshape(expanded, [size if axis in elastic else 1
                                 for axis, size in enumerate(parameter.shape)])


def apply_mean(routing: Routing, weights: Sequence[tf.Tensor],
               accumulator: Accumulator) -> tuple[tf.Tensor, ...]:
    """The new server weights: weights + numerator / mass, position by position.

    Where the numerator is 0, because nobody covers a position or nobody changed it (as with
    learning rate 0), the old value is kept bit for bit, -0.0 included.
    """
    result = []
    for parameter, extents, weight, numerator in zip(
            routing.layout.parameters, routing.extents, weights, accumulator.numerator):
        mass = expand_mass(parameter, extents, accumulator.mass)
        # tf.not_equal: inside a TFF computation `!=` on tensors compares identities.
        result.append(tf.where(tf.not_equal(numerator, 0.0),
                               weight + tf.math.divide_no_nan(numerator, mass), weight))
    return tuple(result)
