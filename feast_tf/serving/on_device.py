"""A client's local training as one TensorFlow Lite file: a phone takes part in a federation (3.4).

The file holds an envelope's weights, the training rule and the optimiser, and needs built-in
operations only. docs/on_device.md shows a round of a phone.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Union

import numpy as np
import tensorflow as tf

from feast_tf.files import write_whole
from feast_tf.routing import Routing, SliceMap
from feast_tf.serving import portable
from feast_tf.serving.saved import SavedSupernet
from feast_tf.serving.tflite import native_messages_dropped
from feast_tf.space import Layout
from feast_tf.training import ROLES, RULES, LocalResult, LocalTraining
from feast_tf.training.augment import normalize
from feast_tf.training.local import STATISTICS, cotrain_gradient
from feast_tf.training.mixing import MixedBatch
from feast_tf.training.rules import trained_variants


def to_vector(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The float32 vector that a file's `set_weights` takes, of a client's slice of the weights."""
    return np.concatenate([np.ravel(np.asarray(array, np.float32)) for array in arrays])


def from_vector(slices: SliceMap, level: int, vector: np.ndarray) -> list[np.ndarray]:
    """The arrays of a client of `level` in a vector that `get_weights` returned: views.

    Raises:
      ValueError: there is no such level, or the vector is of another length.
    """
    shapes = slices.slice_shapes(level)
    sizes = [int(np.prod(shape)) for shape in shapes]
    if np.shape(vector) != (sum(sizes),):
        raise ValueError(f"a client of level {level} has {sum(sizes):,} weights in one vector, but "
                         f"this is of shape {np.shape(vector)}")
    return [part.reshape(shape)
            for part, shape in zip(np.split(vector, np.cumsum(sizes)[:-1]), shapes)]


class TrainableEnvelope(tf.Module):
    """One client's envelope with its training step; `concrete_functions` are a file's signatures.

    Every step is that of `training.local_update`, without augmentation: the application that feeds
    the pictures may crop and flip them. Mixed labels can't be fed.
    """

    def __init__(self, routing: Routing, level: int, weights: Sequence[np.ndarray],
                 training: LocalTraining):
        """Args:
          routing: of the federation's cache.
          level: of the client.
          weights: its slice of the server's weights.
          training: the local training; its learning rate is an input of every step.
        """
        super().__init__()
        self._routing, self._level, self._training = routing, level, training
        self._shapes = routing.slices.slice_shapes(level)
        vector = to_vector(weights)
        self._weights = tf.Variable(vector)
        # Not zeros but the same constant, of which a file then holds one copy; `_steps` masks it.
        self._velocity = tf.Variable(vector)
        self._steps = tf.Variable(0)

    def _logits(self, layout: Layout, weights: Sequence[tf.Tensor], dims: tf.Tensor,
                images: tf.Tensor) -> tf.Tensor:
        images = normalize(images, mean=self._training.mean, std=self._training.std)
        return portable.forward(layout, weights, dims, images)

    def _as_weights(self, vector: tf.Tensor) -> list[tf.Tensor]:
        parts = tf.split(vector, [int(np.prod(shape)) for shape in self._shapes])
        return [tf.reshape(part, shape) for part, shape in zip(parts, self._shapes)]

    def _dims(self, places: tf.Tensor) -> tf.Tensor:
        return tf.gather(tf.constant(self._routing.variant_dims[: self._level + 1]), places)

    def train(self, x: tf.Tensor, y: tf.Tensor, variant: tf.Tensor,
              learning_rate: tf.Tensor) -> dict[str, tf.Tensor]:
        """One step on one mini-batch.

        Args:
          x: uint8[batch, height, width, 3], RGB; a batch may be of any size.
          y: int32[batch], class numbers.
          variant: int32 scalar, the random intermediate: a draw from 0 .. level, anew for every
            batch. Either end means that the batch has no third pass.
          learning_rate: float32 scalar.

        Returns:
          {"metrics": float32[ROLES, STATISTICS]}, sums as in `training.LocalResult`.
        """
        vector, steps = self._weights.read_value(), self._steps.read_value()
        places, roles = trained_variants(RULES[self._training.rule], tf.constant(self._level),
                                         variant)
        gradient, metrics = cotrain_gradient(
            self._routing.layout, self._training, vector, self._as_weights, self._dims(places),
            roles, MixedBatch(x, y, y, tf.ones([])), network=self._logits)
        velocity = tf.where(steps > 0, self._velocity.read_value(), 0.0)
        vector, velocity = self._training.optimizer.apply(gradient, vector, velocity, learning_rate)
        self._weights.assign(vector)
        self._velocity.assign(velocity)
        self._steps.assign(steps + 1)
        return {"metrics": metrics}

    def infer(self, x: tf.Tensor, variant: tf.Tensor) -> dict[str, tf.Tensor]:
        """{"logits": float32[batch, classes]} of the cached variant `variant`, 0 .. level.

        Normalised by the batch's own moments, as in training: give it many pictures at once.
        """
        weights = self._as_weights(self._weights.read_value())
        return {"logits": self._logits(self._routing.layout, weights, self._dims(variant), x)}

    def get_weights(self) -> dict[str, tf.Tensor]:
        """{"weights": float32[payload]}, which `from_vector` cuts up."""
        return {"weights": self._weights.read_value()}

    def set_weights(self, weights: tf.Tensor) -> dict[str, tf.Tensor]:
        """Starts a round: takes float32[payload] and forgets the momentum; {"steps": 0}."""
        self._weights.assign(weights)
        self._steps.assign(0)
        return {"steps": self._steps.read_value()}

    def concrete_functions(self) -> dict[str, tf.types.experimental.ConcreteFunction]:
        """The signatures by their names."""
        size = self._routing.layout.spec.image_size
        x = tf.TensorSpec([None, size, size, 3], tf.uint8, "x")
        y = tf.TensorSpec([None], tf.int32, "y")
        variant = tf.TensorSpec([], tf.int32, "variant")
        signatures = {
            self.train: [x, y, variant, tf.TensorSpec([], tf.float32, "learning_rate")],
            self.infer: [x, variant],
            self.get_weights: [],
            self.set_weights: [tf.TensorSpec(self._weights.shape, tf.float32, "weights")],
        }
        return {method.__name__: tf.function(method, input_signature=specs).get_concrete_function()
                for method, specs in signatures.items()}


def export_trainable(saved: SavedSupernet, level: int, path: Union[str, os.PathLike], *,
                     training: LocalTraining) -> None:
    """Writes the TensorFlow Lite file that trains a client of one level on its device.

    Its signatures are the methods `train`, `infer`, `get_weights` and `set_weights` of
    `TrainableEnvelope`. There are no `save` and `restore`: TensorFlow Lite has no built-in
    operations for them, and an application can store the vector of `get_weights` itself.

    Args:
      saved: the supernet whose weights the file starts with.
      level: place of the client's largest affordable variant in the cache.
      path: of the file, which is written whole or not at all.
      training: the local training of the run. Its augmentation is left to the application, and its
        learning rate is an input; mean and std are taken from `saved`.

    Raises:
      ValueError: there is no such level.
    """
    routing = Routing(saved.cache)
    module = TrainableEnvelope(routing, level, routing.slices.cut(saved.weights, level),
                               dataclasses.replace(training, mean=saved.mean, std=saved.std))
    with tempfile.TemporaryDirectory() as folder, native_messages_dropped():
        tf.saved_model.save(module, folder, signatures=module.concrete_functions())
        converter = tf.lite.TFLiteConverter.from_saved_model(folder)
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS]
        converter.experimental_enable_resource_variables = True
        content = converter.convert()
    write_whole(path, lambda file: file.write(content))


def train_on_device(interpreter: tf.lite.Interpreter, slices: SliceMap, level: int,
                    weights: Sequence[np.ndarray],
                    batches: Iterable[tuple[np.ndarray, np.ndarray]], *, draw: Callable[[], int],
                    learning_rate: float) -> LocalResult:
    """One client's round with a file of `export_trainable`: what an application does, in Python.

    Args:
      interpreter: of the file; that of another TensorFlow Lite package will do.
      slices: the federation's slice map, `Routing.slices`.
      level: the file's.
      weights: the slice that the server sent.
      batches: (uint8[batch, height, width, 3], int32[batch]) of an epoch, or of several.
      draw: returns the place of a batch's random intermediate, uniform over 0 .. level.
      learning_rate: of this round.

    Returns:
      A `LocalResult` of NumPy arrays.

    Raises:
      ValueError: the weights or a batch are not of the file's shapes.
    """
    train = interpreter.get_signature_runner("train")
    size = tuple(map(int, train.get_input_details()["x"]["shape_signature"][1:]))
    received = to_vector(weights)
    from_vector(slices, level, received)  # checks its length
    interpreter.get_signature_runner("set_weights")(weights=received)
    metrics, count = np.zeros([len(ROLES), len(STATISTICS)], np.float32), 0
    for images, labels in batches:
        if images.shape[1:] != size or labels.shape != images.shape[:1] or not len(labels):
            raise ValueError(f"a batch must be pictures of shape {size} and a label for each, but "
                             f"is of shapes {images.shape} and {labels.shape}")
        metrics += train(x=images, y=np.int32(labels), variant=np.int32(draw()),
                         learning_rate=np.float32(learning_rate))["metrics"]
        count += len(labels)
    trained = interpreter.get_signature_runner("get_weights")()["weights"]
    return LocalResult(tuple(from_vector(slices, level, trained - received)), np.int32(count),
                       metrics)
