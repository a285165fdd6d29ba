"""What happens to the pictures of a batch before the network sees them (paper section 4.1).

"All methods use RandAugment(2,6) with alternating Mixup and CutMix"; random crop and flip are the
usual companions for pictures of this size. Everything here runs inside a client's graph: stateless
seeds, no variables, batches of any size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from feast_tf.training import randaugment


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """How training pictures are varied. The defaults are the paper's where it states them.

    Attributes:
        crop_padding: pixels of black border from which the picture is cropped back; 0 is off.
        flip: whether pictures are mirrored left to right with probability one half.
        randaugment_layers: operations per picture, N in RandAugment(N, M); 0 is off.
        randaugment_magnitude: M, on the scale of 0 to 10 of the original RandAugment (some
            libraries count to 30). `randaugment.rand_augment` lists what it means.
        mixup_alpha: Mixup mixes with lam ~ Beta(alpha, alpha); 0 is off. The paper does not give
            it; 0.2 is the ImageNet value of the Mixup paper.
        cutmix_alpha: likewise for CutMix; 0 is off, 1.0 is the CutMix paper's value. When both are
            on, steps with an even number use Mixup and those with an odd number CutMix.
    """

    crop_padding: int = 4
    flip: bool = True
    randaugment_layers: int = 2
    randaugment_magnitude: int = 6
    mixup_alpha: float = 0.2
    cutmix_alpha: float = 1.0

    def __post_init__(self) -> None:
        for field in ("crop_padding", "randaugment_layers", "randaugment_magnitude"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{field}: must be a whole number, 0 or more, got {value!r}")
        if self.randaugment_magnitude > randaugment.MAX_MAGNITUDE:
            raise ValueError(
                f"randaugment_magnitude: must be at most {randaugment.MAX_MAGNITUDE} (the original "
                f"scale), got {self.randaugment_magnitude!r}"
            )
        for field in ("mixup_alpha", "cutmix_alpha"):
            value = getattr(self, field)
            # Below 0.01 the Gamma draws behind Beta underflow.
            if value != 0 and not (math.isfinite(value) and value >= 0.01):
                raise ValueError(f"{field}: must be 0 (off) or 0.01 and more, got {value!r}")

    @classmethod
    def none(cls) -> Augmentation:
        """Leaves pictures and labels as they are."""
        return cls(
            crop_padding=0, flip=False, randaugment_layers=0, mixup_alpha=0.0, cutmix_alpha=0.0
        )


def augment_images(images: tf.Tensor, *, seed: tf.Tensor, config: Augmentation) -> tf.Tensor:
    """Crops, flips and RandAugments each picture of a batch by draws of its own.

    Args:
        images: uint8 `[B, H, W, C]`; `H` and `W` are static, `B` may be dynamic. RandAugment wants
            `C = 3` and sides of at least 3.
        seed: int32 `[2]`, another one for every batch. `mix` may use the same seed.
        config: what to do.

    Returns:
        uint8 `[B, H, W, C]`.

    Raises:
        ValueError: if `images` is not uint8, or its static shape is not as above.
    """
    if images.dtype != tf.uint8 or images.shape.rank != 4 or None in images.shape[1:]:
        raise ValueError(
            "images: augmentation needs uint8 [B, H, W, C] with known H, W and C, got "
            f"{images.dtype.name} {images.shape}"
        )
    crop_seed, flip_seed, randaugment_seed = tf.unstack(
        tf.random.experimental.stateless_split(seed, 3)
    )
    if config.crop_padding or config.flip:
        images = _crop_and_flip(images, crop_seed=crop_seed, flip_seed=flip_seed, config=config)
    if config.randaugment_layers:
        images = randaugment.rand_augment(
            images,
            seed=randaugment_seed,
            layers=config.randaugment_layers,
            magnitude=config.randaugment_magnitude,
        )
    return images


def normalize(images: tf.Tensor, *, mean: Sequence[float], std: Sequence[float]) -> tf.Tensor:
    """Turns pictures into network inputs, `(images / 255 - mean) / std`.

    Args:
        images: uint8 `[B, H, W, C]`.
        mean: per channel, on the scale where white is 1.
        std: likewise, above 0.

    Returns:
        float32 `[B, H, W, C]`.
    """
    mean = tf.constant(mean, tf.float32)
    std = tf.constant(std, tf.float32)
    return (tf.cast(images, tf.float32) / 255.0 - mean) / std


def _crop_and_flip(
    images: tf.Tensor, *, crop_seed: tf.Tensor, flip_seed: tf.Tensor, config: Augmentation
) -> tf.Tensor:
    """Both at once: a crop from a border is a shift, and a flip is a scale of -1."""
    batch = tf.shape(images)[0]
    padding = config.crop_padding
    shifts = tf.random.stateless_uniform(
        [2, batch], crop_seed, -padding, padding + 1, dtype=tf.int32
    )
    shift_x, shift_y = tf.unstack(tf.cast(shifts, tf.float32))
    zeros, ones = tf.zeros([batch]), tf.ones([batch])
    scale = ones
    if config.flip:
        flipped = tf.random.stateless_uniform([batch], flip_seed) < 0.5
        scale = tf.where(flipped, -1.0, 1.0)
    right_to_left = (1.0 - scale) / 2.0 * (images.shape[2] - 1)
    transforms = tf.stack(
        [scale, zeros, right_to_left + shift_x, zeros, ones, shift_y, zeros, zeros], axis=1
    )
    return randaugment.project(images, transforms, fill=0.0)
