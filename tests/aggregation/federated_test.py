"""The sparse sum as a TFF aggregation: its type, and the same numbers as the fold."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from feast_tf.aggregation import (Accumulator, build_sparse_sum, fold, slices_type, sparse_mean,
                                  weights_type)
from feast_tf.routing import Routing
from feast_tf.runtime import use_worker
from feast_tf.space import SupernetSpec, VariantCache

SPEC = SupernetSpec(stem=2, bases=(4,), depths=(0, 1), widths=(0.5, 1.0), expansions=(0.5, 1.0),
                    strides=(1,), classes=3, image_size=4, divisor=2)
ROUTING = Routing(VariantCache(SPEC, [SPEC.variant(d=0, e=0.5, w=(1.0, 0.5)),
                                      SPEC.variant(d=0, e=0.5, w=1.0),
                                      SPEC.variant(d=1, e=1.0, w=1.0)]))
SLICES = ROUTING.slices

W_SLICE = (
    "<float32[3,3,3,2],float32[2],float32[2],"  # stem, whole at all levels
    "float32[3,3,2,?],float32[?],float32[?],float32[3,3,?,?],float32[?],float32[?],"  # block 0
    "float32[1,1,2,?],float32[?],float32[?],"  # its shortcut
    "float32[3,3,?,?],float32[?],float32[?],float32[3,3,?,?],float32[?],float32[?],"  # block 1
    "float32[?,3],float32[3]>"  # head
)
W = (
    "<float32[3,3,3,2],float32[2],float32[2],"
    "float32[3,3,2,4],float32[4],float32[4],float32[3,3,4,4],float32[4],float32[4],"
    "float32[1,1,2,4],float32[4],float32[4],"
    "float32[3,3,4,4],float32[4],float32[4],float32[3,3,4,4],float32[4],float32[4],"
    "float32[4,3],float32[3]>"
)


@pytest.fixture(scope="module")
def sparse_sum():
    worker = use_worker()
    yield build_sparse_sum(SLICES)
    worker.stop()


def contribution(level: int, count: float, seed: int) -> collections.OrderedDict:
    rng = np.random.default_rng(seed)
    update = tuple(rng.normal(size=shape).astype(np.float32)
                   for shape in SLICES.slice_shapes(level))
    return collections.OrderedDict(update=update, weight=np.float32(count))


def counts(accumulator: Accumulator) -> tuple[int, int, int]:
    """(with data, without data, refused)"""
    return tuple(int(count) for count in accumulator[3:])


def test_slices_type():
    assert str(slices_type(SLICES)) == W_SLICE


def test_weights_type():
    assert str(weights_type(SLICES)) == W


def test_type_signature(sparse_sum):
    assert str(sparse_sum.type_signature) == (
        f"({{<update={W_SLICE},weight=float32>}}@CLIENTS -> "
        f"<numerator={W},mass=float32[3],bytes_up=int64,clients_with_data=int32,"
        "clients_without_data=int32,clients_refused=int32>@SERVER)")


def test_sum_over_a_mixed_cohort_gives_the_reference(sparse_sum):
    cohort = [contribution(2, 3, seed=1), contribution(0, 5, seed=2), contribution(0, 0, seed=3),
              contribution(1, 8, seed=4), contribution(1, 2, seed=5)]
    cohort[4]["update"][7][0] = np.nan
    accumulator = sparse_sum(cohort)
    assert isinstance(accumulator, Accumulator)
    np.testing.assert_array_equal(accumulator.mass, [5, 8, 3])
    assert counts(accumulator) == (3, 1, 1)
    nothing = [np.zeros(shape, np.float32) for shape in SLICES.shapes]
    expected = sparse_mean(nothing, [(client["weight"], client["update"]) for client in cohort])
    for ours, theirs in zip(fold.mean(SLICES, accumulator.numerator, accumulator.mass), expected):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def test_cohort_without_pictures_changes_nothing(sparse_sum):
    accumulator = sparse_sum([contribution(level, 0, seed=level) for level in range(3)])
    assert counts(accumulator) == (0, 3, 0)
    assert not np.any(accumulator.mass) and not any(map(np.any, accumulator.numerator))


def test_one_computation_serves_every_cohort_size(sparse_sum):
    for size in (1, 4, 0, 2):
        accumulator = sparse_sum([contribution(2, 3, seed=1)] * size)
        assert int(accumulator.clients_with_data) == size and accumulator.mass[2] == 3 * size
