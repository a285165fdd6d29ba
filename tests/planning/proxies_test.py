"""Tests of feast_tf.planning.proxies."""

import numpy as np
import pytest

from feast_tf.planning.proxies import HETEROFL_RATES
from feast_tf.planning.proxies import SCALEFL_LEVELS
from feast_tf.planning.proxies import baseline_macs
from feast_tf.planning.proxies import largest_affordable
from feast_tf.planning.proxies import resnet18_macs


def test_heterofl_widths():
    # With the head (its inputs x 100 classes) these are the known figures of HeteroFL's levels.
    known = [2_276_480, 8_878_336, 35_058_176, 139_322_368, 555_468_800]
    heads = [32 * 100, 64 * 100, 128 * 100, 256 * 100, 512 * 100]
    assert [resnet18_macs(rate, 32) for rate in HETEROFL_RATES] == [
        macs - head for macs, head in zip(known, heads)]


@pytest.mark.parametrize("width, stages, macs", [
    # With the linear exits of 100 classes on the way.
    (0.4, 1, 23.73e6), (0.5, 2, 72.20e6), (0.7, 3, 202.95e6), (0.75, 4, 312.83e6),
    (1, 1, 152.77e6)])
def test_scalefl_levels(width, stages, macs):
    exits = sum(int(width * channels) * 100 for channels in (64, 128, 256, 512)[:stages])
    found = resnet18_macs(width, 32, stages=stages, rounding=int) + exits
    assert found == pytest.approx(macs, abs=5e3)


def test_larger_pictures_cost_in_proportion():
    assert resnet18_macs(1, 64) == 4 * resnet18_macs(1, 32)


def test_scalefl_levels_are_the_nearest_to_heterofls():
    targets = [resnet18_macs(rate, 32) for rate in HETEROFL_RATES[1:]]
    widths = np.round(np.arange(0.05, 1.01, 0.05), 2)
    for (width, stages), target in zip(SCALEFL_LEVELS, targets):
        costs = [resnet18_macs(w, 32, stages=stages, rounding=int) for w in widths]
        assert widths[np.argmin(np.abs(np.array(costs) - target))] == width


def test_largest_affordable():
    costs = largest_affordable([10, 20, 40], np.array([5.0, 10.0, 39.9, 40.0, 1e9]))
    assert costs.tolist() == [10, 10, 20, 40, 40]


def test_baselines_by_budget():
    found = baseline_macs(np.array([25e6, 150e6, 600e6]), 32)
    assert found["heterofl"].tolist() == [8_871_936, 139_296_768, 555_417_600]
    assert found["scalefl"].tolist() == [9_879_552, 149_491_904, 555_417_600]
    assert found["fiarse"].tolist() == [555_417_600] * 3  # dense whatever the budget
