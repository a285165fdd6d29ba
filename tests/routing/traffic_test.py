"""Tests of feast_tf.routing.traffic."""

import numpy as np
import pytest

from feast_tf.routing import reduction
from feast_tf.routing import training_macs
from feast_tf.routing import weighted_median


def test_reduction_by_hand():
    # Five clients receive 10, 10, 10, 40 and 120 of 120 parameters; nobody is on the second level.
    saved = reduction(np.array([10, 30, 40, 120]), np.array([3, 0, 1, 1]), 120)
    assert saved.mean_payload == 38
    assert saved.aggregate == pytest.approx(120 / 38)
    assert saved.mean == pytest.approx((3 * 12 + 3 + 1) / 5)
    assert (saved.median, saved.largest) == (12, 12)


@pytest.mark.parametrize("values, counts", [
    ([5, 1, 3], [1, 1, 1]), ([5, 1, 3, 9], [1, 1, 1, 1]), ([5, 1, 3], [2, 3, 1]), ([2, 7], [3, 3]),
    ([4], [6]), ([3, 1], [1, 4])])
def test_weighted_median_is_the_median(values, counts):
    values, counts = np.array(values, float), np.array(counts)
    assert weighted_median(values, counts) == np.median(np.repeat(values, counts))


def test_training_macs_by_hand():
    # 3 for forward and backward, 7 rounds of 2 epochs of a quarter of the clients.
    total = training_macs(np.array([10.0, 100.0]), np.array([5.0, 2.0]), rounds=7, epochs=2,
                          participation=0.25)
    assert total == 3 * 7 * 2 * 0.25 * (10 * 5 + 100 * 2)
