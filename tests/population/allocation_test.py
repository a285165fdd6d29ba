"""Tests of feast_tf.population.allocation."""

import math

import numpy as np
import pytest

from feast_tf.population import allocation_weights
from feast_tf.population import alpha_for_effective
from feast_tf.population import effective_alpha


def test_weights_at_gamma_one_follow_the_capped_budgets():
    # Capped at 6: 1, 3, 6, 6 of 16.
    weights = allocation_weights(np.array([1.0, 3.0, 6.0, 90.0]), gamma=1, cap=6)
    assert weights.dtype == np.float64
    np.testing.assert_allclose(weights, [1 / 16, 3 / 16, 6 / 16, 6 / 16], rtol=1e-12)


def test_weights_at_other_gammas():
    budgets = np.array([1.0, 2.0, 5.0])
    weights = {
        gamma: allocation_weights(budgets, gamma=gamma, cap=math.inf) for gamma in (0, 2, 0.5, -1)
    }
    np.testing.assert_allclose(weights[0], [1 / 3, 1 / 3, 1 / 3], rtol=1e-12)
    np.testing.assert_allclose(weights[2], [1 / 30, 4 / 30, 25 / 30], rtol=1e-12)
    roots = np.array([1, math.sqrt(2), math.sqrt(5)])
    np.testing.assert_allclose(weights[0.5], roots / roots.sum(), rtol=1e-12)
    np.testing.assert_allclose(weights[-1], [10 / 17, 5 / 17, 2 / 17], rtol=1e-12)


def test_weights_do_not_overflow():
    # 10^(12 * 50) is far beyond float64; the ratio 2^50 is not.
    weights = allocation_weights(np.array([1e12, 2e12, 5e11]), gamma=50, cap=1e13)
    np.testing.assert_allclose(weights, [2.0**-50, 1, 2.0**-100], rtol=1e-9)
    assert abs(weights.sum() - 1) < 1e-12
    extreme = allocation_weights(np.array([1e-3, 1e12]), gamma=50, cap=math.inf)
    assert extreme.tolist() == [0, 1]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(budgets=[3.0, 0.0, -1.0]), "budget of client 1 must be positive MACs, not 0.0"),
        (dict(budgets=[3.0, 2.0, math.nan]), "budget of client 2 must be positive MACs, not nan"),
        (dict(budgets=[math.inf]), "budget of client 0 must be positive MACs, not inf"),
        (dict(budgets=[]), r"one entry for each client, not shape \(0,\)"),
        (dict(budgets=[[1.0, 2.0]]), r"one entry for each client, not shape \(1, 2\)"),
        (dict(gamma=math.nan), "gamma must be finite, not nan"),
        (dict(cap=0.0), "budget cap must be positive MACs, not 0.0"),
        (dict(cap=math.nan), "budget cap must be positive MACs, not nan"),
    ],
)
def test_weights_refuse(arguments, message):
    with pytest.raises(ValueError, match=message):
        allocation_weights(**{"budgets": [3.0, 2.0], "gamma": 1.0, "cap": 5.0, **arguments})


def test_effective_alpha_of_the_paper():
    assert effective_alpha(0.1, 450, 100) == pytest.approx(0.45, rel=1e-12)


def test_effective_alpha_is_the_mean_concentration_for_any_gamma():
    for gamma in (0, 1, 3):
        weights = allocation_weights(np.array([2.0, 7.0, 9.0, 30.0]), gamma=gamma, cap=20)
        mean = np.mean(0.2 * 50 * weights)
        assert effective_alpha(0.2, 50, 4) == pytest.approx(mean, rel=1e-12) == 2.5


def test_alpha_for_effective_is_the_inverse():
    # CINIC-10 with 9,000 samples a class needs a far smaller alpha for the same effect.
    assert alpha_for_effective(0.45, 9000, 100) == pytest.approx(0.005, rel=1e-12)
    assert effective_alpha(alpha_for_effective(0.3, 70, 11), 70, 11) == pytest.approx(0.3)


@pytest.mark.parametrize(
    "function, first", [(effective_alpha, "alpha"), (alpha_for_effective, "alpha_eff")]
)
def test_effective_alpha_refuses(function, first):
    with pytest.raises(ValueError, match=f"{first} must be positive, not 0"):
        function(0, 450, 100)
    with pytest.raises(ValueError, match="class_count must be positive, not -1"):
        function(0.1, -1, 100)
    with pytest.raises(ValueError, match="num_clients must be positive, not 0"):
        function(0.1, 450, 0)
