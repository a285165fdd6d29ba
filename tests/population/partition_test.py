"""Tests of feast_tf.population.partition."""

import time

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest
from scipy import stats

from feast_tf.population import dirichlet_partition
from feast_tf.population import partition as partition_lib


def _partition(labels, weights, *, alpha=0.1, min_samples=1, seed=0):
    return dirichlet_partition(
        labels, weights, alpha=alpha, min_samples=min_samples, rng=np.random.default_rng(seed)
    )


def _sizes(partition):
    return np.array([len(indices) for indices in partition])


def _class_counts(labels, partition):
    """Returns samples of each client and class, shape [num_clients, num_classes]."""
    return np.array([np.bincount(labels[i], minlength=labels.max() + 1) for i in partition])


@settings(max_examples=150, deadline=None)
@given(
    class_counts=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any),
    raw_weights=st.lists(st.sampled_from([0.0, 1e-12, 0.3, 1.0, 7.0]), min_size=1, max_size=12)
    .filter(any),
    log_alpha=st.floats(-12, 12),
    tightness=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
def test_true_partition_for_any_labels(class_counts, raw_weights, log_alpha, tightness, seed):
    labels = np.random.default_rng(seed).permutation(
        np.repeat(np.arange(len(class_counts)) * 3 - 4, class_counts)
    )
    weights = np.array(raw_weights) / sum(raw_weights)
    # From no minimum up to the largest that the samples allow.
    min_samples = int(tightness * (labels.size // weights.size))
    arguments = dict(alpha=10.0**log_alpha, min_samples=min_samples)
    partition = _partition(labels, weights, **arguments, seed=seed)
    assert len(partition) == weights.size
    np.testing.assert_array_equal(np.sort(np.concatenate(partition)), np.arange(labels.size))
    assert _sizes(partition).min() >= min_samples
    for indices in partition:
        assert indices.dtype == np.int64
        np.testing.assert_array_equal(indices, np.sort(indices))
    again = _partition(labels, weights, **arguments, seed=seed)
    for one, other in zip(partition, again):
        np.testing.assert_array_equal(one, other)


def test_order_of_the_samples_changes_no_class_count():
    labels = np.repeat(np.arange(4), [30, 7, 55, 108])
    weights = np.array([0.05, 0.15, 0.3, 0.5])
    mixed = np.random.default_rng(9).permutation(labels)
    # A minimum of 45 makes the filling up part of what is compared.
    sorted_counts = _class_counts(labels, _partition(labels, weights, min_samples=45))
    mixed_counts = _class_counts(mixed, _partition(mixed, weights, min_samples=45))
    np.testing.assert_array_equal(sorted_counts, mixed_counts)
    assert sorted_counts.sum(axis=1).min() == 45


def test_seed_changes_the_partition():
    labels = np.repeat(np.arange(4), 50)
    weights = np.array([0.2, 0.3, 0.5])
    one, other = (_class_counts(labels, _partition(labels, weights, seed=s)) for s in (1, 2))
    assert not np.array_equal(one, other)


def test_samples_of_a_class_are_shuffled():
    labels = np.zeros(1000, dtype=np.uint8)
    first = _partition(labels, np.array([0.5, 0.5]), alpha=1e6)[0]
    assert first.size in range(490, 511)
    assert 200 < np.count_nonzero(first < 500) < 300


def test_large_alpha_is_near_iid():
    labels = np.repeat(np.arange(10), 500)
    weights = np.linspace(1, 3, 20) / 40
    near_iid = _class_counts(labels, _partition(labels, weights, alpha=1e6))
    assert stats.chi2_contingency(near_iid)[1] > 0.01
    np.testing.assert_allclose(near_iid.sum(axis=1), 5000 * weights, atol=6)
    skewed = _class_counts(labels, _partition(labels, weights, alpha=0.01))
    assert stats.chi2_contingency(skewed)[1] < 1e-12


def test_small_alpha_concentrates_each_class_on_few_clients():
    labels = np.repeat(np.arange(60), 50)
    # The concentrations of a class add up to 0.01 * 50 = 0.5.
    counts = _class_counts(labels, _partition(labels, np.full(20, 0.05), alpha=0.01))
    largest = counts.max(axis=0) / 50
    assert 0.6 < largest.mean() < 0.9
    assert np.median(np.count_nonzero(counts, axis=0)) <= 4


def test_concentration_grows_with_the_class_as_in_the_paper():
    # For the share p of one of two equal clients, Var(p) = 1 / (4 * (alpha * N_k + 1)).
    for class_count in (40, 400):
        labels = np.repeat(np.arange(3000), class_count)
        counts = _class_counts(labels, _partition(labels, np.array([0.5, 0.5]), alpha=0.05))
        variance = np.var(counts[0] / class_count)
        assert variance == pytest.approx(1 / (4 * (0.05 * class_count + 1)), rel=0.08)


@pytest.mark.parametrize("alpha", [0.02, 1.0, 1e9])
def test_mean_share_is_the_weight_even_below_half_a_sample_of_a_class(alpha):
    labels = np.repeat(np.arange(10_000), 4)
    weights = np.array([0.03, 0.07, 0.4, 0.5])
    sizes = _sizes(_partition(labels, weights, alpha=alpha))
    np.testing.assert_allclose(sizes / labels.size, weights, rtol=0.12)


def test_gamma_zero_and_one_share_the_data_as_stated():
    labels = np.repeat(np.arange(100), 90)
    budgets = np.array([1.0, 2.0, 6.0])
    even = _sizes(_partition(labels, np.full(3, 1 / 3), alpha=1.0))
    by_budget = _sizes(_partition(labels, budgets / 9, alpha=1.0))
    # A client's size has a standard deviation of at most 47.
    np.testing.assert_allclose(even, 3000, atol=150)
    np.testing.assert_allclose(by_budget, [1000, 2000, 6000], atol=150)


def test_client_of_weight_zero_gets_the_minimum_only():
    labels = np.repeat(np.arange(5), 40)
    sizes = _sizes(_partition(labels, np.array([0.25, 0.0, 0.75]), min_samples=3))
    assert sizes[1] == 3


def test_one_client_gets_everything():
    (indices,) = _partition(np.array([4, 2, 4]), np.array([1.0]))
    assert indices.tolist() == [0, 1, 2]


def test_minimum_moves_only_what_is_missing():
    labels = np.repeat(np.arange(10), 100)
    weights = np.full(50, 0.02)
    before = _class_counts(labels, _partition(labels, weights, alpha=0.02, min_samples=0))
    after = _class_counts(labels, _partition(labels, weights, alpha=0.02, min_samples=10))
    missing = np.maximum(10 - before.sum(axis=1), 0)
    assert missing.sum() > 50
    np.testing.assert_array_equal(np.maximum(after - before, 0).sum(axis=1), missing)
    # Who neither misses samples nor is among the richest keeps exactly what it had.
    givers = np.flatnonzero((after < before).any(axis=1))
    untouched = np.setdiff1d(np.flatnonzero(missing == 0), givers)
    assert untouched.size
    np.testing.assert_array_equal(after[untouched], before[untouched])
    assert before.sum(axis=1)[untouched].max() <= after.sum(axis=1)[givers].min() + 1


def test_exact_fit_of_the_minimum():
    labels = np.repeat(np.arange(10), 100)
    assert set(_sizes(_partition(labels, np.full(100, 0.01), min_samples=10))) == {10}


def test_impossible_minimum_suggests_values_at_once():
    labels = np.repeat(np.arange(10), 100)
    start = time.monotonic()
    with pytest.raises(
        ValueError,
        match="min_samples=10 for each of 200 clients needs 2000 samples, but there are 1000: "
        "use min_samples <= 5 or num_clients <= 100",
    ):
        _partition(labels, np.full(200, 0.005), min_samples=10)
    assert time.monotonic() - start < 5
    # What it suggests works.
    assert _sizes(_partition(labels, np.full(200, 0.005), min_samples=5)).min() == 5


def test_a_million_samples_are_fast():
    labels = np.random.default_rng(0).integers(0, 3, 1_000_000)
    start = time.monotonic()
    sizes = _sizes(_partition(labels, np.full(1000, 0.001), alpha=1e-7, min_samples=100))
    assert time.monotonic() - start < 10
    assert (sizes.min(), sizes.sum()) == (100, 1_000_000)


@pytest.mark.parametrize(
    "offset, expected",
    [
        # Running sums 3.5, 5.6, 7.
        (0.0, [3, 2, 2]),
        (0.45, [3, 3, 1]),
        (0.6, [4, 2, 1]),
    ],
)
def test_rounding_cuts_the_shifted_running_sum(offset, expected):
    counts = partition_lib._round(np.array([0.5, 0.3, 0.2]), 7, offset=offset)
    assert counts.tolist() == expected


def test_rounding_adds_up_when_the_proportions_do_not():
    below_one, above_one = np.full(10, 0.1), np.array([1 + 1e-12, 0.0])
    assert np.cumsum(below_one)[-1] < 1
    assert partition_lib._round(below_one, 10, offset=0.0).sum() == 10
    assert partition_lib._round(above_one, 3, offset=1 - 1e-12).tolist() == [3, 0]


def test_samples_freed_are_random_and_shuffled_before_they_are_dealt_out():
    owners = np.repeat([0, 1], 40)
    partition_lib._fill_up(owners, 4, 20, np.random.default_rng(0))
    from_first = [np.count_nonzero(owners[:40] == client) for client in range(4)]
    from_second = [np.count_nonzero(owners[40:] == client) for client in range(4)]
    assert (from_first[:2], from_second[:2]) == ([20, 0], [0, 20])
    assert min(from_first[2:] + from_second[2:]) > 3
    # A donor gives a random one of its samples: here, half from each half of what it owned.
    assert 3 < np.count_nonzero(owners[:20] > 1) < 17


def test_the_richest_give_one_by_one():
    # 9 -> 7, then of the equals the first to 6, the other to 6, and the first again.
    taken = partition_lib._taken_from_richest(np.array([9, 2, 7, 1]), 5)
    assert taken.tolist() == [4, 0, 1, 0]


@pytest.mark.parametrize("scale", [1e-200, 1e-9, 1e-3])
def test_tiny_concentrations_leave_one_winner_in_proportion(scale):
    rng = np.random.default_rng(3)
    draws = np.array(
        [partition_lib._dirichlet(scale * np.array([1, 2, 3]), rng) for _ in range(3000)]
    )
    assert np.isfinite(draws).all()
    np.testing.assert_allclose(draws.sum(axis=1), 1, rtol=1e-9)
    assert np.median(draws.max(axis=1)) > 0.999
    np.testing.assert_allclose(draws.mean(axis=0), [1 / 6, 2 / 6, 3 / 6], atol=0.03)


def test_proportions_have_the_moments_of_a_dirichlet_distribution():
    rng = np.random.default_rng(3)
    concentration = np.array([0.2, 1.0, 2.8])
    draws = np.array([partition_lib._dirichlet(concentration, rng) for _ in range(20_000)])
    mean = concentration / 4
    np.testing.assert_allclose(draws.mean(axis=0), mean, rtol=0.03)
    np.testing.assert_allclose(draws.var(axis=0), mean * (1 - mean) / 5, rtol=0.05)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(labels=[[0], [1]]), r"labels must be one row .* not int64 of shape \(2, 1\)"),
        (dict(labels=[0.0, 1.0]), "labels must be one row .* not float64"),
        (dict(labels=np.zeros(0, int)), r"labels must be one row of at least one .* \(0,\)"),
        (dict(weights=[]), r"one entry for each client, not shape \(0,\)"),
        (dict(weights=[0.7, 0.5, -0.2]), "weight of client 2 must be at least 0, not -0.2"),
        (dict(weights=[0.5, np.nan]), "weight of client 1 must be at least 0, not nan"),
        (dict(weights=[0.5, 0.4]), "weights of the clients must sum to 1, not 0.9"),
        (dict(alpha=0.0), "alpha must be positive and finite, not 0.0"),
        (dict(alpha=float("inf")), "alpha must be positive and finite, not inf"),
        (dict(min_samples=-1), "min_samples must be at least 0, not -1"),
    ],
)
def test_partition_refuses(arguments, message):
    arguments = {"labels": [0, 1, 1, 0], "weights": [0.5, 0.5], **arguments}
    with pytest.raises(ValueError, match=message):
        _partition(**arguments)
