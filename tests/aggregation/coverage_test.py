"""The level of an update, by its shapes and by its nonzeros."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from feast_tf.aggregation import coverage
from feast_tf.routing import SliceMap
from tests.aggregation.conftest import NOTHING, SLICES, UPDATES, arrays, padded

NAN = np.float32(np.nan)


def level_and_weight(kind, update, slices=SLICES, weight: float = 7.0):
    level, weight = kind(slices)([tf.constant(part) for part in arrays(update)],
                                 tf.constant(weight))
    return int(level), float(weight)


@pytest.mark.parametrize("level", range(3))
def test_both_name_the_level(level):
    assert level_and_weight(coverage.by_shapes, UPDATES[level]) == (level, 7)
    assert level_and_weight(coverage.by_nonzeros, padded(UPDATES[level])) == (level, 7)


def test_levels_that_hold_the_same_are_one():
    slices = SliceMap(("a",), ((3,),), (np.array([[1], [2], [2], [3]], np.int32),))
    assert level_and_weight(coverage.by_shapes, [[5, 6]], slices) == (1, 7)


@pytest.mark.parametrize("update", [
    pytest.param(([[1]], [3], 4), id="no such kernel"),
    pytest.param(([[1, 2]], [3, 3, 3], 4), id="kernel and bias of different levels"),
])
def test_shapes_of_no_level(update):
    with pytest.raises(tf.errors.InvalidArgumentError, match="shapes are those of no level"):
        level_and_weight(coverage.by_shapes, update)


@pytest.mark.parametrize("changes, level", [
    (dict(kernel=(0, 1)), 0), (dict(bias=(0,)), 0), (dict(scale=()), 0), (dict(kernel=(1, 0)), 1),
    (dict(kernel=(0, 2)), 2), (dict(bias=(1,)), 2), (dict(kernel=(0, 0), bias=(2,)), 2)])
def test_smallest_level_that_holds_all_nonzeros(changes, level):
    update = padded(NOTHING)
    for name, place in changes.items():
        update[SLICES.names.index(name)][place] = -1e-30
    assert level_and_weight(coverage.by_nonzeros, update) == (level, 7)


def test_zeros_alone_count_for_nothing():
    update = padded(NOTHING)
    update[0][1] = -0.0
    assert level_and_weight(coverage.by_nonzeros, update) == (0, 0)


def test_what_is_not_finite_is_left_to_the_sums():
    """It keeps its weight, so that it is counted as refused, and does not stop the round."""
    slices = SliceMap(("a",), ((3,),), (np.array([[1], [2]], np.int32),))
    assert level_and_weight(coverage.by_nonzeros, [[0, 0, NAN]], slices) == (0, 7)


def test_nonzeros_that_no_level_holds():
    slices = SliceMap(("a",), ((3,),), (np.array([[1], [2]], np.int32),))
    with pytest.raises(tf.errors.InvalidArgumentError, match="positions that no level holds"):
        level_and_weight(coverage.by_nonzeros, [[1, 0, 2]], slices)


def test_levels_in_any_order_that_are_not_nested():
    """Rows, the whole, columns: the smallest is by the number of positions."""
    slices = SliceMap(("a",), ((2, 3),), (np.array([[1, 3], [2, 3], [2, 1]], np.int32),))
    assert level_and_weight(coverage.by_nonzeros, [[[4, 0, 0], [0, 0, 0]]], slices) == (2, 7)
    assert level_and_weight(coverage.by_nonzeros, [[[0, 4, 0], [0, 0, 0]]], slices) == (0, 7)
    assert level_and_weight(coverage.by_nonzeros, [[[4, 0, 0], [4, 0, 0]]], slices) == (2, 7)
    assert level_and_weight(coverage.by_nonzeros, [[[4, 4, 0], [4, 0, 0]]], slices) == (1, 7)


def test_an_array_that_a_level_lacks():
    """A level without the array, where the other axis has a size."""
    slices = SliceMap(("a",), ((2, 3),), (np.array([[0, 3], [2, 3]], np.int32),))
    assert level_and_weight(coverage.by_shapes, [np.zeros([0, 3])], slices) == (0, 7)
    assert level_and_weight(coverage.by_nonzeros, [[[4, 0, 0], [0, 0, 0]]], slices) == (1, 7)
