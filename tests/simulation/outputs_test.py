"""Tests of feast_tf.simulation.outputs."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import types

import ml_collections
import numpy as np
import pytest

from feast_tf.population import Client
from feast_tf.routing import Routing
from feast_tf.serving import OperatingPoint
from feast_tf.simulation import outputs
from feast_tf.space import SupernetSpec, VariantCache

SPEC = SupernetSpec(stem=4, bases=(4, 8), depths=(0, 1), widths=(0.5, 1.0), expansions=(0.5, 1.0),
                    strides=(1, 2), classes=3, image_size=4, divisor=2)
ROUTING = Routing(VariantCache(SPEC, [
    SPEC.variant(d=0, e=0.5, w=0.5), SPEC.variant(d=(0, 1), e=0.5, w=(0.5, 1.0, 0.5)),
    SPEC.variant(d=1, e=1.0, w=1.0)]))
CACHE = ROUTING.cache
LEVELS = np.array([2, 0, 0, 2, 0], np.int32)
BUDGETS = (9e6, 1.25e6, 1e6, 7e6, 1.5e6)
CONFIG = ml_collections.ConfigDict(dict(
    dataset="digits", seed=3, rounds=7, shape=(1, 2.5), training=dict(rule="min", rate=0.1),
    evaluation=dict(recalibrate=False)))
EXPERIMENT = types.SimpleNamespace(
    config=CONFIG, routing=ROUTING, levels=LEVELS,
    clients=[Client(id=k, budget=budget, indices=np.arange(count))
             for k, (budget, count) in enumerate(zip(BUDGETS, (40, 3, 5, 0, 12)))])
POINTS = [OperatingPoint(variant, int(CACHE.macs[k]), int(CACHE.params[k]), accuracy, "test")
          for k, (variant, accuracy) in enumerate(zip(CACHE.variants, (0.5, 0.6, 2 / 3)))]


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def names(folder):
    return sorted(os.listdir(folder))


# --- the folder


def test_a_new_folder_gets_the_configuration(tmp_path):
    folder = tmp_path / "runs" / "one"
    with outputs.claimed(folder, CONFIG):
        assert names(folder) == [".lock", "config.json"]
    assert json.loads((folder / "config.json").read_text()) == json.loads(
        json.dumps(CONFIG.to_dict()))
    outputs.check_folder(folder, CONFIG)
    with outputs.claimed(folder, CONFIG):  # the same settings resume
        pass


def test_checking_a_new_folder_writes_nothing(tmp_path):
    outputs.check_folder(tmp_path / "new", CONFIG)
    assert names(tmp_path) == []


@pytest.mark.parametrize("key, value, message", [
    ("rounds", 8, "rounds is 7 there, 8 here"),
    ("training.rule", "max", "training.rule is 'min' there, 'max' here"),
    ("training.rate", 0.2, "training.rate is 0.1 there, 0.2 here"),
    ("shape", (1, 2.0), r"shape is \[1, 2.5\] there, \[1, 2.0\] here"),
])
def test_other_settings_are_refused_and_named(tmp_path, key, value, message):
    with outputs.claimed(tmp_path, CONFIG):
        pass
    config = ml_collections.ConfigDict(CONFIG.to_dict())
    section, _, name = key.rpartition(".")
    (config[section] if section else config)[name] = value
    before = (tmp_path / "config.json").read_bytes()
    for check in (outputs.check_folder, lambda *args: outputs.claimed(*args).__enter__()):
        with pytest.raises(ValueError, match=f"{tmp_path.name} holds a run with other settings "
                                             rf"\({message}\); choose another --output_dir"):
            check(tmp_path, config)
    assert (tmp_path / "config.json").read_bytes() == before


def test_a_setting_that_only_one_of_two_versions_has_is_named(tmp_path):
    with outputs.claimed(tmp_path, CONFIG):
        pass
    config = ml_collections.ConfigDict({**CONFIG.to_dict(), "new": 1})
    with pytest.raises(ValueError, match=r"\(new is None there, 1 here\)"):
        outputs.check_folder(tmp_path, config)


@pytest.mark.parametrize("name", ["config.json", "summary.json"])
@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00" * 20])
def test_a_damaged_file_is_named(tmp_path, name, text):
    with outputs.claimed(tmp_path, CONFIG):
        pass
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name} is .*; choose another --output_dir") as error:
        outputs.check_folder(tmp_path, CONFIG)
        outputs.read_summary(tmp_path)
    assert "\n" not in str(error.value)


def test_another_programs_folder_is_refused(tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a summary.json but no config.json of a run"):
        outputs.check_folder(tmp_path, CONFIG)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match="run is a file; --output_dir must be a folder"):
        outputs.check_folder(tmp_path / "run", CONFIG)
    with pytest.raises(OSError, match="run"):
        with outputs.claimed(tmp_path / "run" / "below", CONFIG):
            pass


def test_one_run_at_a_time(tmp_path):
    with outputs.claimed(tmp_path / "a", CONFIG):
        with outputs.claimed(tmp_path / "b", CONFIG):  # another folder is free
            pass
        with pytest.raises(ValueError, match="another run is at work in .*a; wait for it, or "
                                             "choose another --output_dir"):
            with outputs.claimed(tmp_path / "a", CONFIG):
                pass
    with pytest.raises(KeyError):
        with outputs.claimed(tmp_path / "a", CONFIG):
            raise KeyError
    with outputs.claimed(tmp_path / "a", CONFIG):
        pass


def test_the_lock_ends_with_its_process(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, sys, time\n"
         "file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX)\n"
         "print(flush=True); time.sleep(60)", str(tmp_path / ".lock")], stdout=subprocess.PIPE)
    try:
        holder.stdout.readline()
        with pytest.raises(ValueError, match="another run is at work"):
            with outputs.claimed(tmp_path, CONFIG):
                pass
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    with outputs.claimed(tmp_path, CONFIG):
        pass


def test_what_was_being_written_is_removed_and_nothing_else(tmp_path):
    keep = [".hidden", ".lock", "notes.txt", "metrics.csv", ".env.json.bak", "checkpoints/round_3",
            "checkpoints/best_3.npz", "checkpoints/unreadable_round_2", "model/weights.npz",
            "round_3_temp", "other/.weights.npz.12"]
    remove = [".config.json.811", ".report.html.1", "metrics.csv_temp5512", ".clients.csv.77",
              "checkpoints/round_12_temp4321", "checkpoints/.best_12.npz.811",
              "model/.weights.npz.811", "model/.spec.json.2"]

    def fill():
        for name in [*keep, *remove]:
            path = tmp_path / name
            if "round_" in path.name:
                (path / "variables").mkdir(parents=True, exist_ok=True)
                path = path / "variables" / "data"
            path.parent.mkdir(exist_ok=True)
            path.write_text("half")

    def left():
        return [name for name in [*keep, *remove] if (tmp_path / name).exists()]

    fill()
    with outputs.claimed(tmp_path, CONFIG):
        assert left() == keep
        fill()
    assert left() == keep


# --- metrics.csv


def test_a_row_is_written_whole(tmp_path, monkeypatch):
    import asyncio

    path = tmp_path / "metrics.csv"
    manager = outputs.metrics_manager(path)
    for round_num in (9, 10, 11, 12):
        asyncio.run(manager.release({"loss": round_num / 4}, key=round_num))
    asyncio.run(outputs.metrics_manager(path).release({"loss": 0.5, "new": 2}, key=11))
    assert read(path) == [{"round_num": "9", "loss": "2.25", "new": ""},
                          {"round_num": "10", "loss": "2.5", "new": ""},
                          {"round_num": "11", "loss": "0.5", "new": "2"}]

    def full_disk(*_, **__):
        raise OSError("No space left on device")

    before = path.read_bytes()
    monkeypatch.setattr(csv.DictWriter, "writerow", full_disk)
    monkeypatch.setattr(csv.DictWriter, "writerows", full_disk)
    with pytest.raises(OSError, match="No space left"):
        asyncio.run(manager.release({"loss": 1.0}, key=13))
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "round_num,loss\nx,1\n", "round_num,loss\n,\n",
                                  "round_num,loss\n1.5,2\n"])
def test_a_damaged_table_of_metrics_is_named(tmp_path, text):
    path = tmp_path / "metrics.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match="metrics.csv is damaged: it has no whole numbers "
                                         "round_num; move it away"):
        outputs.metrics_manager(path)
    assert path.read_text() == text


# --- results


def test_operating_points(tmp_path):
    validation = OperatingPoint(CACHE.variants[1], 11, 7, 0.25, "validation")
    outputs.write_operating_points(tmp_path, [*POINTS, validation])
    rows = read(tmp_path / "operating_points.csv")
    assert list(rows[0]) == ["variant", "macs", "params", "accuracy", "split"]
    assert rows[1] == {"variant": "d=0,1 e=0.5,0.5 w=0.5,1,0.5", "macs": str(CACHE.macs[1]),
                       "params": str(CACHE.params[1]), "accuracy": "0.600000", "split": "test"}
    assert rows[3] == {"variant": "d=0,1 e=0.5,0.5 w=0.5,1,0.5", "macs": "11", "params": "7",
                       "accuracy": "0.250000", "split": "validation"}
    assert rows[2]["accuracy"] == "0.666667" and len(rows) == 4


def test_clients(tmp_path):
    outputs.write_clients(tmp_path, EXPERIMENT, POINTS)
    rows = read(tmp_path / "clients.csv")
    assert [row["client"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert rows[3] == {
        "client": "3", "budget_macs": "7000000", "num_samples": "0",
        "served_variant": "d=1,1 e=1,1 w=1,1,1", "served_macs": str(CACHE.macs[2]),
        "accuracy": "0.666667", "payload_params": str(ROUTING.payload[2]),
        "payload_bytes": str(4 * ROUTING.payload[2])}
    assert [row["num_samples"] for row in rows] == ["40", "3", "5", "0", "12"]
    assert [row["payload_params"] for row in rows] == [str(ROUTING.payload[k]) for k in LEVELS]


def test_summary(tmp_path):
    summary = outputs.summarize(EXPERIMENT, POINTS, rounds=7, best_round=6, bytes_down=2**40,
                                bytes_up=5, seconds=1.23456)
    assert summary == {
        "dataset": "digits", "rule": "min", "seed": 3, "rounds": 7, "best_round": 6,
        # Two clients at 2/3, three at 1/2.
        "population_accuracy": pytest.approx((2 * 2 / 3 + 3 / 2) / 5),
        "smallest_accuracy": 0.5, "largest_accuracy": 2 / 3, "recalibrated": False,
        "bytes_down": 2**40, "bytes_up": 5, "seconds": 1.235}
    assert outputs.read_summary(tmp_path) is None
    outputs.write_summary(tmp_path, summary)
    assert outputs.read_summary(tmp_path) == summary
    assert names(tmp_path) == ["summary.json"]


def test_budget_groups_and_their_table():
    groups = outputs.budget_groups(EXPERIMENT, POINTS)
    assert groups == [outputs.BudgetGroup(1e6, 1.5e6, POINTS[0], 3),
                      outputs.BudgetGroup(7e6, 9e6, POINTS[2], 2)]
    table = outputs.format_table([groups[0], outputs.BudgetGroup(7e6, 7e6, POINTS[2], 1)], 0.54321)
    header, first, second, last = table.splitlines()
    assert len(header.split("  variant")[0]) == len(first.split("  d=")[0])
    assert first.split() == ["1", "-", "1.5", f"{CACHE.macs[0] / 1e6:.4g}", f"{CACHE.params[0]:,}",
                             "3", "0.5000", "d=0,0", "e=0.5,0.5", "w=0.5,0.5,0.5"]
    assert second.split()[0:2] == ["7", f"{CACHE.macs[2] / 1e6:.4g}"]
    assert last == ("population-averaged test accuracy under largest-affordable serving: 0.5432")
