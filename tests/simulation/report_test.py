"""Tests of feast_tf.simulation.report."""

from __future__ import annotations

import html
import re
import sys
import types

import pytest

from feast_tf.serving import OperatingPoint
from feast_tf.simulation import report
from feast_tf.simulation.outputs import BudgetGroup

METRICS = """round_num,client_work/train/loss_largest,client_work/train/loss_random,seconds,\
validation/accuracy_0.6M
1,2.5,0.0,9.5,
2,2.25,1.75,1.5,0.0
10,2.0,1.5,1.5,0.75
"""
POINTS = [OperatingPoint(f"d={k} <variant>", macs, params, accuracy, "test")
          for k, (macs, params, accuracy) in enumerate([(612992, 24354, 0.5),
                                                        (4478208, 288090, 0.75)])]
GROUPS = [BudgetGroup(0.7e6, 0.7e6, POINTS[0], 16), BudgetGroup(5e6, 6.25e6, POINTS[1], 3)]
SUMMARY = dict(population_accuracy=0.54321, smallest_accuracy=0.5, largest_accuracy=0.75, rounds=10,
               best_round=2, bytes_down=383_869_632, bytes_up=1_234_567_890, seconds=4321.5,
               rule="min_max", seed=3, recalibrated=True, dataset="digits")
EXPERIMENT = types.SimpleNamespace(config=types.SimpleNamespace(dataset="digits"))


@pytest.fixture
def write(tmp_path):
    def write(metrics=METRICS, **changes):
        (tmp_path / "metrics.csv").write_text(metrics)
        report.write_report(tmp_path, EXPERIMENT, POINTS, GROUPS, {**SUMMARY, **changes})
        return (tmp_path / "report.html").read_text()

    return write


def rows(page):
    cells = re.compile(r"<t[dh]>(.*?)</t[dh]>")
    return [[html.unescape(cell) for cell in cells.findall(row)]
            for row in re.findall("<tr>(.*?)</tr>", page)]


def test_the_results_in_tables(write):
    found = rows(write())
    for row in (["population-averaged test accuracy", "0.5432"],
                ["test accuracy of the smallest variant", "0.5000"],
                ["test accuracy of the largest variant", "0.7500"],
                ["rounds (the best in validation)", "10 (2)"],
                ["sent to clients, received from clients", "383.9 MB, 1,234.6 MB"],
                ["time of the rounds", "4,322 s"], ["training rule", "min_max"], ["seed", "3"],
                ["moments recalibrated for each variant", "yes"],
                ["0.7", "0.613", "24,354", "16", "0.5000", "d=0 <variant>"],
                ["5 - 6.25", "4.478", "288,090", "3", "0.7500", "d=1 <variant>"],
                ["d=1 <variant>", "4,478,208", "288,090", "0.7500"]):
        assert row in found
    assert ["moments recalibrated for each variant", "no"] in rows(write(recalibrated=False))


def test_three_plots(write):
    page = write()
    assert page.count("<svg ") == 3 and "<h1>FEAST on digits</h1>" in page
    for label in ("test accuracy by MACs of one example (millions)",
                  "supervised loss on the clients by round",
                  "validation accuracy of the anchors by round"):
        assert label in page


def test_the_same_numbers_give_the_same_page(write):
    assert write() == write()


def test_columns_leave_out_what_was_not_measured():
    lines = [line.split(",") for line in METRICS.splitlines()]
    table = [dict(zip(lines[0], line)) for line in lines[1:]]
    assert report._columns(table, "client_work/train/loss_", missing="0.0") == {
        "largest": ([1, 2, 10], [2.5, 2.25, 2.0]), "random": ([2, 10], [1.75, 1.5])}
    # An accuracy may well be 0.
    assert report._columns(table, "validation/accuracy_") == {"0.6M": ([2, 10], [0.0, 0.75])}
    assert report._columns([], "x") == {}
    assert report._columns([{"round_num": "1", "x1": ""}], "x") == {"1": ([], [])}


@pytest.mark.parametrize("metrics", ["round_num\n", METRICS.splitlines()[0] + "\n",
                                     "\n".join(METRICS.splitlines()[:2]) + "\n"])
def test_few_rounds_or_none(write, metrics):
    assert write(metrics).count("<svg ") == 3


def test_without_matplotlib_the_tables_are_there(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = write()
    assert "<svg" not in page and ["seed", "3"] in rows(page)


def test_a_page_that_cannot_be_written_leaves_the_old_one(write, tmp_path, monkeypatch):
    old = write()
    monkeypatch.setattr(report, "page", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write()
    assert (tmp_path / "report.html").read_text() == old
