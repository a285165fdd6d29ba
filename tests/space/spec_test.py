"""Tests of feast_tf.space.spec."""

import dataclasses
import pickle

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from feast_tf.space import SupernetSpec
from feast_tf.space import Variant
from feast_tf.space import paper_spec
from feast_tf.space import round_channels

TINY = dict(stem=4, bases=(10, 14), depths=(0, 1, 3), widths=(0.5, 1.0), expansions=(0.25, 0.5),
            strides=(1, 2), classes=7, image_size=6, divisor=1)


def tiny_spec(**changes):
    return SupernetSpec(**{**TINY, **changes})


@pytest.mark.parametrize("value, channels", [
    (6.4, 8), (12.8, 16), (25.6, 24), (27, 32), (38.4, 40), (51.2, 48),
    # Half up, the least value, and the tenth that rounding down may lose.
    (12, 16), (11.9, 16), (8.8, 8), (8.9, 16), (0.3, 8), (20, 24), (1024, 1024),
])
def test_channels_round_by_eight(value, channels):
    assert round_channels(value) == channels


@pytest.mark.parametrize("value, divisor, channels", [
    (2.2, 1, 2), (2.4, 1, 3), (5.4, 1, 5), (5.5, 1, 6), (0.2, 1, 1), (1.4, 1, 2), (1.1, 1, 1),
    (5.9, 4, 8), (4.4, 4, 4), (4.5, 4, 8), (9.1, 4, 12), (1, 4, 4),
])
def test_channels_round_by_other_divisors(value, divisor, channels):
    assert round_channels(value, divisor) == channels


@pytest.mark.parametrize("base, channels", [
    (64, [8, 16, 24, 24, 32, 40, 48, 48, 56, 64]),
    (128, [16, 24, 40, 48, 64, 80, 88, 104, 112, 128]),
    (256, [24, 48, 80, 104, 128, 152, 176, 208, 232, 256]),
    (512, [48, 104, 152, 208, 256, 304, 360, 408, 464, 512]),
    (1024, [104, 208, 304, 408, 512, 616, 720, 816, 920, 1024]),
])
def test_channels_of_the_paper_space(base, channels):
    assert [round_channels(base * width) for width in paper_spec().widths] == channels


@pytest.mark.parametrize("out, expansion, mid", [
    # Rounding out * e to an integer first would give the next multiple for each of these.
    (40, 0.22, 8), (48, 0.18, 8), (80, 0.22, 16), (88, 0.1, 8), (176, 0.1, 16), (464, 0.18, 80),
    (816, 0.22, 176),
])
def test_middle_widths_are_rounded_once(out, expansion, mid):
    assert round_channels(out * expansion) == mid


@given(st.floats(0.01, 5000), st.floats(0, 1), st.integers(1, 16))
@settings(max_examples=200, deadline=None)
def test_rounding_is_monotone_and_loses_at_most_a_tenth(value, share, divisor):
    rounded = round_channels(value, divisor)
    assert rounded % divisor == 0 and rounded >= max(divisor, 0.9 * value)
    assert rounded <= max(divisor, value + divisor)
    # A middle width never exceeds the outer one, nor a variant's that of its envelope.
    assert round_channels(value * share, divisor) <= rounded


def test_the_paper_space_is_the_papers():
    spec = paper_spec()
    assert (spec.stem, spec.bases, spec.strides) == (64, (128, 256, 512, 1024), (1, 2, 2, 2))
    assert (spec.depths, spec.max_depth, spec.num_stages) == (tuple(range(9)), 8, 4)
    assert spec.widths == (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    assert spec.expansions == (0.1, 0.14, 0.18, 0.22, 0.25)
    assert (spec.classes, spec.image_size, spec.divisor) == (100, 32, 8)
    assert paper_spec(10, 64) == dataclasses.replace(spec, classes=10, image_size=64)


def test_fields_are_normalised_so_that_equal_spaces_are_equal():
    other = SupernetSpec(stem=np.int64(4), bases=[10, np.int32(14)], depths=np.array([3, 0, 1, 3]),
                         widths=[1, 0.5, 1.0], expansions=iter([0.5, 0.25]), strides=range(1, 3),
                         classes=np.uint8(7), image_size=6, divisor=1)
    assert other == tiny_spec() and hash(other) == hash(tiny_spec())
    assert other.fingerprint() == tiny_spec().fingerprint()
    assert (other.depths, other.widths) == ((0, 1, 3), (0.5, 1.0))
    assert {type(value) for value in (other.stem, other.classes, *other.bases, *other.depths)} == {
        int}


@pytest.mark.parametrize("changes, message", [
    (dict(bases=()), "bases must not be empty"),
    (dict(depths=[]), "depths must not be empty"),
    (dict(widths=None), "widths must be a sequence of numbers, but is None"),
    (dict(expansions=0.5), "expansions must be a sequence of numbers, but is 0.5"),
    (dict(depths=np.array(2)), r"depths must be a sequence of numbers, but is array\(2\)"),
    (dict(bases="ab"), "bases must hold ints only, but holds 'a'"),
    (dict(bases=(10.0, 14)), "bases must hold ints only, but holds 10.0"),
    (dict(strides=(True, 2)), "strides must hold ints only, but holds True"),
    (dict(widths=("1",)), "widths must hold floats only, but holds '1'"),
    (dict(widths=[[0.5, 1.0]]), r"widths must hold floats only, but holds \[0.5, 1.0\]"),
    (dict(strides=(1, 2, 1)), r"strides must have one value a stage \(2\), but has 3"),
    (dict(stem=0), "stem must be a positive integer, but is 0"),
    (dict(stem=4.0), "stem must be a positive integer, but is 4.0"),
    (dict(classes=True), "classes must be a positive integer, but is True"),
    (dict(classes=-3), "classes must be a positive integer, but is -3"),
    (dict(image_size=None), "image_size must be a positive integer, but is None"),
    (dict(divisor=0), "divisor must be a positive integer, but is 0"),
    (dict(depths=(2, -1)), "depths must not be negative, but hold -1"),
    (dict(bases=(10, 0)), "bases and strides must be positive"),
    (dict(strides=(0, 1)), "bases and strides must be positive"),
    (dict(widths=(0.0, 1.0)), r"widths must lie in \(0, 1\], but are \(0.0, 1.0\)"),
    (dict(widths=(0.5, float("nan"))), r"widths must lie in \(0, 1\]"),
    (dict(expansions=(0.5, 1.01)), r"expansions must lie in \(0, 1\], but are \(0.5, 1.01\)"),
    (dict(image_size=7), "image_size must be a multiple of 2, the product of .*, but is 7"),
    (dict(strides=(3, 3)), "image_size must be a multiple of 9"),
])
def test_impossible_spaces_are_refused(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        tiny_spec(**changes)
    assert "\n" not in str(error.value)


def test_a_single_number_stands_for_every_place():
    spec = tiny_spec()
    variant = spec.variant(d=1, e=0.25, w=(0.5, 1, 0.5))
    assert variant == Variant((1, 1), (0.25, 0.25), (0.5, 1.0, 0.5))
    assert spec.variant(d=np.int64(1), e=np.float64(0.25), w=np.array([0.5, 1, 0.5])) == variant


def test_numpy_numbers_become_pythons():
    variant = Variant(np.array([0, 3], np.int16), np.array([0.25, 0.5], np.float32),
                      [np.float64(1), 1, np.float32(0.5)])
    assert variant == Variant((0, 3), (0.25, 0.5), (1.0, 1.0, 0.5))
    assert {type(value) for value in variant.d} == {int}
    assert {type(value) for value in variant.e + variant.w} == {float}
    assert {variant: "found"}[Variant([0, 3], [0.25, 0.5], [1, 1, 0.5])] == "found"


@pytest.mark.parametrize("kind", [Variant, SupernetSpec])
def test_values_are_frozen_and_survive_pickling(kind):
    value = tiny_spec() if kind is SupernetSpec else tiny_spec().largest()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(kind)[0].name, 3)
    copy = pickle.loads(pickle.dumps(value))
    assert copy == value and hash(copy) == hash(value)


def test_the_text_of_a_variant_names_exactly_one():
    assert str(Variant((0, 3), (0.25, 1 / 3), (1, 0.5, 0.1))) == (
        "d=0,3 e=0.25,0.3333333333333333 w=1,0.5,0.1")


@pytest.mark.parametrize("fields, message", [
    (dict(d=(0, 2)), r"d\[1\] = 2 is not in the space; allowed: 0, 1, 3$"),
    (dict(d=-1), r"d\[0\] = -1 is not in the space"),
    (dict(e=(0.25, 1)), r"e\[1\] = 1 is not in the space; allowed: 0.25, 0.5$"),
    (dict(w=(0.5, 1, 0.7)), r"w\[2\] = 0.7 is not in the space; allowed: 0.5, 1$"),
    (dict(w=float("nan")), r"w\[0\] = nan is not in the space"),
    (dict(d=(0, 1, 0)), "d must have 2 values, but has 3"),
    (dict(e=()), "e must have 2 values, but has 0"),
    (dict(w=(1, 1)), "w must have 3 values, but has 2"),
    (dict(d=1.0), "d must hold ints only, but holds 1.0"),
    (dict(d=(True, 0)), "d must hold ints only, but holds True"),
    (dict(d=np.array([True, False])), "d must hold ints only, but holds"),
    (dict(d=None), "d must hold ints only, but holds None"),
    (dict(d=np.array(1)), r"d must be a sequence of numbers, but is array\(1\)"),
    (dict(e="0.5"), "e must hold floats only, but holds '0'"),
    (dict(w=1j), "w must hold floats only, but holds 1j"),
])
def test_foreign_variants_are_refused_before_anything_runs(fields, message):
    with pytest.raises(ValueError, match=message) as error:
        tiny_spec().variant(**{**dict(d=0, e=0.25, w=0.5), **fields})
    assert "\n" not in str(error.value)


def test_a_value_that_is_almost_allowed_is_shown_in_full():
    # As a float32, 0.1 is another number; "0.1 is not allowed; allowed: 0.1" would help nobody.
    with pytest.raises(ValueError, match=r"w\[0\] = 0.10000000149011612 is not in the space"):
        paper_spec().variant(d=0, e=0.1, w=np.float32(0.1))


def test_smallest_and_largest():
    spec = tiny_spec(depths=(3, 1))
    assert spec.smallest() == Variant((1, 1), (0.25, 0.25), (0.5, 0.5, 0.5))
    assert spec.largest() == Variant((3, 3), (0.5, 0.5), (1, 1, 1))


def test_random_variants_are_uniform_and_reproducible():
    spec = tiny_spec()
    rng, again = np.random.default_rng(5), np.random.default_rng(5)
    draws = [spec.random(rng) for _ in range(3000)]
    assert [spec.random(again) for _ in range(20)] == draws[:20]
    for place in range(2):
        counts = [sum(v.d[place] == depth for v in draws) for depth in spec.depths]
        np.testing.assert_allclose(counts, 1000, atol=120)
        assert abs(sum(v.e[place] == 0.5 for v in draws) - 1500) < 120
    both = sum(v.w[0] == v.w[2] == 0.5 for v in draws)
    assert abs(both - 750) < 120  # places are independent


def test_the_fingerprint_ignores_what_only_changes_costs():
    spec = tiny_spec()
    assert spec.fingerprint() == tiny_spec(classes=99, image_size=32).fingerprint()
    others = [tiny_spec(stem=5), tiny_spec(bases=(14, 10)), tiny_spec(depths=(0, 1)),
              tiny_spec(widths=(0.25, 1.0)), tiny_spec(expansions=(0.5,)),
              tiny_spec(strides=(2, 1)), tiny_spec(divisor=2)]
    assert len({other.fingerprint() for other in [spec, *others]}) == 8


def test_the_fingerprint_of_the_paper_space_never_changes():
    # Cache files of earlier versions name it.
    assert paper_spec().fingerprint() == "8026a63525fb"
