"""The table of prefixes, on arrays small enough to count by hand."""

from __future__ import annotations

import numpy as np
import pytest

from feast_tf.routing import Routing, SliceMap
from feast_tf.space import SupernetSpec, VariantCache

# Level 0 holds 2x1 of "a" and nothing of "b"; level 1 holds 2x3 of "a" and 4 of "b".
MAP = SliceMap(("a", "b"), ((2, 3), (5,)),
               (np.int32([[2, 1], [2, 3]]), np.int32([[0], [4]])))
WEIGHTS = [np.float32([[1, 2, 3], [4, 5, 6]]), np.float32([7, 8, 9, 10, 11])]


def test_what_a_level_is_sent():
    assert [part.tolist() for part in MAP.cut(WEIGHTS, 0)] == [[[1], [4]], []]
    assert [part.tolist() for part in MAP.cut(WEIGHTS, 1)] == [[[1, 2, 3], [4, 5, 6]], [7, 8, 9, 10]]
    assert MAP.slice_shapes(0) == [(2, 1), (0,)] and MAP.payload.tolist() == [2, 10]


def test_only_axes_that_a_level_cuts_are_open():
    assert MAP.elastic_shapes == ((2, None), (None,))


def test_the_slices_of_a_routing():
    spec = SupernetSpec(stem=4, bases=(4, 8), depths=(0, 1), widths=(0.5, 1.0),
                        expansions=(0.5, 1.0), strides=(1, 2), classes=3, image_size=8, divisor=2)
    routing = Routing(VariantCache(spec, [spec.variant(d=0, e=0.5, w=0.5),
                                          spec.variant(d=1, e=1.0, w=1.0)]))
    assert routing.slices.payload.tolist() == routing.payload.tolist()
    weights = [np.arange(np.prod(p.shape), dtype=np.float32).reshape(p.shape)
               for p in routing.layout.parameters]
    for level in (0, 1):
        for ours, theirs in zip(routing.slices.cut(weights, level),
                                routing.layout.cut(weights, routing.envelope_dims[level])):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("level", [-1, 2])
def test_a_level_that_does_not_exist(level):
    with pytest.raises(ValueError, match=f"level must lie in 0..1, but is {level}"):
        MAP.cut(WEIGHTS, level)


@pytest.mark.parametrize("extents, message", [
    ([[2, 4]], "a: extents must lie within the shape"),
    ([[-1, 3]], "a: extents must lie within the shape"),
    ([[2]], "a: extents must be of shape .1 levels, 2 axes."),
])
def test_extents_that_do_not_fit(extents, message):
    with pytest.raises(ValueError, match=message):
        SliceMap(("a",), ((2, 3),), (np.int32(extents),))


def test_missing_extents():
    with pytest.raises(ValueError, match="2 names, 2 shapes and 1 extents"):
        SliceMap(("a", "b"), ((2, 3), (5,)), (np.int32([[2, 1]]),))
