"""FEAST with another aggregator and a server optimiser in the place of the paper's."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from feast_tf import runtime
from feast_tf.aggregation import SlicedMeanFactory
from feast_tf.algorithms import build_feast
from feast_tf.routing import Routing
from feast_tf.space import SupernetSpec, VariantCache
from feast_tf.training import Augmentation, LocalTraining

SPEC = SupernetSpec(stem=2, bases=(4,), depths=(0, 1), widths=(0.5, 1.0), expansions=(0.5, 1.0),
                    strides=(1,), classes=3, image_size=4, divisor=2)
# The stem is whole in all envelopes, and the last level has a block that the others lack.
ROUTING = Routing(VariantCache(SPEC, [SPEC.variant(d=0, e=0.5, w=(1.0, 0.5)),
                                      SPEC.variant(d=0, e=0.5, w=1.0),
                                      SPEC.variant(d=1, e=1.0, w=1.0)]))
TRAINING = LocalTraining(rule="max", augmentation=Augmentation.none())


@pytest.fixture(scope="module", autouse=True)
def in_process():
    runtime.use("in_process")


def build(**replaced):
    return build_feast(ROUTING, TRAINING, total_rounds=4, **replaced)


def client(number: int, level: int, pictures: int) -> collections.OrderedDict:
    rng = np.random.default_rng(number)
    return collections.OrderedDict(
        client=np.int32(number), level=np.int32(level),
        data=tf.data.Dataset.from_tensor_slices(collections.OrderedDict(
            x=rng.integers(0, 256, [pictures, 4, 4, 3], np.uint8),
            y=rng.integers(0, 3, pictures, np.int32))).batch(4))


COHORT = [client(3, 0, 5), client(5, 2, 6), client(8, 1, 3)]


def weights_of(state):
    return [np.array(weight) for weight in state.global_model_weights.trainable]


@pytest.fixture(scope="module")
def after_one_round():
    process = build()
    return weights_of(process.next(process.initialize(), COHORT).state)


def test_stock_pieces_give_the_paper_s_round(after_one_round):
    process = build(
        aggregator=tff.aggregators.clipping_factory(
            1e6, SlicedMeanFactory(ROUTING.slices, tff.aggregators.SumFactory())),
        server_optimizer=tff.learning.optimizers.build_sgdm(1.0))
    output = process.next(process.initialize(), COHORT)
    for ours, expected in zip(weights_of(output.state), after_one_round):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
    assert output.metrics["aggregator"]["clipped_count"] == 0
    assert output.metrics["finalizer"]["update_non_finite"] == 0
    assert output.metrics["client_work"]["train"]["examples"] == 14


def test_server_optimizer_leaves_alone_what_no_envelope_of_the_cohort_holds(after_one_round):
    process = build(server_optimizer=tff.learning.optimizers.build_yogi(0.01))
    first = process.next(process.initialize(), COHORT).state
    second = process.next(first, [client(3, 0, 5)]).state
    changed = 0
    for place, (old, new) in enumerate(zip(weights_of(first), weights_of(second))):
        inside = ROUTING.layout.prefix(place, ROUTING.envelope_dims[0])
        changed += np.count_nonzero(old[inside] != new[inside])
        new[inside] = old[inside]
        assert old.tobytes() == new.tobytes(), ROUTING.slices.names[place]
    assert changed > 0.9 * ROUTING.payload[0]


@pytest.mark.parametrize("replaced, match", [
    (dict(aggregator=tff.aggregators.SumFactory()), "^aggregator must be a tff.aggregators.Weight"),
    (dict(server_optimizer=1.0), "^optimizer must be a tff.learning.optimizers.Optimizer"),
    (dict(aggregator=tff.aggregators.MeanFactory()), "^aggregator does not take slices: "),
], ids=["unweighted", "rate", "plain mean"])
def test_what_does_not_fit(replaced, match):
    with pytest.raises(TypeError, match=match):
        build(**replaced)
