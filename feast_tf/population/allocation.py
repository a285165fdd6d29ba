"""How much of the data each client is due: the gamma-allocation (paper 3.1)."""

from __future__ import annotations

import math

import numpy as np

from feast_tf.population.budgets import checked_budgets


def allocation_weights(budgets: np.ndarray, *, gamma: float, cap: float) -> np.ndarray:
    """Returns q_i(gamma) = min(b_i, cap)^gamma / sum_j min(b_j, cap)^gamma.

    At gamma = 0 all clients are due the same share of the data; at gamma = 1 a share in proportion
    to their capped budgets. The cap keeps a budget beyond the largest served variant from counting.

    Args:
        budgets: Positive budgets of shape [num_clients], in MACs.
        gamma: How strongly the data follow the budgets.
        cap: B_cap in MACs; `math.inf` for none.

    Returns:
        float64 array of shape [num_clients] that sums to 1.

    Raises:
        ValueError: If an argument is out of its range; a bad budget is named with its client.
    """
    budgets = checked_budgets(budgets)
    if not math.isfinite(gamma):
        raise ValueError(f"gamma must be finite, not {gamma}")
    if not cap > 0:
        raise ValueError(f"the budget cap must be positive MACs, not {cap}")
    # In logs, because (600e6)^gamma overflows from gamma = 36 on.
    logits = gamma * np.log(np.minimum(budgets, cap))
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def effective_alpha(alpha: float, class_count: float, num_clients: int) -> float:
    """Returns alpha_eff = alpha * class_count / num_clients, which compares data sets.

    It is the mean over clients of the Dirichlet concentration c_{k,i} = alpha * N_k * q_i(gamma),
    whatever gamma is.

    Args:
        alpha: alpha_data of the partition.
        class_count: N_k, the number of training samples of one class (their mean if they differ).
        num_clients: The number of clients.

    Returns:
        alpha_eff; the paper has 0.45 for alpha = 0.1, 450 samples a class and 100 clients.

    Raises:
        ValueError: If an argument is not positive.
    """
    _check_positive(alpha=alpha, class_count=class_count, num_clients=num_clients)
    return alpha * class_count / num_clients


def alpha_for_effective(alpha_eff: float, class_count: float, num_clients: int) -> float:
    """Returns the alpha_data that gives `alpha_eff`, the inverse of `effective_alpha`.

    Args:
        alpha_eff: The effective concentration wanted.
        class_count: As in `effective_alpha`.
        num_clients: As in `effective_alpha`.

    Returns:
        alpha_data.

    Raises:
        ValueError: If an argument is not positive.
    """
    _check_positive(alpha_eff=alpha_eff, class_count=class_count, num_clients=num_clients)
    return alpha_eff * num_clients / class_count


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive, not {value}")
