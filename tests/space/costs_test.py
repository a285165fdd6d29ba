"""Tests of feast_tf.space.costs; tests/supernet/model_test.py compares them with Keras networks."""

import dataclasses

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from feast_tf.space import LayerCost
from feast_tf.space import SupernetSpec
from feast_tf.space import layer_table
from feast_tf.space import layout_of
from feast_tf.space import macs
from feast_tf.space import params
from feast_tf.space import paper_spec

SPEC = SupernetSpec(stem=4, bases=(10, 14), depths=(0, 1, 2), widths=(0.5, 1.0), expansions=(0.5,),
                    strides=(1, 2), classes=3, image_size=6, divisor=1)


def test_a_network_worked_out_by_hand():
    # Stem 2; stages of 10 and 14 channels with middles of 5 and 7; one extra block, then none.
    variant = SPEC.variant(d=(1, 0), e=0.5, w=(0.5, 1, 1))
    assert layer_table(SPEC, variant) == [
        LayerCost("stem", (3, 3, 3, 2), 6, 58, 1944),
        LayerCost("stage0/block0/conv1", (3, 3, 2, 5), 6, 100, 3240),
        LayerCost("stage0/block0/conv2", (3, 3, 5, 10), 6, 470, 16200),
        LayerCost("stage0/block0/shortcut", (1, 1, 2, 10), 6, 40, 720),
        LayerCost("stage0/block1/conv1", (3, 3, 10, 5), 6, 460, 16200),
        LayerCost("stage0/block1/conv2", (3, 3, 5, 10), 6, 470, 16200),
        LayerCost("stage1/block0/conv1", (3, 3, 10, 7), 3, 644, 5670),
        LayerCost("stage1/block0/conv2", (3, 3, 7, 14), 3, 910, 7938),
        LayerCost("stage1/block0/shortcut", (1, 1, 10, 14), 3, 168, 1260),
        LayerCost("head", (14, 3), 1, 45, 42),
    ]
    assert params(SPEC, variant) == 3365 and macs(SPEC, variant) == 69414
    assert type(params(SPEC, variant)) is int and type(macs(SPEC, variant)) is int


def test_each_field_changes_what_it_should():
    base = dict(d=(1, 0), e=0.5, w=(0.5, 1, 1))
    cost = lambda **changes: (params(SPEC, SPEC.variant(**{**base, **changes})),
                              macs(SPEC, SPEC.variant(**{**base, **changes})))
    # One more block of stage 1: 9 * 14 * 7 twice, and two pairs of gamma and beta.
    assert cost(d=(1, 1)) == (3365 + 1764 + 2 * (7 + 14), 69414 + 1764 * 9)
    # Four channels in the stem: its kernel and norm, then conv1 and shortcut of the first block.
    assert cost(w=1) == (3365 + 58 + 90 + 20, 69414 + 1944 + 3240 + 720)


def test_the_ends_of_the_paper_space():
    spec = paper_spec(classes=100)
    assert params(spec, spec.largest()) == 55_682_916
    assert macs(spec, spec.largest()) == 2_677_837_824
    assert params(spec, spec.smallest()) == 49_916
    assert macs(spec, spec.smallest()) == 3_803_296


def test_classes_and_image_size_change_costs_as_they_should():
    spec, variant = paper_spec(100, 32), paper_spec().variant(d=2, e=0.18, w=0.5)
    head = 512 * 100
    assert params(paper_spec(10), variant) == params(spec, variant) - 513 * 90
    assert macs(paper_spec(10), variant) == macs(spec, variant) - 512 * 90
    # Four times the pixels: all but the head.
    assert macs(paper_spec(100, 64), variant) == 4 * (macs(spec, variant) - head) + head
    assert params(paper_spec(100, 64), variant) == params(spec, variant)


def test_costs_do_not_overflow_32_bits():
    spec = SupernetSpec(stem=3000, bases=(9000,), depths=(0, 5), widths=(1.0,), expansions=(1.0,),
                        strides=(1,), classes=2, image_size=224)
    weights = 9 * 3000 * 9000 + 3000 * 9000 + 11 * 9 * 9000**2
    assert macs(spec, spec.largest()) == 50176 * (9 * 3 * 3000 + weights) + 18000
    assert params(spec, spec.largest()) == (27 * 3000 + weights + 2 * (3000 + 13 * 9000) + 18002)


def test_a_foreign_variant_has_no_costs():
    foreign = paper_spec().variant(d=3, e=0.1, w=0.3)
    for cost in (params, macs, layer_table):
        with pytest.raises(ValueError, match="d must have 2 values, but has 4"):
            cost(SPEC, foreign)
    deep = dataclasses.replace(SPEC.smallest(), d=(0, 3))
    with pytest.raises(ValueError, match=r"d\[1\] = 3 is not in the space; allowed: 0, 1, 2"):
        macs(SPEC, deep)


@given(st.integers(0, 2**32), st.sampled_from([SPEC, paper_spec(7, 8), SupernetSpec(
    stem=7, bases=(9,), depths=(0, 3), widths=(0.1, 2 / 3), expansions=(0.2, 1.0), strides=(3,),
    classes=2, image_size=9, divisor=4)]))
@settings(max_examples=60, deadline=None)
def test_tables_vectors_and_single_costs_agree(seed, spec):
    rng = np.random.default_rng(seed)
    variants = [spec.random(rng) for _ in range(3)]
    tables = [layer_table(spec, variant) for variant in variants]
    dims = np.stack([layout_of(spec).dims(variant) for variant in variants])
    for cost, name in ((params, "params"), (macs, "macs")):
        sums = [sum(getattr(row, name) for row in table) for table in tables]
        assert [cost(spec, variant) for variant in variants] == sums
        together = cost(spec, dims)
        assert together.dtype == np.int64 and together.tolist() == sums
        np.testing.assert_array_equal(cost(spec, dims[:, np.newaxis]), together[:, np.newaxis])
        assert cost(spec, dims[1]) == sums[1]
    for variant, table in zip(variants, tables):
        names = [row.name for row in table]
        assert len(names) == len(set(names)) == 2 + sum(3 + 2 * depth for depth in variant.d)
