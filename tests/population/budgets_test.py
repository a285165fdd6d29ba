"""Tests of feast_tf.population.budgets."""

import json
import pathlib

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from feast_tf.population import bounded_zipf
from feast_tf.population import bounded_zipf_counts
from feast_tf.population import budget_counts
from feast_tf.population import budgets_from_ranks
from feast_tf.population import draw_budgets
from feast_tf.population import parse_budgets
from feast_tf.seeding import stream

_REFERENCE = (
    pathlib.Path(__file__).resolve().parents[3] / "shared" / "reference" / "population_100.json"
)


def _paper_ranks():
    return bounded_zipf(100, num_ranks=100, s=1.2, rng=np.random.default_rng(807))


def test_zipf_gives_the_ranks_of_the_reference_population():
    ranks = _paper_ranks()
    assert ranks.dtype == np.int64
    assert ranks[:12].tolist() == [11, 32, 3, 20, 4, 89, 16, 4, 16, 43, 7, 2]
    assert (ranks.min(), ranks.max(), ranks.sum()) == (1, 97, 1367)


def test_linear_map_gives_the_budgets_of_the_reference_population():
    budgets = budgets_from_ranks(_paper_ranks(), num_ranks=100, low=25e6, high=1500e6)
    assert budgets[:3].tolist() == [173989898.98989898, 486868686.86868685, 54797979.7979798]


@pytest.mark.skipif(not _REFERENCE.exists(), reason=f"{_REFERENCE} is not there")
def test_whole_reference_population():
    reference = json.loads(_REFERENCE.read_text())
    ranks = _paper_ranks()
    budgets = budgets_from_ranks(ranks, num_ranks=100, low=25e6, high=1500e6)
    assert ranks.tolist() == reference["ranks"]
    assert budgets.tolist() == reference["budgets_macs"]


def test_zipf_frequencies_follow_the_law():
    # 1, 1/4, 1/9 over their sum 49/36.
    ranks = bounded_zipf(49_000, num_ranks=3, s=2.0, rng=np.random.default_rng(1))
    np.testing.assert_allclose(np.bincount(ranks)[1:], [36_000, 9_000, 4_000], atol=400)


def test_zipf_of_exponent_zero_is_uniform():
    ranks = bounded_zipf(40_000, num_ranks=4, s=0, rng=np.random.default_rng(1))
    np.testing.assert_allclose(np.bincount(ranks)[1:], 10_000, atol=400)


def test_ranks_map_linearly():
    budgets = budgets_from_ranks(np.array([5, 1, 2, 4]), num_ranks=5, low=10.0, high=50.0)
    assert budgets.dtype == np.float64
    assert budgets.tolist() == [50.0, 10.0, 20.0, 40.0]


def test_a_single_rank_gets_the_lowest_budget():
    assert budgets_from_ranks(np.array([1, 1]), num_ranks=1, low=3.0, high=8.0).tolist() == [3, 3]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(num_clients=0), "num_clients must be at least 1, not 0"),
        (dict(num_ranks=0), "num_ranks must be at least 1, not 0"),
        (dict(s=-0.5), "exponent s must be at least 0 and finite, not -0.5"),
        (dict(s=float("inf")), "exponent s must be at least 0 and finite, not inf"),
    ],
)
def test_zipf_refuses(arguments, message):
    arguments = {"num_clients": 3, "num_ranks": 4, "s": 1.2, **arguments}
    with pytest.raises(ValueError, match=message):
        bounded_zipf(rng=np.random.default_rng(0), **arguments)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(ranks=[2, 3, 0]), r"rank of client 2 must be in 1..3, not 0"),
        (dict(ranks=[2, 4, 9]), r"rank of client 1 must be in 1..3, not 4"),
        (dict(ranks=[1.0, 2.0]), "ranks must be integers in one dimension, not float64"),
        (dict(ranks=[[1], [2]]), r"ranks must be integers in one dimension, not int64\(2, 1\)"),
        (dict(num_ranks=0), "num_ranks must be at least 1, not 0"),
        (dict(low=0.0), "budgets need 0 < low <= high, not low=0.0, high=9.0"),
        (dict(low=9.5), "budgets need 0 < low <= high, not low=9.5, high=9.0"),
        (dict(high=float("nan")), "budgets need 0 < low <= high, not low=2.0, high=nan"),
    ],
)
def test_rank_map_refuses(arguments, message):
    arguments = {"ranks": [1, 2], "num_ranks": 3, "low": 2.0, "high": 9.0, **arguments}
    with pytest.raises(ValueError, match=message):
        budgets_from_ranks(**arguments)


@pytest.mark.parametrize(
    "text, num_clients, expected",
    [
        ("25e6:3,50e6:1,100e6:2", 6, [25e6] * 3 + [50e6] + [100e6] * 2),
        (" 25e6 : 1 , 5e7:2 ", 3, [25e6, 50e6, 50e6]),
        ("7", 2, [7, 7]),
        ("7:1.0", 3, [7, 7, 7]),
        # 10 over 3 does not divide: the first written gets the client left over.
        ("2,3,5", 10, [2] * 4 + [3] * 3 + [5] * 3),
        ("2:0.33,3:0.33,5:0.33", 10, [2] * 4 + [3] * 3 + [5] * 3),
        # Shares of 7 clients: 3.5, 2.1, 1.4 -> 3, 2, 1 and the one left over to the .5.
        ("2:0.5,3:0.3,5:0.2", 7, [2] * 4 + [3] * 2 + [5]),
        # 1.2, 0.9, 0.9: the largest remainders are the last two.
        ("2:0.4,3:0.3,5:0.3", 3, [2, 3, 5]),
        # 2.5, 20, 27.5: equal remainders, though not as float64.
        ("2:0.05,3:0.4,5:0.55", 50, [2] * 3 + [3] * 20 + [5] * 27),
        # Fewer clients than budgets.
        ("2,3,5", 2, [2, 3]),
    ],
)
def test_mix_in_written_order(text, num_clients, expected):
    budgets = parse_budgets(text, num_clients)
    assert budgets.dtype == np.float64
    assert budgets.tolist() == expected


def test_many_equal_shares_prefer_the_first_written():
    text = ",".join(str(budget) for budget in range(1, 41))
    counts = np.bincount(parse_budgets(text, 60).astype(int))[1:]
    assert counts.tolist() == [2] * 20 + [1] * 20


def test_mix_is_shuffled_by_the_generator_alone():
    shuffled = [
        parse_budgets("2:0.6,3:0.3,5:0.1", 50, np.random.default_rng(seed)).tolist()
        for seed in (4, 4, 5)
    ]
    assert shuffled[0] == shuffled[1] != shuffled[2]
    assert shuffled[0] != sorted(shuffled[0]) == [2] * 30 + [3] * 15 + [5] * 5


@settings(max_examples=50, deadline=None)
@given(
    shares=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6),
    num_clients=st.integers(1, 300),
)
def test_every_client_gets_one_budget_near_the_share(shares, num_clients):
    shares = np.array(shares) / sum(shares)
    text = ",".join(f"{10 + group}:{share:.9f}" for group, share in enumerate(shares))
    budgets = parse_budgets(text, num_clients, np.random.default_rng(0))
    assert budgets.shape == (num_clients,)
    counts = np.bincount(budgets.astype(int), minlength=10 + len(shares))[10:]
    assert np.all(np.abs(counts - shares * num_clients) < 1 + 1e-5)


@pytest.mark.parametrize(
    "text, message",
    [
        ("a-b-c", "'a-b-c' needs a positive budget in MACs such as 25e6, not 'a-b-c'"),
        ("", "'' needs a positive budget"),
        ("2,3,", "'' needs a positive budget"),
        ("2,-3", "'-3' needs a positive budget"),
        ("2,nan", "'nan' needs a positive budget"),
        ("2,1e999", "'1e999' needs a positive budget"),
        ("25M:10", "'25M:10' needs a positive budget in MACs such as 25e6, not '25M'"),
        ("2:", "'2:' needs a positive count such as 16 or share such as 0.4, not ''"),
        ("2:0,3:10", "'2:0' needs a positive count"),
        ("2:5:5", "'2:5:5' needs a positive count such as 16 or share such as 0.4, not '5:5'"),
        ("2:x", "'2:x' needs a positive count"),
        ("2:10,3", "'3' has no count or share, but others have one"),
        ("2:0.5,3:5", "'3:5' is a count among shares"),
        ("2:4,3:5", "the counts add up to 9, but there are 10 clients"),
        ("2:0.5,3:0.4", "the shares add up to 0.9 instead of 1"),
        ("2:0.6,3:0.43", "the shares add up to 1.03 instead of 1"),
        ("25e6:0.5,3:0.2,25000000:0.3", "'25000000:0.3' repeats a budget"),
    ],
)
def test_bad_mix_gives_one_line_with_the_faulty_part(text, message):
    with pytest.raises(ValueError, match=message) as error:
        parse_budgets(text, 10, np.random.default_rng(0))
    assert "\n" not in str(error.value)


def test_mix_for_no_clients_is_refused():
    with pytest.raises(ValueError, match="num_clients must be at least 1, not 0"):
        parse_budgets("2,3", 0)


def test_draw_budgets_by_rank_or_mix():
    ranks = bounded_zipf(7, num_ranks=5, s=0.5, rng=np.random.default_rng(3))
    drawn = draw_budgets(7, seed=1, low=10, high=50, num_ranks=5, zipf_s=0.5, ranks_seed=3)
    assert drawn.tolist() == (10 * ranks).tolist()
    ranks = bounded_zipf(7, num_ranks=5, s=0.5, rng=stream(1, "population ranks"))
    assert draw_budgets(7, seed=1, low=10, high=50, num_ranks=5, zipf_s=0.5).tolist() == (
        10 * ranks).tolist()
    mixed = draw_budgets(7, seed=1, mix="5:3,9:4")
    assert mixed.tolist() == parse_budgets("5:3,9:4", 7, stream(1, "budgets")).tolist()


def test_budget_counts():
    budgets, counts = budget_counts("9:0.25,5:0.75", 10_000_000)
    assert (budgets.tolist(), counts.tolist()) == ([9, 5], [2_500_000, 7_500_000])


def test_zipf_counts_follow_the_law():
    counts = bounded_zipf_counts(1_000_000, num_ranks=3, s=2.0, rng=np.random.default_rng(0))
    assert counts.sum() == 1_000_000 and counts.dtype == np.int64
    law = np.array([1, 1 / 4, 1 / 9]) / (1 + 1 / 4 + 1 / 9)
    np.testing.assert_allclose(counts / 1e6, law, atol=5 * 0.5e-3)


@pytest.mark.parametrize("arguments, message", [
    (dict(num_clients=0, num_ranks=3, s=1.0), "num_clients must be at least 1, not 0"),
    (dict(num_clients=1, num_ranks=0, s=1.0), "num_ranks must be at least 1, not 0"),
    (dict(num_clients=1, num_ranks=3, s=-1.0), "the Zipf exponent s must be at least 0")])
def test_bad_zipf_counts_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        bounded_zipf_counts(**arguments, rng=np.random.default_rng(0))
