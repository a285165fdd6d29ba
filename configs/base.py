"""What every experiment's configuration holds, with the paper's values where the paper states them.

Values marked [open] are not in the paper; docs/architecture.md says where they come from.
"""

from __future__ import annotations

import ml_collections


def base_config() -> ml_collections.ConfigDict:
    """The paper's CIFAR-100 setting (4.1)."""
    config = ml_collections.ConfigDict()
    config.dataset = "cifar100"
    config.image_size = 32
    # Share of the training pictures kept from the clients (0: the data set's own rule); of these
    # the server takes `server_samples` for recalibration (0: a fifth) and validation the rest.
    config.held_out = 0.1
    config.server_samples = 0
    config.seed = 0
    config.rounds = 4000

    config.space = ml_collections.ConfigDict(dict(
        stem=64, bases=(128, 256, 512, 1024), depths=tuple(range(9)),
        widths=tuple(tenth / 10 for tenth in range(1, 11)),
        expansions=(0.10, 0.14, 0.18, 0.22, 0.25), strides=(1, 2, 2, 2), divisor=8))
    # A cache that comes with the package, or the path of a cache file.
    config.cache = "paper_56"

    config.population = ml_collections.ConfigDict(dict(
        num_clients=100, cohort_size=10,
        zipf_s=1.2, num_ranks=100,  # [open] number of ranks
        low=25e6, high=1500e6, cap=600e6,
        ranks_seed=807,  # [open] -1: derive the ranks from `seed`
        budgets="",  # explicit budgets such as "25e6:60,100e6:40" instead of Zipf ranks
        gamma=1.0, alpha_eff=0.45, min_samples=1))

    config.training = ml_collections.ConfigDict(dict(
        rule="full", batch_size=64, local_epochs=1,
        learning_rate=0.1, momentum=0.9, weight_decay=5e-4, clip_norm=10.0,  # [open]
        schedule="cosine", rho_kd=0.5, temperature=1.0, label_smoothing=0.0,  # [open]
        gradients="sum"))  # [open]

    config.augmentation = ml_collections.ConfigDict(dict(
        crop_padding=4, flip=True, randaugment_layers=2, randaugment_magnitude=6,
        mixup_alpha=0.2, cutmix_alpha=1.0))  # [open] strengths

    config.evaluation = ml_collections.ConfigDict(dict(
        every=50,
        # In MACs; empty: five spread over the cache.
        anchors=(25e6, 50e6, 229e6, 408e6, 596e6),
        batch_size=250, recalibrate=True))
    config.checkpoint_every = 10
    return config


def shrink(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """The same experiment in minutes on two cores: 30 clients, a network of 0.3M parameters.

    Without RandAugment and mixing, which so small a network does not learn under in so few rounds.
    """
    config.space.update(stem=16, bases=(16, 32, 64, 128), depths=(0, 1, 2),
                        widths=(0.25, 0.5, 0.75, 1.0), expansions=(0.25, 0.5))
    config.cache = "small_5"
    scale = (config.image_size / 16) ** 2  # budgets follow the MACs of the pictures' size
    counts = {0.7e6: 16, 1.3e6: 6, 2e6: 5, 3.5e6: 1, 6e6: 2}
    config.population.update(
        num_clients=30, cap=6e6 * scale, min_samples=2,
        budgets=",".join(f"{budget * scale:g}:{count}" for budget, count in counts.items()))
    config.rounds = 60
    config.training.update(batch_size=32, learning_rate=0.05)
    config.augmentation.update(randaugment_layers=0, mixup_alpha=0.0, cutmix_alpha=0.0)
    config.evaluation.update(every=10, anchors=())
    return config


def finish(config: ml_collections.ConfigDict, arg: str | None) -> ml_collections.ConfigDict:
    """Applies what follows the colon of --config: ":small", ":smoke" (two small rounds) or nothing.

    Raises:
      ValueError: it is something else.
    """
    if arg not in (None, "", "small", "smoke"):
        raise ValueError(f"unknown size {arg!r} after the colon of --config; there are: small, "
                         "smoke")
    if arg:
        shrink(config)
    if arg == "smoke":
        config.rounds = 2
        config.population.cohort_size = 4
        config.evaluation.every = 1
    return config
