"""Tests of feast_tf.space.cache."""

import csv
import dataclasses
import json
import math
import pathlib

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from feast_tf.space import SupernetSpec
from feast_tf.space import Variant
from feast_tf.space import VariantCache
from feast_tf.space import layout_of
from feast_tf.space import load_cache
from feast_tf.space import macs
from feast_tf.space import params
from feast_tf.space import paper_spec
from feast_tf.space import shipped_cache

_REFERENCE = (
    pathlib.Path(__file__).resolve().parents[3] / "shared" / "reference" / "feast_cache_56.csv"
)
SPEC = SupernetSpec(stem=4, bases=(10, 14), depths=(0, 1, 2), widths=(1 / 3, 0.5, 1.0),
                    expansions=(0.5, 2 / 3), strides=(1, 2), classes=3, image_size=6, divisor=1)
VARIANTS = (
    Variant((0, 0), (0.5, 0.5), (1 / 3, 0.5, 1 / 3)),
    Variant((0, 1), (0.5, 2 / 3), (0.5, 0.5, 0.5)),
    Variant((1, 0), (0.5, 0.5), (0.5, 1, 1)),
    Variant((2, 2), (2 / 3, 0.5), (1, 1, 1)),
)
HEAD = f"# feast-tf variant cache, space {SPEC.fingerprint()}\nmacs,params,d,e,w\n"
ROW = "69414,3365,1 0,0.5 0.5,0.5 1 1"


def cache():
    return VariantCache(SPEC, VARIANTS)


def test_variants_are_ordered_by_macs_whatever_the_order_given():
    expected = sorted(macs(SPEC, variant) for variant in VARIANTS)
    for variants in (VARIANTS, VARIANTS[::-1], [VARIANTS[i] for i in (2, 0, 3, 1)]):
        built = VariantCache(SPEC, iter(variants))
        assert built.macs.tolist() == expected and built.macs.dtype == np.int64
        assert built.macs.tolist() == [macs(SPEC, v) for v in built.variants]
        assert built.params.tolist() == [params(SPEC, v) for v in built.variants]
        assert built.dims.tolist() == [layout_of(SPEC).dims(v).tolist() for v in built.variants]
        assert len(built) == 4 and built.minimum == VARIANTS[0]
    # By hand; the first has a stem of 2, stages of 5 and 5 and middles of 3 and 3 channels.
    assert expected[0] == 11778 and 69414 in expected


def test_equal_macs_are_ordered_by_parameters_then_fields():
    # One stage's middle 10, two of 5, in any order: the stages are alike, so the costs are equal.
    spec = SupernetSpec(stem=10, bases=(10, 10, 10), depths=(0,), widths=(1.0,),
                        expansions=(0.5, 1.0), strides=(1, 1, 1), classes=2, image_size=2,
                        divisor=1)
    variants = [spec.variant(d=0, e=e, w=1) for e in ((1, .5, .5), (.5, .5, 1), (.5, 1, .5))]
    built = VariantCache(spec, variants)
    assert len(set(built.macs)) == len(set(built.params)) == 1
    assert [v.e for v in built.variants] == [(0.5, 0.5, 1), (0.5, 1, 0.5), (1, 0.5, 0.5)]
    assert VariantCache(spec, variants[::-1]).variants == built.variants
    # All of them have the level of the last: a level affords all that cost no more.
    assert built.level(built.macs[0]) == 2


def test_affordable_sets():
    built = cache()
    second = int(built.macs[1])
    assert built.affordable(second) == built.variants[:2] and built.largest(second) == VARIANTS[1]
    assert built.affordable(second - 1) == built.variants[:1]
    assert built.affordable(second + 0.5) == built.variants[:2]
    assert built.level(np.int64(second)) == built.level(np.float32(second)) == 1
    assert built.affordable(built.macs[0]) == (built.minimum,)


@pytest.mark.parametrize("budget", [math.inf, 1e300, 10**30, 2**63, 2**64])
def test_huge_budgets_afford_everything(budget):
    assert cache().affordable(budget) == cache().variants
    assert cache().largest(budget) == VARIANTS[3]


@pytest.mark.parametrize("budget, shown", [
    (math.nan, "nan"), (-math.inf, "-inf"), (0, "0"), (-3.0, "-3"), (1234, "1,234"),
])
def test_budgets_that_afford_nothing(budget, shown):
    built = cache()
    for ask in (built.level, built.affordable, built.largest):
        with pytest.raises(ValueError, match=f"^a budget of {shown} MACs affords no variant: the "
                                             "cheapest needs 11,778$"):
            ask(budget)


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=30), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_affordable_sets_are_exact_and_nested(budgets, seed):
    rng = np.random.default_rng(seed)
    drawn = {layout_of(SPEC).dims(v).tobytes(): v for v in (SPEC.random(rng) for _ in range(12))}
    built = VariantCache(SPEC, drawn.values())
    previous = ()
    for budget in sorted(budgets):
        expected = {v for v in drawn.values() if macs(SPEC, v) <= budget}
        if not expected:
            with pytest.raises(ValueError, match="affords no variant"):
                built.affordable(budget)
            continue
        affordable = built.affordable(budget)
        assert set(affordable) == expected and affordable[: len(previous)] == previous
        previous = affordable


def test_an_empty_cache_is_refused():
    with pytest.raises(ValueError, match="a variant cache needs at least one variant"):
        VariantCache(SPEC, ())


def test_a_foreign_variant_is_refused():
    with pytest.raises(ValueError, match=r"e\[0\] = 0.25 is not in the space; allowed: 0.5, 0.66"):
        VariantCache(SPEC, [*VARIANTS, Variant((0, 0), (0.25, 0.5), (1, 1, 1))])


def test_the_same_variant_twice_is_refused():
    with pytest.raises(ValueError, match="d=0,0 .* and d=0,0 .* are the same network"):
        VariantCache(SPEC, [*VARIANTS, VARIANTS[0]])


def test_two_names_of_one_network_are_refused():
    # 64 * 0.3 and 64 * 0.4 both round to 24 channels.
    spec = paper_spec()
    with pytest.raises(ValueError, match=r"w=0.3,\S* and .* w=0.4,\S* are the same network"):
        VariantCache(spec, [spec.variant(d=1, e=0.1, w=(stem, 0.1, 0.1, 0.1, 0.1))
                            for stem in (0.3, 0.4)])


def test_two_names_of_one_network_are_refused_with_an_equally_large_one_between():
    # Middles (l, l, h), (l, h, l) and (l, h, l) cost the same, and sort with the other between.
    spec = SupernetSpec(stem=8, bases=(8, 8, 8), depths=(0,), widths=(1.0,), divisor=4,
                        expansions=(0.4, 0.5, 1.0), strides=(1, 1, 1), classes=2, image_size=2)
    variants = [spec.variant(d=0, e=e, w=1) for e in ((.4, .4, 1), (.4, 1, .4), (.5, .4, 1))]
    assert len({macs(spec, v) for v in variants}) == len({params(spec, v) for v in variants}) == 1
    with pytest.raises(ValueError, match="e=0.4,0.4,1 .* and .* e=0.5,0.4,1 .* same network"):
        VariantCache(spec, variants)


def test_save_writes_what_load_reads(tmp_path):
    path = tmp_path / "new" / "cache.csv"
    cache().save(path)
    lines = path.read_text().split("\n")
    assert lines[:2] == HEAD.splitlines()
    assert lines[2] == "11778,622,0 0,0.5 0.5,0.3333333333333333 0.5 0.3333333333333333"
    assert lines[4] == ROW and lines[6:] == [""]
    loaded = VariantCache.load(path, SPEC)
    assert loaded.variants == cache().variants and loaded.macs.tolist() == cache().macs.tolist()
    assert [entry.name for entry in path.parent.iterdir()] == ["cache.csv"]


def test_costs_in_the_file_are_never_trusted(tmp_path):
    path = tmp_path / "cache.csv"
    cache().save(path)
    lines = path.read_text().splitlines()
    shuffled = [lines[i] for i in (0, 1, 5, 3, 2, 4)]
    path.write_text("\n".join([*shuffled[:2], *("7,," + line.split(",", 2)[2]
                                               for line in shuffled[2:])]))
    loaded = VariantCache.load(path, SPEC)
    assert loaded.variants == cache().variants and loaded.macs.tolist() == cache().macs.tolist()


def test_a_cache_serves_other_classes_and_image_sizes(tmp_path):
    path = tmp_path / "cache.csv"
    cache().save(path)
    other = dataclasses.replace(SPEC, classes=500, image_size=12)
    loaded = VariantCache.load(path, other)
    assert loaded.spec == other and set(loaded.variants) == set(VARIANTS)
    assert loaded.macs.tolist() == sorted(macs(other, variant) for variant in VARIANTS)
    hand = loaded.variants.index(VARIANTS[2])
    assert loaded.macs[hand] == (69414 - 42) * 4 + 14 * 500
    assert loaded.params[hand] == 3365 - 45 + 15 * 500


@pytest.mark.parametrize("change", [
    lambda text: text.replace("\n", "\r\n"),
    lambda text: "\ufeff" + text,
    lambda text: "\ufeff" + text.replace("\n", "\r\n").rstrip(),
    lambda text: text.replace(" 0.5,", "  0.50 ,"),
    lambda text: text.replace("0.5 1 1", "0.5 1.0 1e0"),
    lambda text: text.replace("69414,3365", "Größe,?"),
])
def test_what_editors_do_to_a_file_does_no_harm(tmp_path, change):
    path = tmp_path / "cache.csv"
    cache().save(path)
    path.write_bytes(change(path.read_text()).encode())
    assert VariantCache.load(path, SPEC).variants == cache().variants


@pytest.mark.parametrize("text, message", [
    ("", "line 1 must be '# feast-tf variant cache, space '"),
    ("\n" + HEAD, "line 1 must be '# feast-tf variant cache, space '"),
    ("macs,params,d,e,w\n" + ROW, "line 1 must be '# feast-tf variant cache, space '"),
    (HEAD.replace(SPEC.fingerprint(), ""), "made for the space , but the configuration's is "),
    (HEAD.replace(SPEC.fingerprint(), "0123456789ab") + ROW,
     f"made for the space 0123456789ab, but the configuration's is {SPEC.fingerprint()}"),
    (HEAD.splitlines()[0], "line 2 must be macs,params,d,e,w"),
    (HEAD.replace("params", "parameters") + ROW, "line 2 must be macs,params,d,e,w"),
    (HEAD.replace(",", ";") + ROW, "line 1 must be"),
    (HEAD.replace("macs,params,d,e,w\n", "") + ROW, "line 2 must be macs,params,d,e,w"),
    (HEAD, "a variant cache needs at least one variant"),
    (HEAD + ROW + "\n\n", "line 4: must hold macs,params,d,e,w, but has 1 fields"),
    (HEAD + ROW + "\n69414,3365,1 0,0.5 0.5", "line 4: must hold .*, but has 4 fields"),
    (HEAD + ROW + ",", "line 3: must hold .*, but has 6 fields"),
    (HEAD + ROW.replace(",", ";"), "line 3: must hold .*, but has 1 fields"),
    (HEAD + ROW.replace(" ", ","), "line 3: must hold .*, but has 9 fields"),
    (HEAD + ROW.replace("1 0", "1 O"), "line 3: .*'O'"),
    (HEAD + ROW.replace("1 0", "1.0 0"), "line 3: .*'1.0'"),
    (HEAD + ROW.replace("0.5 0.5", "0.5 0·5"), "line 3: .*'0·5'"),
    (HEAD + ROW.replace("1 0", "9 0"), r"line 3: d\[0\] = 9 is not in the space; allowed: 0, 1, 2"),
    (HEAD + ROW.replace("0.5 0.5", "0.5 nan"), r"line 3: e\[1\] = nan is not in the space"),
    (HEAD + ROW.replace("0.5 1 1", "0.5 1"), "line 3: w must have 3 values, but has 2"),
    (HEAD + ROW.replace("1 0", ""), "line 3: d must have 2 values, but has 0"),
    (HEAD + ROW.replace("0.5 1 1", "0.5 1 inf"), r"line 3: w\[2\] = inf is not in the space"),
    (HEAD + f'"{ROW}\n{ROW}"', """line 4: .*'1"'"""),
    (HEAD + ROW + "\n0,0,0 0,0.5 0.5,1 1 1\n" + ROW, "line 5: the same network as line 3"),
    # A third of 4 channels and half of them are both 2: another name of the same network.
    (HEAD + ROW + "\n" + ROW.replace("0.5 1 1", "0.3333333333333333 1 1"),
     "line 4: the same network as line 3"),
])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_malformed_files_are_refused_by_name_and_line(tmp_path, text, message, ending):
    path = tmp_path / "edited.csv"
    path.write_bytes(text.replace("\n", ending).encode())
    with pytest.raises(ValueError, match=f"^{path}: .*?{message}") as error:
        VariantCache.load(path, SPEC)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("data, message", [
    (HEAD.encode("utf-16"), "line 1 must be"),
    (b"\x89PNG\r\n\x1a\n\x00\xff", "line 1 must be"),
    (HEAD.encode() + ROW.encode().replace(b"0.5 0.5", b"0.5 0\xb75"), "line 3: could not convert"),
    (HEAD.encode() + ROW.encode().replace(b"1 0", b"1 \x000"), "line 3: .*'.x000'"),
])
def test_files_that_are_not_text_are_refused_by_name(tmp_path, data, message):
    path = tmp_path / "edited.csv"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"^{path}: {message}"):
        VariantCache.load(path, SPEC)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.csv"):
        VariantCache.load(tmp_path / "nowhere.csv", SPEC)


def test_the_paper_cache_holds_the_paper_figures():
    built = shipped_cache("paper_56", paper_spec(classes=100))
    assert len(built) == 56
    assert built.minimum == Variant((3, 7, 6, 7), (0.1,) * 4, (0.3, 0.1, 0.1, 0.1, 0.1))
    assert (built.macs[0], built.params[0]) == (24_967_328, 336_972)
    assert built.largest(600e6) == Variant((8, 8, 8, 8), (0.1, 0.25, 0.1, 0.18),
                                           (0.6, 0.3, 0.6, 0.8, 0.5))
    assert (built.macs[-1], built.params[-1]) == (595_847_168, 11_777_532)
    assert np.all(np.diff(built.macs) > 0)


@pytest.mark.skipif(not _REFERENCE.exists(), reason=f"{_REFERENCE} is not there")
def test_the_whole_paper_cache():
    with open(_REFERENCE, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    built = shipped_cache("paper_56", paper_spec(classes=100))
    assert built.macs.tolist() == [int(row["macs"]) for row in rows]
    assert built.params.tolist() == [int(row["params"]) for row in rows]
    assert list(built.variants) == [
        Variant(*(json.loads(row[name]) for name in "dew")) for row in rows]


def test_shipped_files_are_as_saved(tmp_path):
    folder = pathlib.Path(__file__).resolve().parents[2] / "feast_tf" / "space" / "caches"
    shipped_cache("paper_56", paper_spec(classes=100)).save(tmp_path / "cache.csv")
    assert (tmp_path / "cache.csv").read_bytes() == (folder / "paper_56.csv").read_bytes()


def test_unknown_shipped_caches_are_refused_with_the_known_names():
    with pytest.raises(ValueError, match="^no shipped cache 'paper'; there are .*paper_56"):
        shipped_cache("paper", paper_spec())
    with pytest.raises(ValueError, match="paper_56.csv: made for the space 8026a63525fb, but"):
        shipped_cache("paper_56", SPEC)


def test_a_configuration_names_a_shipped_cache_or_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(load_cache("paper_56", paper_spec())) == 56
    cache().save("own.csv")
    for name in ("own.csv", str(tmp_path / "own.csv"), "./own.csv"):
        assert load_cache(name, SPEC).variants == cache().variants
    (tmp_path / "own").write_bytes((tmp_path / "own.csv").read_bytes())
    assert load_cache("./own", SPEC).variants == cache().variants
    for name, message in (("other.csv", "cache: there is no file other.csv"),
                          ("./other", "cache: there is no file ./other"),
                          ("own", "no shipped cache 'own'; there are ")):
        with pytest.raises(ValueError, match=message):
            load_cache(name, SPEC)
