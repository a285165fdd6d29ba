"""One experiment, built from its configuration: data, space, clients, routing, local training."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import numbers
import os
from typing import Optional, Union

import ml_collections
import numpy as np
import tensorflow as tf

from feast_tf import datasets, population, space
from feast_tf.routing import Routing
from feast_tf.seeding import stream
from feast_tf.training import SGD, Augmentation, LocalTraining


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything that stays the same over the rounds.

    Attributes:
      config: the configuration, locked.
      dataset: pictures of all splits.
      routing: envelopes of the variant cache.
      clients: the population.
      levels: int32[N], place of each client's largest affordable variant in the cache.
      training: the local training.
    """

    config: ml_collections.ConfigDict
    dataset: datasets.Dataset
    routing: Routing
    clients: tuple[population.Client, ...]
    levels: np.ndarray
    training: LocalTraining

    def cohort_ids(self, round_num: int) -> np.ndarray:
        """The clients of a round: a function of (seed, round), so a resumed run draws the same."""
        return population.sample_cohort(len(self.clients), self.config.population.cohort_size,
                                        seed=self.config.seed, round_num=round_num)

    def client_round(self, client_id: int, round_num: int) -> collections.OrderedDict:
        """What one client brings to a round, in the form of `algorithms.feast.client_type`.

        Its pictures are shuffled anew in every round and epoch, by (seed, round, client).
        """
        client, train = self.clients[client_id], self.dataset.train
        rng = stream(self.config.seed, "shuffle", round_num, client_id)
        order = np.concatenate([rng.permutation(client.indices)
                                for _ in range(self.config.training.local_epochs)])
        pictures = collections.OrderedDict(x=train.images[order], y=train.labels[order])
        data = tf.data.Dataset.from_tensor_slices(pictures).batch(self.config.training.batch_size)
        return collections.OrderedDict(client=np.int32(client_id),
                                       level=np.int32(self.levels[client_id]), data=data)

    def cohort(self, round_num: int) -> list[collections.OrderedDict]:
        """The clients' contributions to `next` of one round."""
        return [self.client_round(int(client), round_num) for client in self.cohort_ids(round_num)]


def build_space(config: ml_collections.ConfigDict, classes: int) -> space.VariantCache:
    """The variant cache of a configuration, for a number of classes."""
    spec = space.SupernetSpec(classes=classes, image_size=config.image_size,
                              **config.space.to_dict())
    return space.load_cache(config.cache, spec)


def build_clients(config: ml_collections.ConfigDict,
                  train: datasets.Split) -> tuple[population.Client, ...]:
    """The population of a configuration, sharing the training split."""
    settings = config.population
    budgets = population.draw_budgets(
        settings.num_clients, seed=config.seed, low=settings.low, high=settings.high,
        num_ranks=settings.num_ranks, zipf_s=settings.zipf_s, ranks_seed=settings.ranks_seed,
        mix=settings.budgets)
    # alpha_eff = alpha_data * N_k / N with the mean size of a class for N_k.
    class_size = len(train) / len(np.unique(train.labels))
    alpha = population.alpha_for_effective(settings.alpha_eff, class_size, settings.num_clients)
    return population.build_population(
        train.labels, num_clients=settings.num_clients, seed=config.seed, cap=settings.cap,
        gamma=settings.gamma, alpha=alpha, min_samples=settings.min_samples, budgets=budgets)


def build_training(config: ml_collections.ConfigDict, mean, std) -> LocalTraining:
    """The local training of a configuration."""
    settings = config.training
    optimizer = SGD(learning_rate=settings.learning_rate, momentum=settings.momentum,
                    weight_decay=settings.weight_decay, clip_norm=settings.clip_norm,
                    schedule=settings.schedule)
    return LocalTraining(
        rule=settings.rule, optimizer=optimizer, rho_kd=settings.rho_kd,
        temperature=settings.temperature, label_smoothing=settings.label_smoothing,
        gradients=settings.gradients, augmentation=Augmentation(**config.augmentation.to_dict()),
        mean=tuple(map(float, mean)), std=tuple(map(float, std)))


def check_config(config: ml_collections.ConfigDict) -> None:
    """Raises ValueError, naming the key, for values that no later step would explain."""
    for key in ("rounds", "checkpoint_every", "evaluation.every", "evaluation.batch_size",
                "training.batch_size", "training.local_epochs", "population.num_clients",
                "population.cohort_size"):
        value = functools.reduce(getattr, key.split("."), config)
        if value < 1:
            raise ValueError(f"{key} must be at least 1, but is {value}")
    for anchor in config.evaluation.anchors:
        if not (isinstance(anchor, numbers.Real) and 0 < anchor < math.inf):
            raise ValueError(f"evaluation.anchors must hold positive MACs, but holds {anchor!r}")
    if config.population.cohort_size > config.population.num_clients:
        raise ValueError(f"population.cohort_size ({config.population.cohort_size}) must not be "
                         f"larger than population.num_clients ({config.population.num_clients})")


def build_experiment(config: ml_collections.ConfigDict, *,
                     data_dir: Optional[Union[str, os.PathLike]] = None) -> Experiment:
    """Builds an experiment.

    Args:
      config: as `configs.base.base_config` describes it.
      data_dir: where the data set is, or is downloaded to.

    Raises:
      ValueError: a setting does not fit; the message names it. Errors of the data set as
        `datasets.load` describes them.
    """
    config = ml_collections.FrozenConfigDict(config)
    check_config(config)
    training = build_training(config, (0, 0, 0), (1, 1, 1))  # settings fail before data is read
    dataset = datasets.load(
        config.dataset, data_dir=data_dir, image_size=config.image_size,
        held_out=config.held_out or None, server_samples=config.server_samples or None,
        seed=config.seed)
    cache = build_space(config, len(dataset.classes))
    training = dataclasses.replace(training, mean=tuple(map(float, dataset.mean)),
                                   std=tuple(map(float, dataset.std)))
    clients = build_clients(config, dataset.train)
    levels = []
    for client in clients:
        try:
            levels.append(cache.level(client.budget))
        except ValueError as error:
            raise ValueError(f"client {client.id}: {error}") from error
    return Experiment(config, dataset, Routing(cache), clients, np.array(levels, np.int32),
                      training)
