"""Tests of feast_tf.serving.calibration."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st
import numpy as np
import pytest
from sklearn.metrics import confusion_matrix as sklearn_confusion

from feast_tf.serving import ClassResult, confusion_matrix, reliability, worst_classes


def logits_of(probabilities):
    """Logits with these softmax probabilities, and a shift that must not matter."""
    return np.log(np.array(probabilities)) + np.arange(len(probabilities))[:, np.newaxis]


# Confidences 0.7, 0.55, 0.65, 0.9 and 0.35.
PREDICTIONS = logits_of([[0.2, 0.7, 0.1], [0.55, 0.25, 0.2], [0.1, 0.25, 0.65], [0.9, 0.06, 0.04],
                         [0.35, 0.33, 0.32]])
LABELS = np.array([1, 0, 0, 0, 2])  # right, right, wrong, right, wrong


def test_reliability_by_hand():
    found = reliability(PREDICTIONS, LABELS, bins=4)
    np.testing.assert_array_equal(found.count, [0, 1, 3, 1])
    np.testing.assert_allclose(found.confidence, [0, 0.35, 1.9 / 3, 0.9], rtol=1e-12)
    np.testing.assert_allclose(found.accuracy, [0, 0, 2 / 3, 1], rtol=1e-12)
    # (1 * 0.35 + 3 * (2 / 3 - 1.9 / 3) + 1 * 0.1) / 5
    assert found.error == pytest.approx(0.55 / 5, rel=1e-12)


def test_fifteen_bins_unless_told_otherwise():
    found = reliability(PREDICTIONS, LABELS)
    # Multiples of 1/15: 0.7 and 0.65 are in (10/15, 11/15] and (9/15, 10/15].
    np.testing.assert_array_equal(np.flatnonzero(found.count), [5, 8, 9, 10, 13])
    assert found.count.shape == (15,)


def test_a_confidence_on_an_edge_belongs_to_the_lower_bin():
    # Two equal logits: 0.5 exactly.
    np.testing.assert_array_equal(reliability(np.zeros([3, 2]), np.zeros(3), bins=4).count,
                                  [0, 3, 0, 0])
    sure = reliability(np.array([[2000.0, -3000.0]]), np.array([0]), bins=4)
    np.testing.assert_array_equal(sure.count, [0, 0, 0, 1])
    assert sure.error == 0


@pytest.mark.parametrize("logits", [np.zeros([0, 3]), np.array([[1, np.nan, 0]]),
                                    np.array([[1, np.inf, 0]])])
def test_what_is_no_prediction_is_refused(logits):
    with pytest.raises(ValueError, match="at least one prediction, and finite logits"):
        reliability(logits, np.zeros(len(logits), int))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 40), bins=st.integers(1, 20))
def test_the_error_is_at_least_that_of_one_bin(seed, count, bins):
    rng = np.random.default_rng(seed)
    logits, labels = rng.normal(0, 3, [count, 4]), rng.integers(0, 4, count)
    found, one = reliability(logits, labels, bins), reliability(logits, labels, 1)
    assert found.count.sum() == count
    assert one.error - 1e-12 <= found.error <= 1
    assert one.accuracy[0] == pytest.approx(np.mean(np.argmax(logits, axis=1) == labels))


def test_confusion_by_hand():
    np.testing.assert_array_equal(confusion_matrix(PREDICTIONS, LABELS),
                                  [[2, 0, 1], [0, 1, 0], [1, 0, 0]])


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_confusion_is_that_of_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    logits, labels = rng.normal(size=[30, 5]), rng.integers(0, 5, 30)
    np.testing.assert_array_equal(
        confusion_matrix(logits, labels),
        sklearn_confusion(labels, np.argmax(logits, axis=1), labels=range(5)))


# Accuracies 0.6, none, 0.25, 0.25, 1.
CONFUSION = np.array([[6, 1, 0, 3, 0], [0, 0, 0, 0, 0], [3, 0, 2, 1, 2], [0, 5, 1, 2, 0],
                      [0, 0, 0, 0, 7]])


def test_worst_classes_by_hand():
    assert worst_classes(CONFUSION, count=3, confusions=2) == [
        ClassResult(2, 8, 0.25, ((0, 0.375), (4, 0.25))),
        ClassResult(3, 8, 0.25, ((1, 0.625), (2, 0.125))),
        ClassResult(0, 10, 0.6, ((3, 0.3), (1, 0.1)))]


def test_all_classes_with_pictures():
    found = worst_classes(CONFUSION, count=9, confusions=9)
    assert [result.label for result in found] == [2, 3, 0, 4]
    assert found[0].confusions == ((0, 0.375), (4, 0.25), (3, 0.125))
    assert found[3].confusions == ()
