"""The sparse sample-weighted mean in NumPy: slow, obvious, and what the tests compare with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


def sparse_mean(weights: Sequence[np.ndarray],
                contributions: Iterable[tuple[float, Sequence[np.ndarray]]]) -> list[np.ndarray]:
    """New server weights by the aggregation rule of paper 3.3, position by position.

        theta[u] <- theta[u] + sum_i n_i * update_i[u] / sum_i n_i   over clients i that cover u,

    which is the mean of the clients' weights, since update_i = theta_i - theta. A position that no
    client with a positive weight covers keeps its value bit for bit.

    Args:
      weights: arrays of the whole supernet.
      contributions: for each client (n_i, arrays of its update), where every array covers the
        leading positions of the weight, up to its own shape. One that is not finite is left out.

    Returns:
      float32 arrays of the shapes of `weights`.
    """
    numerators = [np.zeros(weight.shape, np.float64) for weight in weights]
    masses = [np.zeros(weight.shape, np.float64) for weight in weights]
    for count, update in contributions:
        if count <= 0 or not all(np.all(np.isfinite(part)) for part in update):
            continue
        for numerator, mass, part in zip(numerators, masses, update):
            region = tuple(slice(0, size) for size in np.shape(part))
            numerator[region] += count * np.asarray(part, np.float64)
            mass[region] += count
    result = []
    for weight, numerator, mass in zip(weights, numerators, masses):
        covered = mass > 0
        mean = np.divide(numerator, mass, out=np.zeros_like(numerator), where=covered)
        result.append(np.where(covered, weight + mean.astype(np.float32), weight))
    return result
