"""What a population's rounds send and compute (paper 3.3, 4.3)."""

from __future__ import annotations

import dataclasses

import numpy as np

# A backward pass costs about twice a forward pass.
FORWARD_AND_BACKWARD = 3


@dataclasses.dataclass(frozen=True)
class Reduction:
    """Model-parameter traffic against sending the full supernet to every client.

    Attributes:
      mean_payload: parameters that the mean client receives.
      aggregate: full over mean payload, the ratio of the traffic of all rounds.
      mean, median, largest: of the clients' own ratios.
    """

    mean_payload: float
    aggregate: float
    mean: float
    median: float
    largest: float


def reduction(payload: np.ndarray, clients: np.ndarray, full: int) -> Reduction:
    """The traffic that routing saves; every client is as likely to be sampled as any other.

    Args:
      payload: int[A], parameters that a client of each level receives.
      clients: int[A], how many clients there are of each level.
      full: parameters of the supernet.
    """
    held = clients > 0
    ratios, counts = full / payload[held], clients[held]
    mean_payload = float(np.average(payload[held], weights=counts))
    return Reduction(mean_payload, full / mean_payload, float(np.average(ratios, weights=counts)),
                     weighted_median(ratios, counts), float(ratios.max()))


def weighted_median(values: np.ndarray, counts: np.ndarray) -> float:
    """The median of `values[i]` taken `counts[i]` times; the mean of the middle two."""
    order = np.argsort(values)
    ends = np.cumsum(counts[order])
    middle = [(ends[-1] - 1) // 2, ends[-1] // 2]
    return float(values[order][np.searchsorted(ends, middle, side="right")].mean())


def training_macs(per_sample: np.ndarray, samples: np.ndarray, *, rounds: int, epochs: int,
                  participation: float) -> float:
    """Multiply-accumulates of a whole training, forward and backward.

    Args:
      per_sample: float[A], forward MACs that a client of each level spends on a sample.
      samples: float[A], samples that clients of each level hold.
      rounds: of the training.
      epochs: local epochs a round.
      participation: share of the clients that a round samples.
    """
    return float(FORWARD_AND_BACKWARD * rounds * epochs * participation * (per_sample @ samples))
