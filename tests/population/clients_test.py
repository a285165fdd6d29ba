"""Tests of feast_tf.population.clients."""

import numpy as np
import pytest

from feast_tf.population import build_population
from feast_tf.population import sample_cohort

_LABELS = np.repeat(np.arange(20), 150)


def test_population_of_the_paper_settings():
    clients = build_population(_LABELS, num_clients=100, seed=3)
    assert [client.id for client in clients] == list(range(100))
    everything = np.concatenate([client.indices for client in clients])
    np.testing.assert_array_equal(np.sort(everything), np.arange(3000))
    assert [client.num_samples for client in clients] == [len(c.indices) for c in clients]
    budgets = np.array([client.budget for client in clients])
    assert budgets.min() == 25e6
    # Ranks are whole: (b - 25M) / 1475M * 99.
    ranks = (budgets - 25e6) / 1475e6 * 99
    np.testing.assert_allclose(ranks, np.round(ranks), atol=1e-9)
    assert 10 < np.count_nonzero(ranks == 0) < 45


def test_budgets_decide_the_amount_of_data_up_to_the_cap():
    budgets = [10e6, 20e6, 50e6, 400e6]
    shared = dict(num_clients=4, cap=50e6, alpha=1e6, seed=1, budgets=budgets)
    clients = build_population(_LABELS, gamma=1.0, **shared)
    assert [client.budget for client in clients] == budgets
    sizes = [client.num_samples for client in clients]
    np.testing.assert_allclose(sizes, 3000 * np.array([1, 2, 5, 5]) / 13, atol=15)
    sizes = [client.num_samples for client in build_population(_LABELS, gamma=0.0, **shared)]
    np.testing.assert_allclose(sizes, 750, atol=15)


def test_ranks_can_be_given():
    clients = build_population(
        _LABELS, num_clients=3, seed=1, ranks=[2, 5, 1], num_ranks=5, low=10.0, high=50.0
    )
    assert [client.budget for client in clients] == [20.0, 50.0, 10.0]


def test_seed_decides_all_of_it():
    def summary(**arguments):
        clients = build_population(_LABELS, num_clients=30, **arguments)
        return [(client.budget, client.indices.tolist()) for client in clients]

    assert summary(seed=8) == summary(seed=8)
    budgets = [budget for budget, _ in summary(seed=8)]
    assert budgets != [budget for budget, _ in summary(seed=9)]
    # The partition has a stream of its own: it does not notice that no ranks were drawn.
    assert summary(seed=8, budgets=budgets) == summary(seed=8)
    assert summary(seed=8, budgets=budgets) != summary(seed=9, budgets=budgets)


def test_nobody_is_empty_by_default():
    sizes = [
        client.num_samples
        for client in build_population(_LABELS, num_clients=1000, alpha=1e-3, seed=0)
    ]
    assert min(sizes) == 1
    assert sum(sizes) == 3000


def test_minimum_is_passed_on():
    clients = build_population(_LABELS, num_clients=50, alpha=1e-3, min_samples=11, seed=0)
    assert min(client.num_samples for client in clients) == 11


def test_samples_of_a_client_cannot_be_changed():
    client = build_population(_LABELS, num_clients=5, seed=0)[2]
    with pytest.raises(ValueError, match="read-only"):
        client.indices[0] = 7
    with pytest.raises(AttributeError, match="cannot assign to field 'budget'"):
        client.budget = 1.0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(ranks=[1, 2, 3], budgets=[1.0, 2.0, 3.0]), "either ranks or budgets, not both"),
        (dict(ranks=[1, 2]), "budgets for 2 clients, not for 3"),
        (dict(budgets=[1.0, 2.0, 3.0, 4.0]), "budgets for 4 clients, not for 3"),
        (dict(budgets=[1.0, 0.0, 3.0]), "budget of client 1 must be positive MACs, not 0.0"),
        (dict(min_samples=1001), "use min_samples <= 1000 or num_clients <= 2"),
    ],
)
def test_population_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_population(_LABELS, num_clients=3, seed=0, **arguments)


def test_cohort_depends_on_seed_and_round_only():
    cohort = sample_cohort(100, 10, seed=0, round_num=1)
    assert cohort.dtype == np.int64
    assert cohort.tolist() == [8, 9, 10, 13, 34, 70, 71, 73, 77, 84]
    assert sample_cohort(100, 10, seed=0, round_num=2).tolist() != cohort.tolist()
    assert sample_cohort(100, 10, seed=1, round_num=1).tolist() != cohort.tolist()
    assert sample_cohort(100, 10, seed=0, round_num=1).tolist() == cohort.tolist()


def test_cohort_has_no_client_twice():
    assert sample_cohort(7, 7, seed=5, round_num=0).tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_cohorts_are_uniform():
    drawn = np.concatenate([sample_cohort(8, 3, seed=2, round_num=r) for r in range(4000)])
    np.testing.assert_allclose(np.bincount(drawn), 1500, rtol=0.1)


@pytest.mark.parametrize("cohort_size", [0, 6])
def test_cohort_refuses(cohort_size):
    with pytest.raises(ValueError, match=f"cohort_size must be in 1..5 clients, not {cohort_size}"):
        sample_cohort(5, cohort_size, seed=0, round_num=0)
