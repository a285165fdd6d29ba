"""Tests of feast_tf.space.path."""

import dataclasses

import pytest

from feast_tf.space import Search
from feast_tf.space import SupernetSpec
from feast_tf.space import VariantCache
from feast_tf.space.path import build_cache
from feast_tf.space.path import fingerprint
from feast_tf.space.path import fittest_within
from feast_tf.space.path import parse_pin
from feast_tf.space.path import parse_targets
from feast_tf.space.path import read_table
from feast_tf.space.path import search_path
from feast_tf.space.path import write_table

SPEC = SupernetSpec(stem=32, bases=(64, 128), depths=(0, 1, 2), widths=(0.5, 0.75, 1.0),
                    expansions=(0.2, 0.4, 0.6), strides=(1, 2), classes=5, image_size=16)


@pytest.fixture(scope="module")
def search():
    return Search(SPEC)


def limits(search, count):
    step = (search.dearest - search.cheapest) / count
    return [search.cheapest + int(step * (number + 1)) for number in range(count)]


def test_targets():
    assert parse_targets("25e6:600e6:56")[:3] == [25000000, 35454545, 45909090]  # whole numbers
    assert parse_targets("25e6:600e6:56")[-1] == 600e6 and len(parse_targets("25e6:600e6:56")) == 56
    assert parse_targets("0.5:1.5:3") == [0.5, 1.0, 1.5]
    assert parse_targets("1e6,3e6,10e6") == [1e6, 3e6, 10e6]


@pytest.mark.parametrize("text", ["", "a", "1:2", "1:2:0", "1:2:x", "3,2", "2,2", "-1,2", "0:5:2",
                                  "1,inf", "nan"])
def test_bad_targets_raise(text):
    with pytest.raises(ValueError, match="must be low:high:count such as 25e6:600e6:56"):
        parse_targets(text)


def test_pin():
    assert parse_pin("d=1,2 e=0.4 w=0.5,1,1", SPEC) == SPEC.variant(d=[1, 2], e=0.4, w=[0.5, 1, 1])
    assert parse_pin(str(SPEC.largest()), SPEC) == SPEC.largest()


@pytest.mark.parametrize("text, message", [
    ("d=1 e=0.4", "must look like"), ("d=1 e=0.4 w=1 k=3", "must look like"),
    ("x", "must look like"),
    ("d=1 e=0.3 w=1", r"pin 'd=1 e=0.3 w=1': e\[0\] = 0.3 is not in the space"),
])
def test_bad_pin_raises(text, message):
    with pytest.raises(ValueError, match=message):
        parse_pin(text, SPEC)


def test_path_is_the_fittest_for_each_target(search):
    targets = limits(search, 6)
    rows = list(search_path(search, targets))
    assert [row.target for row in rows] == targets
    for row in rows:
        assert row.score.macs <= row.target
        if row.how == "fittest":
            assert row.score == search.fittest(row.target).score
    assert [row.score.fitness for row in rows] == sorted(row.score.fitness for row in rows)


def test_no_architecture_comes_twice(search):
    fittest = search.fittest(search.dearest // 2)
    first = fittest.score.macs
    # A larger limit at which it is still the fittest, though others lie between.
    last = next(limit for limit in range(first + 2, 2 * first, first // 200)
                if search.fittest(limit, above=first + 1))
    assert search.fittest(last).score == fittest.score
    rows = list(search_path(search, [first, first + 1, last]))
    assert rows[0].architecture == fittest.architecture and rows[0].how == "fittest"
    assert [row.target for row in rows] == [first, last]  # nothing costs just one more
    assert rows[1].how == "fittest above the previous target"
    assert first + 1 < rows[1].score.macs <= last
    assert rows[1].score.fitness < fittest.score.fitness


def test_pins_take_the_place_of_a_target(search):
    targets = limits(search, 5)
    plain = list(search_path(search, targets))
    pin = SPEC.variant(d=[1, 2], e=0.6, w=[1, 0.5, 1])
    beyond = SPEC.largest()
    rows = list(search_path(search, targets[:-1], pins=[beyond, pin]))
    pinned = [row for row in rows if row.how == "pinned"]
    assert [row.architecture.variant() for row in pinned] == [pin, beyond]
    place = rows.index(pinned[0])
    assert (targets[place - 1] if place else 0) < pinned[0].score.macs <= targets[place]
    assert len(rows) == len(targets) and rows[-1] is pinned[1]
    others = [row for row in rows if row.how != "pinned"]
    assert others == [row for row in plain[:-1] if row.target != targets[place]]


def test_a_known_row_is_not_searched_again(search, monkeypatch):
    targets = limits(search, 5)
    rows = list(search_path(search, targets))
    asked = []
    fittest = search.fittest
    monkeypatch.setattr(search, "fittest",
                        lambda limit, **kwargs: asked.append(limit) or fittest(limit, **kwargs))
    assert list(search_path(search, targets, known=rows[:3])) == rows
    assert sorted(set(asked)) == targets[3:]


def test_table_is_read_as_written(search, tmp_path):
    rows = list(search_path(Search(SPEC, expansion="block"), limits(search, 7)))
    assert any(len(set(e)) > 1 for row in rows for e in row.architecture.e)
    rows[2] = dataclasses.replace(rows[2], latency=0.125)
    write_table(tmp_path / "t.csv", rows, "abc")
    assert read_table(tmp_path / "t.csv", search, "abc") == rows
    assert read_table(tmp_path / "none.csv", search, "abc") == []


def test_foreign_or_damaged_table_raises(search, tmp_path):
    path = tmp_path / "t.csv"
    write_table(path, list(search_path(search, limits(search, 2))), "abc")
    with pytest.raises(ValueError, match=r"t.csv: holds another search; choose another --output"):
        read_table(path, search, "abd")
    path.write_text(path.read_text().replace("fittest\n", "fittest\n1,2,3\n", 1))
    with pytest.raises(ValueError, match=r"t.csv: line 4: "):
        read_table(path, search, "abc")


@pytest.mark.parametrize("change", [dict(cost="params"), dict(expansion="block")])
def test_fingerprint_depends_on_the_search(search, change):
    mark = fingerprint(search, [5.0], [])
    assert mark == fingerprint(Search(SPEC), [5.0], [])
    assert mark != fingerprint(Search(SPEC, **change), [5.0], [])
    assert mark != fingerprint(search, [6.0], [])
    assert mark != fingerprint(search, [5.0], [SPEC.largest()])


def test_build_cache_writes_what_the_cache_loads(search, tmp_path):
    path = tmp_path / "variants.csv"
    seen = []
    rows = build_cache(search, limits(search, 5), path, pins=[SPEC.smallest()], on_row=seen.append)
    cache = VariantCache.load(path, SPEC)
    assert cache.variants == tuple(row.architecture.variant() for row in rows) and seen == rows
    assert cache.minimum == SPEC.smallest()


def test_interrupted_build_goes_on(search, tmp_path):
    targets, whole, broken = limits(search, 5), tmp_path / "whole.csv", tmp_path / "broken.csv"
    build_cache(search, targets, whole)

    def interrupt(row):
        if row.target == targets[2]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_cache(search, targets, broken, on_row=interrupt)
    assert not broken.exists()
    assert len((tmp_path / "broken.fitness.csv").read_text().splitlines()) == 2 + 3
    build_cache(search, targets, broken)
    for suffix in (".csv", ".fitness.csv"):
        assert broken.with_suffix(suffix).read_bytes() == whole.with_suffix(suffix).read_bytes()


def test_latency_takes_the_fittest_measured_within_each_limit(search, tmp_path):
    calls = []

    def measure(spec, variant):
        calls.append(variant)
        return float(sum(variant.d))  # the fittest of few convolutions is wide

    path = tmp_path / "variants.csv"
    rows = build_cache(search, [0.0, 1.0, 9.0], path, measure=measure, candidates=12)
    assert [row.latency <= limit for row, limit in zip(rows, [0.0, 1.0, 9.0])] == [True] * len(rows)
    first = len(calls)
    assert first >= len(rows)
    assert build_cache(search, [0.0, 1.0, 9.0], path, measure=measure, candidates=12) == rows
    assert len(calls) == first  # the table keeps what was measured


def test_fittest_within(search):
    rows = list(search_path(search, limits(search, 3)))
    low, middle, high = (dataclasses.replace(row, latency=latency)
                         for row, latency in zip(rows, (2.0, 5.0, 4.0)))
    assert fittest_within([low, middle, high], [1.0, 2.0, 3.0, 4.5, 6.0]) == [low, high]


def test_nothing_within_the_targets_raises(search, tmp_path):
    with pytest.raises(ValueError, match="the cheapest of the space costs [0-9,]+ macs"):
        build_cache(search, [search.cheapest - 1], tmp_path / "v.csv")
    assert not list(tmp_path.iterdir())


def test_blocks_write_the_table_only(search, tmp_path):
    build_cache(Search(SPEC, expansion="block"), limits(search, 3), tmp_path / "v.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["v.fitness.csv"]
    with pytest.raises(ValueError, match="latency needs --expansion=stage"):
        build_cache(Search(SPEC, expansion="block"), [1.0], tmp_path / "v.csv",
                    measure=lambda spec, variant: 1.0)
