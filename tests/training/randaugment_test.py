"""RandAugment against Pillow and against small examples worked out by hand."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageEnhance, ImageOps

from feast_tf.training import randaugment

SIGNED = len(randaugment.OPERATIONS)


def make_pictures() -> np.ndarray:
    """Eight pictures over the full range and eight over narrow ones; one has a flat channel."""
    generator = np.random.default_rng(3)
    pictures = generator.integers(0, 256, (16, 32, 32, 3), dtype=np.uint8)
    low = generator.integers(0, 100, (8, 1, 1, 3))
    span = generator.integers(5, 150, (8, 1, 1, 3))
    pictures[:8] = low + generator.random((8, 32, 32, 3)) * span
    pictures[0, ..., 1] = 77
    return pictures


@pytest.fixture(scope="module", name="apply")
def fixture_apply():
    """Applies one operation, compiled as in training: eager execution hides the optimiser."""

    @functools.lru_cache(maxsize=None)
    def compiled(height, width, magnitude):
        return tf.function(
            functools.partial(randaugment.apply_operations, magnitude=magnitude),
            input_signature=[
                tf.TensorSpec([None, height, width, 3], tf.uint8),
                tf.TensorSpec([None], tf.int32),
            ],
        )

    def apply(pictures, operation, *, sign, magnitude):
        choice = randaugment.OPERATIONS.index(operation) + (0 if sign > 0 else SIGNED)
        choices = np.full([len(pictures)], choice, np.int32)
        return compiled(*pictures.shape[1:3], magnitude)(pictures, choices).numpy()

    return apply


def apply_with_pillow(picture, operation, *, sign, magnitude):
    image = Image.fromarray(picture)
    strength = sign * magnitude / 10

    def affine(*coefficients):
        return image.transform(image.size, Image.AFFINE, coefficients, fillcolor=(128,) * 3)

    operations = {
        "Identity": lambda: image,
        "AutoContrast": lambda: ImageOps.autocontrast(image),
        "Equalize": lambda: ImageOps.equalize(image),
        "Solarize": lambda: ImageOps.solarize(image, round(256 - 25.6 * magnitude)),
        "Posterize": lambda: ImageOps.posterize(image, 8 - round(0.4 * magnitude)),
        "Brightness": lambda: ImageEnhance.Brightness(image).enhance(1 + 0.9 * strength),
        "Color": lambda: ImageEnhance.Color(image).enhance(1 + 0.9 * strength),
        "Contrast": lambda: ImageEnhance.Contrast(image).enhance(1 + 0.9 * strength),
        "Sharpness": lambda: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * strength),
        "Rotate": lambda: image.rotate(30 * strength, fillcolor=(128,) * 3),
        "ShearX": lambda: affine(1, 0.3 * strength, 0, 0, 1, 0),
        "ShearY": lambda: affine(1, 0, 0, 0.3 * strength, 1, 0),
        "TranslateX": lambda: affine(1, 0, round(32 * 150 / 331 * strength), 0, 1, 0),
        "TranslateY": lambda: affine(1, 0, 0, 0, 1, round(32 * 150 / 331 * strength)),
    }
    return np.asarray(operations[operation]())


@pytest.mark.parametrize("magnitude", [3, 6, 10])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("operation", randaugment.OPERATIONS)
def test_operation_equals_pillow(apply, operation, sign, magnitude):
    pictures = make_pictures()
    ours = apply(pictures, operation, sign=sign, magnitude=magnitude)
    theirs = np.stack(
        [apply_with_pillow(p, operation, sign=sign, magnitude=magnitude) for p in pictures]
    )
    # Pillow stretches in floating point and may end just below a whole number.
    tolerance = 1 if operation == "AutoContrast" else 0
    np.testing.assert_allclose(ours.astype(int), theirs.astype(int), atol=tolerance, rtol=0)
    if operation != "Identity":
        assert np.any(ours != pictures)


@pytest.mark.parametrize(
    "operation",
    sorted(set(randaugment.OPERATIONS) - {"AutoContrast", "Equalize"}),
)
def test_magnitude_zero_changes_nothing(apply, operation):
    pictures = make_pictures()
    np.testing.assert_array_equal(apply(pictures, operation, sign=1, magnitude=0), pictures)


def test_equalize_at_the_edges_of_its_steps(apply):
    # Pixels below the brightest: exact multiples of 255 only just reach their step; 509 with a step
    # of 1 would give the brightest the value 509.
    for below in (255, 509, 510, 765, 1020):
        channel = np.full([1024], 200, np.uint8)
        channel[:below] = np.arange(below) % 90
        picture = np.repeat(channel.reshape(1, 32, 32, 1), 3, axis=-1)
        theirs = np.asarray(ImageOps.equalize(Image.fromarray(picture[0])))
        ours = apply(picture, "Equalize", sign=1, magnitude=6)
        np.testing.assert_array_equal(ours[0], theirs)


def test_auto_contrast_reaches_both_ends_and_leaves_a_flat_channel(apply):
    result = apply(make_pictures()[:2], "AutoContrast", sign=1, magnitude=6)
    assert result[1].min(axis=(0, 1)).tolist() == [0, 0, 0]
    assert result[1].max(axis=(0, 1)).tolist() == [255, 255, 255]
    assert np.all(result[0, ..., 1] == 77)


NINE = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


@pytest.mark.parametrize(
    ("operation", "sign", "expected"),
    [
        # round(3 * 150 / 331) = 1 pixel.
        ("TranslateX", 1, [[2, 3, 128], [5, 6, 128], [8, 9, 128]]),
        ("TranslateX", -1, [[128, 1, 2], [128, 4, 5], [128, 7, 8]]),
        ("TranslateY", 1, [[4, 5, 6], [7, 8, 9], [128, 128, 128]]),
        ("TranslateY", -1, [[128, 128, 128], [1, 2, 3], [4, 5, 6]]),
        # The centres of the rows are 0.5, 1.5 and 2.5 below the corner: shifts by 0.15, 0.45, 0.75.
        ("ShearX", 1, [[1, 2, 3], [4, 5, 6], [8, 9, 128]]),
        ("ShearX", -1, [[1, 2, 3], [4, 5, 6], [128, 7, 8]]),
        ("ShearY", 1, [[1, 2, 6], [4, 5, 9], [7, 8, 128]]),
        ("ShearY", -1, [[1, 2, 128], [4, 5, 3], [7, 8, 6]]),
    ],
)
def test_moves_of_nine_pixels(apply, operation, sign, expected):
    picture = np.repeat(np.array(NINE, np.uint8)[np.newaxis, :, :, np.newaxis], 3, axis=-1)
    result = apply(picture, operation, sign=sign, magnitude=10)
    assert result[0, :, :, 1].tolist() == expected


def test_height_and_width_are_not_swapped(apply):
    picture = np.arange(1, 6 * 12 * 3 + 1, dtype=np.uint8).reshape(1, 6, 12, 3)
    # At magnitude 5 the shifts are round(12 * 0.2266) = 3 columns and round(6 * 0.2266) = 1 row.
    right = apply(picture, "TranslateX", sign=-1, magnitude=5)
    np.testing.assert_array_equal(right[0, :, 3:], picture[0, :, :-3])
    down = apply(picture, "TranslateY", sign=-1, magnitude=5)
    np.testing.assert_array_equal(down[0, 1:], picture[0, :-1])
    wide = make_pictures()[:4, :20]
    rotated = apply(wide, "Rotate", sign=1, magnitude=6)
    for ours, one in zip(rotated, wide):
        theirs = apply_with_pillow(one, "Rotate", sign=1, magnitude=6)
        np.testing.assert_array_equal(ours, theirs)


def test_mixed_batch_keeps_its_order():
    pictures = make_pictures()[:14]
    choices = tf.random.stateless_uniform([14], [5, 6], 0, 28, dtype=tf.int32)
    together = randaugment.apply_operations(tf.constant(pictures), choices, magnitude=6)
    for i in range(14):
        alone = randaugment.apply_operations(
            tf.constant(pictures[i : i + 1]), choices[i : i + 1], magnitude=6
        )
        np.testing.assert_array_equal(together[i], alone[0])


def narrow_picture() -> np.ndarray:
    """One on which no operation but Identity is void."""
    return np.random.default_rng(4).integers(9, 240, (1, 32, 32, 3), dtype=np.uint8)


def test_draws_are_per_picture_and_reach_every_operation():
    picture = narrow_picture()
    # 14 operations; the 9 moves and blends have two signs each.
    every = randaugment.apply_operations(
        tf.repeat(picture, 28, axis=0), tf.range(28), magnitude=6
    ).numpy()
    outcomes = {result.tobytes() for result in every}
    assert len(outcomes) == 5 + 2 * 9
    drawn = randaugment.rand_augment(
        tf.repeat(picture, 1400, axis=0), seed=[7, 8], layers=1, magnitude=6
    ).numpy()
    assert {result.tobytes() for result in drawn} == outcomes
    unchanged = sum(result.tobytes() == picture.tobytes() for result in drawn)
    assert 70 <= unchanged <= 130  # 1400 / 14 = 100, standard deviation 9.6


def test_layers_are_drawn_independently():
    picture = narrow_picture()
    drawn = randaugment.rand_augment(
        tf.repeat(picture, 200, axis=0), seed=[7, 8], layers=2, magnitude=6
    ).numpy()
    # One draw used for both layers could give at most 23 results.
    assert len({result.tobytes() for result in drawn}) > 60


@pytest.mark.parametrize("shape", [(4, 8, 8, 1), (4, 2, 8, 3), (8, 8, 3)])
def test_wrong_shape_raises(shape):
    with pytest.raises(ValueError, match="images: RandAugment needs .* got \\("):
        randaugment.rand_augment(tf.zeros(shape, tf.uint8), seed=[1, 2], layers=1, magnitude=6)
