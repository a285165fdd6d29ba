"""Tests of feast_tf.serving.evaluation."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from feast_tf.routing import Routing
from feast_tf.serving import Evaluator, OperatingPoint, anchor_levels, population_accuracy
from feast_tf.space import SupernetSpec, VariantCache
from feast_tf.supernet import ElasticRunner, extract

SPEC = SupernetSpec(stem=4, bases=(4, 8), depths=(0, 1), widths=(0.5, 1.0), expansions=(0.5, 1.0),
                    strides=(1, 2), classes=5, image_size=4, divisor=2)
ROUTING = Routing(VariantCache(SPEC, [
    SPEC.variant(d=0, e=0.5, w=0.5),
    SPEC.variant(d=(0, 1), e=(1.0, 0.5), w=(0.5, 1.0, 0.5)),
    SPEC.variant(d=1, e=1.0, w=1.0),
]))
DIMS = ROUTING.cache.dims
MEAN, STD = (0.1, 0.2, 0.3), (0.5, 0.4, 0.25)


def random_pictures(seed, count):
    return np.random.default_rng(seed).integers(0, 256, (count, 4, 4, 3), np.uint8)


@pytest.fixture(scope="module")
def weights():
    rng = np.random.default_rng(7)
    return [np.float32((p.kind == "gamma") + rng.normal(0, 0.5, p.shape))
            for p in ROUTING.layout.parameters]


@pytest.fixture(scope="module")
def evaluator():
    return Evaluator(ROUTING, random_pictures(1, 23), mean=MEAN, std=STD, batch_size=10)


def flat(moments):
    return np.concatenate([np.ravel(part) for pair in moments for part in pair])


class StubRunner:
    """Guesses the class that a picture's first pixel says, and keeps what it was asked."""

    def __init__(self):
        self.recalibrated, self.moments = [], []

    def recalibrate(self, weights, dims, batches):
        self.recalibrated.append([len(batch) for batch in batches])
        return [f"moments {len(self.recalibrated)}"]

    def logits(self, weights, dims, moments, images):
        self.moments.append(moments[0])
        guess = np.rint((images[:, 0, 0, 0] * STD[0] + MEAN[0]) * 255).astype(int)
        return tf.one_hot(guess, SPEC.classes)


def stubbed(**options):
    evaluator = Evaluator(ROUTING, random_pictures(1, 5), mean=MEAN, std=STD, batch_size=2,
                          **options)
    evaluator._runner = StubRunner()
    return evaluator, evaluator._runner


GUESSES = np.zeros((5, 4, 4, 3), np.uint8)
GUESSES[:, 0, 0, 0] = [3, 0, 4, 1, 2]


def test_accuracy_by_hand():
    evaluator, runner = stubbed()
    # Right: the first, the fourth and the fifth, which are in three batches.
    assert evaluator.accuracy([], DIMS[0], GUESSES, np.array([3, 1, 2, 1, 2])) == 3 / 5
    assert evaluator.accuracy([], DIMS[0], GUESSES[:3], np.array([4, 0, 1])) == 1 / 3
    assert evaluator.accuracy([], DIMS[0], GUESSES, np.array([0, 1, 2, 3, 4])) == 0


def test_an_operating_point_is_recalibrated_once_on_the_server_pictures():
    evaluator, runner = stubbed()
    evaluator.operating_points([], [2, 0], GUESSES, np.zeros(5, np.int32), "test")
    assert runner.recalibrated == [[2, 2, 1]] * 2
    assert runner.moments == ["moments 1"] * 3 + ["moments 2"] * 3


def test_without_recalibration_a_batch_has_its_own_moments():
    evaluator, runner = stubbed(recalibrate=False)
    evaluator.accuracy([], DIMS[0], GUESSES, np.zeros(5, np.int32))
    assert runner.recalibrated == [[2], [2], [1]]
    assert runner.moments == ["moments 1", "moments 2", "moments 3"]


def test_normalisation_by_hand():
    evaluator, _ = stubbed()
    images = np.zeros((3, 4, 4, 3), np.uint8)
    images[2, 1, 1] = (255, 51, 102)
    batches = list(evaluator.normalized_batches(images))
    assert [len(batch) for batch in batches] == [2, 1]
    assert batches[1].dtype == np.float32
    np.testing.assert_allclose(batches[1][0, 1, 1], [1.8, 0.0, 0.4], atol=1e-6)
    np.testing.assert_allclose(batches[1][0, 0, 0], [-0.2, -0.5, -1.2], atol=1e-6)


@pytest.mark.parametrize("level", [0, 1])
def test_an_operating_point_equals_the_extracted_network(evaluator, weights, level):
    images = random_pictures(2, 60)
    moments = evaluator.moments(weights, DIMS[level])
    network = extract(SPEC, weights, ROUTING.cache.variants[level], moments)
    guesses = network.predict(np.concatenate(list(evaluator.normalized_batches(images))),
                              verbose=0).argmax(-1)
    labels = np.where(np.arange(60) < 41, guesses, (guesses + 1) % 5)
    (point,) = evaluator.operating_points(weights, [level], images, labels, "validation")
    assert point == OperatingPoint(
        variant=ROUTING.cache.variants[level], macs=int(ROUTING.cache.macs[level]),
        params=network.count_params() - sum(int(np.prod(w.shape))
                                            for w in network.non_trainable_weights),
        accuracy=41 / 60, split="validation")


def test_points_come_in_the_given_order_and_are_reported_as_they_are_done(evaluator, weights):
    seen = []
    points = evaluator.operating_points(weights, [2, 0, 1], random_pictures(2, 30),
                                        np.arange(30) % 5, "test", on_point=seen.append)
    assert [point.variant for point in points] == [ROUTING.cache.variants[k] for k in (2, 0, 1)]
    assert seen == points
    assert points[1].macs < points[2].macs < points[0].macs
    assert points[1].params < points[2].params < points[0].params


def test_every_variant_has_logits_of_its_own(evaluator, weights):
    images = np.concatenate(list(evaluator.normalized_batches(random_pictures(3, 6))))
    logits = [evaluator._runner.logits(weights, dims, evaluator.moments(weights, dims), images)
              for dims in DIMS]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(logits[one] - logits[other]).max() > 0.1


def test_moments_are_those_of_the_server_pictures(evaluator, weights):
    expected = ElasticRunner(ROUTING.layout).recalibrate(
        weights, DIMS[1], [np.float32((random_pictures(1, 23) / 255 - MEAN) / STD)])
    before = flat(evaluator.moments(weights, DIMS[1]))
    # Averages of batches of 10, 10 and 3, so only the means of the first layer must agree.
    np.testing.assert_allclose(evaluator.moments(weights, DIMS[1])[0][0], expected[0][0],
                               rtol=1e-4, atol=1e-5)
    evaluator.operating_points(weights, [1], random_pictures(5, 17), np.zeros(17), "test")
    assert flat(evaluator.moments(tuple(weights), DIMS[1])).tobytes() == before.tobytes()
    other = Evaluator(ROUTING, random_pictures(4, 23), mean=MEAN, std=STD, batch_size=10)
    assert not np.allclose(flat(other.moments(weights, DIMS[1])), before, rtol=1e-3)


def test_only_without_recalibration_does_batching_matter(evaluator, weights, monkeypatch):
    images, labels = random_pictures(6, 40), np.random.default_rng(6).integers(0, 5, 40)
    server = evaluator.moments(weights, DIMS[2])
    monkeypatch.setattr(evaluator, "moments", lambda *_: server)

    def accuracies(recalibrate):
        monkeypatch.setattr(evaluator, "recalibrate", recalibrate)
        found = set()
        for batch_size in (1, 3, 40):
            monkeypatch.setattr(evaluator, "batch_size", batch_size)
            found.add(evaluator.accuracy(weights, DIMS[2], images, labels))
        return found

    assert len(accuracies(True)) == 1
    assert len(accuracies(False)) > 1


def test_one_graph_serves_all_variants(evaluator, weights):
    evaluator.operating_points(weights, [0, 1, 2], random_pictures(2, 25), np.zeros(25), "test")
    assert evaluator._runner._record.experimental_get_tracing_count() == 1
    assert evaluator._runner._predict.experimental_get_tracing_count() == 1


def test_accuracy_of_nothing_is_refused(evaluator, weights):
    with pytest.raises(ValueError, match="an evaluation needs at least one picture"):
        evaluator.accuracy(weights, DIMS[0], random_pictures(1, 0), np.zeros(0, np.int32))


def test_population_accuracy_by_hand():
    # Two clients at 0.9, one at 0.25, three at 0.5.
    assert population_accuracy([2, 0, 1, 2, 1, 1], [0.25, 0.5, 0.9]) == pytest.approx(3.55 / 6)
    assert population_accuracy(np.array([1], np.int32), (0.25, 0.5, 0.9)) == 0.5
    with pytest.raises(ValueError, match="the population is empty"):
        population_accuracy([], [0.5])


MACS = np.array([10, 20, 40, 70, 110, 160, 220], np.int64)


@pytest.mark.parametrize("anchors, expected", [
    ((), [0, 2, 3, 4, 6]),  # 0, 1.5, 3, 4.5, 6 to the nearest even
    ((40,), [2]),
    ((220.0, 10.0), [0, 6]),  # ascending, whatever the order
    ((31, 29), [1, 2]),
    ((30,), [1]),  # the cheaper of two at the same distance
    ((1, 2, 1e12), [0, 6]),  # each once
])
def test_anchors_by_hand(anchors, expected):
    levels = anchor_levels(MACS, anchors)
    assert levels == expected and all(type(level) is int for level in levels)


@pytest.mark.parametrize("count, expected", [(1, [0]), (2, [0, 1]), (5, [0, 1, 2, 3, 4]),
                                             (56, [0, 14, 28, 41, 55])])
def test_anchors_of_small_and_large_caches(count, expected):
    assert anchor_levels(np.arange(1, count + 1), ()) == expected
