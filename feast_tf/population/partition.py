"""The budget-aware Dirichlet partition of the training samples over the clients (paper 3.1)."""

from __future__ import annotations

import heapq
import math

import numpy as np

# Below this a concentration cannot be told from 0, and -log(U) / concentration would overflow.
_SMALLEST_CONCENTRATION = 1e-300


def dirichlet_partition(
    labels: np.ndarray,
    weights: np.ndarray,
    *,
    alpha: float,
    min_samples: int = 1,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Splits the samples over the clients, each sample to exactly one of them.

    For each class k of N_k samples, the clients' proportions are drawn from Dir(c_{k,1}, ...) with
    c_{k,i} = alpha * N_k * q_i. Client i gets N_k * p_i of the class's shuffled samples, rounded up
    or down so that the mean over draws is exact: even a client that is due 0.3 samples of each of
    200 classes gets 60 on average. The class counts of a client do not depend on the order of the
    samples; only which samples of a class it gets does.

    Then clients with fewer than `min_samples` are filled up. Each missing sample is taken from the
    client that is the richest at that time (of equals, the first), which gives a random one of its
    samples; the samples taken are shuffled and dealt out. No client that had enough falls below
    the minimum, and as few samples move as possible.

    Args:
        labels: Integer classes of shape [num_samples].
        weights: The expected share q_i of the data, of shape [num_clients]; sums to 1.
        alpha: alpha_data. The smaller, the fewer clients share a class; note that N_k scales it.
        min_samples: How many samples each client has at least.
        rng: Where all draws come from.

    Returns:
        One sorted int64 array of indices into `labels` for each client.

    Raises:
        ValueError: If an argument is out of its range, or there are too few samples for
            `min_samples`.
    """
    labels, weights = _checked(labels, weights, alpha, min_samples)
    num_clients = weights.size
    class_counts = np.unique(labels, return_counts=True)[1]
    # Positions in `samples` run class by class, shuffled within a class. Who owns a position then
    # depends on the class counts and not on the order of the input.
    samples = np.argsort(labels, kind="stable")
    owners = np.empty(labels.size, dtype=np.int64)
    start = 0
    for class_count in class_counts:
        end = start + class_count
        rng.shuffle(samples[start:end])
        proportions = _dirichlet(alpha * weights * class_count, rng)
        counts = _round(proportions, class_count, offset=rng.random())
        owners[start:end] = np.repeat(np.arange(num_clients), counts)
        start = end
    _fill_up(owners, num_clients, min_samples, rng)
    by_owner = samples[np.argsort(owners, kind="stable")]
    ends = np.cumsum(np.bincount(owners, minlength=num_clients))
    return [np.sort(indices) for indices in np.split(by_owner, ends[:-1])]


def _dirichlet(concentration: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draws proportions from a Dirichlet distribution, for concentrations of any size.

    In logs, with Gamma(a) = Gamma(a + 1) * U^(1/a): plain Gamma draws of a small shape a are all
    rounded to 0, and NumPy's own `Generator.dirichlet` slows down without bound as a shrinks.
    """
    shape = np.maximum(concentration, _SMALLEST_CONCENTRATION)
    # A standard exponential draw is -log(U), and never infinite.
    log_gamma = np.log(rng.standard_gamma(shape + 1)) - rng.standard_exponential(shape.size) / shape
    proportions = np.exp(log_gamma - log_gamma.max())
    return proportions / proportions.sum()


def _round(proportions: np.ndarray, total: int, *, offset: float) -> np.ndarray:
    """Turns proportions into counts that add up to `total`, each rounded up or down.

    The running sums are cut at whole numbers after a shift by `offset`. With an offset uniform in
    [0, 1) each count has the exact mean, where rounding by largest remainders would always give
    nothing to a client that is due less than half a sample.
    """
    edges = np.floor(np.cumsum(proportions) * total + offset).astype(np.int64)
    edges[-1] = total
    return np.diff(np.minimum(edges, total), prepend=0)


def _fill_up(
    owners: np.ndarray, num_clients: int, min_samples: int, rng: np.random.Generator
) -> None:
    """Changes `owners` in place so that every client owns at least `min_samples` positions."""
    sizes = np.bincount(owners, minlength=num_clients)
    missing = np.maximum(min_samples - sizes, 0)
    if not missing.any():
        return
    taken = _taken_from_richest(sizes, missing.sum())
    owned = np.split(np.argsort(owners, kind="stable"), np.cumsum(sizes)[:-1])
    freed = [
        rng.choice(owned[donor], taken[donor], replace=False) for donor in np.flatnonzero(taken)
    ]
    owners[rng.permutation(np.concatenate(freed))] = np.repeat(np.arange(num_clients), missing)


def _taken_from_richest(sizes: np.ndarray, amount: int) -> np.ndarray:
    """Returns how many samples each client gives when the richest gives one, `amount` times."""
    taken = np.zeros_like(sizes)
    richest_first = [(-size, client) for client, size in enumerate(sizes.tolist())]
    heapq.heapify(richest_first)
    for _ in range(amount):
        negative_size, client = richest_first[0]
        heapq.heapreplace(richest_first, (negative_size + 1, client))
        taken[client] += 1
    return taken


def _checked(
    labels: np.ndarray, weights: np.ndarray, alpha: float, min_samples: int
) -> tuple[np.ndarray, np.ndarray]:
    labels = np.asarray(labels)
    if labels.ndim != 1 or not labels.size or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            "labels must be one row of at least one integer class, "
            f"not {labels.dtype} of shape {labels.shape}"
        )
    weights = np.asarray(weights, dtype=np.float64)
    if weights.ndim != 1 or not weights.size:
        raise ValueError(f"weights must have one entry for each client, not shape {weights.shape}")
    bad = np.flatnonzero(~(weights >= 0))
    if bad.size:
        raise ValueError(f"the weight of client {bad[0]} must be at least 0, not {weights[bad[0]]}")
    if not abs(weights.sum() - 1) < 1e-6:
        raise ValueError(f"the weights of the clients must sum to 1, not {weights.sum()}")
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha must be positive and finite, not {alpha}")
    if min_samples < 0:
        raise ValueError(f"min_samples must be at least 0, not {min_samples}")
    if weights.size * min_samples > labels.size:
        raise ValueError(
            f"min_samples={min_samples} for each of {weights.size} clients needs "
            f"{weights.size * min_samples} samples, but there are {labels.size}: use "
            f"min_samples <= {labels.size // weights.size} or "
            f"num_clients <= {labels.size // min_samples}"
        )
    return labels, weights
