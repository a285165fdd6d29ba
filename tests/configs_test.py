"""Tests of configs: every one loads in every size, and builds an experiment on real pictures."""

from __future__ import annotations

from pathlib import Path
import re

import ml_collections
import numpy as np
import pytest

from feast_tf.datasets import NAMES
from feast_tf.space import load_cache, paper_spec, SupernetSpec
from feast_tf.training import RULES
from tff_programs.flags import load_config

ROOT = Path(__file__).resolve().parents[1]
ARCHIVES = {"digits": None, "cifar10": "cifar-10-batches-py-subset.tar.gz",
            "cifar100": "cifar-100-python-subset.tar.gz", "cinic10": "CINIC-10-subset.tar.gz",
            "tinyimagenet": "tiny-imagenet-200-subset.zip"}
FILES = sorted(path.stem for path in (ROOT / "configs").glob("*.py")
               if path.stem not in ("__init__", "base"))


def load(name, size=""):
    return load_config(f"{ROOT / 'configs' / name}.py" + (f":{size}" if size else ""))


def test_there_is_one_for_every_data_set():
    assert set(NAMES) <= set(FILES) and set(ARCHIVES) == set(NAMES)
    for name in NAMES:
        assert load(name).dataset == name


@pytest.mark.parametrize("size", ["", "small", "smoke"])
@pytest.mark.parametrize("name", FILES)
def test_every_configuration_loads(name, size):
    config = load(name, size)
    assert isinstance(config, ml_collections.ConfigDict)
    assert config.training.rule == "full" in RULES
    spec = SupernetSpec(classes=10, image_size=config.image_size, **config.space.to_dict())
    cache = load_cache(config.cache, spec)
    small = bool(size) or name == "digits"
    assert len(cache) == (5 if small else 56)
    assert (spec == paper_spec(10)) == (not small)
    if size == "smoke":
        assert config.rounds == 2 and config.population.cohort_size == 4
        assert config.evaluation.every == 1
    elif small:
        assert config.rounds == 60 and config.population.num_clients == 30
    else:  # the paper's 4.1
        assert (config.rounds, config.population.num_clients, config.population.cohort_size) == (
            4000, 100, 10)


@pytest.mark.parametrize("name", FILES)
def test_an_unknown_size_is_refused(name):
    with pytest.raises(ValueError, match="unknown size 'big' after the colon of --config; there "
                                         "are: small, smoke"):
        load(name, "big")


@pytest.mark.parametrize("name", FILES)
def test_commands_in_a_docstring_name_the_configuration(name):
    text = (ROOT / "configs" / f"{name}.py").read_text()
    commands = re.findall(r"python -m tff_programs\.\w+.*", text.split('"""')[1])
    assert commands
    for command in commands:
        found = re.findall(r"--(?:dataset=|config=configs/)(\w+)", command)
        assert found in ([name], []) and (found or name == "digits")


def test_budgets_of_small_configurations_follow_the_size_of_the_pictures():
    digits, cifar = (load(name, "small") for name in ("digits", "cifar10"))
    read = lambda config: [part.split(":") for part in config.population.budgets.split(",")]
    for (budget, count), (larger, same) in zip(read(digits), read(cifar)):
        assert float(larger) == 4 * float(budget) and count == same
    assert (digits.population.cap, cifar.population.cap) == (6e6, 24e6)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """Where the read-only archives are unpacked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEAST_TF_DATA", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.mark.parametrize("name", NAMES)
def test_every_data_set_builds(name, shared_data, unpacked):
    from feast_tf.simulation import build_experiment

    archive = ARCHIVES[name] and shared_data / ARCHIVES[name]
    for size in ("", "small", "smoke"):
        experiment = build_experiment(load(name, size), data_dir=archive)
        config, data = experiment.config, experiment.dataset
        sizes = [client.num_samples for client in experiment.clients]
        # Every training picture is at one client, and nobody goes empty-handed.
        assert sum(sizes) == len(data.train) and min(sizes) >= config.population.min_samples
        assert len(np.unique(np.concatenate([c.indices for c in experiment.clients]))) == sum(sizes)
        assert data.train.images.shape[1:] == (config.image_size, config.image_size, 3)
        assert experiment.routing.cache.spec.classes == len(data.classes)
        assert len(np.unique(experiment.levels)) >= (5 if size or name == "digits" else 10)
        assert len(experiment.cohort(0)) == config.population.cohort_size


def test_cinic10s_own_split_is_held_out(shared_data, unpacked):
    from feast_tf.simulation import build_experiment

    archive = shared_data / ARCHIVES["cinic10"]
    config = load("cinic10", "smoke")
    data = build_experiment(config, data_dir=archive).dataset
    # 150 / 50 / 50 pictures of each of ten classes; a fifth of the valid split is the server's.
    assert (len(data.train), len(data.validation), len(data.server), len(data.test)) == (
        1500, 400, 100, 500)
    config.held_out = 0.1
    with pytest.raises(ValueError, match="held_out does not go with cinic10"):
        build_experiment(config, data_dir=archive)
