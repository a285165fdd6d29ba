"""Tests of feast_tf.simulation.measured."""

from __future__ import annotations

import numpy as np
import pytest

from feast_tf.serving import confusion_matrix, reliability
from feast_tf.simulation import StoredRun, measure_points, measured
from feast_tf.space import costs, layout_of


@pytest.fixture(scope="module")
def stored(tiny):
    rng = np.random.default_rng(2)  # as they are initialised, all networks guess one class
    weights = tuple(np.float32((p.kind == "gamma") + rng.normal(0, 0.5, p.shape))
                    for p in tiny.experiment.routing.layout.parameters)
    return StoredRun(tiny.experiment, weights, 3, False, "the third round")


@pytest.fixture(scope="module")
def evaluation(stored):
    return measure_points(stored, uncached=3, seed=5)


@pytest.fixture
def traced(monkeypatch, tiny):
    """An evaluator whose graphs are there already."""
    monkeypatch.setattr(measured, "make_evaluator", lambda experiment: tiny.evaluator)


def test_cached_points_are_those_of_the_run(stored, tiny, evaluation):
    test = tiny.experiment.dataset.test
    expected = tiny.evaluator.operating_points(stored.weights, range(4), test.images, test.labels,
                                               "test")
    assert [cached.point for cached in evaluation.cached] == expected
    assert len({point.accuracy for point in expected}) > 1


def test_who_is_served_what(tiny, evaluation):
    levels, accuracies = tiny.experiment.levels, [m.point.accuracy for m in evaluation.cached]
    assert [cached.clients for cached in evaluation.cached] == [
        list(levels).count(level) for level in range(4)]
    assert evaluation.population_accuracy == pytest.approx(
        sum(accuracies[level] for level in levels) / 8)


def test_uncached_points_against_the_curve(stored, tiny, evaluation):
    spec, cache = tiny.experiment.routing.cache.spec, tiny.experiment.routing.cache
    assert len(evaluation.uncached) == 3
    for uncached, gap in zip(evaluation.uncached, evaluation.gap.gap):
        point = uncached.point
        assert point.variant not in cache.variants and uncached.clients is None
        assert point.macs == costs.macs(spec, point.variant)
        assert point.params == costs.params(spec, point.variant)
        above = int(np.searchsorted(cache.macs, point.macs))
        (low, high), (left, right) = cache.macs[above - 1: above + 1], [
            cached.point.accuracy for cached in evaluation.cached[above - 1: above + 1]]
        share = (point.macs - low) / (high - low)
        assert gap == pytest.approx(point.accuracy - (1 - share) * left - share * right)
    assert (evaluation.draw, evaluation.seed) == ("random", 5)


def test_calibration_and_confusions_are_those_of_the_logits(stored, tiny, evaluation):
    test, found = tiny.experiment.dataset.test, evaluation.uncached[1]
    dims = layout_of(tiny.experiment.routing.cache.spec).dims(found.point.variant)
    logits = tiny.evaluator.logits(stored.weights, dims, test.images)
    assert found.reliability.error == reliability(logits, test.labels).error
    np.testing.assert_array_equal(found.confusion, confusion_matrix(logits, test.labels))
    assert np.trace(found.confusion) / len(test) == found.point.accuracy


def test_the_same_call_gives_the_same_numbers(stored, traced, evaluation):
    again = measure_points(stored, uncached=3, seed=5)
    assert [m.point for m in again.uncached] == [m.point for m in evaluation.uncached]
    assert again.gap.mean_absolute == evaluation.gap.mean_absolute
    other = measure_points(stored, uncached=3, seed=6)
    assert {m.point.variant for m in other.uncached} != {m.point.variant
                                                         for m in evaluation.uncached}


def test_the_validation_split_and_no_uncached_variants(stored, traced, tiny):
    calls = []
    found = measure_points(stored, split="validation", on_variants=calls.append,
                           on_point=lambda: calls.append("point"))
    assert calls == [4, "point", "point", "point", "point"]
    assert found.gap is None and found.uncached == ()
    validation = tiny.experiment.dataset.validation
    assert {m.point.split for m in found.cached} == {"validation"}
    assert found.cached[2].confusion.sum() == len(validation)
    assert found.cached[2].point.accuracy == tiny.evaluator.accuracy(
        stored.weights, tiny.experiment.routing.cache.dims[2], validation.images, validation.labels)


def test_the_fittest_instead_of_random_ones(stored, traced):
    found = measure_points(stored, uncached=4, draw="fittest")
    assert 0 < len(found.uncached) <= 4 and len(found.gap.gap) == len(found.uncached)


@pytest.mark.parametrize("arguments, message", [
    (dict(split="train"), "split must be one of test, validation, but is 'train'"),
    (dict(draw="best"), "draw must be one of random, fittest, but is 'best'"),
    (dict(uncached=-1), "uncached must not be negative, but is -1"),
    (dict(uncached=500), "500 uncached variants were asked for, but the space has"),
])
def test_arguments_that_do_not_fit(stored, arguments, message):
    with pytest.raises(ValueError, match=message):
        measure_points(stored, **arguments)


def test_diverged_weights_are_named(stored, traced, tiny):
    weights = [np.full_like(weight, np.nan) for weight in stored.weights]
    with pytest.raises(ValueError, match=r"d=0,0 .*: the logits are not finite; the run has"):
        measure_points(StoredRun(tiny.experiment, weights, 1, True, ""))
