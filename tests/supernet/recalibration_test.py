"""Tests of feast_tf.supernet.recalibration."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from feast_tf.space import SupernetSpec
from feast_tf.space import layout_of
from feast_tf.supernet import ElasticRunner
from feast_tf.supernet import forward

SPEC = SupernetSpec(stem=6, bases=(8, 10), depths=(0, 1, 2), widths=(0.5, 1.0),
                    expansions=(0.25, 0.5, 1.0), strides=(1, 2), classes=5, image_size=6, divisor=2)
LAYOUT = layout_of(SPEC)
VARIANT = LAYOUT.dims(SPEC.variant(d=(1, 0), e=(0.5, 1), w=(0.5, 1, 0.5)))


@pytest.fixture(scope="module")
def runner():
    return ElasticRunner(LAYOUT)


@pytest.fixture(scope="module")
def weights():
    rng = np.random.default_rng(3)
    spread = {"kernel": 0.5, "gamma": 0.3, "beta": 0.4, "head_kernel": 0.7, "head_bias": 0.5}
    return [tf.constant((p.kind == "gamma") + spread[p.kind] * rng.normal(size=p.shape), tf.float32)
            for p in LAYOUT.parameters]


def pictures(seed, count, scale=1.0):
    """Batches of different scales have different moments, so that a wrong average shows."""
    return np.float32(scale * np.random.default_rng(seed).normal(0.3, 1, (count, 6, 6, 3)))


def batches():
    return [pictures(1, 3), pictures(2, 5, 2.0), pictures(3, 1, 0.5)]


def numpy_stem(kernel, images):
    """Mean and population variance of a 3x3 convolution with a border of zeros, in float64."""
    padded = np.pad(np.float64(images), [(0, 0), (1, 1), (1, 1), (0, 0)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    y = np.einsum("nyxchw,hwco->nyxo", windows, np.float64(kernel))
    return y.mean(axis=(0, 1, 2)), y.var(axis=(0, 1, 2))


def assert_moments_equal(found, expected, **tolerance):
    assert len(found) == len(expected) == LAYOUT.num_norms
    for pair, expected_pair in zip(found, expected):
        for part, expected_part in zip(pair, expected_pair):
            assert part.shape == expected_part.shape
            np.testing.assert_allclose(part, expected_part, **tolerance)


def test_the_stems_moments_by_hand(runner, weights):
    moments = runner.recalibrate(weights, VARIANT, batches())
    kernel = weights[LAYOUT.stem.kernel].numpy()[..., :4]  # half of the stem's 6 channels, even
    found = [numpy_stem(kernel, images) for images in batches()]
    for part in range(2):
        # By pictures: neither every batch alike nor all pictures as one batch.
        expected = (3 * found[0][part] + 5 * found[1][part] + 1 * found[2][part]) / 9
        assert moments[LAYOUT.stem.norm][part].dtype == tf.float32
        np.testing.assert_allclose(moments[LAYOUT.stem.norm][part], expected, rtol=1e-5, atol=1e-6)
    one_batch = numpy_stem(kernel, np.concatenate(batches()))[1]
    assert np.min(np.abs(moments[LAYOUT.stem.norm][1] / one_batch - 1)) > 1e-3


def test_all_moments_are_the_exact_average_of_the_batches(runner, weights):
    parts = [forward(LAYOUT, weights, VARIANT, images, record_moments=True)[1]
             for images in batches()]
    expected = [[sum(count * np.float64(part[norm][which]) for count, part in zip((3, 5, 1), parts))
                 / 9 for which in range(2)] for norm in range(LAYOUT.num_norms)]
    assert_moments_equal(runner.recalibrate(weights, VARIANT, batches()), expected,
                         rtol=1e-5, atol=1e-6)


def test_blocks_that_the_variant_lacks_have_no_moments(runner, weights):
    moments = runner.recalibrate(weights, VARIANT, batches())
    sizes = [len(mean) for mean, _ in moments]
    # Stem; a stage of 8 with middle 4, one of two extra blocks; a stage of 6 with middle 6, none.
    assert sizes == [4, 4, 8, 8, 4, 8, 0, 0, 6, 6, 6, 0, 0, 0, 0]
    assert [len(variance) for _, variance in moments] == sizes


def test_the_order_of_the_batches_does_not_matter(runner, weights):
    expected = runner.recalibrate(weights, VARIANT, batches())
    for order in itertools.permutations(batches()):
        assert_moments_equal(runner.recalibrate(weights, VARIANT, iter(order)), expected,
                             rtol=1e-6, atol=1e-7)


def test_earlier_calls_leave_no_trace(runner, weights):
    first = runner.recalibrate(weights, VARIANT, batches())
    runner.recalibrate(weights, LAYOUT.full_dims, [pictures(9, 4, 30.0)])
    runner.recalibrate([weight + 1 for weight in weights], VARIANT, [pictures(9, 4, 30.0)])
    again = runner.recalibrate(weights, VARIANT, batches())
    for pair, other in zip(first, again):
        np.testing.assert_array_equal(pair[0], other[0])
        np.testing.assert_array_equal(pair[1], other[1])


def test_empty_batches_count_nothing(runner, weights):
    none = np.zeros([0, 6, 6, 3], np.float32)
    one, two, three = batches()
    assert_moments_equal(runner.recalibrate(weights, VARIANT, [none, one, two, none, three, none]),
                         runner.recalibrate(weights, VARIANT, batches()), rtol=0, atol=0)


@pytest.mark.parametrize("nothing", [[], iter(()), [np.zeros([0, 6, 6, 3], np.float32)] * 2])
def test_no_pictures_are_an_error(runner, weights, nothing):
    with pytest.raises(ValueError, match="recalibration needs at least one server-held picture"):
        runner.recalibrate(weights, VARIANT, nothing)


def test_moments_of_a_batch_give_its_training_logits(runner, weights):
    images = pictures(4, 8)
    moments = runner.recalibrate(weights, VARIANT, [images])
    np.testing.assert_allclose(runner.logits(weights, VARIANT, moments, images),
                               forward(LAYOUT, weights, VARIANT, images), rtol=1e-4, atol=1e-5)


def test_served_logits_do_not_depend_on_the_other_pictures(runner, weights):
    images = pictures(4, 6)
    moments = runner.recalibrate(weights, VARIANT, batches())
    together = runner.logits(weights, VARIANT, moments, images)
    assert together.shape == (6, 5)
    alone = [runner.logits(weights, VARIANT, moments, image[np.newaxis])[0] for image in images]
    np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-5)
    trained = forward(LAYOUT, weights, VARIANT, images)
    assert np.max(np.abs(together - trained)) > 1e-2


def test_each_variant_needs_moments_of_its_own(runner, weights):
    # The same stem channels have other statistics only downstream of what differs.
    other = LAYOUT.dims(SPEC.variant(d=(2, 1), e=(0.5, 1), w=(0.5, 1, 0.5)))
    own, others = (runner.recalibrate(weights, dims, batches()) for dims in (VARIANT, other))
    second_stage = LAYOUT.stages[1][0].conv1.norm
    np.testing.assert_array_equal(own[LAYOUT.stem.norm][0], others[LAYOUT.stem.norm][0])
    assert np.max(np.abs(own[second_stage][0] - others[second_stage][0])) > 1e-2


def test_two_graphs_serve_all_variants_and_batch_sizes(weights):
    fresh, rng = ElasticRunner(LAYOUT), np.random.default_rng(5)
    variants = [SPEC.smallest(), SPEC.largest(), SPEC.random(rng), SPEC.random(rng)]
    for count, variant in enumerate(variants, start=2):
        dims = LAYOUT.dims(variant)
        moments = fresh.recalibrate(weights, dims, [pictures(6, count), pictures(7, 2 * count)])
        assert np.all(np.isfinite(fresh.logits(weights, dims, moments, pictures(8, count))))
    assert fresh._record.experimental_get_tracing_count() == 1
    assert fresh._predict.experimental_get_tracing_count() == 1
