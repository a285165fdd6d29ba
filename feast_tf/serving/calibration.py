"""How far a classifier's probabilities can be trusted, and what it takes for what. NumPy only."""

from __future__ import annotations

import dataclasses

import numpy as np

ECE_BINS = 15


@dataclasses.dataclass(frozen=True, eq=False)
class Reliability:
    """Predictions by their confidence, in bins of equal width; 0 in empty bins.

    Attributes:
      count: int64[bins], predictions in each bin.
      confidence: float64[bins], mean confidence of a bin.
      accuracy: float64[bins], share of a bin that is right.
    """

    count: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray

    @property
    def error(self) -> float:
        """The expected calibration error (Guo et al., 2017): sum_b n_b / n |accuracy - confidence|.
        """
        return float(np.average(np.abs(self.accuracy - self.confidence), weights=self.count))


@dataclasses.dataclass(frozen=True)
class ClassResult:
    """One class as a classifier sees it.

    Attributes:
      label: the class.
      pictures: how many there are of it.
      accuracy: share of them that is classified right.
      confusions: (class, share of the pictures) that it is taken for most often, the most frequent
        first.
    """

    label: int
    pictures: int
    accuracy: float
    confusions: tuple[tuple[int, float], ...]


def reliability(logits: np.ndarray, labels: np.ndarray, bins: int = ECE_BINS) -> Reliability:
    """Bins predictions by confidence, the largest softmax probability; bin b is (b/B, (b+1)/B].

    Args:
      logits: float[n, classes].
      labels: int[n].
      bins: B, how many bins of equal width cut up 0..1.

    Raises:
      ValueError: there are no logits, or they are not finite.
    """
    if not len(logits) or not np.all(np.isfinite(logits)):
        raise ValueError("calibration needs at least one prediction, and finite logits")
    shifted = np.float64(logits) - np.max(logits, axis=1, keepdims=True)
    confidence = 1.0 / np.exp(shifted).sum(axis=1)
    right = np.argmax(logits, axis=1) == labels
    place = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    count = np.bincount(place, minlength=bins)
    mean = lambda values: np.bincount(place, values, bins) / np.maximum(count, 1)
    return Reliability(count, mean(confidence), mean(right))


def confusion_matrix(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """int64[classes, classes]: pictures of the row's class that were taken for the column's."""
    classes = logits.shape[1]
    pairs = np.asarray(labels, np.int64) * classes + np.argmax(logits, axis=1)
    return np.bincount(pairs, minlength=classes**2).reshape(classes, classes)


def worst_classes(confusion: np.ndarray, count: int = 5, confusions: int = 3) -> list[ClassResult]:
    """The classes with the lowest accuracy, the worst first; equal ones by their number.

    Args:
      confusion: int[classes, classes] as `confusion_matrix` returns it. Classes without pictures
        are left out.
      count: how many classes.
      confusions: how many other classes to name for each, at most.
    """
    pictures = confusion.sum(axis=1)
    share = confusion / np.maximum(pictures, 1)[:, np.newaxis]
    present = np.flatnonzero(pictures)
    worst = present[np.argsort(np.diag(share)[present], kind="stable")][:count]
    result = []
    for label in worst:
        others = [k for k in np.argsort(-share[label], kind="stable")
                  if k != label and confusion[label, k]]
        result.append(ClassResult(int(label), int(pictures[label]), float(share[label, label]),
                                  tuple((int(k), float(share[label, k]))
                                        for k in others[:confusions])))
    return result
