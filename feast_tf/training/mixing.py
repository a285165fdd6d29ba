"""Mixup and CutMix: each picture of a batch is mixed with another one of the same batch.

The supervised loss of a mixed batch is `lam * CE(., labels_a) + (1 - lam) * CE(., labels_b)`
(paper section 3.4); the paper alternates the two kinds of mixing (section 4.1).
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from feast_tf.training.augment import Augmentation


class MixedBatch(NamedTuple):
    """A batch after mixing.

    Attributes:
        images: float32 `[B, H, W, C]`.
        labels_a: int32 `[B]`, the labels of the pictures with share `lam`.
        labels_b: int32 `[B]`, the labels of their partners, with share `1 - lam`.
        lam: float32 scalar from 0 to 1.
    """

    images: tf.Tensor
    labels_a: tf.Tensor
    labels_b: tf.Tensor
    lam: tf.Tensor


def mix(
    images: tf.Tensor,
    labels: tf.Tensor,
    *,
    seed: tf.Tensor,
    step: tf.Tensor,
    config: Augmentation,
) -> MixedBatch:
    """Mixes a batch with a random permutation of itself, in one ratio for the whole batch.

    Mixup (Zhang et al., 2018) averages pictures with `lam ~ Beta(mixup_alpha, mixup_alpha)`. CutMix
    (Yun et al., 2019) pastes a rectangle of the partner over a share `1 - lam` of the picture, with
    `lam ~ Beta(cutmix_alpha, cutmix_alpha)`; the border may cut the rectangle, and the `lam` that
    is returned is the share that really stays.

    Args:
        images: float32 `[B, H, W, C]`; `H` and `W` are static, `B` may be dynamic.
        labels: int32 `[B]`.
        seed: int32 `[2]`, another one for every batch. `augment_images` may use the same seed.
        step: int32 scalar, counts batches: when both kinds are on, even steps use Mixup and odd
            ones CutMix. It is no source of randomness.
        config: the strengths of both; 0 is off, and with both off nothing changes and `lam` is 1.

    Returns:
        The mixed batch.
    """
    if not config.mixup_alpha and not config.cutmix_alpha:
        return MixedBatch(images, labels, labels, tf.ones([]))
    # A seed apart from those that `augment_images` derives from the same one.
    seed = tf.random.experimental.stateless_fold_in(seed, 1)
    shuffle_seed, beta_seed, box_seed = tf.unstack(
        tf.random.experimental.stateless_split(seed, 3)
    )
    partners = tf.random.experimental.stateless_shuffle(
        tf.range(tf.shape(images)[0]), shuffle_seed
    )
    if config.mixup_alpha and config.cutmix_alpha:
        is_cutmix = tf.equal(step % 2, 1)
    else:
        is_cutmix = tf.constant(config.mixup_alpha == 0)
    alpha = tf.where(is_cutmix, float(config.cutmix_alpha), float(config.mixup_alpha))
    lam = _draw_beta(alpha, beta_seed)
    outside = _outside_box(images.shape[1], images.shape[2], lam=lam, seed=box_seed)
    # One share per pixel serves both kinds: 0 or 1 for CutMix, the same everywhere for Mixup.
    share = tf.where(is_cutmix, outside, lam)
    lam = tf.where(is_cutmix, tf.reduce_mean(outside), lam)
    mixed = share * images + (1.0 - share) * tf.gather(images, partners)
    return MixedBatch(mixed, labels, tf.gather(labels, partners), lam)


def _draw_beta(alpha: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """A draw from Beta(alpha, alpha) as the share of one of two Gamma draws: float32 scalar."""
    # float64, since for a small alpha both draws may be too small for float32.
    draws = tf.random.stateless_gamma([2], seed, tf.cast(alpha, tf.float64), dtype=tf.float64)
    return tf.cast(draws[0] / tf.reduce_sum(draws), tf.float32)


def _outside_box(height: int, width: int, *, lam: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """0 in a rectangle of about `(1 - lam) H W` pixels, 1 elsewhere: float32 `[H, W, 1]`."""
    centre = tf.random.stateless_uniform([2], seed) * tf.constant([height, width], tf.float32)
    half = tf.sqrt(1.0 - lam) * tf.constant([height, width], tf.float32) / 2.0
    first, last = tf.round(centre - half), tf.round(centre + half)
    rows = tf.range(height, dtype=tf.float32)[:, tf.newaxis, tf.newaxis]
    columns = tf.range(width, dtype=tf.float32)[tf.newaxis, :, tf.newaxis]
    inside = (
        (rows >= first[0]) & (rows < last[0]) & (columns >= first[1]) & (columns < last[1])
    )
    return 1.0 - tf.cast(inside, tf.float32)
