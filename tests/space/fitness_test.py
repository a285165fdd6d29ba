"""Tests of feast_tf.space.fitness."""

import ast
import csv
import math
from pathlib import Path

import numpy as np
import pytest

from feast_tf.space import Architecture
from feast_tf.space import FitnessSettings
from feast_tf.space import SupernetSpec
from feast_tf.space import macs
from feast_tf.space import paper_spec
from feast_tf.space import params
from feast_tf.space import score
from feast_tf.space import shipped_cache
from feast_tf.space.fitness import channels

WIDTHS = tuple(tenth / 10 for tenth in range(1, 11))
EXPANSIONS = (0.10, 0.14, 0.18, 0.22, 0.25)
# DeepFedNAS's own space and the first network of its published cache.
DEEPFEDNAS = SupernetSpec(
    stem=64, bases=(256, 512, 1024, 2048), depths=(0, 1, 2), widths=WIDTHS, expansions=EXPANSIONS,
    strides=(1, 2, 2, 2), classes=10, image_size=32)
DEEPFEDNAS_ROW_0 = Architecture(
    (2, 2, 2, 2),
    ((0.18, 0.1, 0.1), (0.18, 0.14, 0.1), (0.14, 0.14, 0.1), (0.1, 0.1, 0.1)),
    (1.0, 0.5, 0.5, 0.5, 0.5))

# Two stages of channels that need no rounding.
TINY = SupernetSpec(stem=4, bases=(10, 6), depths=(0, 1, 2), widths=(0.5, 1.0),
                    expansions=(0.2, 0.4), strides=(1, 2), classes=7, image_size=6, divisor=1)


def test_fitness_by_hand():
    # Stem 4; stage 0: 10 channels at 6x6, blocks of middle width 2, 4 and 2; stage 1: 6 channels at
    # 3x3, one block of middle width 2 (1.2 is rounded up, as 1 would lose over a tenth).
    found = score(TINY, Architecture((2, 0), ((0.2, 0.4, 0.2), (0.2,)), (1.0, 1.0, 1.0)))
    first = (math.log(9 * 4) + math.log(9 * 2) + math.log(4)  # with its projection
             + math.log(9 * 10) + math.log(9 * 4) + math.log(9 * 10) + math.log(9 * 2))
    second = math.log(9 * 10) + math.log(9 * 2) + math.log(10)
    entropy = math.log(36 * 10) * first + math.log(9 * 6) * second
    rho = 11 / math.exp((math.log(27) + first + second) / 11)
    assert found.entropy == pytest.approx(entropy)
    assert found.rho == pytest.approx(rho)
    # 3 and 1 blocks have the variance 1; the second stage is 4 channels narrower. The stem's width
    # does not count as a decrease.
    assert found.fitness == pytest.approx(entropy - 10 * math.e + 1000 * rho - 4)


def test_every_constant_counts():
    architecture = Architecture((2, 0), ((0.2, 0.4, 0.2), (0.2,)), (1.0, 1.0, 1.0))
    plain = score(TINY, architecture)
    changed = score(TINY, architecture, FitnessSettings(
        depth_variance=13, effectiveness=1500, narrowing=3))
    assert changed.fitness - plain.fitness == pytest.approx(-3 * math.e + 500 * plain.rho - 2 * 4)


def test_narrower_than_the_stem_is_no_decrease():
    wide, narrow = (score(TINY, Architecture((0, 0), ((0.4,), (0.4,)), (1.0, 0.5, w)))
                    for w in (1.0, 0.5))
    for found, decrease in ((wide, 0), (narrow, 2)):  # 5 -> 6 and 5 -> 3 channels
        assert found.fitness == pytest.approx(found.entropy - 10 + 1000 * found.rho - decrease)


def test_the_published_network_of_deepfednas():
    found = score(DEEPFEDNAS, DEEPFEDNAS_ROW_0)
    assert (found.params, found.macs) == (8_176_266, 458_237_952)
    assert found.entropy == pytest.approx(1996.43447, abs=5e-6)
    assert found.rho == pytest.approx(0.0405945, abs=5e-8)
    assert found.fitness == pytest.approx(2027.02896, abs=1e-5)


def test_costs_are_those_of_the_index_map():
    spec, rng = paper_spec(classes=10), np.random.default_rng(3)
    for _ in range(20):
        variant = spec.random(rng)
        found = score(spec, variant)
        assert (found.macs, found.params) == (macs(spec, variant), params(spec, variant))


def test_reference_cache_has_its_fitness():
    path = Path(__file__).resolve().parents[3] / "shared" / "reference" / "feast_cache_56.csv"
    if not path.exists():
        pytest.skip(f"no reference cache {path}")
    cache = shipped_cache("paper_56", paper_spec())
    with open(path, newline="") as file:
        for variant, row in zip(cache.variants, csv.DictReader(file)):
            assert tuple(ast.literal_eval(row["d"])) == variant.d
            found = score(cache.spec, variant)
            assert found.fitness == pytest.approx(float(row["fitness"]), abs=1e-3)
            assert found.rho == pytest.approx(float(row["rho"]), abs=1e-4)


def test_architecture_of_a_variant_and_back():
    variant = TINY.variant(d=[2, 0], e=[0.2, 0.4], w=[0.5, 1.0, 0.5])
    architecture = Architecture.of(variant)
    assert architecture.e == ((0.2, 0.2, 0.2), (0.4,))
    assert architecture.variant() == variant
    assert str(architecture) == str(variant)


def test_mixed_expansions_are_no_variant():
    mixed = Architecture((1, 0), ((0.2, 0.4), (0.2,)), (1.0, 1.0, 1.0))
    assert str(mixed) == "d=1,0 e=0.2,0.4|0.2 w=1,1,1"
    with pytest.raises(ValueError, match=r"stage 0 has blocks of expansions \(0.2, 0.4\)"):
        mixed.variant()


def test_channels_tell_networks_apart():
    spec = paper_spec()
    one = Architecture.of(spec.variant(d=0, e=0.1, w=[0.3, 0.1, 0.1, 0.1, 0.1]))
    same = Architecture.of(spec.variant(d=0, e=0.1, w=[0.4, 0.1, 0.1, 0.1, 0.1]))  # 24 channels too
    other = Architecture.of(spec.variant(d=0, e=0.1, w=[0.5, 0.1, 0.1, 0.1, 0.1]))
    assert channels(spec, one) == channels(spec, same) == (24, (16, 8), (24, 8), (48, 8), (104, 16))
    assert channels(spec, one) != channels(spec, other)


@pytest.mark.parametrize("name, value", [
    ("max_rho", 0.0), ("max_rho", math.inf), ("max_rho", math.nan), ("effectiveness", -1.0)])
def test_bad_constant_raises(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*, but is {value}"):
        FitnessSettings(**{name: value})


def test_very_unequal_depths_are_unfit_and_no_overflow():
    space = SupernetSpec(stem=8, bases=(8, 8), depths=(0, 100), widths=(1.0,), expansions=(0.5,),
                         strides=(1, 1), classes=2, image_size=2)
    assert score(space, space.variant(d=[0, 100], e=0.5, w=1.0)).fitness < -1e300


@pytest.mark.parametrize("d, e, w, message", [
    ((3, 0), ((0.2,) * 4, (0.2,)), (1.0, 1.0, 1.0), r"d\[0\] = 3 is not in the space; allowed: 0"),
    ((1, 0), ((0.2, 0.3), (0.2,)), (1.0, 1.0, 1.0), r"e\[0\] = 0.3 is not in the space"),
    ((0, 0), ((0.2,), (0.2,)), (1.0, 1.0, 0.7), r"w\[2\] = 0.7 is not in the space"),
    ((1, 0), ((0.2,), (0.2,)), (1.0, 1.0, 1.0), "e must have 1 [+] d values for each stage"),
])
def test_foreign_architecture_raises(d, e, w, message):
    with pytest.raises(ValueError, match=message):
        score(TINY, Architecture(d, e, w))
