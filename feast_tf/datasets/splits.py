"""What a data set consists of, and how labelled pictures are divided without shifting classes."""

from __future__ import annotations

import dataclasses

import numpy as np

# Pictures whose pixels are added at once. As 1024 * 255^2 < 2^32, uint32 sums are exact, and they
# are an order of magnitude faster than float64 ones.
_MOMENT_CHUNK = 1024


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """Labelled pictures.

    Attributes:
        images: uint8 array of shape [N, height, width, 3], RGB in 0..255.
        labels: int32 array of shape [N], class numbers from 0.
    """

    images: np.ndarray
    labels: np.ndarray

    def __post_init__(self) -> None:
        if self.images.dtype != np.uint8 or self.images.ndim != 4 or self.images.shape[3] != 3:
            raise ValueError(
                f"images must be uint8 [N, height, width, 3], not {self.images.dtype} "
                f"{list(self.images.shape)}"
            )
        if self.labels.dtype != np.int32 or self.labels.shape != self.images.shape[:1]:
            raise ValueError(
                f"labels must be int32 [{len(self.images)}], one per picture, not "
                f"{self.labels.dtype} {list(self.labels.shape)}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: np.ndarray) -> Split:
        """Returns the pictures at `indices`, integers of shape [M], in that order."""
        return Split(self.images[indices], self.labels[indices])


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """A data set in the four disjoint parts that a run needs.

    Attributes:
        name: One of `feast_tf.datasets.NAMES`.
        classes: The class names; label k means `classes[k]`.
        train: What the clients share out among themselves.
        validation: Picks checkpoints.
        server: Held by the server to recalibrate batch normalisation; no client sees it.
        test: The official test pictures, for the final figures and nothing else.
        mean: float32 array of shape [3], the mean of each channel of `train` on a 0..1 scale.
        std: float32 array of shape [3], the standard deviation to `mean`.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    validation: Split
    server: Split
    test: Split
    mean: np.ndarray
    std: np.ndarray


def stratified_split(
    labels: np.ndarray, count: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Chooses `count` examples with the class proportions of the whole.

    Each class gives its exact share `count * n_c / N` rounded down; what is then missing to `count`
    comes from the classes with the largest remainders, the lower class number first. So no class
    is further than one example from its share.

    Args:
        labels: Integers of shape [N], at least 0.
        count: How many to choose, from 0 to N.
        rng: Decides which examples of a class are chosen.

    Returns:
        `(chosen, rest)`: ascending int64 indices of shapes [count] and [N - count].

    Raises:
        ValueError: If `count` is not in 0..N.
    """
    if not 0 <= count <= len(labels):
        raise ValueError(f"count must be in 0..{len(labels)}, the number of examples, not {count}")
    chosen = np.zeros(len(labels), dtype=bool)
    if count:
        for label, quota in enumerate(stratified_counts(np.bincount(labels), count)):
            chosen[rng.permutation(np.flatnonzero(labels == label))[:quota]] = True
    return np.flatnonzero(chosen), np.flatnonzero(~chosen)


def stratified_counts(sizes: np.ndarray, count: int) -> np.ndarray:
    """How many examples of each class `stratified_split` chooses.

    Args:
        sizes: Examples of each class, integers of shape [classes].
        count: How many to choose, from 0 to their sum.

    Returns:
        int64 array of shape [classes] that adds up to `count`.
    """
    sizes = np.asarray(sizes, np.int64)
    quotas, remainders = np.divmod(count * sizes, max(sizes.sum(), 1))
    by_remainder = np.argsort(-remainders, kind="stable")
    quotas[by_remainder[: count - quotas.sum()]] += 1
    return quotas


def channel_moments(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean and the standard deviation of each channel on a 0..1 scale.

    Args:
        images: uint8 array of shape [N, height, width, 3].

    Returns:
        `(mean, std)`, float32 arrays of shape [3].
    """
    total = np.zeros(3, dtype=np.uint64)
    total_of_squares = np.zeros(3, dtype=np.uint64)
    for start in range(0, len(images), _MOMENT_CHUNK):
        pixels = images[start : start + _MOMENT_CHUNK].astype(np.uint16)
        total += _sum_over_pixels(pixels)
        total_of_squares += _sum_over_pixels(np.square(pixels))
    pixel_count = images.size // 3
    mean = total / pixel_count
    variance = total_of_squares / pixel_count - np.square(mean)
    return (mean / 255).astype(np.float32), (np.sqrt(variance) / 255).astype(np.float32)


def _sum_over_pixels(values: np.ndarray) -> np.ndarray:
    return values.sum(axis=0, dtype=np.uint32).sum(axis=(0, 1), dtype=np.uint64)
