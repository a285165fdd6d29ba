"""Tests of feast_tf.simulation.experiment."""

from __future__ import annotations

import collections
import dataclasses
import math

import numpy as np
import pytest
import tensorflow as tf

from feast_tf.algorithms import client_type
from feast_tf.population import sample_cohort
from feast_tf.simulation import build_experiment, make_evaluator


def with_config(experiment, config):
    return dataclasses.replace(experiment, config=config)


def pictures(contribution):
    batches = list(contribution["data"].as_numpy_iterator())
    return (np.concatenate([batch["x"] for batch in batches]),
            np.concatenate([batch["y"] for batch in batches]))


def rows(images):
    return sorted(image.tobytes() for image in images)


def test_a_cohort_is_a_function_of_seed_and_round(tiny, make_config):
    experiment = tiny.experiment
    cohorts = [experiment.cohort_ids(round_num).tolist() for round_num in range(8)]
    assert cohorts == [experiment.cohort_ids(round_num).tolist() for round_num in range(8)]
    assert cohorts[5] == sample_cohort(8, 3, seed=0, round_num=5).tolist()
    assert len(set(map(tuple, cohorts))) > 4
    other = with_config(experiment, make_config(seed=1))
    assert cohorts != [other.cohort_ids(round_num).tolist() for round_num in range(8)]
    members = experiment.cohort(5)
    assert [int(member["client"]) for member in members] == cohorts[5]


def test_a_contribution_has_the_type_of_the_process(tiny):
    member = tiny.experiment.client_round(6, 2)
    assert member["client"].dtype == member["level"].dtype == np.int32
    assert member["client"] == 6 and member["level"] == tiny.experiment.levels[6]
    assert member["data"].element_spec == collections.OrderedDict(
        x=tf.TensorSpec([None, 8, 8, 3], tf.uint8), y=tf.TensorSpec([None], tf.int32))
    assert list(member) == ["client", "level", "data"]
    assert str(client_type(tiny.experiment.routing)) == (
        "<client=int32,level=int32,data=<x=uint8[?,8,8,3],y=int32[?]>*>")


def test_pictures_are_shuffled_by_seed_round_client_and_epoch(tiny, make_config):
    experiment = with_config(tiny.experiment, make_config(**{"training.local_epochs": 2}))
    client = experiment.clients[3]
    count, train = client.num_samples, experiment.dataset.train
    own = rows(train.images[client.indices])
    images, labels = pictures(experiment.client_round(3, 7))
    assert len(images) == 2 * count
    assert rows(images[:count]) == rows(images[count:]) == own
    assert not np.array_equal(images[:count], images[count:])
    label_of = dict(zip((image.tobytes() for image in train.images), train.labels))
    assert [label_of[image.tobytes()] for image in images] == labels.tolist()

    again, _ = pictures(experiment.client_round(3, 7))
    assert np.array_equal(again, images)
    for other in (experiment.client_round(3, 8),
                  with_config(experiment, make_config(**{"training.local_epochs": 2, "seed": 1}))
                  .client_round(3, 7)):
        found, _ = pictures(other)
        assert rows(found) == rows(images) and not np.array_equal(found, images)
    # Two clients with the same pictures shuffle them differently.
    twins = dataclasses.replace(experiment, clients=(client,) * 8)
    assert not np.array_equal(pictures(twins.client_round(4, 7))[0], images)


def test_batches_have_the_configured_size_and_nothing_is_dropped(tiny, make_config):
    experiment = with_config(tiny.experiment, make_config(**{"training.batch_size": 7}))
    sizes = [len(batch["y"]) for batch in experiment.client_round(0, 0)["data"]]
    assert sum(sizes) == experiment.clients[0].num_samples
    assert set(sizes[:-1]) == {7} and 1 <= sizes[-1] <= 7


def test_a_client_without_pictures_brings_an_empty_data_set(tiny):
    empty = dataclasses.replace(tiny.experiment.clients[0], indices=np.zeros(0, np.int64))
    experiment = dataclasses.replace(tiny.experiment, clients=(empty,) * 8)
    member = experiment.client_round(0, 0)
    assert list(member["data"]) == []
    assert member["data"].element_spec["x"].shape == [None, 8, 8, 3]


def test_clients_are_served_their_largest_affordable_variant(tiny):
    experiment = tiny.experiment
    budgets = [client.budget for client in experiment.clients]
    assert sorted(set(budgets)) == [120e3, 200e3, 400e3]
    level_of = {120e3: 0, 200e3: 2, 400e3: 3}  # of 111184, 149152, 195232 and 296608 MACs
    assert experiment.levels.tolist() == [level_of[budget] for budget in budgets]
    assert experiment.levels.dtype == np.int32


def test_an_experiment_is_a_function_of_its_configuration(tiny, make_config):
    again = build_experiment(make_config())
    assert again.config.to_dict() == tiny.experiment.config.to_dict()
    for one, other in zip(again.clients, tiny.experiment.clients):
        assert one.budget == other.budget and np.array_equal(one.indices, other.indices)
    other = build_experiment(make_config(seed=5))
    assert not all(np.array_equal(one.indices, two.indices)
                   for one, two in zip(other.clients, tiny.experiment.clients))


def test_normalisation_is_that_of_the_training_pictures(tiny):
    dataset, training = tiny.experiment.dataset, tiny.experiment.training
    scaled = dataset.train.images / 255
    np.testing.assert_allclose(training.mean, scaled.mean(axis=(0, 1, 2)), rtol=1e-5)
    np.testing.assert_allclose(training.std, scaled.std(axis=(0, 1, 2)), rtol=1e-5)
    assert tiny.evaluator._mean.tolist() == np.float32(training.mean).tolist()


def test_recalibration_sees_the_server_pictures_only(tiny):
    experiment = tiny.experiment
    weights = tiny.process.initialize().global_model_weights.trainable
    dims = experiment.routing.cache.dims[1]
    noise = lambda split: dataclasses.replace(
        split, images=np.random.default_rng(1).integers(0, 256, split.images.shape, np.uint8))

    def moments(**splits):
        dataset = dataclasses.replace(experiment.dataset, **splits)
        evaluator = make_evaluator(dataclasses.replace(experiment, dataset=dataset))
        return np.concatenate([np.ravel(part) for pair in evaluator.moments(weights, dims)
                               for part in pair])

    expected, data = moments(), experiment.dataset
    unseen = moments(validation=noise(data.validation), test=noise(data.test))
    assert unseen.tobytes() == expected.tobytes()
    assert not np.allclose(moments(server=noise(data.server)), expected, rtol=0.01)


BAD = {
    "rounds": 0, "checkpoint_every": -1, "evaluation.every": 0, "evaluation.batch_size": 0,
    "training.batch_size": 0, "training.local_epochs": 0, "population.num_clients": 0,
    "population.cohort_size": 9, "evaluation.anchors": ("a",), "training.rule": "maximum",
    "training.rho_kd": 1.5, "training.temperature": 0.0, "training.label_smoothing": 1.0,
    "training.gradients": "max", "training.learning_rate": math.nan, "training.momentum": 1.0,
    "training.weight_decay": -0.1, "training.clip_norm": -1.0, "training.schedule": "linear",
    "augmentation.crop_padding": -1, "augmentation.mixup_alpha": -0.5,
    "augmentation.cutmix_alpha": math.inf, "augmentation.randaugment_magnitude": 11,
    "held_out": 1.5, "server_samples": 280, "image_size": 7, "cache": "big_5", "space.stem": 0,
    "space.bases": (8, 0), "space.depths": (), "space.widths": (0.5, 1.2),
    "space.expansions": (0.0,), "space.strides": (2,), "space.divisor": 0,
    "population.gamma": math.nan, "population.cap": 0.0, "population.alpha_eff": 0.0,
    "population.min_samples": 1000, "population.budgets": "120e3:x",
}


@pytest.mark.parametrize("key", BAD)
def test_a_bad_setting_is_one_line_that_names_it(make_config, key):
    with pytest.raises(ValueError) as error:
        build_experiment(make_config(**{key: BAD[key]}))
    message = str(error.value)
    assert key.rpartition(".")[2] in message and "\n" not in message


@pytest.mark.parametrize("key", ["evaluation.anchors", "training.rule", "rounds",
                                 "augmentation.crop_padding"])
def test_settings_are_checked_before_data_are_read(make_config, key, tmp_path):
    with pytest.raises(ValueError, match=key.rpartition(".")[2]):
        build_experiment(make_config(**{key: BAD[key], "dataset": "cifar10"}),
                         data_dir=tmp_path / "missing")


@pytest.mark.parametrize("anchor", [0.0, -1.0, math.nan, math.inf])
def test_anchors_are_positive_numbers(make_config, anchor):
    with pytest.raises(ValueError, match="evaluation.anchors must hold positive MACs"):
        build_experiment(make_config(**{"evaluation.anchors": (1e5, anchor)}))


def test_a_budget_that_affords_nothing_names_the_client(make_config):
    with pytest.raises(ValueError, match=r"client \d: a budget of 100,000 MACs affords no variant"):
        build_experiment(make_config(**{"population.budgets": "100e3,400e3"}))


def test_the_configuration_cannot_be_changed_afterwards(tiny):
    with pytest.raises(AttributeError):
        tiny.experiment.config.rounds = 9
