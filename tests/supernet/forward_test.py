"""Tests of feast_tf.supernet.forward."""

import dataclasses

from hypothesis import Phase
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf

from feast_tf.space import SupernetSpec
from feast_tf.space import layout_of
from feast_tf.space import paper_spec
from feast_tf.supernet import BN_EPSILON
from feast_tf.supernet import forward
from feast_tf.supernet import initial_weights

SPEC = SupernetSpec(stem=6, bases=(8, 10), depths=(0, 1, 2), widths=(0.5, 1.0),
                    expansions=(0.25, 0.5, 1.0), strides=(1, 2), classes=5, image_size=6, divisor=2)
LAYOUT = layout_of(SPEC)
OTHER_SPECS = {
    "one stage, stride 3, no extra blocks": SupernetSpec(
        stem=3, bases=(5,), depths=(0,), widths=(0.4, 1.0), expansions=(0.5, 1.0), strides=(3,),
        classes=2, image_size=9, divisor=1),
    "three stages, at least one extra block": SupernetSpec(
        stem=4, bases=(7, 4, 9), depths=(1, 3), widths=(1 / 3, 1.0), expansions=(0.3, 0.9),
        strides=(2, 1, 3), classes=3, image_size=12, divisor=1),
    "divisor 4": SupernetSpec(
        stem=4, bases=(8, 16), depths=(0, 2), widths=(0.3, 0.6), expansions=(0.25, 1.0),
        strides=(2, 2), classes=4, image_size=4, divisor=4),
}
SPECS = {"two stages": SPEC, **OTHER_SPECS}


def random_weights(layout, seed):
    """float32 weights on which nothing is trivial: gammas around 1, and no zeros."""
    rng = np.random.default_rng(seed)
    spread = {"kernel": 0.5, "gamma": 0.3, "beta": 0.4, "head_kernel": 0.7, "head_bias": 0.5}
    return [np.float32((p.kind == "gamma") + spread[p.kind] * rng.normal(size=p.shape))
            for p in layout.parameters]


def pictures(spec, seed, count=5):
    size = spec.image_size
    return np.random.default_rng(seed).normal(0.3, 1, (count, size, size, 3)).astype(np.float32)


def loss_and_gradients(layout, weights, dims, images, execution):
    weights = [tf.convert_to_tensor(weight) for weight in weights]
    with tf.GradientTape() as tape:
        tape.watch(weights)
        logits = forward(layout, weights, dims, images, execution=execution)
        loss = tf.reduce_mean(tf.nn.log_softmax(logits)[:, 0])
    return logits, tape.gradient(loss, weights, unconnected_gradients="zero")


@pytest.fixture(scope="module")
def traced():
    """Slice execution of SPEC as one graph for all variants and envelopes."""
    return tf.function(
        lambda weights, dims, images: loss_and_gradients(LAYOUT, weights, dims, images, "slice"),
        input_signature=[[tf.TensorSpec(p.elastic_shape) for p in LAYOUT.parameters],
                         tf.TensorSpec([LAYOUT.num_dims], tf.int32),
                         tf.TensorSpec([None, SPEC.image_size, SPEC.image_size, 3])])


def numpy_forward(layout, weights, dims, images):
    """(logits, moments) in float64, written down from the paper's description."""
    weights = [np.float64(part) for part in layout.cut(weights, dims)]
    moments = {}

    def conv(x, unit, stride):
        kernel = weights[unit.kernel]
        reach = kernel.shape[0] // 2
        x = np.pad(x, [(0, 0), (reach, reach), (reach, reach), (0, 0)])
        size = (x.shape[1] - 2 * reach - 1) // stride + 1
        y = sum(x[:, i: i + stride * (size - 1) + 1: stride, j: j + stride * (size - 1) + 1: stride]
                @ kernel[i, j] for i in range(kernel.shape[0]) for j in range(kernel.shape[1]))
        mean, variance = y.mean(axis=(0, 1, 2)), y.var(axis=(0, 1, 2))
        moments[unit.norm] = mean, variance
        return ((y - mean) / np.sqrt(variance + 1e-5) * weights[unit.gamma] + weights[unit.beta])

    relu = lambda x: np.maximum(x, 0)
    x = relu(conv(images, layout.stem, 1))
    depths = dims[-len(layout.stages):]
    for blocks, depth in zip(layout.stages, depths):
        for block in blocks[: 1 + depth]:
            y = relu(conv(x, block.conv1, block.conv1.stride))
            y = relu(conv(y, block.conv2, 1))
            if block.shortcut:
                n, height, width, channels = x.shape
                s = block.shortcut.stride
                pooled = x.reshape(n, height // s, s, width // s, s, channels).mean(axis=(2, 4))
                x = conv(pooled, block.shortcut, 1)
            x = relu(y + x)
    return x.mean(axis=(1, 2)) @ weights[layout.head_kernel] + weights[layout.head_bias], moments


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("scale", [1, 3e-3])  # at 3e-3 the stem's variances are about epsilon
def test_logits_and_moments_equal_a_numpy_network(spec, scale):
    layout, rng = layout_of(spec), np.random.default_rng(2)
    weights, images = random_weights(layout, 3), scale * pictures(spec, 4)
    for variant in (spec.smallest(), spec.random(rng), spec.largest()):
        dims = layout.dims(variant)
        expected, moments = numpy_forward(layout, weights, dims, images)
        logits = forward(layout, weights, dims, images)
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
        recorded_logits, recorded = forward(layout, weights, dims, images, record_moments=True)
        np.testing.assert_allclose(recorded_logits, expected, rtol=1e-4, atol=1e-4)
        assert len(recorded) == layout.num_norms
        for norm, (mean, variance) in enumerate(recorded):
            if norm in moments:
                np.testing.assert_allclose(mean, moments[norm][0], rtol=1e-4, atol=1e-5)
                np.testing.assert_allclose(variance, moments[norm][1], rtol=1e-4, atol=1e-9)
            else:
                assert mean.shape == variance.shape == (0,)


def hand_network():
    """One channel, stride 2: stem and conv2 pass on, conv1 has nine distinct taps, shortcut 100."""
    spec = SupernetSpec(stem=1, bases=(1,), depths=(0,), widths=(1.0,), expansions=(1.0,),
                        strides=(2,), classes=2, image_size=4, divisor=1)
    layout = layout_of(spec)
    weights = [np.zeros(p.shape, np.float32) if p.kind in ("kernel", "beta")
               else np.ones(p.shape, np.float32) for p in layout.parameters]
    block = layout.stages[0][0]
    weights[layout.stem.kernel][1, 1, 0, 0] = 1
    weights[block.conv1.kernel][..., 0, 0] = [[2, 3, 5], [7, 11, 13], [17, 19, 23]]
    weights[block.conv2.kernel][1, 1, 0, 0] = 1
    weights[block.shortcut.kernel][...] = 100
    weights[layout.head_kernel][...] = [[1, 2]]
    weights[layout.head_bias][...] = [0, 4]
    identity = [(tf.zeros([1]), tf.constant([1 - BN_EPSILON]))] * layout.num_norms
    return layout, weights, identity


@pytest.mark.parametrize("row, column, taps", [
    # Windows begin one pixel outside the picture; with "SAME" the first would give 2.
    (0, 0, 11), (0, 1, 13 + 7), (1, 0, 19 + 3), (1, 1, 23 + 17 + 5 + 2), (2, 2, 11), (3, 3, 23),
    (3, 1, 23 + 17),
])
def test_strided_convolutions_pad_on_every_side_and_shortcuts_average(row, column, taps):
    layout, weights, identity = hand_network()
    image = np.zeros([1, 4, 4, 3], np.float32)
    image[0, row, column] = [8, 9, 10]  # the stem reads red only
    logits = forward(layout, weights, layout.full_dims, image, moments=identity)
    mean = (8 * taps + 100 * 8 / 4) / 4  # over the 2 x 2 pixels of the last stage
    np.testing.assert_allclose(logits, [[mean, 2 * mean + 4]], rtol=1e-6)


def test_fixed_moments_normalise_with_epsilon_1e_5():
    layout, weights, moments = hand_network()
    assert BN_EPSILON == 1e-5
    moments = list(moments)
    moments[layout.stem.norm] = (tf.constant([2.0]), tf.constant([3e-5]))
    image = np.full([1, 4, 4, 3], 2.0, np.float32)
    image[0, 0, 0] = 2 + 0.004
    logits = forward(layout, weights, layout.full_dims, image, moments=moments)
    value = 0.004 / np.sqrt(3e-5 + 1e-5)
    np.testing.assert_allclose(logits[0, 0], (11 * value + 100 * value / 4) / 4, rtol=1e-4)


def assert_close(found, expected):
    """Within 1e-5 of the larger of 1 and the tensor's greatest value."""
    found, expected = np.asarray(found), np.asarray(expected)
    scale = max(1.0, np.max(np.abs(expected), initial=0))
    np.testing.assert_allclose(found / scale, expected / scale, rtol=0, atol=1e-5)


def assert_zero_outside(gradients, extents):
    for gradient, extent in zip(gradients, extents):
        outside = np.array(gradient)
        outside[tuple(slice(0, int(size)) for size in extent)] = 0
        assert not outside.any()  # exactly, not nearly


def variants_of(spec):
    stages = spec.num_stages
    several = lambda values, count: st.tuples(*[st.sampled_from(values)] * count)
    return st.builds(lambda d, e, w: spec.variant(d=d, e=e, w=w), several(spec.depths, stages),
                     several(spec.expansions, stages), several(spec.widths, stages + 1))


@given(variants_of(SPEC), variants_of(SPEC), st.integers(0, 2**32))
@settings(max_examples=12, deadline=None,
          phases=(Phase.explicit, Phase.reuse, Phase.generate))  # shrinking would take minutes
def test_executions_agree_on_the_supernet_and_on_envelopes(traced, variant, other, seed):
    weights, images = random_weights(LAYOUT, seed), pictures(SPEC, seed, count=4)
    dims = LAYOUT.dims(variant)
    extents = LAYOUT.extents(dims)
    logits, gradients = traced(weights, dims, images)
    masked_logits, masked = loss_and_gradients(LAYOUT, weights, dims, images, "mask")
    assert_close(masked_logits, logits)
    for found, expected in zip(masked, gradients):
        assert_close(found, expected)
    assert_zero_outside(gradients, extents)
    assert_zero_outside(masked, extents)
    assert any(np.any(gradient) for gradient in gradients)

    # What a client holds: an envelope of both variants.
    envelope = np.maximum(dims, LAYOUT.dims(other))
    received = LAYOUT.cut(weights, envelope)
    within = LAYOUT.cut(gradients, envelope)
    for execution in ("slice", "mask"):
        found_logits, found = (traced(received, dims, images) if execution == "slice" else
                               loss_and_gradients(LAYOUT, received, dims, images, execution))
        assert_close(found_logits, logits)
        for part, expected in zip(found, within):
            assert part.shape == expected.shape
            assert_close(part, expected)
        assert_zero_outside(found, extents)


@pytest.mark.parametrize("spec", OTHER_SPECS.values(), ids=OTHER_SPECS)
def test_executions_agree_in_other_spaces(spec):
    layout, rng = layout_of(spec), np.random.default_rng(8)
    weights, images = random_weights(layout, 1), pictures(spec, 2)
    for variant in (spec.smallest(), spec.largest(), spec.random(rng)):
        dims = layout.dims(variant)
        received = layout.cut(weights, np.maximum(dims, layout.dims(spec.random(rng))))
        logits, gradients = loss_and_gradients(layout, weights, dims, images, "slice")
        for held, execution in ((weights, "mask"), (received, "slice"), (received, "mask")):
            found_logits, found = loss_and_gradients(layout, held, dims, images, execution)
            assert_close(found_logits, logits)
            assert_zero_outside(found, layout.extents(dims))
            for part, expected in zip(layout.cut(found, dims), layout.cut(gradients, dims)):
                assert_close(part, expected)


def test_mask_execution_compiles_with_xla():
    weights, images = random_weights(LAYOUT, 5), pictures(SPEC, 6)
    compiled = tf.function(lambda dims: forward(LAYOUT, weights, dims, images, execution="mask"),
                           jit_compile=True, input_signature=[
                               tf.TensorSpec([LAYOUT.num_dims], tf.int32)])
    for variant in (SPEC.smallest(), SPEC.variant(d=(2, 0), e=(1, 0.25), w=(1, 0.5, 1))):
        dims = LAYOUT.dims(variant)
        assert_close(compiled(dims), forward(LAYOUT, weights, dims, images))


def test_one_trace_serves_all_variants_envelopes_and_batch_sizes(traced):
    rng = np.random.default_rng(1)
    weights = random_weights(LAYOUT, 2)
    for count in (2, 3, 7):
        variant = LAYOUT.dims(SPEC.random(rng))
        traced(weights, variant, pictures(SPEC, 3, count))
        envelope = np.maximum(variant, LAYOUT.dims(SPEC.random(rng)))
        traced(LAYOUT.cut(weights, envelope), variant, pictures(SPEC, 4, count))
    assert traced.experimental_get_tracing_count() == 1


def test_different_variants_give_different_logits(traced):
    # A width or depth that is silently ignored would give equal ones.
    weights, images = random_weights(LAYOUT, 7), pictures(SPEC, 8)
    base = dict(d=(1, 1), e=(0.5, 0.5), w=(1, 1, 1))
    changes = [dict(), dict(d=(0, 1)), dict(d=(2, 1)), dict(d=(1, 0)), dict(d=(1, 2)),
               dict(e=(0.25, 0.5)), dict(e=(0.5, 1)), dict(w=(0.5, 1, 1)), dict(w=(1, 0.5, 1)),
               dict(w=(1, 1, 0.5))]
    variants = [SPEC.smallest(), SPEC.largest(), SPEC.random(np.random.default_rng(3))]
    variants += [SPEC.variant(**{**base, **change}) for change in changes]
    dims = np.unique([LAYOUT.dims(variant) for variant in variants], axis=0)
    assert len(dims) == len(variants)
    logits = [traced(weights, variant, images)[0].numpy() for variant in dims]
    for place, one in enumerate(logits):
        for other in logits[:place]:
            assert np.max(np.abs(one - other)) > 1e-2


def test_blocks_beyond_the_depth_do_not_run_in_slice_execution(traced):
    # NaN anywhere they read would reach the logits.
    weights, images = random_weights(LAYOUT, 9), pictures(SPEC, 1)
    variant = SPEC.variant(d=(1, 0), e=0.5, w=(0.5, 1, 0.5))
    dims = LAYOUT.dims(variant)
    poisoned = []
    for weight, extent in zip(weights, LAYOUT.extents(dims)):
        poisoned.append(np.full_like(weight, np.nan))
        kept = tuple(slice(0, int(size)) for size in extent)
        poisoned[-1][kept] = weight[kept]
    np.testing.assert_array_equal(traced(poisoned, dims, images)[0],
                                  traced(weights, dims, images)[0])


def test_unknown_executions_are_refused():
    with pytest.raises(ValueError, match="execution must be one of slice, mask, but is 'masked'"):
        forward(LAYOUT, random_weights(LAYOUT, 0), LAYOUT.full_dims, pictures(SPEC, 0),
                execution="masked")


@pytest.mark.parametrize("arguments", [dict(record_moments=True), dict(moments=[])])
def test_mask_execution_has_no_moments(arguments):
    with pytest.raises(ValueError, match="moments belong to one variant's own sizes: use .*slice"):
        forward(LAYOUT, random_weights(LAYOUT, 0), LAYOUT.full_dims, pictures(SPEC, 0),
                execution="mask", **arguments)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_initial_weights_are_a_function_of_the_seed(spec):
    layout = layout_of(spec)
    one, again, other = (initial_weights(layout, seed) for seed in (7, 7, 8))
    for parameter, a, b, c in zip(layout.parameters, one, again, other):
        assert a.shape == parameter.shape and a.dtype == tf.float32
        np.testing.assert_array_equal(a, b)
        if "kernel" in parameter.kind:
            assert not np.any(a.numpy() == c.numpy())
    for seed in (0, -3, 2**31 - 1, 2**40 + 5, np.int64(9)):
        assert all(np.all(np.isfinite(weight)) for weight in initial_weights(layout, seed))


def test_initial_weights_differ_between_kernels():
    weights = initial_weights(LAYOUT, 3)
    one, other = (weights[LAYOUT.stages[0][slot].conv1.kernel] for slot in (1, 2))
    assert one.shape == other.shape and not np.any(one.numpy() == other.numpy())


def test_initial_weights_have_the_spread_of_he():
    layout = layout_of(dataclasses.replace(paper_spec(), depths=(0,), bases=(64, 128, 256, 512)))
    for parameter, weight in zip(layout.parameters, initial_weights(layout, 4)):
        weight = weight.numpy()
        if parameter.kind == "kernel":
            fan_in = np.prod(parameter.shape[:3])
            # Five standard errors of a sample's spread and mean.
            error = 5 / np.sqrt(weight.size)
            assert weight.std() == pytest.approx(np.sqrt(2 / fan_in), rel=error / np.sqrt(2))
            assert abs(weight.mean()) < error * np.sqrt(2 / fan_in)
        elif parameter.kind == "head_kernel":
            limit = 1 / np.sqrt(512)
            assert 0.999 * limit < weight.max() <= limit and -limit <= weight.min() < -0.999 * limit
            assert weight.std() == pytest.approx(limit / np.sqrt(3), rel=0.02)
        else:
            assert np.all(weight == (parameter.kind == "gamma"))
