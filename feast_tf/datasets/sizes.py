"""Sizes of the data sets, known without their pictures: to plan before anything is downloaded."""

from __future__ import annotations

import numpy as np

from feast_tf.datasets.loading import DEFAULT_HELD_OUT
from feast_tf.datasets.loading import DIGITS_TEST_COUNT
from feast_tf.datasets.loading import NAMES
from feast_tf.datasets.splits import stratified_counts

# Pictures of each class in the official train split; of all digits, which have no splits.
_PUBLISHED = {
    "digits": (178, 182, 177, 183, 181, 182, 181, 179, 174, 180),
    "cifar10": (5000,) * 10,
    "cifar100": (500,) * 100,
    "cinic10": (9000,) * 10,
    "tinyimagenet": (500,) * 200,
}


def class_counts(name: str, held_out: float | None = None) -> np.ndarray:
    """Returns how many pictures of each class `load` leaves to the clients.

    Args:
        name: One of `NAMES`.
        held_out: As in `load`.

    Returns:
        int64 array of shape [classes].

    Raises:
        ValueError: If the data set is unknown, or `held_out` leaves nothing.
    """
    if name not in _PUBLISHED:
        raise ValueError(f"data set {name!r} is unknown; it must be one of {', '.join(NAMES)}")
    sizes = np.array(_PUBLISHED[name], np.int64)
    if name == "digits":
        sizes -= stratified_counts(sizes, DIGITS_TEST_COUNT)
    if name == "cinic10":
        return sizes
    count = max(2, round((DEFAULT_HELD_OUT if held_out is None else held_out) * int(sizes.sum())))
    if not count < sizes.sum():
        raise ValueError(f"held_out {held_out} must leave some of the {sizes.sum()} train pictures")
    return sizes - stratified_counts(sizes, count)
