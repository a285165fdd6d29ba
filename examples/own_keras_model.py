"""Your own Keras model as an elastic one: three widths of one network, trained federatedly by TFF.

    python examples/own_keras_model.py

Twelve clients of three budgets hold a part each of scikit-learn's breast cancer table (569 rows, 30
columns). Takes about half a minute.
"""

from __future__ import annotations

import collections

import numpy as np
from sklearn.datasets import load_breast_cancer
import tensorflow as tf
import tensorflow_federated as tff

from feast_tf import runtime
from feast_tf.algorithms import build_sliced_fed_avg
from feast_tf.interop.keras_slices import slice_map, submodel

# What the clients of each level train: units of the named layers; the last level trains everything.
LEVELS = [{"first": 4, "second": 2}, {"first": 16, "second": 0.25}, {}]
CLIENTS, ROUNDS = 12, 20


def build_model() -> tf.keras.Model:
    tf.keras.utils.set_random_seed(0)
    return tf.keras.Sequential([
        tf.keras.Input([30]),
        tf.keras.layers.Dense(64, "relu", name="first"),
        tf.keras.layers.LayerNormalization(),
        tf.keras.layers.Dense(32, "relu", name="second"),
        tf.keras.layers.Dense(2, name="head"),
    ])


def main() -> None:
    table = load_breast_cancer()
    order = np.random.default_rng(0).permutation(len(table.target))
    features = table.data[order].astype(np.float32)
    labels = table.target[order].astype(np.int32)
    train, test = slice(0, 400), slice(400, None)
    features = (features - features[train].mean(axis=0)) / features[train].std(axis=0)

    clients = []
    for client, part in enumerate(np.array_split(np.arange(400), CLIENTS)):
        rows = tf.data.Dataset.from_tensor_slices(
            collections.OrderedDict(x=features[part], y=labels[part]))
        clients.append(collections.OrderedDict(client=np.int32(client), level=np.int32(client % 3),
                                               data=rows.batch(8)))

    runtime.use("in_process")
    model = build_model()
    process = build_sliced_fed_avg(
        model, LEVELS, element_spec=clients[0]["data"].element_spec,
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tff.learning.optimizers.build_sgdm(0.05, momentum=0.9),
        metrics={"accuracy": tf.keras.metrics.sparse_categorical_accuracy})
    state = process.initialize()
    for round_num in range(ROUNDS):
        state, metrics = process.next(state, clients)
        if (round_num + 1) % 5 == 0:
            train_metrics = metrics["client_work"]["train"]
            print(f"round {round_num + 1}: loss {train_metrics['loss']:.4f}, "
                  f"accuracy {train_metrics['accuracy']:.4f}, "
                  f"{metrics['distributor']['bytes_down'] / 1e3:.1f} kB down")

    for variable, value in zip(model.trainable_weights, state.global_model_weights.trainable):
        variable.assign(value)
    for level, (widths, payload) in enumerate(zip(LEVELS, slice_map(model, LEVELS).payload)):
        served = submodel(model, widths)  # a plain Keras model: save it, export it, serve it
        guesses = np.argmax(served(features[test]), axis=-1)
        print(f"level {level}: {payload} parameters, test accuracy "
              f"{np.mean(guesses == labels[test]):.3f}")


if __name__ == "__main__":
    main()
