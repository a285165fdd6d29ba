"""Tests of feast_tf.planning.text and feast_tf.planning.report."""

import json

import pytest

from configs.digits import get_config as digits_config
from configs.paper import get_config
from feast_tf.planning import build_plan
from feast_tf.planning import format_plan
from feast_tf.planning import write_plan
from feast_tf.planning.text import format_table


@pytest.fixture(scope="module")
def paper():
    return build_plan(get_config())


def test_published_figures_stand_next_to_the_computed(paper):
    lines = format_plan(paper).splitlines()
    row = lambda start: next(line for line in lines if line.startswith(start)).split()
    assert row("mean payload, parameters (M)")[-2:] == ["8.221", "8.17"]
    assert row("training, forward and backward")[-2:] == ["31.01", "31.01"]
    assert row("  over the HeteroFL proxy")[-2:] == ["2.047", "2.07"]
    assert row("figure")[-2:] == ["computed", "published"]


def test_every_group_is_a_row(paper):
    lines = format_plan(paper).splitlines()
    start = lines.index("Budget groups") + 2
    rows = lines[start:start + len(paper.groups)]
    assert rows[0].split()[:3] == ["25", "23", "1"]
    assert rows[-1].split()[:5] == ["650.8-1455", "11", "56", "595.8", "11.78"]
    assert lines[start + len(paper.groups)] == ""


def test_reconstructions_are_named(paper):
    text = format_plan(paper)
    for word in ("paper_56", "807", "21.2M", "45,000", "ScaleFL: likewise", "psi_min"):
        assert word in text
    small = format_plan(build_plan(digits_config()))
    assert "paper_56" not in small and "45,000" not in small and "published  " not in small


def test_files(paper, tmp_path):
    write_plan(tmp_path / "new", paper)
    content = json.loads((tmp_path / "new" / "plan.json").read_text())
    assert content["largest_envelope_params"] == 35_602_596
    assert len(content["notes"]) == 7
    page = (tmp_path / "new" / "plan.html").read_text()
    assert page.count("<svg") == 5 and "650.8-1455" in page and "stage3/block8" in page
    assert "src=" not in page and "<link" not in page and "<script" not in page


def test_table_is_aligned():
    assert format_table(["a", "bb"], [["ccc", "1"], ["d", "234"]]) == "a     bb\nccc    1\nd    234"
