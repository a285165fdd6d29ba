"""Tests of feast_tf.serving.post_hoc."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from feast_tf.serving import fittest_variants, post_hoc_gap, uncached_variants
from feast_tf.space import SupernetSpec, VariantCache, costs, layout_of

SPEC = SupernetSpec(stem=8, bases=(8, 16), depths=(0, 1), widths=(0.5, 1.0), expansions=(0.5, 1.0),
                    strides=(1, 2), classes=3, image_size=8, divisor=4)
LAYOUT = layout_of(SPEC)
CACHE = VariantCache(SPEC, [SPEC.variant(d=0, e=0.5, w=(0.5, 1.0, 0.5)),
                            SPEC.variant(d=(1, 0), e=0.5, w=1.0),
                            SPEC.variant(d=(0, 1), e=1.0, w=1.0)])


def networks():
    """{dims as bytes: MACs} of all networks of the space."""
    places = itertools.product(itertools.product(SPEC.depths, repeat=2),
                               itertools.product(SPEC.expansions, repeat=2),
                               itertools.product(SPEC.widths, repeat=3))
    dims = [LAYOUT.dims(SPEC.variant(d=d, e=e, w=w)) for d, e, w in places]
    return {row.tobytes(): costs.macs(SPEC, row) for row in dims}


def test_the_gap_by_hand():
    # At 150 the curve is 0.5 + 0.5 * 0.2, at 340 0.7 - 0.7 * 0.1, at the ends the ends'.
    found = post_hoc_gap([100, 150, 340, 400], [0.5, 0.65, 0.55, 0.7], [100, 200, 400],
                         [0.5, 0.7, 0.6])
    np.testing.assert_allclose(found.curve, [0.5, 0.6, 0.63, 0.6], rtol=1e-12)
    np.testing.assert_allclose(found.gap, [0, 0.05, -0.08, 0.1], atol=1e-12)
    assert found.mean_absolute == pytest.approx(0.23 / 4)
    assert found.mean_signed == pytest.approx(0.07 / 4)


def test_cached_variants_of_the_same_macs_count_as_one():
    found = post_hoc_gap([200, 300], [0.5, 0.5], [100, 200, 200, 400], [0.2, 0.3, 0.7, 0.9])
    np.testing.assert_allclose(found.curve, [0.5, 0.7], rtol=1e-12)


def test_a_cache_of_one_variant_has_a_flat_curve():
    np.testing.assert_allclose(post_hoc_gap([5, 7], [0.5, 0.25], [6], [0.4]).gap, [0.1, -0.15])


def test_draws_are_different_networks_within_the_range_and_not_cached():
    found = uncached_variants(CACHE, 12, np.random.default_rng(3))
    macs = [costs.macs(SPEC, variant) for variant in found]
    assert len(found) == 12 and macs == sorted(macs)
    assert CACHE.macs[0] <= macs[0] and macs[-1] <= CACHE.macs[-1]
    dims = {LAYOUT.dims(variant).tobytes() for variant in found}
    assert len(dims) == 12
    assert not dims & {row.tobytes() for row in CACHE.dims}
    assert found == uncached_variants(CACHE, 12, np.random.default_rng(3))
    assert found != uncached_variants(CACHE, 12, np.random.default_rng(4))


def test_the_whole_space_and_no_more():
    low, high = CACHE.macs[0], CACHE.macs[-1]
    expected = {dims for dims, macs in networks().items() if low <= macs <= high}
    assert len(expected) < len(networks())
    expected -= {row.tobytes() for row in CACHE.dims}
    found = uncached_variants(CACHE, len(expected), np.random.default_rng(0))
    assert {LAYOUT.dims(variant).tobytes() for variant in found} == expected
    with pytest.raises(ValueError, match=(
            f"^{len(expected) + 1} uncached variants were asked for, but the space has "
            f"{len(expected)} between the {low:,} and {high:,} MACs of the cache$")):
        uncached_variants(CACHE, len(expected) + 1, np.random.default_rng(0))


def test_no_draws_draw_nothing():
    assert uncached_variants(CACHE, 0, np.random.default_rng(0)) == []


def test_the_fittest_are_not_cached_and_ascend():
    found = fittest_variants(CACHE, 6)
    macs = [costs.macs(SPEC, variant) for variant in found]
    assert 0 < len(found) <= 6 and macs == sorted(set(macs))
    assert CACHE.macs[0] <= macs[0] and macs[-1] <= CACHE.macs[-1]
    assert not {LAYOUT.dims(variant).tobytes() for variant in found} & {
        row.tobytes() for row in CACHE.dims}


def test_where_all_fittest_are_cached_it_says_so():
    cached = VariantCache(SPEC, [*CACHE.variants, *fittest_variants(CACHE, 1)])
    with pytest.raises(ValueError, match="the fittest networks under 1 limits between .* MACs are "
                                         "all in the cache; ask for more, or for random ones"):
        fittest_variants(cached, 1)
