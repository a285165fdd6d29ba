"""Mixup and CutMix on pictures of distinct values."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from feast_tf.training import mixing
from feast_tf.training.augment import Augmentation

OFF = Augmentation.none()
MIXUP = dataclasses.replace(OFF, mixup_alpha=1.0)
CUTMIX = dataclasses.replace(OFF, cutmix_alpha=1.0)
BOTH = dataclasses.replace(OFF, mixup_alpha=1.0, cutmix_alpha=1.0)
HEIGHT, WIDTH = 8, 12


def flat_pictures(count: int) -> np.ndarray:
    """Picture i has the value 2^i everywhere, so that any mixture tells its parts."""
    values = 2.0 ** np.arange(count, dtype=np.float32)
    return np.broadcast_to(values[:, None, None, None], (count, HEIGHT, WIDTH, 3)).copy()


def mix_flat(count, config, *, seed, step=0):
    images = tf.constant(flat_pictures(count))
    result = mixing.mix(images, tf.range(count), seed=seed, step=step, config=config)
    return [part.numpy() for part in result]


def test_mixup_is_the_weighted_mean_with_the_partner():
    images, labels_a, labels_b, lam = mix_flat(6, MIXUP, seed=[1, 2])
    assert labels_a.tolist() == [0, 1, 2, 3, 4, 5]
    assert sorted(labels_b) == [0, 1, 2, 3, 4, 5] and labels_b.tolist() != labels_a.tolist()
    assert 0.05 < lam < 0.95 and abs(lam - 0.5) > 0.05
    for i, partner in enumerate(labels_b):
        np.testing.assert_allclose(
            images[i], np.full((HEIGHT, WIDTH, 3), lam * 2.0**i + (1 - lam) * 2.0**partner),
            rtol=1e-6,
        )


@pytest.mark.parametrize("seed", range(20))
def test_cutmix_lam_is_the_share_of_pixels_that_stay(seed):
    images, labels_a, labels_b, lam = mix_flat(5, CUTMIX, seed=[seed, 3])
    for i, partner in enumerate(labels_b):
        stays = images[i] == 2.0**i
        assert np.all(stays | (images[i] == 2.0**partner))
        if partner != i:
            assert lam == np.float32(1 - np.sum(~stays[..., 0]) / (HEIGHT * WIDTH))
            pasted = ~stays.all(axis=-1)
            box = pasted.any(axis=1, keepdims=True) & pasted.any(axis=0, keepdims=True)
            np.testing.assert_array_equal(pasted, box)


def test_cutmix_box_has_the_shape_of_the_picture_and_reaches_every_pixel():
    covered = np.zeros([40, 60], bool)
    whole_boxes = 0
    for seed in range(100):
        outside = mixing._outside_box(40, 60, lam=0.75, seed=[seed, 4]).numpy()[..., 0]
        covered |= outside == 0
        rows = np.flatnonzero(outside.min(axis=1) == 0)
        columns = np.flatnonzero(outside.min(axis=0) == 0)
        if rows[0] > 0 and rows[-1] < 39 and columns[0] > 0 and columns[-1] < 59:
            whole_boxes += 1
            # Half of each side, since a quarter of the area goes; the corners are rounded.
            assert abs(rows.size - 20) <= 1 and abs(columns.size - 30) <= 1
    assert covered.all() and whole_boxes > 10


def is_one_value(picture: np.ndarray) -> bool:
    return bool(np.all(picture == picture[0, 0, 0]))


def test_even_steps_use_mixup_and_odd_steps_cutmix():
    for step in range(6):
        alternating = mix_flat(6, BOTH, seed=[1, 2], step=step)
        alone = mix_flat(6, CUTMIX if step % 2 else MIXUP, seed=[1, 2], step=step)
        for ours, theirs in zip(alternating, alone):
            np.testing.assert_array_equal(ours, theirs)
        assert all(is_one_value(picture) for picture in alternating[0]) == (step % 2 == 0)


def test_each_kind_uses_its_own_strength():
    config = dataclasses.replace(OFF, mixup_alpha=0.01, cutmix_alpha=1000)
    for seed in range(5):
        # Beta(0.01, 0.01) is close to 0 or 1. Beta(1000, 1000) is close to 0.5, where whole boxes
        # have 6 x 9 of 96 pixels at most, and those that a corner cuts 3 x 4 at least.
        assert abs(mix_flat(2, config, seed=[seed, 5], step=0)[3] - 0.5) > 0.45
        assert 1 - 54 / 96 <= mix_flat(2, config, seed=[seed, 5], step=1)[3] <= 1 - 12 / 96


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_lam_has_the_moments_of_beta(alpha):
    config = dataclasses.replace(OFF, mixup_alpha=alpha)

    @tf.function(input_signature=[tf.TensorSpec([2], tf.int32)])
    def draw(seed):
        return mixing.mix(tf.zeros([2, 3, 3, 3]), tf.range(2), seed=seed, step=0, config=config).lam

    draws = np.array([draw(tf.constant([seed, 6])).numpy() for seed in range(1500)])
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(draws.mean() - 0.5) < 4 * np.sqrt(variance / 1500)
    assert draws.var() == pytest.approx(variance, rel=0.1)


def test_off_gives_the_batch_back():
    images, labels_a, labels_b, lam = mix_flat(4, OFF, seed=[1, 2])
    np.testing.assert_array_equal(images, flat_pictures(4))
    assert labels_a.tolist() == labels_b.tolist() == [0, 1, 2, 3]
    assert lam == 1.0


@pytest.mark.parametrize("step", [0, 1])
def test_batch_of_one_is_mixed_with_itself(step):
    images, labels_a, labels_b, lam = mix_flat(1, BOTH, seed=[1, 2], step=step)
    np.testing.assert_allclose(images, flat_pictures(1), rtol=1e-6)
    assert labels_a.tolist() == labels_b.tolist() == [0]
    assert 0.0 <= lam <= 1.0


def test_seed_decides():
    first, again = mix_flat(9, BOTH, seed=[1, 2]), mix_flat(9, BOTH, seed=[1, 2])
    other = mix_flat(9, BOTH, seed=[2, 2])
    for ours, theirs in zip(first, again):
        np.testing.assert_array_equal(ours, theirs)
    assert first[3] != other[3] and first[2].tolist() != other[2].tolist()
