"""Federated rounds in plain NumPy: a small network on handwritten digits, no TensorFlow anywhere.

    python examples/numpy_rounds.py

Thirty clients of three levels train hidden layers of 8, 24 and 96 units that are prefixes of one
network. In every round one client dies and one sends garbage. Takes a few seconds.
"""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

from feast_tf.interop.rounds import merge, plan_round
from feast_tf.routing import SliceMap

WIDTHS, PIXELS, CLASSES = (8, 24, 96), 64, 10
CLIENTS, COHORT, ROUNDS, EPOCHS, RATE = 30, 10, 40, 3, 0.2

# Which part of each array the clients of each level hold: [levels, axes].
SLICES = SliceMap(
    names=("hidden kernel", "hidden bias", "head kernel", "head bias"),
    shapes=((PIXELS, WIDTHS[-1]), (WIDTHS[-1],), (WIDTHS[-1], CLASSES), (CLASSES,)),
    extents=(np.int32([[PIXELS, width] for width in WIDTHS]), np.int32([[w] for w in WIDTHS]),
             np.int32([[width, CLASSES] for width in WIDTHS]), np.int32([[CLASSES]] * 3)))


def forward(weights, pictures):
    """The activations of the hidden layer, and the probabilities of the classes."""
    hidden = np.maximum(pictures @ weights[0] + weights[1], 0)
    logits = hidden @ weights[2] + weights[3]
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return hidden, exponentials / exponentials.sum(axis=1, keepdims=True)


def train(weights, pictures, labels, rng):
    """A client's local epochs of SGD; returns the trained weights."""
    weights = [weight.copy() for weight in weights]
    for _ in range(EPOCHS):
        for batch in np.array_split(rng.permutation(len(labels)), max(1, len(labels) // 16)):
            hidden, errors = forward(weights, pictures[batch])
            errors[np.arange(len(batch)), labels[batch]] -= 1
            errors /= len(batch)
            behind = errors @ weights[2].T * (hidden > 0)
            gradients = (pictures[batch].T @ behind, behind.sum(axis=0), hidden.T @ errors,
                         errors.sum(axis=0))
            for weight, gradient in zip(weights, gradients):
                weight -= RATE * gradient
    return weights


def main() -> None:
    rng = np.random.default_rng(0)
    digits = load_digits()
    order = rng.permutation(len(digits.target))
    pictures, labels = (digits.data[order] / 16).astype(np.float32), digits.target[order]
    held_out = slice(0, 360)
    shares = np.array_split(np.arange(360, len(labels)), CLIENTS)
    levels = {client: client % len(WIDTHS) for client in range(CLIENTS)}
    weights = [rng.normal(0, 1 / np.sqrt(shape[0]), shape).astype(np.float32) if len(shape) == 2
               else np.zeros(shape, np.float32) for shape in SLICES.shapes]

    def results(plan):
        dies, lies = rng.choice(list(plan), 2, replace=False)
        for client, received in plan.items():
            share = shares[client]
            trained = train(received, pictures[share], labels[share], rng)
            if client == lies:
                trained[0][0, 0] = np.nan
            if client != dies:
                yield client, trained, len(share)

    for round_num in range(ROUNDS):
        cohort = {int(client): levels[client]
                  for client in rng.choice(CLIENTS, COHORT, replace=False)}
        plan = plan_round(SLICES, weights, cohort)
        weights, summary = merge(SLICES, weights, cohort, results(plan))
        if (round_num + 1) % 10 == 0:
            print(f"round {round_num + 1}: {len(summary['with_data'])} clients in the mean, "
                  f"{len(summary['refused'])} refused, {len(summary['missing'])} missing, "
                  f"{summary['bytes_down'] / 1e3:.1f} kB down, "
                  f"{summary['bytes_up'] / 1e3:.1f} kB up")
    for level, width in enumerate(WIDTHS):
        _, probabilities = forward(SLICES.cut(weights, level), pictures[held_out])
        accuracy = np.mean(probabilities.argmax(axis=1) == labels[held_out])
        print(f"level {level}: {width} hidden units, {SLICES.payload[level]} parameters, "
              f"test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
