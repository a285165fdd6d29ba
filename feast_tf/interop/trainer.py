"""A client's local training with NumPy arrays in and out, for frameworks that move those.

With the seed, the rounds and the client numbers of `algorithms.build_feast` and the same pictures,
a client computes here what it computes there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from feast_tf.datasets import Split
from feast_tf.routing import ROLES, Routing
from feast_tf.seeding import stream
from feast_tf.training import RULES, LocalTraining, local_seed, local_update
from feast_tf.training.local import STATISTICS


class TrainedSlice(NamedTuple):
    """What a client sends back.

    Attributes:
      update: float32 arrays of the shapes that the client received, trained minus received weights.
      num_examples: n_i, pictures that were trained on, all epochs counted.
      metrics: "loss" and "accuracy" of the largest variant that the rule trains, means over the
        pictures.
    """

    update: list[np.ndarray]
    num_examples: int
    metrics: dict[str, float]


class LocalTrainer:
    """Local training of any level's slice: one graph, traced at the first call."""

    def __init__(self, routing: Routing, training: LocalTraining, *, batch_size: int = 32,
                 local_epochs: int = 1):
        """Args:
          routing: of the federation's variant cache.
          training: what is done with a mini-batch.
          batch_size, local_epochs: how a client's pictures are dealt out; shuffled in every epoch.
        """
        for name, value in (("batch_size", batch_size), ("local_epochs", local_epochs)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, but is {value}")
        self.routing, self.training = routing, training
        self._batch_size, self._local_epochs = batch_size, local_epochs
        size = routing.cache.spec.image_size
        batches = {"x": tf.TensorSpec([None, size, size, 3], tf.uint8),
                   "y": tf.TensorSpec([None], tf.int32)}
        dims = tf.constant(routing.variant_dims)

        def update(weights, level, data, seed, rate):
            return local_update(routing.layout, training, dims, weights, level, data, seed, rate)

        self._update = tf.function(update, input_signature=[
            [tf.TensorSpec(shape) for shape in routing.slices.elastic_shapes],
            tf.TensorSpec([], tf.int32), tf.data.DatasetSpec(batches),
            tf.TensorSpec([2], tf.int32), tf.TensorSpec([])])

    def train(self, weights: Sequence[np.ndarray], pictures: Split, *, client: int, level: int,
              round_num: int, total_rounds: int, seed: int = 0) -> TrainedSlice:
        """Trains the slice of one client in one round.

        Args:
          weights: float32 arrays, the slice of `level` that the server sent.
          pictures: the client's own.
          client: its number, which tells its random draws from those of others.
          level: place of its largest affordable variant in the cache.
          round_num: from 0.
          total_rounds: length of the learning rate's schedule.
          seed: of the federation.

        Returns:
          A `TrainedSlice`; without pictures its update and metrics are zero.

        Raises:
          ValueError: the weights do not have the level's shapes, or the pictures the space's size.
        """
        shapes = self.routing.slices.slice_shapes(level)
        if [np.shape(weight) for weight in weights] != shapes:
            raise ValueError(f"client {client}: the weights are not the slice of level {level}")
        size = self.routing.cache.spec.image_size
        if pictures.images.shape[1:3] != (size, size):
            raise ValueError(f"client {client}: pictures must be of {size} x {size} pixels, but "
                             f"are of {pictures.images.shape[1]} x {pictures.images.shape[2]}")
        rng = stream(seed, "shuffle", round_num, client)
        order = np.concatenate([rng.permutation(len(pictures)) for _ in range(self._local_epochs)])
        data = tf.data.Dataset.from_tensor_slices(
            {"x": pictures.images[order], "y": pictures.labels[order]}).batch(self._batch_size)
        update, num_examples, sums = self._update(
            [tf.constant(weight, tf.float32) for weight in weights], tf.constant(level), data,
            local_seed(seed, round_num, client),
            self.training.optimizer.rate(tf.constant(round_num), total_rounds))
        return TrainedSlice([part.numpy() for part in update], int(num_examples),
                            self._metrics(sums.numpy()))

    def _metrics(self, sums: np.ndarray) -> dict[str, float]:
        row = sums[ROLES.index(RULES[self.training.rule].roles[0])]
        examples = max(row[STATISTICS.index("examples")], 1.0)
        return {"loss": float(row[STATISTICS.index("supervised_loss")] / examples),
                "accuracy": float(row[STATISTICS.index("correct")] / examples)}
