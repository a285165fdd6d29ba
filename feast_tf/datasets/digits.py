"""Handwritten digits that come with scikit-learn: small enough for a first run without download."""

from __future__ import annotations

import numpy as np
from PIL import Image

from feast_tf.datasets.pictures import resize_all
from feast_tf.datasets.splits import Split

CLASSES = tuple("0123456789")
_BRIGHTEST = 16


def read_digits(image_size: int) -> Split:
    """Returns all 1797 digits, official order, grey 0..16 scaled to 0..255 in three equal channels.

    Args:
        image_size: Height and width in pixels; the 8x8 originals are resampled (bilinear).
    """
    # Here, because scikit-learn takes longer to import than this whole package.
    from sklearn.datasets import load_digits

    digits = load_digits()
    grey = np.rint(digits.images * (255 / _BRIGHTEST)).astype(np.uint8)
    images = np.repeat(grey[..., np.newaxis], 3, axis=3)
    images = resize_all(images, image_size, Image.Resampling.BILINEAR)
    return Split(images, digits.target.astype(np.int32))
