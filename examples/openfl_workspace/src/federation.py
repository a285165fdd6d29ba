"""FEAST in OpenFL: what the plan's data loader and task runner are."""

from __future__ import annotations

import functools

import numpy as np

from feast_tf import datasets, routing, space, training
from feast_tf.interop.openfl import FeastTaskRunner, PictureLoader

SPEC = space.SupernetSpec(
    stem=16, bases=(16, 32, 64, 128), depths=(0, 1, 2), widths=(0.25, 0.5, 0.75, 1.0),
    expansions=(0.25, 0.5), strides=(1, 2, 2, 2), classes=10, image_size=16)
ROUTES = routing.Routing(space.shipped_cache("small_5", SPEC))
TRAINING = training.LocalTraining(optimizer=training.SGD(learning_rate=0.1),
                                  augmentation=training.Augmentation.none())


@functools.lru_cache(maxsize=None)
def digits() -> datasets.Dataset:
    """The same split everywhere; collaborators read their own data here in a real federation."""
    return datasets.load("digits", image_size=SPEC.image_size, held_out=0.2, server_samples=160,
                         seed=0)


class ShareOfDigits(PictureLoader):
    """Every n-th training picture, as a line of plan/data.yaml says."""

    def __init__(self, data_path: str | None, **kwargs):
        budget, share = (data_path or "0 0/1").split()  # None where the plan is initialised
        place, count = map(int, share.split("/"))
        train = digits().train
        super().__init__(float(budget), train.take(np.arange(place, len(train), count)), place,
                         **kwargs)


class DigitsRunner(FeastTaskRunner):
    """The elastic network of this federation."""

    def __init__(self, data_loader: PictureLoader, total_rounds: int, **kwargs):
        super().__init__(data_loader, routing=ROUTES, training=TRAINING, total_rounds=total_rounds,
                         **kwargs)
