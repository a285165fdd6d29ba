"""Tests of feast_tf.serving.choice."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from feast_tf.serving import ExportRequest, choose
from feast_tf.serving.choice import Trials
from feast_tf.space import Search, SupernetSpec, VariantCache, costs

SPEC = SupernetSpec(stem=4, bases=(4, 8), depths=(0, 1, 2), widths=(0.5, 1.0),
                    expansions=(0.5, 1.0), strides=(1, 2), classes=3, image_size=8, divisor=2)
# Not the smallest of the space, and more MACs do not always mean more parameters.
CACHE = VariantCache(SPEC, [
    SPEC.variant(d=(2, 1), e=(0.5, 1.0), w=0.5), SPEC.variant(d=(0, 1), e=0.5, w=1.0),
    SPEC.variant(d=(1, 0), e=(0.5, 1.0), w=1.0), SPEC.variant(d=(2, 0), e=(0.5, 1.0), w=1.0),
    SPEC.variant(d=2, e=1.0, w=1.0)])
MACS, PARAMS = CACHE.macs.tolist(), CACHE.params.tolist()


def forbidden(variant):
    raise AssertionError(f"{variant} was tried")


TRIALS = Trials("tflite, 2 threads", 4, forbidden, forbidden)


def levels(request, trials=TRIALS):
    return [choice.level for choice in choose(CACHE, request, trials)]


def by_level(values, asked):
    """A function of a variant that looks its level's value up and notes the level."""
    def value(variant):
        asked.append(CACHE.variants.index(variant))
        return values[asked[-1]]
    return value


def test_the_cache_is_what_the_tests_take_it_for():
    assert PARAMS[1] > PARAMS[2] and costs.macs(SPEC, SPEC.smallest()) < MACS[0]


def test_without_a_size_five_spread_over_the_cache():
    assert levels(ExportRequest()) == [0, 1, 2, 3, 4]
    larger = VariantCache(SPEC, {str(v): v for v in (
        SPEC.random(np.random.default_rng(seed)) for seed in range(13))}.values())
    found = [choice.level for choice in choose(larger, ExportRequest(), TRIALS)]
    assert found == np.round(np.linspace(0, len(larger) - 1, 5)).astype(int).tolist()


def test_levels_in_their_order_each_once():
    assert levels(ExportRequest(levels=(3, 0, 3))) == [3, 0]
    for level in (-1, 5):
        with pytest.raises(ValueError, match=rf"level {level} is not in the cache; its levels are "
                                             "0 to 4"):
            levels(ExportRequest(levels=(0, level)))


def test_a_budget_gives_the_largest_within_it():
    assert levels(ExportRequest(budgets=(MACS[1], MACS[3] - 1, 1e12))) == [1, 2, 4]
    choice, = choose(CACHE, ExportRequest(budgets=(MACS[1] + 0.5,)), TRIALS)
    assert choice.variant == CACHE.variants[1]
    assert choice.reason == f"largest cached within {MACS[1]:,} MACs"


def test_params_give_the_most_macs_within_them():
    assert levels(ExportRequest(params=PARAMS[2])) == [2]
    assert levels(ExportRequest(params=PARAMS[1])) == [2]  # smaller in parameters, larger in MACs
    assert levels(ExportRequest(params=PARAMS[3])) == [3]


@pytest.mark.parametrize("cost, field", [("macs", "budgets"), ("params", "params")])
def test_below_the_cache_the_space_is_searched(cost, field):
    least = getattr(CACHE, cost).min()
    limit = float(least - 1)
    choice, = choose(CACHE, ExportRequest(**{field: (limit,) if field == "budgets" else limit}),
                     TRIALS)
    assert choice.level is None and getattr(costs, cost)(SPEC, choice.variant) <= limit
    assert choice.reason.startswith(f"fittest in the cache's range within {limit:,.0f}")


def test_what_no_cached_variant_has_is_not_searched():
    middle = VariantCache(SPEC, [SPEC.variant(d=0, e=1.0, w=1.0), SPEC.variant(d=1, e=1.0, w=1.0)])
    for limit in np.linspace(middle.macs[0], 1e5, 9):
        choice, = choose(middle, ExportRequest(budgets=(float(limit),), post_hoc=True), TRIALS)
        assert max(choice.variant.d) <= 1 and min(choice.variant.e + choice.variant.w) == 1.0
    with pytest.raises(ValueError, match=f"in the cache's range of d, e and w {middle.macs[0]:,}$"):
        choose(middle, ExportRequest(budgets=(float(middle.macs[0] - 1),)), TRIALS)


def test_the_limit_on_rho_gives_way():
    limit = 12_000.0  # below the cheapest network that keeps it
    assert Search(SPEC).fittest(limit) is None
    choice, = choose(CACHE, ExportRequest(budgets=(limit,)), TRIALS)
    assert costs.macs(SPEC, choice.variant) <= limit


def test_below_the_space_the_minimum_is_named():
    least = costs.macs(SPEC, SPEC.smallest())
    with pytest.raises(ValueError, match=f"no network keeps {least - 1:,} MACs: the smallest "
                                         f"cached one has {MACS[0]:,}, the smallest in the "
                                         f"cache's range of d, e and w {least:,}$"):
        levels(ExportRequest(budgets=(float(least - 1),)))
    least = costs.params(SPEC, SPEC.smallest())
    with pytest.raises(ValueError, match=f"the smallest in the cache's range .* {least:,}$"):
        levels(ExportRequest(params=1.0))


def test_post_hoc_searches_although_the_cache_has_some():
    choice, = choose(CACHE, ExportRequest(budgets=(float(MACS[3]),), post_hoc=True), TRIALS)
    assert choice.reason.startswith("fittest in the cache's range")
    assert costs.macs(SPEC, choice.variant) <= MACS[3] and choice.level is None


def test_a_named_variant_is_found_in_the_cache_or_not():
    found = choose(CACHE, ExportRequest(variants=("d=2,1;e=0.5,1;w=0.5", "d=1;e=1;w=1",
                                                  "d=1,0 e=0.5,1 w=1,1,1")), TRIALS)
    assert [choice.level for choice in found] == [0, None, 2]
    assert found[1].variant == SPEC.variant(d=1, e=1.0, w=1.0)


@pytest.mark.parametrize("text, message", [
    ("d=3;e=1;w=1", r"variant 'd=3;e=1;w=1': d\[0\] = 3 is not in the space; allowed: 0, 1, 2"),
    ("d=1;e=1", "variant 'd=1;e=1' must look like 'd="),
    ("d=1,1,1;e=1;w=1", "d must have 2 values, but has 3")])
def test_a_variant_outside_the_space_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        levels(ExportRequest(variants=(text,)))


def test_bytes_try_only_what_could_fit():
    sizes, asked = [2000, 7000, 6000, 9900, 12000], []
    trials = dataclasses.replace(TRIALS, size=by_level(sizes, asked))
    assert levels(ExportRequest(bytes=9900), trials) == [3]
    weights = [sum(np.prod(row.kernel) for row in costs.layer_table(SPEC, variant))
               for variant in CACHE.variants]
    assert asked == [level for level in (4, 3) if 4 * weights[level] <= 9900]
    choice, = choose(CACHE, ExportRequest(bytes=6999), trials)
    assert choice.level == 2
    assert choice.reason == "largest cached within 6,999 bytes: 6,000 (tflite, 2 threads)"


def test_bytes_never_skip_what_fits():
    # The bound that skips is below any file: here files have no byte beside their weights.
    weights = [4 * sum(int(np.prod(row.kernel)) for row in costs.layer_table(SPEC, variant))
               for variant in CACHE.variants]
    for level in (0, 2, 4):
        trials = dataclasses.replace(TRIALS, size=by_level(weights, []))
        assert levels(ExportRequest(bytes=weights[level]), trials)[0] >= level


def test_no_file_is_small_enough():
    trials = dataclasses.replace(TRIALS, size=by_level([2000, 7, 6, 9, 12], []))
    with pytest.raises(ValueError, match="no cached variant's file keeps 10 bytes: the smallest "
                                         r"has 2,000 \(tflite, 2 threads\)"):
        levels(ExportRequest(bytes=10), trials)


@pytest.mark.parametrize("limit, level", [(1.0, 0), (2.5, 1), (3.0, 2), (4.5, 3), (50.0, 4)])
def test_latency_is_bisected(limit, level):
    asked = []
    trials = dataclasses.replace(TRIALS, latency_ms=by_level([1.0, 2.0, 3.0, 4.0, 5.0], asked))
    choice, = choose(CACHE, ExportRequest(latency_ms=limit), trials)
    assert choice.level == level and len(asked) <= 3
    for other in asked:
        assert f"{other + 1} ms at {MACS[other] / 1e6:.4g}M MACs" in choice.reason


def test_no_latency_is_short_enough():
    trials = dataclasses.replace(TRIALS, latency_ms=by_level([1.5, 2.5, 3.5, 4.5, 5.5], []))
    with pytest.raises(ValueError, match=r"no cached variant keeps 1.25 ms; measured: 1.5 ms at .* "
                                         r"\(tflite, 2 threads\)"):
        levels(ExportRequest(latency_ms=1.25), trials)


@pytest.mark.parametrize("fields, message", [
    (dict(budgets=(1.0,), latency_ms=2.0), "in one unit only, not in --budget and --latency_ms"),
    (dict(levels=(0,), variants=("d=1",), bytes=3), "not in --levels and --variant and --bytes"),
    (dict(budgets=(5.0, -1.0)), "--budget must be positive, but is -1"),
    (dict(params=0.0), "--params must be positive, but is 0"),
    (dict(bytes=float("inf")), "--bytes must be positive, but is inf"),
    (dict(latency_ms=float("nan")), "--latency_ms must be positive, but is nan"),
    (dict(post_hoc=True), "--post_hoc goes with --budget or --params only"),
    (dict(bytes=3, post_hoc=True), "--post_hoc goes with --budget or --params only")])
def test_a_request_that_contradicts_itself_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ExportRequest(**fields)
