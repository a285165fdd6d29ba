"""An existing FedAvg pipeline of TFF that gets the sliced mean: one argument more.

    python examples/fedavg_pipeline.py

A user's Keras network for handwritten digits has a hidden layer of which a client uses the first
units alone: 8, 32 or 96, as its budget says. `tff.learning` sends everybody the whole model, and
what a client does not use has the gradient 0. A plain mean then divides the updates of the last
units, which 3 of 24 clients train, by the examples of all; the sliced mean divides by theirs. Takes
about half a minute.
"""

from __future__ import annotations

from tff_programs import environment  # isort: skip  (first: it prepares TensorFlow's import)
import collections

import numpy as np
from sklearn.datasets import load_digits
import tensorflow as tf
import tensorflow_federated as tff

from feast_tf import runtime
from feast_tf.aggregation import SlicedMeanFactory, hold_unreported
from feast_tf.routing import SliceMap

WIDTHS, PIXELS, CLASSES = (8, 32, 96), 64, 10
LEVELS = [0] * 15 + [1] * 6 + [2] * 3  # of the clients
ROUNDS, EPOCHS, HELD_OUT = 8, 4, 360

# What the clients of each level train of the kernels and biases, in Keras' order: [levels, axes].
SLICES = SliceMap(
    names=("hidden kernel", "hidden bias", "head kernel", "head bias"),
    shapes=((PIXELS, WIDTHS[-1]), (WIDTHS[-1],), (WIDTHS[-1], CLASSES), (CLASSES,)),
    extents=(np.int32([[PIXELS, width] for width in WIDTHS]), np.int32([[w] for w in WIDTHS]),
             np.int32([[width, CLASSES] for width in WIDTHS]), np.int32([[CLASSES]] * 3)))
# A batch: (pictures, the client's number of units for each of them), labels.
BATCH = collections.OrderedDict(
    x=(tf.TensorSpec([None, PIXELS]), tf.TensorSpec([None], tf.int32)),
    y=tf.TensorSpec([None], tf.int32))


class FirstUnits(tf.keras.layers.Layer):
    """Sets all but the first units of a layer to 0."""

    def call(self, inputs):
        units, used = inputs
        return units * tf.sequence_mask(used, units.shape[-1], units.dtype)


def build_network() -> tf.keras.Model:
    tf.keras.utils.set_random_seed(0)
    pictures = tf.keras.Input([PIXELS])
    used = tf.keras.Input([], dtype=tf.int32)
    hidden = tf.keras.layers.Dense(WIDTHS[-1], "relu")(pictures)
    logits = tf.keras.layers.Dense(CLASSES)(FirstUnits()([hidden, used]))
    return tf.keras.Model([pictures, used], logits)


def model_fn() -> tff.learning.models.VariableModel:
    return tff.learning.models.from_keras_model(
        build_network(), loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        input_spec=BATCH)


def main() -> None:
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    pictures, labels = (digits.data[order] / 16).astype(np.float32), digits.target[order]

    def batches(level: int, rows: np.ndarray) -> tf.data.Dataset:
        examples = collections.OrderedDict(
            x=(pictures[rows], np.full(len(rows), WIDTHS[level], np.int32)),
            y=labels[rows].astype(np.int32))
        return tf.data.Dataset.from_tensor_slices(examples).repeat(EPOCHS).batch(16)

    shares = np.array_split(np.arange(HELD_OUT, len(labels)), len(LEVELS))
    clients = [batches(level, rows) for level, rows in zip(LEVELS, shares)]

    runtime.use("in_process")
    optimizer = tff.learning.optimizers.build_sgdm(1.0, momentum=0.5)
    pipelines = {
        "plain mean": dict(server_optimizer_fn=optimizer),
        "sliced mean": dict(server_optimizer_fn=hold_unreported(optimizer),
                            model_aggregator=SlicedMeanFactory(SLICES))}
    for name, options in pipelines.items():
        process = tff.learning.algorithms.build_weighted_fed_avg(
            model_fn, client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.1), **options)
        state = process.initialize()
        for _ in range(ROUNDS):
            state = process.next(state, clients).state
        network = build_network()
        process.get_model_weights(state).assign_weights_to(network)
        accuracies = []
        for width in WIDTHS:
            logits = network([pictures[:HELD_OUT], np.full(HELD_OUT, width, np.int32)])
            accuracies.append(np.mean(np.argmax(logits, axis=1) == labels[:HELD_OUT]))
        print(f"{name}: test accuracy after {ROUNDS} rounds "
              + ", ".join(f"{accuracy:.3f} with {width} units"
                          for width, accuracy in zip(WIDTHS, accuracies)))


if __name__ == "__main__":
    main()
