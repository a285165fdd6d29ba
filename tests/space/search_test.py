"""Tests of feast_tf.space.search: optimality against enumeration, and the published networks."""

import csv
import dataclasses
import itertools
from pathlib import Path

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from feast_tf.space import Architecture
from feast_tf.space import FitnessSettings
from feast_tf.space import Search
from feast_tf.space import SupernetSpec
from feast_tf.space import paper_spec
from feast_tf.space import score

# 3 widths of which two round alike, and expansions that round alike for the narrower stages.
SMALL = SupernetSpec(stem=16, bases=(24, 40), depths=(0, 1, 3), widths=(0.5, 0.6, 1.0),
                     expansions=(0.2, 0.4, 0.6), strides=(1, 2), classes=5, image_size=8)
# Every block its own expansion, all of them different.
BLOCKS = SupernetSpec(stem=16, bases=(24, 40), depths=(0, 1), widths=(0.5, 1.0),
                      expansions=(0.2, 0.4), strides=(1, 2), classes=5, image_size=8, divisor=2)


# Large enough that the fitness grows with the cost.
LARGER = SupernetSpec(stem=32, bases=(64, 128), depths=(0, 1, 2), widths=(0.5, 1.0),
                      expansions=(0.2, 0.4, 0.6), strides=(1, 2), classes=5, image_size=16)


def every_architecture(spec, expansion):
    """(cost by name, fitness, rho) of the whole space, by brute force."""
    stages = spec.num_stages
    for d in itertools.product(spec.depths, repeat=stages):
        each = [itertools.product(spec.expansions, repeat=1 + extra) if expansion == "block"
                else [(e,) * (1 + extra) for e in spec.expansions] for extra in d]
        for e in itertools.product(*each):
            for w in itertools.product(spec.widths, repeat=1 + stages):
                yield Architecture(d, e, w)


@pytest.fixture(scope="module")
def scores():
    return {(space, expansion): [score(space, one) for one in every_architecture(space, expansion)]
            for space, expansion in ((SMALL, "stage"), (BLOCKS, "block"))}


def best(found, cost, limit, above, max_rho):
    return max((one.fitness for one in found
                if above < getattr(one, cost) <= limit and one.rho <= max_rho), default=None)


@settings(max_examples=30, deadline=None)
@given(expansion=st.sampled_from(["stage", "block"]), cost=st.sampled_from(["macs", "params"]),
       share=st.floats(0, 1), window=st.sampled_from([0.02, 0.3, 1.0]),
       max_rho=st.sampled_from([0.2, 0.27, 0.51, 2.0]))
def test_nothing_in_the_space_is_fitter(scores, expansion, cost, share, window, max_rho):
    space, found = next((key[0], value) for key, value in scores.items() if key[1] == expansion)
    search = Search(space, cost=cost, expansion=expansion,
                    settings=FitnessSettings(max_rho=max_rho))
    costs = sorted(getattr(one, cost) for one in found)
    assert (search.cheapest, search.dearest) == (costs[0], costs[-1])
    limit = costs[int(share * (len(costs) - 1))]
    above = limit - window * (costs[-1] - costs[0]) - 1
    result = search.fittest(limit, above=above)
    expected = best(found, cost, limit, above, max_rho)
    if expected is None:
        assert result is None
        return
    assert result.score.fitness == pytest.approx(expected, abs=2e-6)
    assert above < getattr(result.score, cost) <= limit and result.score.rho <= max_rho
    assert result.score == score(space, result.architecture)


@pytest.mark.parametrize("constants", [
    dict(effectiveness=0.0), dict(effectiveness=20000.0), dict(depth_variance=500.0),
    dict(narrowing=40.0), dict(narrowing=300.0, max_rho=0.4)])
@pytest.mark.parametrize("bases", [(24, 40), (80, 16)])  # (80, 16): narrower in any case
def test_optimal_for_other_constants(constants, bases):
    constants = FitnessSettings(**constants)
    space = dataclasses.replace(SMALL, bases=bases)
    search = Search(space, settings=constants)
    limit = (search.cheapest + search.dearest) // 2
    expected = max(found.fitness for found in (
        score(space, one, constants) for one in every_architecture(space, "stage"))
        if found.macs <= limit and found.rho <= constants.max_rho)
    assert search.fittest(limit).score.fitness == pytest.approx(expected, abs=2e-6)


def test_limits_that_nothing_keeps():
    search = Search(SMALL)
    assert search.fittest(search.cheapest - 1) is None
    assert search.fittest(search.dearest + 5, above=search.dearest) is None
    assert Search(SMALL, settings=FitnessSettings(max_rho=0.01)).fittest(search.dearest) is None
    cheapest = search.fittest(search.cheapest)
    assert cheapest.score.macs == search.cheapest


def test_known_floor_is_returned_if_nothing_is_fitter():
    search = Search(SMALL)
    known = search.fittest(search.dearest)
    assert search.fittest(search.dearest, floor=known) is known


def test_never_worse_than_the_reference_cache():
    path = Path(__file__).resolve().parents[3] / "shared" / "reference" / "feast_cache_56.csv"
    if not path.exists():
        pytest.skip(f"no reference cache {path}")
    search, floor = Search(paper_spec()), None
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            floor = search.fittest(float(row["target"]), floor=floor)
            assert floor.score.macs <= float(row["target"]) and floor.score.rho <= 0.51
            assert floor.score.fitness > float(row["fitness"]) - 1e-3, row["idx"]


@pytest.mark.parametrize("expansion", ["stage", "block"])
def test_fitter_than_the_first_network_of_deepfednas(expansion):
    space = SupernetSpec(stem=64, bases=(256, 512, 1024, 2048), depths=(0, 1, 2),
                         widths=paper_spec().widths, expansions=paper_spec().expansions,
                         strides=(1, 2, 2, 2), classes=10, image_size=32)
    found = Search(space, expansion=expansion).fittest(458_237_952)  # fitness 2027.02896
    assert found.score.macs <= 458_237_952 and found.score.rho <= 0.51
    assert found.score.fitness == pytest.approx(2046.1021, abs=1e-4)


def test_blocks_of_their_own_are_at_least_as_fit():
    by_stage, by_block = (Search(LARGER, expansion=expansion) for expansion in ("stage", "block"))
    gains = [by_block.fittest(limit).score.fitness - by_stage.fittest(limit).score.fitness
             for limit in range(by_stage.dearest // 2, by_stage.dearest, by_stage.dearest // 9)]
    assert min(gains) > -1e-6 and max(gains) > 1


@pytest.mark.parametrize("arguments, message", [
    (dict(cost="joules"), "cost must be one of macs, params, but is 'joules'"),
    (dict(expansion="layer"), "expansion must be one of stage, block, but is 'layer'"),
])
def test_unknown_choice_raises(arguments, message):
    with pytest.raises(ValueError, match=message):
        Search(SMALL, **arguments)
