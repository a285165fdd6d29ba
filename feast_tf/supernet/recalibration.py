"""Batch-normalisation moments of one operating point (paper 4.1).

Sub-networks share weights but not activation statistics, so each served variant gets moments of its
own, computed from server-held samples: the exact average of the batch statistics, whatever moments
came before and in whatever order the batches come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

from feast_tf.space import Layout
from feast_tf.supernet.forward import Moments, forward


class ElasticRunner:
    """Compiled recalibration and inference for all variants of one layout: two graphs in all."""

    def __init__(self, layout: Layout):
        self.layout = layout
        weights = [tf.TensorSpec(p.shape, tf.float32) for p in layout.parameters]
        dims = tf.TensorSpec([layout.num_dims], tf.int32)
        images = tf.TensorSpec([None, layout.spec.image_size, layout.spec.image_size, 3])
        moment = tf.TensorSpec([None])
        moments = [(moment, moment) for _ in range(layout.num_norms)]
        self._record = tf.function(
            lambda w, d, x: forward(layout, w, d, x, record_moments=True)[1],
            input_signature=[weights, dims, images])
        self._predict = tf.function(
            lambda w, d, m, x: forward(layout, w, d, x, moments=m),
            input_signature=[weights, dims, moments, images])

    def recalibrate(self, weights: Sequence[tf.Tensor], dims: np.ndarray,
                    batches: Iterable[np.ndarray]) -> Moments:
        """Moments of a variant.

        Args:
          weights: tensors of the whole supernet.
          dims: int32[1 + 3S], the variant.
          batches: float32[batch, height, width, 3] server-held pictures, normalised. A batch counts
            by its number of pictures.

        Returns:
          (mean, variance) as float32[channels] tensors for every batch normalisation; of length 0
          for blocks that the variant does not have. The variance is the average of the batches'
          population variances, which is what training normalises by.

        Raises:
          ValueError: no pictures.
        """
        dims, total, sums = tf.constant(dims, tf.int32), 0, None
        for images in batches:
            if not len(images):  # moments of nothing are NaN
                continue
            # Sums in float64, so that the order of batches can't be seen in float32.
            found = [np.asarray(m, np.float64) * len(images)
                     for pair in self._record(weights, dims, images) for m in pair]
            sums = found if sums is None else [a + b for a, b in zip(sums, found)]
            total += len(images)
        if not total:
            raise ValueError("recalibration needs at least one server-held picture")
        means = [tf.constant(s / total, tf.float32) for s in sums]
        return list(zip(means[::2], means[1::2]))

    def logits(self, weights: Sequence[tf.Tensor], dims: np.ndarray, moments: Moments,
               images: np.ndarray) -> tf.Tensor:
        """float32[batch, classes] of a recalibrated variant."""
        return self._predict(weights, tf.constant(dims, tf.int32), list(moments), images)
