"""Tests of feast_tf.planning.devices."""

import tracemalloc

import numpy as np
import pytest

from configs.cifar100 import get_config
from configs.digits import get_config as digits_config
from feast_tf.planning import configured_devices
from feast_tf.planning import parse_classes
from feast_tf.planning import read_devices
from feast_tf.population import draw_budgets


def config(**population):
    result = get_config()
    result.population.update(population)
    return result


def test_configured_devices_are_the_clients_of_a_run():
    devices = configured_devices(config())
    budgets = draw_budgets(100, seed=0, ranks_seed=807)
    assert devices.budget[devices.members].tolist() == budgets.tolist()
    assert devices.count.tolist() == [np.sum(budgets == budget) for budget in devices.budget]
    assert devices.num_clients == 100 and np.isnan(devices.bandwidth).all()
    assert (np.diff(devices.budget) > 0).all()


def test_a_mix_of_budgets():
    devices = configured_devices(digits_config())
    assert dict(zip(devices.budget.tolist(), devices.count.tolist())) == {
        0.7e6: 16, 1.3e6: 6, 2e6: 5, 3.5e6: 1, 6e6: 2}
    many = digits_config()
    many.population.update(num_clients=1_000_000, budgets="6e6:0.25,0.7e6:0.75")
    devices = configured_devices(many)
    assert devices.budget.tolist() == [0.7e6, 6e6] and devices.members is None
    assert devices.count.tolist() == [750_000, 250_000]


def test_ten_million_clients_follow_the_law_in_little_memory():
    tracemalloc.start()
    devices = configured_devices(config(num_clients=10_000_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6
    assert devices.num_clients == 10_000_000 and devices.members is None
    ranks = np.arange(1, 101.0)
    law = ranks**-1.2 / np.sum(ranks**-1.2)
    assert devices.budget.tolist() == (25e6 + (ranks - 1) * 1475e6 / 99).tolist()
    np.testing.assert_allclose(devices.count / 1e7, law, atol=5 * 0.5 / np.sqrt(1e7))
    again = configured_devices(config(num_clients=10_000_000))
    assert again.count.tolist() == devices.count.tolist()
    other = configured_devices(config(num_clients=10_000_000, ranks_seed=8))
    assert other.count.tolist() != devices.count.tolist()


def test_budgets_from_a_file(tmp_path):
    path = tmp_path / "devices.csv"
    path.write_text("budget,count,bandwidth_mbps\n600e6,2,20\n25e6,3,\n600e6,1,20\n600e6,1,5\n")
    devices = read_devices(path, {})
    assert devices.budget.tolist() == [25e6, 600e6, 600e6]
    assert devices.count.tolist() == [3, 1, 3]
    assert devices.bandwidth[1:].tolist() == [5e6, 20e6] and np.isnan(devices.bandwidth[0])
    assert devices.members.tolist() == [2, 2, 0, 0, 0, 2, 1]  # in the order of the file


def test_device_classes_from_a_file(tmp_path):
    path = tmp_path / "devices.csv"
    path.write_text("device\nwatch\nphone\nwatch\n")
    devices = read_devices(path, parse_classes("phone:300e6, watch:25e6"))
    assert devices.budget[devices.members].tolist() == [25e6, 300e6, 25e6]


def test_a_large_count_is_not_written_out(tmp_path):
    path = tmp_path / "devices.csv"
    path.write_text("budget,count\n25e6,9000000000\n50e6,1\n")
    devices = read_devices(path, {})
    assert devices.num_clients == 9_000_000_001 and devices.members is None


@pytest.mark.parametrize("text, message", [
    ("", "the first line must name the columns budget or device"),
    ("count\n1\n", "the first line must name the columns budget or device"),
    ("budget,device\n1,a\n", "the first line must name the columns budget or device"),
    ("budget,size\n1,2\n", ".* may name count and bandwidth_mbps, but is 'budget,size'"),
    ("budget\n", "there are no devices"),
    ("budget\n25e6\nx\n", "line 3: budget must be positive MACs, not 'x'"),
    ("budget\n-1\n", "line 2: budget must be positive MACs, not '-1'"),
    ("budget,count\n25e6,1.5\n", "line 2: count must be a positive whole number, not 1.5"),
    ("budget,count\n25e6,0\n", "line 2: count must be a positive whole number, not '0'"),
    ("budget,bandwidth_mbps\n25e6,nan\n", "line 2: bandwidth_mbps must be positive, not 'nan'"),
    ("device\nfridge\n", "line 2: device 'fridge' has no budget; --devices gives budgets to phone"),
])
def test_bad_file_raises(tmp_path, text, message):
    path = tmp_path / "devices.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"devices.csv: {message}"):
        read_devices(path, {"phone": 300e6})


@pytest.mark.parametrize("text", ["phone", "phone:x", "phone:-1"])
def test_bad_classes_raise(text):
    with pytest.raises(ValueError, match=f"devices: '{text}' must be name:budget"):
        parse_classes(text)
