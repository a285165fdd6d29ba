"""Inference budgets of the clients, in MACs per example (paper 3.1).

Either drawn from a bounded Zipf law over ranks, or written out as a mix of budgets. The paper
leaves the map from rank to budget to its supplement; the linear one here is a reconstruction.
"""

from __future__ import annotations

import math
import re

import numpy as np

from feast_tf.seeding import stream

# How far written shares may be from adding up to 1, so that "0.33" may stand for a third.
_SHARE_TOLERANCE = 0.02


def bounded_zipf(
    num_clients: int, *, num_ranks: int, s: float, rng: np.random.Generator
) -> np.ndarray:
    """Draws independent budget ranks with P(rank = k) proportional to k^-s, k = 1..num_ranks.

    Args:
        num_clients: How many ranks to draw.
        num_ranks: The largest rank.
        s: The exponent, at least 0. Low ranks, which mean low budgets, are the frequent ones.
        rng: Where the draws come from.

    Returns:
        int64 array of shape [num_clients], values in 1..num_ranks.

    Raises:
        ValueError: If an argument is out of its range.
    """
    _check_zipf(num_clients, num_ranks, s)
    return rng.choice(num_ranks, num_clients, p=_zipf(num_ranks, s)).astype(np.int64) + 1


def bounded_zipf_counts(
    num_clients: int, *, num_ranks: int, s: float, rng: np.random.Generator
) -> np.ndarray:
    """Draws how many clients have each rank, as `bounded_zipf` would, in memory for the ranks only.

    Args:
        num_clients: As in `bounded_zipf`.
        num_ranks: As in `bounded_zipf`.
        s: As in `bounded_zipf`.
        rng: Where the draws come from; they are not those of `bounded_zipf`.

    Returns:
        int64 array of shape [num_ranks] that adds up to `num_clients`.

    Raises:
        ValueError: If an argument is out of its range.
    """
    _check_zipf(num_clients, num_ranks, s)
    return rng.multinomial(num_clients, _zipf(num_ranks, s))


def budgets_from_ranks(
    ranks: np.ndarray, *, num_ranks: int, low: float, high: float
) -> np.ndarray:
    """Maps ranks to budgets: b = low + (rank - 1) / (num_ranks - 1) * (high - low).

    Args:
        ranks: Integers of shape [num_clients], in 1..num_ranks.
        num_ranks: The rank that gets `high`. When it is 1, every client gets `low`.
        low: The budget of rank 1, in MACs.
        high: The budget of rank `num_ranks`, in MACs.

    Returns:
        float64 array of shape [num_clients], in MACs.

    Raises:
        ValueError: If an argument is out of its range; a bad rank is named with its client.
    """
    _check_num_ranks(num_ranks)
    if not 0 < low <= high < math.inf:
        raise ValueError(f"budgets need 0 < low <= high, not low={low}, high={high}")
    ranks = np.asarray(ranks)
    if ranks.ndim != 1 or not np.issubdtype(ranks.dtype, np.integer):
        raise ValueError(f"ranks must be integers in one dimension, not {ranks.dtype}{ranks.shape}")
    outside = np.flatnonzero((ranks < 1) | (ranks > num_ranks))
    if outside.size:
        client = outside[0]
        raise ValueError(f"rank of client {client} must be in 1..{num_ranks}, not {ranks[client]}")
    return low + (ranks - 1) * (high - low) / max(num_ranks - 1, 1)


def draw_budgets(
    num_clients: int,
    *,
    seed: int,
    low: float = 25e6,
    high: float = 1500e6,
    num_ranks: int = 100,
    zipf_s: float = 1.2,
    ranks_seed: int = -1,
    mix: str = "",
) -> np.ndarray:
    """Draws the budget of every client of a run.

    Args:
        num_clients: The number of clients.
        seed: The seed of the run.
        low: The budget of rank 1, in MACs.
        high: The budget of the last rank, in MACs.
        num_ranks: The number of budget ranks.
        zipf_s: The exponent of the Zipf law over the ranks.
        ranks_seed: The seed of `numpy.random.default_rng` for the ranks; below 0 they come from
            `seed`.
        mix: Budgets as `parse_budgets` reads them; then the other settings do not matter.

    Returns:
        float64 array of shape [num_clients], in MACs.

    Raises:
        ValueError: If a setting is out of its range.
    """
    if mix:
        return parse_budgets(mix, num_clients, stream(seed, "budgets"))
    rng = np.random.default_rng(ranks_seed) if ranks_seed >= 0 else stream(seed, "population ranks")
    ranks = bounded_zipf(num_clients, num_ranks=num_ranks, s=zipf_s, rng=rng)
    return budgets_from_ranks(ranks, num_ranks=num_ranks, low=low, high=high)


def parse_budgets(
    text: str, num_clients: int, rng: np.random.Generator | None = None
) -> np.ndarray:
    """Reads a mix of budgets and gives every client exactly one of them.

    A mix is written in one of three ways:
      * `"25e6:16,50e6:6,100e6:5"`: whole numbers are client counts and add up to `num_clients`;
      * `"25e6:0.6,50e6:0.4"`: decimals are shares and add up to 1 (0.02 off is allowed, so that
        0.33 can be a third). Each group gets the whole part of its share of the clients; those
        left over go to the largest remainders, at equal remainders to the group written first;
      * `"25e6,50e6"`: equal shares.

    Args:
        text: The mix; budgets in MACs.
        num_clients: How many clients there are.
        rng: Decides which client gets which budget; without it they follow the written order.

    Returns:
        float64 array of shape [num_clients], in MACs.

    Raises:
        ValueError: If the text is not such a mix; the message names the faulty part.
    """
    assigned = np.repeat(*budget_counts(text, num_clients))
    return assigned if rng is None else rng.permutation(assigned)


def budget_counts(text: str, num_clients: int) -> tuple[np.ndarray, np.ndarray]:
    """Reads a mix of budgets as `parse_budgets` does, in memory for the mix only.

    Args:
        text: The mix; budgets in MACs.
        num_clients: How many clients there are.

    Returns:
        `(budgets, counts)`: float64 and int64 arrays with an entry for each budget, as written.

    Raises:
        ValueError: If the text is not such a mix; the message names the faulty part.
    """
    if num_clients < 1:
        raise ValueError(f"num_clients must be at least 1, not {num_clients}")
    parts = [part.strip() for part in text.split(",")]
    budgets, weights = [], []
    for part in parts:
        budget, colon, weight = part.partition(":")
        budgets.append(_positive_number(budget, what="budget in MACs such as 25e6", part=part))
        weights.append(weight.strip() if colon else None)
        if budgets[-1] in budgets[:-1]:
            raise ValueError(f"budgets {text!r}: {part!r} repeats a budget")
    return np.array(budgets), _group_sizes(text, parts, weights, num_clients)


def checked_budgets(budgets: np.ndarray) -> np.ndarray:
    """Returns the budgets as float64 of shape [num_clients], all positive and finite.

    Args:
        budgets: Budgets in MACs, anything `numpy.asarray` takes.

    Returns:
        float64 array of shape [num_clients].

    Raises:
        ValueError: If they are not one non-empty row, or a budget is not positive and finite.
    """
    budgets = np.asarray(budgets, dtype=np.float64)
    if budgets.ndim != 1 or not budgets.size:
        raise ValueError(f"budgets must have one entry for each client, not shape {budgets.shape}")
    bad = np.flatnonzero(~((budgets > 0) & (budgets < math.inf)))
    if bad.size:
        raise ValueError(
            f"the budget of client {bad[0]} must be positive MACs, not {budgets[bad[0]]}"
        )
    return budgets


def _group_sizes(
    text: str, parts: list[str], weights: list[str | None], num_clients: int
) -> np.ndarray:
    """Returns how many clients each group of a mix gets; they add up to `num_clients`."""
    if all(weight is None for weight in weights):
        return _largest_remainder(np.ones(len(weights)), num_clients)
    if None in weights:
        part = parts[weights.index(None)]
        raise ValueError(f"budgets {text!r}: {part!r} has no count or share, but others have one")
    numbers = [
        _positive_number(weight, what="count such as 16 or share such as 0.4", part=part)
        for weight, part in zip(weights, parts)
    ]
    is_count = [re.fullmatch("[0-9]+", weight) is not None for weight in weights]
    if any(is_count) and not all(is_count):
        part = parts[is_count.index(True)]
        raise ValueError(
            f"budgets {text!r}: {part!r} is a count among shares; write all as counts, or all "
            "as shares with a decimal point"
        )
    total = math.fsum(numbers)
    if all(is_count):
        if total != num_clients:
            raise ValueError(
                f"budgets {text!r}: the counts add up to {total:g}, but there are {num_clients} "
                "clients; shares are written with a decimal point, such as 0.4"
            )
        return np.array(numbers, dtype=np.int64)
    if abs(total - 1) > _SHARE_TOLERANCE:
        raise ValueError(f"budgets {text!r}: the shares add up to {total:g} instead of 1")
    return _largest_remainder(np.array(numbers), num_clients)


def _largest_remainder(shares: np.ndarray, total: int) -> np.ndarray:
    exact = shares / shares.sum() * total
    counts = np.floor(exact).astype(np.int64)
    # Rounded, since float64 tells apart remainders that are equal on paper (50 clients at 0.05,
    # 0.4 and 0.55); the stable order then prefers the group written first.
    remainders = np.round(exact - counts, 9)
    counts[np.argsort(-remainders, kind="stable")[: total - counts.sum()]] += 1
    return counts


def _positive_number(text: str, *, what: str, part: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"budgets: {part!r} needs a positive {what}, not {text.strip()!r}")
    return number


def _zipf(num_ranks: int, s: float) -> np.ndarray:
    probabilities = np.arange(1, num_ranks + 1, dtype=np.float64) ** -s
    return probabilities / probabilities.sum()


def _check_zipf(num_clients: int, num_ranks: int, s: float) -> None:
    if num_clients < 1:
        raise ValueError(f"num_clients must be at least 1, not {num_clients}")
    _check_num_ranks(num_ranks)
    if not 0 <= s < math.inf:
        raise ValueError(f"the Zipf exponent s must be at least 0 and finite, not {s}")


def _check_num_ranks(num_ranks: int) -> None:
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, not {num_ranks}")
