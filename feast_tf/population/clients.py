"""The clients of a run, and which of them take part in a round (paper 3.1 and 4.1)."""

from __future__ import annotations

import dataclasses

import numpy as np

from feast_tf.population.allocation import allocation_weights
from feast_tf.population.budgets import budgets_from_ranks
from feast_tf.population.budgets import checked_budgets
from feast_tf.population.budgets import draw_budgets
from feast_tf.population.partition import dirichlet_partition
from feast_tf.seeding import stream


@dataclasses.dataclass(frozen=True, eq=False)
class Client:
    """One client.

    Attributes:
        id: Its position in the population, from 0.
        budget: The largest inference cost of a variant that it may train or serve, in MACs.
        indices: Its samples, as sorted int64 indices into the training split; read-only.
    """

    id: int
    budget: float
    indices: np.ndarray

    @property
    def num_samples(self) -> int:
        """n_i, the weight of this client's update."""
        return len(self.indices)


def build_population(
    labels: np.ndarray,
    *,
    num_clients: int,
    seed: int,
    low: float = 25e6,
    high: float = 1500e6,
    cap: float = 600e6,
    num_ranks: int = 100,
    zipf_s: float = 1.2,
    gamma: float = 1.0,
    alpha: float = 0.1,
    min_samples: int = 1,
    ranks: np.ndarray | None = None,
    budgets: np.ndarray | None = None,
) -> tuple[Client, ...]:
    """Gives every client a budget and a part of the training data (paper 3.1).

    The defaults are the paper's; `num_ranks` and the linear map from rank to budget, which the
    paper leaves to its supplement, are reconstructed.

    Args:
        labels: Integer classes of the training split, of shape [num_samples].
        num_clients: The number of clients.
        seed: Decides the ranks and the partition, each from a stream of its own.
        low: The lowest budget, in MACs.
        high: The highest budget, in MACs.
        cap: B_cap of the allocation, in MACs.
        num_ranks: The number of budget ranks.
        zipf_s: The exponent of the Zipf law over the ranks.
        gamma: How strongly the amount of data follows the budget.
        alpha: alpha_data of the Dirichlet partition.
        min_samples: How many samples each client has at least.
        ranks: The ranks to use instead of drawn ones, int of shape [num_clients].
        budgets: The budgets in MACs to use instead of ranks, of shape [num_clients]. Then `low`,
            `high`, `num_ranks` and `zipf_s` do not matter.

    Returns:
        The clients, in the order of their ids.

    Raises:
        ValueError: If an argument is out of its range, or there are too few samples for
            `min_samples`.
    """
    if budgets is not None and ranks is not None:
        raise ValueError("give either ranks or budgets, not both")
    if budgets is None:
        if ranks is None:
            budgets = draw_budgets(num_clients, seed=seed, low=low, high=high,
                                   num_ranks=num_ranks, zipf_s=zipf_s)
        else:
            budgets = budgets_from_ranks(ranks, num_ranks=num_ranks, low=low, high=high)
    budgets = checked_budgets(budgets)
    if budgets.size != num_clients:
        raise ValueError(f"there are budgets for {budgets.size} clients, not for {num_clients}")
    partition = dirichlet_partition(
        labels,
        allocation_weights(budgets, gamma=gamma, cap=cap),
        alpha=alpha,
        min_samples=min_samples,
        rng=stream(seed, "population partition"),
    )
    for indices in partition:
        indices.setflags(write=False)
    return tuple(
        Client(id=client_id, budget=budget, indices=indices)
        for client_id, (budget, indices) in enumerate(zip(budgets.tolist(), partition))
    )


def sample_cohort(
    num_clients: int, cohort_size: int, *, seed: int, round_num: int
) -> np.ndarray:
    """Draws the clients of a round, uniformly and without replacement.

    Args:
        num_clients: The number of clients.
        cohort_size: How many of them take part.
        seed: The seed of the run.
        round_num: The round. The cohort depends on it and the seed only, so a resumed run draws
            the same cohorts as an unbroken one.

    Returns:
        int64 array of shape [cohort_size], client ids in ascending order.

    Raises:
        ValueError: If the cohort is empty or larger than the population.
    """
    if not 1 <= cohort_size <= num_clients:
        raise ValueError(f"cohort_size must be in 1..{num_clients} clients, not {cohort_size}")
    drawn = stream(seed, "cohort", round_num).choice(num_clients, cohort_size, replace=False)
    return np.sort(drawn)
