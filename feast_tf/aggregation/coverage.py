"""Which positions a client's update covers: the level that its shapes, or its nonzeros, name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from feast_tf.routing import SliceMap

# From an update and its float32 weight n_i to (int32 level, float32 weight).
Coverage = Callable[[Sequence[tf.Tensor], tf.Tensor], tuple[tf.Tensor, tf.Tensor]]


def by_shapes(slices: SliceMap) -> Coverage:
    """The coverage of updates that are slices: the level whose slices have their shapes.

    Levels that hold the same positions cannot be told apart, and need not be: the first is named.
    The coverage raises `tf.errors.InvalidArgumentError` for shapes of no level.
    """
    held = np.concatenate(slices.extents, axis=1)  # int32[levels, axes of all arrays]

    def coverage(update, weight):
        found = tf.concat([tf.shape(part) for part in update], axis=0)
        fits = tf.reduce_all(tf.equal(held, found), axis=1)
        known = tf.debugging.Assert(tf.reduce_any(fits), [
            "an update's shapes are those of no level:", found], summarize=-1)
        with tf.control_dependencies([known]):  # of the level alone: sums need not wait for it
            return tf.argmax(tf.cast(fits, tf.int32), output_type=tf.int32), weight

    return coverage


def by_nonzeros(slices: SliceMap) -> Coverage:
    """The coverage of updates that are whole arrays: the smallest level that holds all nonzeros.

    "Smallest" is by the number of positions, and one level is named for all arrays together: a
    client that trained a level leaves the positions beyond it at exactly 0, and hardly ever all of
    those that set it apart from the next smaller level as well. Where it does, it counts as a
    client of that smaller level. An update of zeros alone says nothing about its level and gets
    the weight 0. The coverage raises `tf.errors.InvalidArgumentError` for nonzeros that no level
    holds.
    """
    ascending = np.argsort(slices.payload, kind="stable").astype(np.int32)
    elastic = [[axis for axis, size in enumerate(shape) if size is None]
               for shape in slices.elastic_shapes]
    held = np.concatenate([extents[ascending][:, axes]
                           for extents, axes in zip(slices.extents, elastic)], axis=1)

    def coverage(update, weight):
        used, moved = [], []
        for part, axes in zip(update, elastic):
            # What is not finite is left to the sums, which refuse it.
            changed = tf.logical_and(tf.not_equal(part, 0), tf.math.is_finite(part))
            moved.append(tf.reduce_any(tf.not_equal(part, 0)))
            for axis in axes:
                others = [other for other in range(len(part.shape)) if other != axis]
                ends = tf.range(1, part.shape[axis] + 1)
                used.append(tf.reduce_max(tf.where(tf.reduce_any(changed, others), ends, 0)))
        fits = tf.reduce_all(tf.greater_equal(held, tf.stack(used)), axis=1)
        known = tf.debugging.Assert(tf.reduce_any(fits), [
            "an update changes positions that no level holds; it reaches", used], summarize=-1)
        with tf.control_dependencies([known]):
            level = tf.gather(ascending, tf.argmax(tf.cast(fits, tf.int32)))
            return level, tf.where(tf.reduce_any(moved), weight, 0.0)

    return coverage
