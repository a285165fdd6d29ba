"""RandAugment for whole batches, as pure graph operations on stateless seeds.

The fourteen operations and their ranges are those of RandAugment (Cubuk et al., 2020), which takes
them from AutoAugment; the paper trains with RandAugment(2, 6) (section 4.1). Apart from Identity,
every operation is of one of three kinds, and a layer does each kind at once for all pictures whose
operation is of that kind:

1. an affine map of coordinates (Rotate, ShearX, ShearY, TranslateX, TranslateY),
2. a table of 256 values per channel (AutoContrast, Equalize, Posterize, Solarize),
3. a blend with a degenerate picture (Brightness, Color, Contrast, Sharpness).
"""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

_MOVES = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")
_TABLES = ("AutoContrast", "Equalize", "Posterize", "Solarize")
_BLENDS = ("Brightness", "Color", "Contrast", "Sharpness")
_KINDS = (("Identity",), _MOVES, _TABLES, _BLENDS)
OPERATIONS = tuple(operation for kind in _KINDS for operation in kind)
MAX_MAGNITUDE = 10
FILL = 128.0

_LEVELS = 256


def rand_augment(images: tf.Tensor, *, seed: tf.Tensor, layers: int, magnitude: int) -> tf.Tensor:
    """Applies `layers` random operations, drawn anew for each picture and layer, to a batch.

    Operations are drawn uniformly from `OPERATIONS`, with replacement; those with a direction get a
    random sign. The magnitude is on the original scale of 0 to 10, and with `m = magnitude / 10`:

    | operation | strength | range |
    | --- | --- | --- |
    | Rotate | `30 m` degrees about the centre, either way | 0 to 30 |
    | ShearX, ShearY | `0.3 m` pixels per pixel from the top left corner, either way | 0 to 0.3 |
    | TranslateX, TranslateY | `150/331 m` of the side in whole pixels, either way | 0 to 0.453 |
    | Brightness, Color, Contrast, Sharpness | factor `1 +- 0.9 m` | 0.1 to 1.9 |
    | Posterize | keeps `8 - round(4 m)` bits | 8 to 4 |
    | Solarize | inverts values from `round(256 (1 - m))` on | 256 (none) to 0 (all) |
    | Identity, AutoContrast, Equalize | the magnitude does not matter | |

    Pixels from outside of the picture are grey (`FILL`); sampling is nearest neighbour.

    Args:
        images: uint8 `[B, H, W, 3]`; `H` and `W` are static and at least 3, `B` may be dynamic.
        seed: int32 `[2]`.
        layers: how many operations to apply in a row, N in RandAugment(N, M).
        magnitude: M, from 0 to 10.

    Returns:
        uint8 `[B, H, W, 3]`.

    Raises:
        ValueError: if the static shape of `images` is not `[B, H, W, 3]` with sides of at least 3.
    """
    shape = images.shape
    if shape.rank != 4 or shape[3] != 3 or None in shape[1:3] or min(shape[1:3]) < 3:
        raise ValueError(
            f"images: RandAugment needs [B, H, W, 3] with known sides of 3 or more, got {shape}"
        )
    choices = tf.random.stateless_uniform(
        [layers, tf.shape(images)[0]], seed, 0, 2 * len(OPERATIONS), dtype=tf.int32
    )
    for layer in range(layers):
        images = apply_operations(images, choices[layer], magnitude=magnitude)
    return images


def apply_operations(images: tf.Tensor, choices: tf.Tensor, *, magnitude: int) -> tf.Tensor:
    """Applies to each picture the operation that was chosen for it.

    Args:
        images: uint8 `[B, H, W, 3]` with static `H` and `W`.
        choices: int32 `[B]`. Values from 0 to 13 are positions in `OPERATIONS` with positive sign,
            14 to 27 the same operations with negative sign (the sign is void for some). Positive is
            Pillow's direction: Rotate counterclockwise, TranslateX to the left, TranslateY up,
            ShearX and ShearY the lower rows to the left and the right columns up.
        magnitude: from 0 to 10, see `rand_augment`.

    Returns:
        uint8 `[B, H, W, 3]`.
    """
    _, height, width, _ = images.shape
    operations = choices % len(OPERATIONS)
    kind_of = [kind for kind, names in enumerate(_KINDS) for _ in names]
    kinds = tf.gather(kind_of, operations)
    # Twice as fast as doing every kind to every picture and selecting afterwards (64 pictures of
    # 32x32 on two CPU cores).
    positions = tf.dynamic_partition(tf.range(tf.shape(images)[0]), kinds, len(_KINDS))
    images = tf.dynamic_partition(images, kinds, len(_KINDS))
    choices = tf.dynamic_partition(choices, kinds, len(_KINDS))
    operations = tf.dynamic_partition(operations, kinds, len(_KINDS))

    transforms = tf.gather(_transforms(height, width, magnitude), choices[1])  # [B', 8]
    images[1] = project(images[1], transforms, fill=FILL)
    images[2] = _look_up(images[2], operations[2], magnitude)
    factors = tf.gather(_blend_factors(magnitude), choices[3])  # [B']
    images[3] = _blend(images[3], operations[3], factors)
    return tf.dynamic_stitch(positions, images)


def project(images: tf.Tensor, transforms: tf.Tensor, *, fill: float) -> tf.Tensor:
    """Moves the pixels of each picture by its own affine map, with nearest neighbour sampling.

    Args:
        images: `[B, H, W, C]` with static `H` and `W`.
        transforms: float32 `[B, 8]`, rows `(a, b, c, d, e, f, 0, 0)`: the result at column `x` and
            row `y` is the pixel at column `a x + b y + c` and row `d x + e y + f`.
        fill: the value of pixels from outside of the picture.

    Returns:
        `[B, H, W, C]` in the type of `images`.
    """
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=images,
        transforms=transforms,
        output_shape=images.shape[1:3],
        fill_value=fill,
        interpolation="NEAREST",
        fill_mode="CONSTANT",
    )


def _transforms(height: int, width: int, magnitude: int) -> np.ndarray:
    """The maps of `project` for all operations, positive then negative: float32 `[28, 8]`."""
    rows = []
    for sign in (1.0, -1.0):
        strength = sign * magnitude / MAX_MAGNITUDE
        angle = math.radians(30.0 * strength)
        cosine, sine = math.cos(angle), math.sin(angle)
        shear = 0.3 * strength
        centre_x, centre_y = (width - 1) / 2, (height - 1) / 2
        maps = {
            "Rotate": (
                cosine, -sine, centre_x - cosine * centre_x + sine * centre_y,
                sine, cosine, centre_y - sine * centre_x - cosine * centre_y,
            ),
            # Half a pixel, since the fixed point is the corner of the first pixel, not its centre.
            "ShearX": (1.0, shear, shear / 2, 0.0, 1.0, 0.0),
            "ShearY": (1.0, 0.0, 0.0, shear, 1.0, shear / 2),
            "TranslateX": (1.0, 0.0, round(150 / 331 * strength * width), 0.0, 1.0, 0.0),
            "TranslateY": (1.0, 0.0, 0.0, 0.0, 1.0, round(150 / 331 * strength * height)),
        }
        identity = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
        rows += [(*maps.get(operation, identity), 0.0, 0.0) for operation in OPERATIONS]
    return np.array(rows, np.float32)


def _blend_factors(magnitude: int) -> np.ndarray:
    """The factors of `_blend` for all operations, positive then negative: float32 `[28]`."""
    change = 0.9 * magnitude / MAX_MAGNITUDE
    return np.repeat(np.float32([1.0 + change, 1.0 - change]), len(OPERATIONS))


def _fixed_tables(magnitude: int) -> np.ndarray:
    """The tables that do not depend on the picture, one per operation: float32 `[14, 256]`."""
    levels = np.arange(_LEVELS)
    dropped_bits = round(4 * magnitude / MAX_MAGNITUDE)
    threshold = round(_LEVELS * (1 - magnitude / MAX_MAGNITUDE))
    tables = {
        "Posterize": levels >> dropped_bits << dropped_bits,
        "Solarize": np.where(levels < threshold, levels, 255 - levels),
    }
    return np.array([tables.get(operation, levels) for operation in OPERATIONS], np.float32)


def _look_up(images: tf.Tensor, operations: tf.Tensor, magnitude: int) -> tf.Tensor:
    """Replaces each value by the entry of its channel's table: uint8 `[B, H, W, 3]`."""
    batch = tf.shape(images)[0]
    offsets = tf.reshape(tf.range(3 * batch) * _LEVELS, [-1, 1, 1, 3])
    positions = tf.cast(images, tf.int32) + offsets  # in the flat tables of [B, 3, 256]
    counts = tf.raw_ops.DenseBincount(
        input=tf.reshape(positions, [-1]),
        size=3 * _LEVELS * batch,
        weights=tf.zeros([0], tf.float32),
        binary_output=False,
    )
    counts = tf.reshape(counts, [-1, 3, _LEVELS])
    fixed = tf.gather(_fixed_tables(magnitude), operations)[:, tf.newaxis, :]  # [B, 1, 256]
    tables = tf.where(
        _chosen(operations, "AutoContrast", rank=3), _auto_contrast_tables(counts), fixed
    )
    tables = tf.where(_chosen(operations, "Equalize", rank=3), _equalize_tables(counts), tables)
    return tf.cast(tf.gather(tf.reshape(tables, [-1]), positions), tf.uint8)


def _auto_contrast_tables(counts: tf.Tensor) -> tf.Tensor:
    """Stretches the values of each channel to 0..255; a channel of one value stays."""
    levels = tf.range(_LEVELS, dtype=tf.float32)
    present = counts > 0.0
    low = tf.reduce_min(tf.where(present, levels, 255.0), axis=-1, keepdims=True)
    high = tf.reduce_max(tf.where(present, levels, 0.0), axis=-1, keepdims=True)
    stretched = (levels - low) * 255.0 // tf.maximum(high - low, 1.0)
    return tf.where(high > low, stretched, levels)


def _equalize_tables(counts: tf.Tensor) -> tf.Tensor:
    """Evens out the histogram of each channel, by Pillow's whole-number rule.

    The counts are whole numbers in float32, since GPUs have no cumulative sum of integers.
    """
    levels = tf.range(_LEVELS, dtype=tf.float32)
    below = tf.cumsum(counts, axis=-1, exclusive=True)
    # Pixels below the brightest value present: the largest count that any present value has below.
    all_but_brightest = tf.reduce_max(tf.where(counts > 0.0, below, 0.0), axis=-1, keepdims=True)
    step = all_but_brightest // 255.0
    evened = (step // 2.0 + below) // tf.maximum(step, 1.0)
    return tf.where(step > 0.0, tf.minimum(evened, 255.0), levels)


def _blend(images: tf.Tensor, operations: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
    """Moves each picture away from (factor > 1) or towards its degenerate: uint8 `[B, H, W, 3]`.

    Degenerates: black for Brightness, grey for Color, the mean grey for Contrast, smoothed for
    Sharpness.
    """
    values = tf.cast(images, tf.float32)
    red, green, blue = tf.unstack(values[..., tf.newaxis, :], axis=-1)  # [B, H, W, 1]
    # The 16-bit luma weights of Pillow; the sums are below 2^24 and so exact in float32.
    grey = (19595.0 * red + 38470.0 * green + 7471.0 * blue + 32768.0) // 65536.0
    mean_grey = tf.floor(tf.reduce_mean(grey, axis=[1, 2], keepdims=True) + 0.5)
    grey = tf.where(_chosen(operations, "Contrast", rank=4), mean_grey, grey)
    grey = tf.where(_chosen(operations, "Brightness", rank=4), 0.0, grey)
    degenerate = tf.where(_chosen(operations, "Sharpness", rank=4), _smooth(values), grey)
    factors = tf.reshape(factors, [-1, 1, 1, 1])
    blended = degenerate + factors * (values - degenerate)
    # The cast cuts fractions off, as Pillow does.
    return tf.cast(tf.clip_by_value(blended, 0.0, 255.0), tf.uint8)


def _smooth(values: tf.Tensor) -> tf.Tensor:
    """The 3x3 mean with weight 5 at the centre and 1 around it; border pixels stay."""
    columns = values[:, :, :-2] + values[:, :, 1:-1] + values[:, :, 2:]
    neighbourhood = columns[:, :-2] + columns[:, 1:-1] + columns[:, 2:]
    centre = values[:, 1:-1, 1:-1]
    smoothed = tf.floor((neighbourhood + 4.0 * centre) / 13.0 + 0.5)
    return values + tf.pad(smoothed - centre, [[0, 0], [1, 1], [1, 1], [0, 0]])


def _chosen(operations: tf.Tensor, name: str, *, rank: int) -> tf.Tensor:
    """Whether each picture's operation is `name`: bool `[B, 1, ...]` of the given rank."""
    return tf.reshape(tf.equal(operations, OPERATIONS.index(name)), [-1] + [1] * (rank - 1))
