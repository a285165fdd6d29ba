"""Tests of feast_tf.datasets.sizes."""

import numpy as np
import pytest

from feast_tf.datasets import class_counts
from feast_tf.datasets import load
from feast_tf.datasets.splits import stratified_counts


@pytest.mark.parametrize("name, held_out, classes, each", [
    ("cifar100", None, 100, 450), ("cifar100", 0.2, 100, 400), ("cifar10", None, 10, 4500),
    ("cinic10", None, 10, 9000), ("tinyimagenet", 0.1, 200, 450)])
def test_counts_of_published_data_sets(name, held_out, classes, each):
    assert class_counts(name, held_out).tolist() == [each] * classes


@pytest.mark.parametrize("held_out", [None, 0.2, 0.37])
def test_digits_are_counted_as_they_are_loaded(held_out):
    train = load("digits", held_out=held_out, seed=3).train
    assert class_counts("digits", held_out).tolist() == np.bincount(train.labels).tolist()


def test_counts_that_do_not_divide():
    # Shares 1.6, 1.2 and 1.2 of 4: the largest remainder gets the missing one.
    assert stratified_counts(np.array([4, 3, 3]), 4).tolist() == [2, 1, 1]
    # An odd number of held-out pictures over a hundred classes: the lower classes lose one more.
    counts = class_counts("cifar100", 0.10046)
    assert counts.sum() == 50_000 - 5023 and counts[:23].tolist() == [449] * 23
    assert set(counts[23:]) == {450}


@pytest.mark.parametrize("name, held_out, message", [
    ("mnist", None, "data set 'mnist' is unknown; it must be one of digits, cifar10"),
    ("cifar10", 1.0, "held_out 1.0 must leave some of the 50000 train pictures")])
def test_bad_argument_raises(name, held_out, message):
    with pytest.raises(ValueError, match=message):
        class_counts(name, held_out)
