"""Tests of feast_tf.planning.plan: the paper's published figures, and worked examples."""

import json
from pathlib import Path
import subprocess
import sys

import numpy as np
import pytest

from configs.cifar100 import get_config as cifar100_config
from configs.digits import get_config as digits_config
from configs.paper import get_config
from feast_tf import datasets
from feast_tf import population
from feast_tf.planning import Devices
from feast_tf.planning import build_plan
from feast_tf.planning.plan import expected_largest

# (name, published, computed, distance from the published figure that is left)
PUBLISHED = [
    ("supernet_params", 55.68e6, 55_682_916, 0.0001),
    ("largest_envelope_params", 35.60e6, 35_602_596, 0.0001),
    ("largest_variant_params", 11.78e6, 11_777_532, 0.0003),
    ("mean_payload_params", 8.17e6, 8_220_851.44, 0.0063),
    ("aggregate_reduction", 6.8, 6.7734, 0.005),
    ("reduction_mean", 43.8, 44.6381, 0.02),
    ("reduction_median", 22.9, 22.9371, 0.002),
    ("reduction_max", 111, 111.4452, 0.0041),
    ("training_pmacs", 31.01, 31.0104, 0.0001),
    ("over_single", 1.56, 1.5638, 0.0025),
    ("over_heterofl", 2.07, 2.0469, 0.012),
    ("over_scalefl", 2.04, 2.0349, 0.003),
    ("over_fiarse", 1.03, 1.0339, 0.004),
]


@pytest.fixture(scope="module")
def paper():
    return build_plan(get_config())


@pytest.mark.parametrize("name, published, computed, distance", PUBLISHED)
def test_published_figure(paper, name, published, computed, distance):
    assert paper.figures[name] == pytest.approx(computed, rel=1e-4)
    assert paper.figures[name] == pytest.approx(published, rel=distance)
    assert paper.to_json()["published"][name] == published


def test_groups_of_the_paper(paper):
    first, last = paper.groups[0], paper.groups[-1]
    assert (first.clients, first.affordable, first.macs) == (23, 1, 24_967_328)
    assert first.most_macs == first.expected_macs == first.macs  # one variant, one pass
    assert (last.clients, last.affordable, last.macs) == (11, 56, 595_847_168)
    assert last.widths == (1.0, 0.7, 0.7, 0.8, 0.8) and last.depths == (8, 8, 8, 8)
    macs = paper.routing.cache.macs
    assert last.most_macs == macs[55] + macs[0] + macs[54]
    assert last.expected_macs == pytest.approx(macs[55] + macs[0] + macs[1:55].sum() / 56)
    second = next(group for group in paper.groups if group.level == 1)
    assert second.most_macs == second.expected_macs == macs[0] + macs[1]  # no third variant
    assert sum(group.clients for group in paper.groups) == 100
    assert sum(group.share for group in paper.groups) == pytest.approx(1)


def test_data_shares_by_hand(paper):
    """q_i(1): the capped budget over the sum of the capped budgets."""
    budgets = population.draw_budgets(100, seed=0, ranks_seed=807)
    capped = np.minimum(budgets, 600e6)
    assert paper.groups[-1].share == pytest.approx(
        capped[budgets >= 595_847_168].sum() / capped.sum())
    assert paper.groups[0].expected_samples == pytest.approx(45_000 * 25e6 / capped.sum())
    assert paper.data_share[0.0] == pytest.approx([group.clients / 100 for group in paper.groups])
    root = np.sqrt(capped)
    assert paper.data_share[0.5][0] == pytest.approx(23 * np.sqrt(25e6) / root.sum())
    assert paper.data_share[1.0] == pytest.approx([group.share for group in paper.groups])
    assert paper.figures["alpha_eff"] == pytest.approx(0.45)
    assert paper.figures["alpha_data"] == pytest.approx(0.1)


def test_traffic_by_hand(paper):
    mean = paper.figures["mean_payload_params"]
    assert paper.figures["round_bytes"] == pytest.approx(2 * 4 * 10 * mean)
    assert paper.figures["run_bytes"] == pytest.approx(2 * 4 * 10 * 4000 * mean)
    assert paper.figures["run_bytes_full"] == 2 * 4 * 10 * 4000 * 55_682_916


def test_drawn_samples_are_those_of_a_run():
    config = digits_config()
    plan = build_plan(config)
    data = datasets.load("digits", held_out=0.2, server_samples=160, seed=config.seed)
    labels = data.train.labels
    budgets = population.draw_budgets(30, seed=config.seed, mix=config.population.budgets)
    alpha = population.alpha_for_effective(0.45, len(labels) / 10, 30)
    clients = population.build_population(labels, num_clients=30, seed=config.seed, cap=6e6,
                                          alpha=alpha, min_samples=2, budgets=budgets)
    assert [client.drawn_samples for client in plan.clients] == [
        client.num_samples for client in clients]
    assert [client.budget for client in plan.clients] == budgets.tolist()
    assert sum(client.share for client in plan.clients) == pytest.approx(1)
    assert plan.clients[3].expected_samples == pytest.approx(
        len(labels) * min(budgets[3], 6e6) / np.minimum(budgets, 6e6).sum())
    for group in plan.groups:
        own = [client for client in clients if group.lowest <= client.budget <= group.highest]
        sizes = [client.num_samples for client in own]
        assert group.drawn_samples == (min(sizes), np.mean(sizes), max(sizes))
        held = [np.bincount(labels[client.indices], minlength=10) for client in own]
        assert group.class_counts == tuple(np.sum(held, axis=0))
        assert group.drawn_classes == np.mean([np.sum(counts > 0) for counts in held])


def test_what_the_settings_change():
    config = get_config()
    config.population.gamma = 0.0
    config.rounds = 1000
    config.training.local_epochs = 2
    changed = build_plan(config).figures
    # Equal shares and half the passes: the mean of the groups' own costs.
    plan = build_plan(get_config())
    expected = 3 * 1000 * 2 * 0.1 * 450 * sum(
        group.clients * (group.expected_macs - heads(plan, group.level)) for group in plan.groups)
    assert changed["training_pmacs"] == pytest.approx(expected / 1e15)


def heads(plan, level):
    """MACs of the heads in the expected passes; the proxy does not count them."""
    each = np.array([plan.routing.layout.dims(variant)[4] * 100
                     for variant in plan.routing.cache.variants], float)
    between = each[1:level].sum() / (level + 1)
    return each[level] + (each[0] if level else 0) + between


def test_bound(paper):
    psi = paper.bound["psi_min"]
    assert psi == pytest.approx(0.0071309, abs=1e-7)
    # The sum of 0.05 (1 + cos(pi t/T)), t < T, and of the squares.
    assert paper.bound["sum_of_rates"] == pytest.approx(0.05 * 4001)
    assert paper.bound["sum_of_squared_rates"] == pytest.approx(0.0025 * (4000 * 1.5 + 2))
    assert paper.bound["factor_of_delta"] == pytest.approx(1 / (psi * 200.05))
    assert paper.bound["factor_of_epsilon_squared"] == pytest.approx(1 / psi**2)
    assert paper.bound["factor_of_smoothness_and_noise"] == pytest.approx(15.005 / (psi * 200.05))


def test_transfer_by_hand():
    config = get_config()
    config.population.cohort_size = 1
    devices = Devices(np.array([25e6, 600e6, 700e6]), np.array([2, 1, 1]),
                      np.array([1e6, 8e6, np.nan]), np.array([0, 0, 1, 2]))
    transfer = build_plan(config, devices).transfer
    low, high = 64 * 499_644 / 1e6, 64 * 35_602_596 / 8e6
    assert transfer.known == 3
    assert transfer.slowest == pytest.approx(high)
    assert transfer.mean == pytest.approx((2 * low + high) / 3)
    assert transfer.round == pytest.approx(transfer.mean)  # one client a round
    full = 64 * 55_682_916
    assert transfer.full_round == pytest.approx((2 * full / 1e6 + full / 8e6) / 3)
    assert build_plan(get_config()).transfer is None


def test_expected_largest_by_enumeration():
    values, count = np.array([5.0, 1.0, 8.0]), np.array([2, 3, 1])
    pairs = [max(a, b) for place, a in enumerate(np.repeat(values, count))
             for b in np.repeat(values, count)[place + 1:]]
    assert expected_largest(values, count, 2) == pytest.approx(np.mean(pairs))
    assert expected_largest(values, count, 6) == 8
    assert expected_largest(values, count, 1) == pytest.approx((10 + 3 + 8) / 6)


def test_ten_million_clients():
    config = get_config()
    config.population.update(num_clients=10_000_000, cohort_size=1000)
    plan = build_plan(config)
    assert sum(group.clients for group in plan.groups) == 10_000_000
    assert plan.groups[0].drawn_samples is None and plan.groups[0].class_counts is None
    assert plan.clients == ()
    # The law of the budgets, without the luck of a hundred draws.
    ranks = np.arange(1, 101.0)
    budgets, law = 25e6 + (ranks - 1) * 1475e6 / 99, ranks**-1.2 / np.sum(ranks**-1.2)
    levels = [plan.routing.cache.level(budget) for budget in budgets]
    assert plan.figures["mean_payload_params"] == pytest.approx(
        law @ plan.routing.payload[levels], rel=0.002)


def test_json_is_complete_and_plain(paper):
    content = json.loads(json.dumps(paper.to_json()))
    for name, *_ in PUBLISHED:
        assert isinstance(content[name], (int, float))
    assert len(content["exposure"]) == 1 + 4 * 9 + 1
    assert list(content["data_share_by_gamma"]) == ["0", "0.5", "1"]
    assert content["config"]["population"]["gamma"] == 1.0
    assert "published" not in content["config"]


def test_only_the_paper_configuration_has_published_figures():
    assert build_plan(cifar100_config()).to_json()["published"] == {}


@pytest.mark.parametrize("change, message", [
    (lambda config: config.population.update(cohort_size=101),
     r"population.cohort_size must be in 1..100, the number of clients, but is 101"),
    (lambda config: config.update(rounds=0), "rounds must be at least 1, but is 0"),
    (lambda config: config.training.update(rule="all"), "training.rule must be one of min, max"),
    (lambda config: config.population.update(low=1e6),
     "a budget of 1,000,000 MACs affords no variant"),
    (lambda config: config.update(dataset="mnist"), "data set 'mnist' is unknown"),
    (lambda config: config.update(cache="none"), "no shipped cache 'none'"),
])
def test_bad_setting_raises(change, message):
    config = get_config()
    change(config)
    with pytest.raises(ValueError, match=message):
        build_plan(config)


def test_planning_needs_no_tensorflow():
    script = ("import sys\nfrom feast_tf import planning\n"
              "assert not {'tensorflow', 'matplotlib', 'sklearn'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])
