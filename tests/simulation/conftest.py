"""An experiment so small that a round takes a tenth of a second."""

from __future__ import annotations

import types

import pytest

from configs import digits
from feast_tf.space import SupernetSpec, VariantCache

SPACE = dict(stem=8, bases=(8, 16), depths=(0, 1), widths=(0.5, 1.0), expansions=(0.5, 1.0),
             strides=(1, 2), divisor=8)


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory):
    """The path of a cache of four variants: 111184, 149152, 195232 and 296608 MACs."""
    spec = SupernetSpec(classes=10, image_size=8, **SPACE)
    path = tmp_path_factory.mktemp("cache") / "tiny.csv"
    VariantCache(spec, [spec.variant(d=0, e=0.5, w=0.5), spec.variant(d=0, e=1.0, w=1.0),
                        spec.variant(d=(1, 0), e=0.5, w=1.0),
                        spec.variant(d=1, e=1.0, w=1.0)]).save(path)
    return path


@pytest.fixture(scope="session")
def make_config(tiny_cache):
    """make_config(**{"training.rule": "min", ...}): digits at 8x8, 8 clients of 3 budgets."""

    def make(**changes):
        config = digits.get_config("smoke")
        config.space.update(SPACE)
        config.update(image_size=8, cache=str(tiny_cache), rounds=4)
        config.population.update(num_clients=8, cohort_size=3, budgets="120e3,200e3,400e3")
        for key, value in changes.items():
            section, _, name = key.rpartition(".")
            (config[section] if section else config)[name] = value
        return config

    return make


@pytest.fixture(scope="session")
def tiny(make_config):
    """What the rounds of all tests share, traced once: experiment, process and evaluator."""
    from feast_tf import runtime
    from feast_tf.algorithms import build_feast
    from feast_tf.simulation import build_experiment, make_evaluator

    runtime.use("in_process")
    experiment = build_experiment(make_config())
    process = build_feast(experiment.routing, experiment.training, total_rounds=4)
    return types.SimpleNamespace(experiment=experiment, process=process,
                                 evaluator=make_evaluator(experiment))
