"""Accuracy of operating points and of the population they serve (paper 3.3, 4.1, 4.2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Optional

import numpy as np
import tensorflow as tf

from feast_tf.routing import Routing
from feast_tf.space import Variant
from feast_tf.supernet import ElasticRunner, Moments


@dataclasses.dataclass(frozen=True)
class OperatingPoint:
    """One served variant, measured.

    Attributes:
      variant: the architecture.
      macs: multiply-accumulates of one example.
      params: parameters of the deployed network.
      accuracy: share of pictures classified right, 0..1.
      split: what it was measured on, "validation" or "test".
    """

    variant: Variant
    macs: int
    params: int
    accuracy: float
    split: str


class Evaluator:
    """Recalibrates and measures variants of one supernet; every variant runs the same two graphs.

    Recalibration uses the same server-held pictures in the same order every time, so it is
    deterministic; they must come from neither the validation nor the test split.
    """

    def __init__(self, routing: Routing, server_images: np.ndarray, *, mean: Sequence[float],
                 std: Sequence[float], batch_size: int = 250, recalibrate: bool = True):
        """Args:
          routing: of the cache whose variants are measured.
          server_images: uint8[n, height, width, 3], for the moments of each operating point.
          mean, std: per-channel normalisation of pictures scaled to 0..1.
          batch_size: pictures in a batch, of recalibration and of evaluation.
          recalibrate: False normalises by each evaluated batch's own moments instead, which shows
            what recalibration is worth; accuracies then depend on how pictures are batched.
        """
        self.routing = routing
        self.batch_size, self.recalibrate = batch_size, recalibrate
        self._mean, self._std = np.float32(mean), np.float32(std)
        self._server_images = server_images
        self._runner = ElasticRunner(routing.layout)

    def normalized_batches(self, images: np.ndarray) -> Iterator[np.ndarray]:
        """float32 network inputs of uint8 pictures, `batch_size` at a time."""
        for start in range(0, len(images), self.batch_size):
            batch = images[start: start + self.batch_size].astype(np.float32) / 255.0
            yield (batch - self._mean) / self._std

    def moments(self, weights: Sequence[tf.Tensor], dims: np.ndarray) -> Moments:
        """The recalibrated moments of one operating point."""
        return self._runner.recalibrate(list(weights), dims,
                                        self.normalized_batches(self._server_images))

    def logits(self, weights: Sequence[tf.Tensor], dims: np.ndarray,
               images: np.ndarray) -> np.ndarray:
        """float32[n, classes] of the variant `dims` for uint8[n, height, width, 3] pictures.

        Raises:
          ValueError: there are no pictures.
        """
        if not len(images):
            raise ValueError("an evaluation needs at least one picture")
        weights = list(weights)
        moments = self.moments(weights, dims) if self.recalibrate else None
        found = []
        for batch in self.normalized_batches(images):
            own = moments or self._runner.recalibrate(weights, dims, [batch])
            found.append(self._runner.logits(weights, dims, own, batch))
        return np.concatenate(found)

    def accuracy(self, weights: Sequence[tf.Tensor], dims: np.ndarray, images: np.ndarray,
                 labels: np.ndarray) -> float:
        """Share of pictures that the variant `dims` classifies right; raises as `logits` does."""
        return share_correct(self.logits(weights, dims, images), labels)

    def operating_points(self, weights: Sequence[np.ndarray], levels: Sequence[int],
                         images: np.ndarray, labels: np.ndarray, split: str,
                         on_point: Optional[Callable[[OperatingPoint], None]] = None
                         ) -> list[OperatingPoint]:
        """Measures cached variants.

        Args:
          weights: of the whole supernet, in the order of the layout's parameters.
          levels: places in the cache.
          images, labels: uint8[n, height, width, 3] and int[n].
          split: name of what is measured, kept in the result.
          on_point: called with each point as it is done, for progress.

        Returns:
          A point for each level, in the given order.
        """
        weights = [tf.convert_to_tensor(weight, tf.float32) for weight in weights]
        cache, points = self.routing.cache, []
        for level in levels:
            point = OperatingPoint(
                variant=cache.variants[level], macs=int(cache.macs[level]),
                params=int(cache.params[level]), split=split,
                accuracy=self.accuracy(weights, cache.dims[level], images, labels))
            points.append(point)
            if on_point:
                on_point(point)
        return points


def share_correct(logits: np.ndarray, labels: np.ndarray) -> float:
    """Share of the rows of float[n, classes] whose largest value is at the label, int[n]."""
    return int(np.sum(np.argmax(logits, axis=-1) == labels)) / len(labels)


def population_accuracy(levels: Sequence[int], accuracies: Sequence[float]) -> float:
    """Mean over clients of the accuracy of each one's largest affordable variant (Table 1).

    Args:
      levels: the clients' places in the cache.
      accuracies: of all cached variants, in the order of the cache.
    """
    if not len(levels):
        raise ValueError("the population is empty")
    return float(np.mean(np.asarray(accuracies, np.float64)[np.asarray(levels)]))


def anchor_levels(macs: np.ndarray, anchors: Sequence[float]) -> list[int]:
    """Which cached variants are watched during training.

    Args:
      macs: int64[A], of the cache, ascending.
      anchors: MACs; each names the cached variant nearest to it (the cheaper of two). Empty: five
        variants spread evenly over the cache, the smallest and the largest among them.

    Returns:
      Ascending places, each once.
    """
    if not len(anchors):
        places = np.round(np.linspace(0, len(macs) - 1, 5)).astype(int)
    else:
        places = [int(np.argmin(np.abs(np.asarray(macs) - anchor))) for anchor in anchors]
    return sorted({int(place) for place in places})
