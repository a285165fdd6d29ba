"""Tests of feast_tf.interop.trainer: the numbers of local_update, in NumPy."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

from feast_tf.datasets import Split
from feast_tf.interop.trainer import LocalTrainer
from feast_tf.routing import Routing
from feast_tf.seeding import stream
from feast_tf.space import SupernetSpec, VariantCache
from feast_tf.supernet import initial_weights
from feast_tf.training import SGD, Augmentation, LocalTraining, local_seed, local_update

SPEC = SupernetSpec(stem=4, bases=(4, 8), depths=(0, 1), widths=(0.5, 1.0), expansions=(0.5, 1.0),
                    strides=(1, 2), classes=3, image_size=8, divisor=2)
ROUTES = Routing(VariantCache(SPEC, [SPEC.smallest(), SPEC.largest()]))
TRAINING = LocalTraining(optimizer=SGD(learning_rate=0.05), augmentation=Augmentation(
    crop_padding=1, flip=True, randaugment_layers=0))


@functools.lru_cache(maxsize=None)
def weights():
    """Not at import: TensorFlow must not start while tests are collected."""
    return [weight.numpy() for weight in initial_weights(ROUTES.layout, 3)]


def pictures(count, size=8):
    rng = np.random.default_rng(count)
    return Split(rng.integers(0, 256, (count, size, size, 3), np.uint8),
                 rng.integers(0, 3, count).astype(np.int32))


@pytest.fixture(scope="module")
def trainer():
    return LocalTrainer(ROUTES, TRAINING, batch_size=2, local_epochs=2)


@pytest.mark.parametrize("level", [0, 1])
def test_it_is_local_update_on_shuffled_pictures(trainer, level):
    own, received = pictures(5), ROUTES.slices.cut(weights(), level)
    result = trainer.train(received, own, client=7, level=level, round_num=2, total_rounds=9,
                           seed=4)

    rng = stream(4, "shuffle", 2, 7)
    order = [*rng.permutation(5), *rng.permutation(5)]
    data = tf.data.Dataset.from_tensor_slices(
        {"x": own.images[order], "y": own.labels[order]}).batch(2)
    expected = tf.function(lambda: local_update(
        ROUTES.layout, TRAINING, tf.constant(ROUTES.variant_dims),
        [tf.constant(weight) for weight in received], tf.constant(level), data,
        local_seed(4, 2, 7), TRAINING.optimizer.rate(tf.constant(2), 9)))()
    assert result.num_examples == 10
    for ours, theirs in zip(result.update, expected.update):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    assert max(np.max(np.abs(part)) for part in result.update if part.size) > 1e-3
    loss, _, correct, examples = expected.metrics.numpy()[0]
    assert result.metrics["loss"] == pytest.approx(loss / examples)
    assert result.metrics["accuracy"] == pytest.approx(correct / examples)


def test_rounds_and_clients_draw_differently_and_repeatably(trainer):
    own, received = pictures(5), ROUTES.slices.cut(weights(), 1)
    first = lambda **who: trainer.train(
        received, own, level=1, total_rounds=9, **who).update[0].sum()
    base = first(client=7, round_num=2)
    assert first(client=7, round_num=2) == base
    assert first(client=8, round_num=2) != base
    assert first(client=7, round_num=2, seed=1) != base


def test_a_client_without_pictures_changes_nothing(trainer):
    received = ROUTES.slices.cut(weights(), 0)
    result = trainer.train(received, pictures(5).take(np.arange(0)), client=0, level=0, round_num=0,
                           total_rounds=9)
    assert result.num_examples == 0 and result.metrics == {"loss": 0, "accuracy": 0}
    assert not any(np.any(part) for part in result.update)


def test_what_does_not_fit_is_refused(trainer):
    train = lambda weights, own: trainer.train(weights, own, client=3, level=0, round_num=0,
                                               total_rounds=9)
    with pytest.raises(ValueError, match="client 3: the weights are not the slice of level 0"):
        train(weights(), pictures(5))
    with pytest.raises(ValueError, match="client 3: pictures must be of 8 x 8 pixels, but are"):
        train(ROUTES.slices.cut(weights(), 0), pictures(5, size=9))
    with pytest.raises(ValueError, match="batch_size must be at least 1, but is 0"):
        LocalTrainer(ROUTES, TRAINING, batch_size=0)
