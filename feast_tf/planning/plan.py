"""The analytic side of a federation: who trains what, what is sent, what it costs (paper 3.1-3.4).

Nothing is trained and no picture is read. Sums over clients are sums over their budgets, sums over
parameters are sums over cells of equal exposure, so populations of any size take the same time.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Optional

import ml_collections
import numpy as np

from feast_tf import datasets, population, routing, space
from feast_tf.planning.devices import Devices, configured_devices
from feast_tf.planning.proxies import baseline_macs

# A class histogram of more clients than this is not drawn.
MOST_PARTITIONED_CLIENTS = 10_000
GAMMAS = (0.0, 0.5, 1.0)


@dataclasses.dataclass(frozen=True)
class Group:
    """The clients that are served the same variant: a row of the plan's first table.

    Attributes:
      level: place of the served variant in the cache.
      clients: how many there are.
      lowest, highest: their budgets in MACs.
      affordable: |A_i|, how many cached variants they can train.
      variant: the served one, the largest affordable.
      macs, params: of the served variant.
      depths, widths: of the envelope.
      payload: parameters of the envelope, sent in either direction.
      most_macs, expected_macs: forward MACs of a training sample in the dearest and the mean
        mini-batch.
      share: share of the training data, sum of q_i.
      expected_samples: of the mean client, q_i times all samples.
      drawn_samples: (least, mean, most) samples of a client in the run's own partition, or None.
      drawn_classes: classes that the mean client holds in it, or None.
      class_counts: samples of each class that the group holds in it, or None.
    """

    level: int
    clients: int
    lowest: float
    highest: float
    affordable: int
    variant: str
    macs: int
    params: int
    depths: tuple[int, ...]
    widths: tuple[float, ...]
    payload: int
    most_macs: float
    expected_macs: float
    share: float
    expected_samples: float
    drawn_samples: Optional[tuple[int, float, int]]
    drawn_classes: Optional[float]
    class_counts: Optional[tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Client:
    """What one client is due: q_i, its share of the training samples, and what it draws.

    Attributes:
      id: its place in the population.
      budget: in MACs.
      level: place of its largest affordable variant in the cache.
      share: q_i.
      expected_samples: q_i times all samples.
      drawn_samples: n_i of the run's own partition.
    """

    id: int
    budget: float
    level: int
    share: float
    expected_samples: float
    drawn_samples: int


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Seconds to send and return the envelope, of the clients whose bandwidth is known.

    Attributes:
      known: how many clients that is.
      mean, slowest: of a client.
      round: expected time of the slowest client of a round.
      full_round: the same if every client got the full supernet.
    """

    known: int
    mean: float
    slowest: float
    round: float
    full_round: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is planned.

    Attributes:
      config: the configuration.
      devices: the clients.
      routing: envelopes of the cache.
      groups: by level, ascending.
      clients: one by one; empty where no partition is drawn.
      figures: the headline numbers by name; those the paper publishes are named like its figures.
      exposure: of every parameter group.
      bound: psi_min and what the terms of the finite-horizon bound are multiplied by.
      data_share: for each gamma of `GAMMAS` the share of the data of each group.
      transfer: None where no bandwidth is known.
    """

    config: ml_collections.ConfigDict
    devices: Devices
    routing: routing.Routing
    groups: tuple[Group, ...]
    clients: tuple[Client, ...]
    figures: dict[str, float]
    exposure: tuple[routing.GroupExposure, ...]
    bound: dict[str, float]
    data_share: dict[float, tuple[float, ...]]
    transfer: Optional[Transfer]

    def to_json(self) -> dict[str, Any]:
        """What plan.json holds."""
        config = self.config.to_dict()
        return {
            **self.figures,
            "published": config.pop("published", {}),
            "groups": [dataclasses.asdict(group) for group in self.groups],
            "per_client": [dataclasses.asdict(client) for client in self.clients],
            "exposure": [dataclasses.asdict(group) for group in self.exposure],
            "bound": self.bound,
            "data_share_by_gamma": {
                f"{gamma:g}": share for gamma, share in self.data_share.items()},
            "transfer": None if self.transfer is None else dataclasses.asdict(self.transfer),
            "config": config,
        }


def build_plan(config: ml_collections.ConfigDict, devices: Optional[Devices] = None) -> Plan:
    """Plans a federation.

    Args:
      config: as `configs.base.base_config` describes it.
      devices: the clients; by default those of the configuration.

    Raises:
      ValueError: a setting does not fit; the message names it.
    """
    settings, training = config.population, config.training
    devices = configured_devices(config) if devices is None else devices
    if not 1 <= settings.cohort_size <= devices.num_clients:
        raise ValueError(f"population.cohort_size must be in 1..{devices.num_clients}, the number "
                         f"of clients, but is {settings.cohort_size}")
    if config.rounds < 1:
        raise ValueError(f"rounds must be at least 1, but is {config.rounds}")
    if training.rule not in routing.RULES:
        raise ValueError(f"training.rule must be one of {', '.join(routing.RULES)}, but is "
                         f"{training.rule!r}")
    classes = datasets.class_counts(config.dataset, config.held_out or None)
    samples = int(classes.sum())
    spec = space.SupernetSpec(classes=len(classes), image_size=config.image_size,
                              **config.space.to_dict())
    cache = space.load_cache(config.cache, spec)
    routes, rule = routing.Routing(cache), routing.RULES[training.rule]
    levels = np.array([cache.level(budget) for budget in devices.budget])
    by_level = lambda values: np.bincount(levels, weights=values, minlength=len(cache))

    each = client_share(devices, settings.gamma, settings.cap)  # q_i
    share = by_level(each * devices.count)
    alpha = population.alpha_for_effective(settings.alpha_eff, samples / len(classes),
                                           devices.num_clients)
    drawn = _draw(config, devices, classes, alpha)
    groups = tuple(
        _group(routes, rule, devices, level, np.flatnonzero(levels == level), each * samples, drawn)
        for level in np.unique(levels))
    clients = () if drawn is None else tuple(
        Client(number, float(devices.budget[place]), int(levels[place]), float(each[place]),
               float(each[place] * samples), int(counts.sum()))
        for number, (place, counts) in enumerate(zip(devices.members, drawn)))
    exposure = routing.Exposure(routes, rule)
    figures = _figures(config, routes, rule, devices, levels, share * samples)
    figures.update(
        clients=devices.num_clients, samples=samples, alpha_data=alpha,
        alpha_eff=population.effective_alpha(alpha, samples / len(classes), devices.num_clients))
    gammas = {gamma: by_level(client_share(devices, gamma, settings.cap) * devices.count)
              for gamma in GAMMAS}
    return Plan(
        config=config, devices=devices, routing=routes, groups=groups, clients=clients,
        figures=figures,
        exposure=tuple(exposure.by_group(share)), bound=_bound(config, exposure.psi_min(share)),
        data_share={gamma: tuple(values[np.unique(levels)].tolist())
                    for gamma, values in gammas.items()},
        transfer=_transfer(devices, routes, levels, settings.cohort_size,
                           int(figures["supernet_params"])))


def client_share(devices: Devices, gamma: float, cap: float) -> np.ndarray:
    """q_i(gamma) of one client of each group: float64[G]; all clients together have 1."""
    weights = population.allocation_weights(devices.budget, gamma=gamma, cap=cap)
    return weights / (weights @ devices.count)


def _draw(config: ml_collections.ConfigDict, devices: Devices, classes: np.ndarray,
          alpha: float) -> Optional[np.ndarray]:
    """int64[N, classes], the partition that a run of the configuration draws; None for too many.

    Who gets how many samples of a class does not depend on the samples' order, so labels in
    order stand for the data set's.
    """
    settings = config.population
    least = max(settings.min_samples, 1) * devices.num_clients
    if devices.members is None or devices.num_clients > MOST_PARTITIONED_CLIENTS or (
            least > classes.sum()):
        return None
    labels = np.repeat(np.arange(len(classes)), classes)
    clients = population.build_population(
        labels, num_clients=devices.num_clients, seed=config.seed, cap=settings.cap,
        gamma=settings.gamma, alpha=alpha, min_samples=settings.min_samples,
        budgets=devices.budget[devices.members])
    return np.stack([np.bincount(labels[client.indices], minlength=len(classes))
                     for client in clients])


def _group(routes: routing.Routing, rule: routing.TrainingRule, devices: Devices, level: int,
           own: np.ndarray, expected: np.ndarray, drawn: Optional[np.ndarray]) -> Group:
    cache, envelope = routes.cache, routes.envelope(int(level))
    count = devices.count[own]
    chances = rule.expected_passes(len(cache))[level]
    # Where a third variant is drawn, the dearest draw is the one just below the largest.
    certain = np.where(chances == 1, cache.macs, 0).sum()
    third = np.where((chances > 0) & (chances < 1), cache.macs, 0).max()
    drawn_samples = drawn_classes = class_counts = None
    if drawn is not None:
        rows = drawn[np.isin(devices.members, own)]
        sizes = rows.sum(axis=1)
        drawn_samples = (int(sizes.min()), float(sizes.mean()), int(sizes.max()))
        drawn_classes = float((rows > 0).sum(axis=1).mean())
        class_counts = tuple(rows.sum(axis=0).tolist())
    clients = int(count.sum())
    group_samples = float(expected[own] @ count)
    return Group(
        level=int(level), clients=clients, lowest=float(devices.budget[own].min()),
        highest=float(devices.budget[own].max()), affordable=int(level) + 1,
        variant=str(cache.variants[level]), macs=int(cache.macs[level]),
        params=int(cache.params[level]), depths=envelope.d, widths=envelope.w,
        payload=envelope.payload, most_macs=float(certain + third),
        expected_macs=float(chances @ cache.macs),
        share=group_samples / float(expected @ devices.count),
        expected_samples=group_samples / clients, drawn_samples=drawn_samples,
        drawn_classes=drawn_classes, class_counts=class_counts)


def _figures(config: ml_collections.ConfigDict, routes: routing.Routing,
             rule: routing.TrainingRule, devices: Devices, levels: np.ndarray,
             samples: np.ndarray) -> dict[str, float]:
    cache, settings = routes.cache, config.population
    full = int(space.params(cache.spec, routes.layout.full_dims))
    clients = np.bincount(levels, weights=devices.count, minlength=len(cache)).astype(np.int64)
    saved = routing.reduction(routes.payload, clients, full)
    both_ways = 2 * routing.BYTES_PER_PARAMETER * settings.cohort_size

    # The paper's proxy counts convolutions only, forward and backward.
    head = np.prod(routes.layout.extents(cache.dims)[routes.layout.head_kernel], axis=-1)
    conv = (cache.macs - head).astype(np.float64)
    length = dict(rounds=config.rounds, epochs=config.training.local_epochs,
                  participation=settings.cohort_size / devices.num_clients)
    total = routing.training_macs(rule.expected_passes(len(cache)) @ conv, samples, **length)
    single = routing.training_macs(conv, samples, **length)
    by_device = client_share(devices, settings.gamma, settings.cap) * devices.count * samples.sum()
    baselines = {name: routing.training_macs(macs, by_device, **length) for name, macs in
                 baseline_macs(devices.budget, cache.spec.image_size).items()}
    return {
        "supernet_params": full,
        "largest_envelope_params": int(routes.payload[-1]),
        "largest_variant_params": int(cache.params[-1]),
        "mean_payload_params": saved.mean_payload,
        "aggregate_reduction": saved.aggregate,
        "reduction_mean": saved.mean,
        "reduction_median": saved.median,
        "reduction_max": saved.largest,
        "training_pmacs": total / 1e15,
        "over_single": total / single,
        **{f"over_{name}": total / macs for name, macs in baselines.items()},
        "round_bytes": both_ways * saved.mean_payload,
        "round_bytes_full": float(both_ways * full),
        "run_bytes": both_ways * saved.mean_payload * config.rounds,
        "run_bytes_full": float(both_ways * full * config.rounds),
    }


def _bound(config: ml_collections.ConfigDict, psi_min: float) -> dict[str, float]:
    """psi_min and the known factors of the terms of the bound (paper 3.4).

    L_F, Delta_F, epsilon and sigma_round are properties of the loss that nobody knows beforehand.
    H_T and Q_T, the sums of the rounds' learning rates and of their squares, are those of the
    configuration's schedule.
    """
    settings = config.training
    rates = np.full(config.rounds, float(settings.learning_rate))
    if settings.schedule == "cosine":
        rates = rates * 0.5 * (1 + np.cos(math.pi * np.arange(config.rounds) / config.rounds))
    horizon, squares = float(rates.sum()), float((rates**2).sum())
    result = {"psi_min": psi_min, "sum_of_rates": horizon, "sum_of_squared_rates": squares}
    if psi_min > 0 and horizon > 0:
        result.update(factor_of_delta=1 / (psi_min * horizon),
                      factor_of_epsilon_squared=1 / psi_min**2,
                      factor_of_smoothness_and_noise=squares / (psi_min * horizon))
    return result


def _transfer(devices: Devices, routes: routing.Routing, levels: np.ndarray, cohort: int,
              full: int) -> Optional[Transfer]:
    known = ~np.isnan(devices.bandwidth)
    if not known.any():
        return None
    count, bandwidth = devices.count[known], devices.bandwidth[known]
    bits = 2 * 8 * routing.BYTES_PER_PARAMETER
    seconds = bits * routes.payload[levels[known]] / bandwidth
    clients = int(count.sum())
    cohort = min(cohort, clients)
    return Transfer(clients, float(np.average(seconds, weights=count)), float(seconds.max()),
                    expected_largest(seconds, count, cohort),
                    expected_largest(bits * full / bandwidth, count, cohort))


def expected_largest(values: np.ndarray, count: np.ndarray, draws: int) -> float:
    """The mean of the largest of `draws` draws without replacement from `count[i]` `values[i]`s."""
    order = np.argsort(values)
    below = np.cumsum(count[order]).astype(np.float64)
    taken = np.arange(draws)
    # P(all draws are among the n smallest) = prod_j (n - j) / (N - j).
    chance = np.prod(np.maximum(below[:, None] - taken, 0) / (below[-1] - taken), axis=1)
    return float(values[order] @ np.diff(chance, prepend=0))
