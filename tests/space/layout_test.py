"""Tests of feast_tf.space.layout."""

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from feast_tf.space import Layout
from feast_tf.space import SupernetSpec
from feast_tf.space import layout_of
from feast_tf.space import paper_spec

SPEC = SupernetSpec(stem=4, bases=(10, 16), depths=(0, 1), widths=(0.5, 1.0),
                    expansions=(0.25, 0.5), strides=(1, 3), classes=7, image_size=6, divisor=1)
# Stem 2; stages of 10 and 8 channels; middles of 5 and 2 channels; one extra block, then none.
DIMS = [2, 10, 8, 5, 2, 1, 0]


def small_variant():
    return SPEC.variant(d=(1, 0), e=(0.5, 0.25), w=(0.5, 1, 0.5))


def test_dims_of_a_variant():
    dims = layout_of(SPEC).dims(small_variant())
    assert dims.dtype == np.int32 and dims.tolist() == DIMS
    assert layout_of(SPEC).full_dims.tolist() == [4, 10, 16, 5, 8, 1, 1]
    assert layout_of(SPEC).num_dims == 7


def test_dims_of_a_paper_variant():
    spec = paper_spec()
    variant = spec.variant(d=(3, 7, 6, 0), e=(0.1, 0.22, 0.25, 0.14), w=(0.3, 0.1, 0.2, 0.9, 0.7))
    # Middles: 1.6 -> 8; 10.56 -> 16, as 8 would lose a tenth; 116 -> 120; 100.8 -> 104.
    assert layout_of(spec).dims(variant).tolist() == [
        24, 16, 48, 464, 720, 8, 16, 120, 104, 3, 7, 6, 0]


def test_every_tensor_in_order_with_its_extent():
    layout = layout_of(SPEC)
    found = [(p.name, p.kind, p.shape, tuple(map(int, extent)))
             for p, extent in zip(layout.parameters, layout.extents(DIMS))]
    names = [entry[0] for entry in found]
    assert len(set(names)) == len(names) == 11 * 3 + 2
    kernels = [entry for entry in found if "kernel" in entry[1]]
    assert kernels == [
        ("stem/kernel", "kernel", (3, 3, 3, 4), (3, 3, 3, 2)),
        ("stage0/block0/conv1/kernel", "kernel", (3, 3, 4, 5), (3, 3, 2, 5)),
        ("stage0/block0/conv2/kernel", "kernel", (3, 3, 5, 10), (3, 3, 5, 10)),
        ("stage0/block0/shortcut/kernel", "kernel", (1, 1, 4, 10), (1, 1, 2, 10)),
        ("stage0/block1/conv1/kernel", "kernel", (3, 3, 10, 5), (3, 3, 10, 5)),
        ("stage0/block1/conv2/kernel", "kernel", (3, 3, 5, 10), (3, 3, 5, 10)),
        ("stage1/block0/conv1/kernel", "kernel", (3, 3, 10, 8), (3, 3, 10, 2)),
        ("stage1/block0/conv2/kernel", "kernel", (3, 3, 8, 16), (3, 3, 2, 8)),
        ("stage1/block0/shortcut/kernel", "kernel", (1, 1, 10, 16), (1, 1, 10, 8)),
        # The variant ends before this block: its elastic axes are empty.
        ("stage1/block1/conv1/kernel", "kernel", (3, 3, 16, 8), (3, 3, 0, 0)),
        ("stage1/block1/conv2/kernel", "kernel", (3, 3, 8, 16), (3, 3, 0, 0)),
        ("head/kernel", "head_kernel", (16, 7), (8, 7)),
    ]
    assert found[-1] == ("head/bias", "head_bias", (7,), (7,))
    for place, (name, kind, shape, extent) in enumerate(found):
        if kind == "kernel":
            unit, width, kept = name[: -len("kernel")], shape[-1:], extent[-1:]
            assert found[place + 1] == (f"{unit}gamma", "gamma", width, kept)
            assert found[place + 2] == (f"{unit}beta", "beta", width, kept)


def test_units_and_blocks_refer_to_their_tensors():
    layout = layout_of(SPEC)
    units = list(layout.units())
    assert [unit.norm for unit, _ in units] == list(range(11)) and layout.num_norms == 11
    for unit, gate in units:
        for place, part in ((unit.kernel, "kernel"), (unit.gamma, "gamma"), (unit.beta, "beta")):
            assert layout.parameters[place].name == f"{unit.name}/{part}"
            assert layout.parameters[place].gate == gate
    assert [(u.name, u.stride, u.output_size) for u, _ in units if u.stride > 1] == [
        ("stage1/block0/conv1", 3, 2), ("stage1/block0/shortcut", 3, 2)]
    assert [u.output_size for u, _ in units] == [6] * 6 + [2] * 5
    assert [[block.gate for block in blocks] for blocks in layout.stages] == [
        [None, (5, 1)], [None, (6, 1)]]
    assert [[block.shortcut is None for block in blocks] for blocks in layout.stages] == [
        [False, True], [False, True]]
    assert layout.parameters[layout.head_kernel].name == "head/kernel"
    assert layout.parameters[layout.head_bias].name == "head/bias"


def test_elastic_shapes_leave_the_cut_axes_open():
    shapes = {p.name: p.elastic_shape for p in layout_of(SPEC).parameters}
    assert shapes["stem/kernel"] == (3, 3, 3, None)
    assert shapes["stage0/block0/conv1/kernel"] == (3, 3, None, None)
    assert shapes["stage1/block1/conv2/gamma"] == (None,)
    assert shapes["head/kernel"] == (None, 7) and shapes["head/bias"] == (7,)


def test_extents_of_many_sub_networks_at_once():
    layout = layout_of(SPEC)
    many = np.array([[DIMS, layout.full_dims], [layout.dims(SPEC.smallest()), DIMS]])
    together = layout.extents(many)
    for place, extent in enumerate(together):
        assert extent.shape == (2, 2, len(layout.parameters[place].shape))
        for index in np.ndindex(2, 2):
            np.testing.assert_array_equal(extent[index], layout.extents(many[index])[place])


def test_the_full_extent_is_the_shape():
    layout = layout_of(SPEC)
    for parameter, extent in zip(layout.parameters, layout.extents(layout.full_dims)):
        assert tuple(extent) == parameter.shape


def test_cut_takes_the_prefix():
    layout = layout_of(SPEC)
    weights = [np.arange(np.prod(p.shape)).reshape(p.shape) for p in layout.parameters]
    parts = layout.cut(weights, np.array(DIMS))
    kernel = layout.stages[1][0].conv2.kernel
    assert layout.prefix(kernel, np.array(DIMS)) == (
        slice(0, 3), slice(0, 3), slice(0, 2), slice(0, 8))
    np.testing.assert_array_equal(parts[kernel], weights[kernel][:, :, :2, :8])
    np.testing.assert_array_equal(parts[layout.head_kernel], weights[layout.head_kernel][:8])
    assert parts[layout.stages[1][1].conv1.kernel].shape == (3, 3, 0, 0)


def test_layouts_are_built_once_for_equal_spaces():
    again = SupernetSpec(**{**vars(SPEC), "bases": [10, 16], "widths": [1, 0.5]})
    assert layout_of(again) is layout_of(SPEC)


def test_a_foreign_variant_has_no_dims():
    with pytest.raises(ValueError, match="d must have 2 values, but has 4"):
        layout_of(SPEC).dims(paper_spec().variant(d=7, e=0.1, w=0.5))


@pytest.mark.parametrize("changes, norms, sizes", [
    (dict(bases=(5,), strides=(1,)), 6, [6]),
    (dict(bases=(5,), strides=(3,), depths=(0,)), 4, [2]),
    (dict(bases=(5, 6, 7), strides=(2, 1, 3), depths=(2,)), 22, [3, 3, 1]),
    (dict(image_size=1, strides=(1, 1)), 11, [1, 1]),
])
def test_other_shapes_of_space(changes, norms, sizes):
    layout = Layout(SupernetSpec(**{**vars(SPEC), **changes}))
    assert layout.num_norms == norms
    assert [blocks[0].conv2.output_size for blocks in layout.stages] == sizes
    for parameter, extent in zip(layout.parameters, layout.extents(layout.full_dims)):
        assert tuple(extent) == parameter.shape and min(parameter.shape) > 0


@st.composite
def spaces(draw):
    stages = draw(st.integers(1, 3))
    some = lambda values, least=1: draw(st.lists(st.sampled_from(values), min_size=least))
    strides = draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
    return SupernetSpec(
        stem=draw(st.integers(1, 9)),
        bases=draw(st.lists(st.integers(1, 20), min_size=stages, max_size=stages)),
        depths=some([0, 1, 2, 3]), widths=some([0.1, 0.3, 0.5, 2 / 3, 1.0]),
        expansions=some([0.1, 0.25, 1 / 3, 1.0]), strides=strides, classes=draw(st.integers(1, 5)),
        image_size=int(np.prod(strides)) * draw(st.integers(1, 2)),
        divisor=draw(st.sampled_from([1, 2, 4, 8])))


@given(spaces(), st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_sub_networks_are_prefixes_that_nest(spec, seed):
    layout, rng = layout_of(spec), np.random.default_rng(seed)
    one, other = (layout.dims(spec.random(rng)) for _ in range(2))
    outer = np.maximum(one, other)
    assert np.all(layout.dims(spec.smallest()) <= one) and np.all(outer <= layout.full_dims)
    weights = [rng.normal(size=parameter.shape) for parameter in layout.parameters]
    within = layout.cut(weights, outer)
    for part, direct, extent in zip(layout.cut(within, one), layout.cut(weights, one),
                                    layout.extents(one)):
        assert direct.shape == tuple(extent)
        np.testing.assert_array_equal(part, direct)
