"""Crop, flip, the configuration, and how everything behaves inside a graph."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from feast_tf.training.augment import Augmentation, augment_images, normalize
from feast_tf.training.mixing import mix

OFF = Augmentation.none()


def distinct_picture() -> np.ndarray:
    """All values from 1 to 192; 0 is left for the border."""
    return np.arange(1, 193, dtype=np.uint8).reshape(8, 8, 3)


def random_pictures(count: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


def augment_copies(picture, count, config, seed=(3, 4)):
    return augment_images(tf.repeat(picture[np.newaxis], count, axis=0), seed=seed, config=config)


def windows(picture: np.ndarray, padding: int) -> dict:
    """Every crop from the padded picture, as bytes, with its position."""
    height, width, _ = picture.shape
    padded = np.pad(picture, [(padding, padding), (padding, padding), (0, 0)])
    return {
        padded[y : y + height, x : x + width].tobytes(): (y, x)
        for y in range(2 * padding + 1)
        for x in range(2 * padding + 1)
    }


def test_crop_is_a_shifted_window_and_reaches_every_position():
    config = dataclasses.replace(OFF, crop_padding=2)
    positions = windows(distinct_picture(), 2)
    result = augment_copies(distinct_picture(), 500, config).numpy()
    assert {positions[picture.tobytes()] for picture in result} == set(positions.values())


def test_flip_mirrors_half_of_the_pictures():
    config = dataclasses.replace(OFF, flip=True)
    picture = distinct_picture()
    result = augment_copies(picture, 400, config).numpy()
    mirrored = [np.array_equal(one, picture[:, ::-1]) for one in result]
    kept = [np.array_equal(one, picture) for one in result]
    assert all(a != b for a, b in zip(mirrored, kept))
    assert 160 <= sum(mirrored) <= 240  # standard deviation 10


def test_crop_and_flip_together():
    config = dataclasses.replace(OFF, crop_padding=1, flip=True)
    picture = distinct_picture()
    plain, mirrored = windows(picture, 1), windows(picture[:, ::-1], 1)
    result = {one.tobytes() for one in augment_copies(picture, 600, config).numpy()}
    assert result == set(plain) | set(mirrored)


def test_crop_of_a_wide_picture_with_one_channel():
    picture = np.arange(1, 61, dtype=np.uint8).reshape(5, 12, 1)
    config = dataclasses.replace(OFF, crop_padding=1, flip=True)
    result = {one.tobytes() for one in augment_copies(picture, 600, config).numpy()}
    assert result == set(windows(picture, 1)) | set(windows(picture[:, ::-1], 1))


def test_none_changes_nothing():
    pictures = random_pictures(5)
    result = augment_images(tf.constant(pictures), seed=[1, 2], config=OFF)
    np.testing.assert_array_equal(result, pictures)


def test_same_seed_same_pictures_other_seed_other_pictures():
    pictures = tf.constant(random_pictures(20))
    first = augment_images(pictures, seed=[1, 2], config=Augmentation()).numpy()
    again = augment_images(pictures, seed=[1, 2], config=Augmentation()).numpy()
    other = augment_images(pictures, seed=[1, 3], config=Augmentation()).numpy()
    np.testing.assert_array_equal(first, again)
    assert sum(np.array_equal(a, b) for a, b in zip(first, other)) <= 1


def test_equal_pictures_get_different_augmentations():
    result = augment_copies(random_pictures(1)[0], 50, Augmentation()).numpy()
    assert len({picture.tobytes() for picture in result}) >= 48


def build_pipeline(config):
    def pipeline(images, labels, seed, step):
        images = augment_images(images, seed=seed, config=config)
        images = normalize(images, mean=[0.4, 0.5, 0.6], std=[0.2, 0.3, 0.4])
        return mix(images, labels, seed=seed, step=step, config=config)

    return pipeline


def test_one_trace_serves_every_batch_size_without_captures():
    pipeline = tf.function(
        build_pipeline(Augmentation()),
        input_signature=[
            tf.TensorSpec([None, 32, 32, 3], tf.uint8),
            tf.TensorSpec([None], tf.int32),
            tf.TensorSpec([2], tf.int32),
            tf.TensorSpec([], tf.int32),
        ],
    )
    for step, size in enumerate([1, 5, 64, 0]):
        images, labels_a, labels_b, lam = pipeline(
            random_pictures(size), np.arange(size, dtype=np.int32), [9, step], step
        )
        assert images.shape == (size, 32, 32, 3) and images.dtype == tf.float32
        assert np.all(np.isfinite(images))
        assert labels_a.numpy().tolist() == list(range(size))
        assert sorted(labels_b.numpy()) == list(range(size))
        assert 0.0 <= lam <= 1.0
    assert pipeline.experimental_get_tracing_count() == 1
    concrete = pipeline.get_concrete_function()
    assert not concrete.captured_inputs
    assert concrete.structured_outputs.images.shape.as_list() == [None, 32, 32, 3]


def test_runs_in_a_plain_graph_with_the_same_numbers():
    pictures, labels = random_pictures(6), np.arange(6, dtype=np.int32)
    pipeline = build_pipeline(Augmentation())
    with tf.Graph().as_default():
        images_in = tf.compat.v1.placeholder(tf.uint8, [None, 32, 32, 3])
        labels_in = tf.compat.v1.placeholder(tf.int32, [None])
        outputs = pipeline(images_in, labels_in, tf.constant([5, 6]), tf.constant(1))
        with tf.compat.v1.Session() as session:
            in_graph = session.run(outputs, {images_in: pictures, labels_in: labels})
    eager = pipeline(tf.constant(pictures), tf.constant(labels), tf.constant([5, 6]), 1)
    for ours, theirs in zip(in_graph, eager):
        # The graph optimiser turns divisions into products.
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_normalize_by_hand():
    images = tf.constant([[[[0, 51, 255]]]], tf.uint8)
    result = normalize(images, mean=[0.5, 0.1, 0.25], std=[0.25, 0.5, 0.3])
    np.testing.assert_allclose(result[0, 0, 0], [-2.0, 0.2, 2.5], rtol=1e-6)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("crop_padding", -1, "crop_padding: must be a whole number, 0 or more, got -1"),
        ("randaugment_layers", 1.5, "randaugment_layers: must be a whole number, 0 or more"),
        ("randaugment_magnitude", 11, "randaugment_magnitude: must be at most 10"),
        ("mixup_alpha", -0.1, "mixup_alpha: must be 0 \\(off\\) or 0.01 and more, got -0.1"),
        ("cutmix_alpha", float("nan"), "cutmix_alpha: must be 0 \\(off\\).* got nan"),
    ],
)
def test_wrong_settings_raise(field, value, message):
    with pytest.raises(ValueError, match=message):
        Augmentation(**{field: value})


def test_wrong_images_raise():
    with pytest.raises(ValueError, match="images: augmentation needs uint8 .* got float32"):
        augment_images(tf.zeros([2, 8, 8, 3]), seed=[1, 2], config=Augmentation())
