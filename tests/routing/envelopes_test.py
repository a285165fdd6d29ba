"""Tests of feast_tf.routing.envelopes."""

import csv
import dataclasses
import json
import pathlib

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from feast_tf.routing import Envelope
from feast_tf.routing import Routing
from feast_tf.space import SupernetSpec
from feast_tf.space import Variant
from feast_tf.space import VariantCache
from feast_tf.space import layout_of
from feast_tf.space import params
from feast_tf.space import paper_spec
from feast_tf.space import shipped_cache

_REFERENCE = (
    pathlib.Path(__file__).resolve().parents[3] / "shared" / "reference" / "feast_cache_56.csv"
)
SPEC = SupernetSpec(stem=4, bases=(10, 16), depths=(0, 1, 2), widths=(0.5, 1.0),
                    expansions=(0.25, 0.5), strides=(1, 2), classes=3, image_size=6, divisor=1)


def three_levels():
    return Routing(VariantCache(SPEC, [
        SPEC.variant(d=(1, 0), e=0.25, w=(0.5, 0.5, 0.5)),
        SPEC.variant(d=(0, 2), e=(0.5, 0.25), w=(0.5, 0.5, 1)),
        SPEC.variant(d=(2, 1), e=0.25, w=(1, 1, 0.5)),
    ]))


def test_envelopes_worked_out_by_hand():
    routing = three_levels()
    # Running maxima of d and w; all at the largest expansion, 0.5.
    assert routing.envelope_dims.tolist() == [
        [2, 5, 8, 3, 4, 1, 0],
        [2, 5, 16, 3, 8, 1, 2],
        [4, 10, 16, 5, 8, 2, 2],
    ]
    assert routing.envelope_dims.dtype == np.int32 and routing.num_levels == 3
    assert routing.variant_dims.tolist() == routing.cache.dims.tolist()
    # The lowest level: stem 54 + 4, conv1 54 + 6, conv2 135 + 10, shortcut 10 + 10, the extra block
    # 135 + 6 and 135 + 10; conv1 180 + 8, conv2 288 + 16, shortcut 40 + 16, head 24 + 3.
    first = 58 + 60 + 145 + 20 + 141 + 145 + 188 + 304 + 56 + 27
    assert routing.envelope(0) == Envelope(level=0, d=(1, 0), w=(0.5, 0.5, 0.5), payload=first)
    assert routing.envelope(1).d == (1, 2) and routing.envelope(1).w == (0.5, 0.5, 1)
    assert routing.envelope(2).d == (2, 2) and routing.envelope(2).w == (1, 1, 1)
    assert routing.envelope(0).payload_bytes == 4 * first == 4576
    # The top level is the whole supernet.
    assert routing.envelope(2).payload == params(SPEC, SPEC.largest())
    assert routing.payload.dtype == np.int64
    assert routing.payload.tolist() == [routing.envelope(level).payload for level in range(3)]


def test_a_budget_gets_the_envelope_of_its_largest_variant():
    routing = three_levels()
    macs = routing.cache.macs
    assert routing.envelope_for(macs[1] - 1) == routing.envelope(0)
    assert routing.envelope_for(macs[1]) == routing.envelope(1)
    assert routing.envelope_for(float("inf")) == routing.envelope(2)
    with pytest.raises(ValueError, match=f"affords no variant: the cheapest needs {macs[0]:,}"):
        routing.envelope_for(macs[0] - 1)
    with pytest.raises(ValueError, match="a budget of nan MACs affords no variant"):
        routing.envelope_for(float("nan"))


@pytest.mark.parametrize("level", [-1, 3, 1000])
def test_unknown_levels_are_refused(level):
    with pytest.raises(ValueError, match=rf"level must lie in 0\.\.2, but is {level}"):
        three_levels().envelope(level)


def test_envelopes_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        three_levels().envelope(0).payload = 3


def test_extents_say_which_prefix_each_level_receives():
    routing = three_levels()
    for place, extents in enumerate(routing.extents):
        assert extents.shape == (3, len(routing.layout.parameters[place].shape))
    sizes = sum(np.prod(extents, axis=1, dtype=np.int64) for extents in routing.extents)
    assert sizes.tolist() == routing.payload.tolist()
    second_extra = routing.layout.stages[1][2].conv1.kernel
    assert routing.extents[second_extra].tolist() == [[3, 3, 0, 0], [3, 3, 16, 8], [3, 3, 16, 8]]


def test_one_variant_makes_one_envelope():
    routing = Routing(VariantCache(SPEC, [SPEC.smallest()]))
    assert routing.num_levels == 1 and routing.payload.shape == (1,)
    assert routing.envelope_for(1e9) == routing.envelope(0)
    assert routing.envelope(0).payload > params(SPEC, SPEC.smallest())  # at full expansion


def test_the_paper_envelopes():
    routing = Routing(shipped_cache("paper_56", paper_spec(classes=100)))
    smallest, top = routing.envelope(0), routing.envelope_for(596e6)
    assert smallest == Envelope(0, (3, 7, 6, 7), (0.3, 0.1, 0.1, 0.1, 0.1), 499_644)
    assert top == Envelope(55, (8, 8, 8, 8), (1.0, 0.7, 0.7, 0.8, 0.8), 35_602_596)
    assert top.payload_bytes == 142_410_384


@pytest.mark.skipif(not _REFERENCE.exists(), reason=f"{_REFERENCE} is not there")
def test_all_paper_envelopes():
    with open(_REFERENCE, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    routing = Routing(shipped_cache("paper_56", paper_spec(classes=100)))
    assert [routing.envelope(level) for level in range(56)] == [
        Envelope(level, tuple(json.loads(row["env_d"])), tuple(json.loads(row["env_w"])),
                 int(row["env_params"])) for level, row in enumerate(rows)]


@st.composite
def caches(draw):
    stages = draw(st.integers(1, 3))
    one_of = lambda values: st.lists(st.sampled_from(values), min_size=1)
    per_stage = lambda values: draw(st.lists(st.sampled_from(values), min_size=stages,
                                             max_size=stages))
    strides = per_stage([1, 2, 3])
    spec = SupernetSpec(
        stem=draw(st.integers(1, 12)), bases=per_stage(range(1, 25)), depths=draw(one_of(range(4))),
        widths=draw(one_of([0.1, 0.3, 0.5, 2 / 3, 1.0])), strides=strides, classes=3,
        expansions=draw(one_of([0.1, 0.25, 1 / 3, 1.0])), image_size=int(np.prod(strides)),
        divisor=draw(st.sampled_from([1, 2, 4, 8])))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    drawn = [spec.random(rng) for _ in range(draw(st.integers(1, 8)))]
    return VariantCache(spec, {layout_of(spec).dims(v).tobytes(): v for v in drawn}.values())


@given(caches(), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_envelopes_hold_their_variants_and_nest(cache, seed):
    routing = Routing(cache)
    layout, rng = routing.layout, np.random.default_rng(seed)
    for extents in routing.extents:
        assert np.all(np.diff(extents, axis=0) >= 0)
    assert np.all(np.diff(routing.payload) >= 0)
    weights = [rng.normal(size=parameter.shape) for parameter in layout.parameters]
    for level in range(routing.num_levels):
        received = layout.cut(weights, routing.envelope_dims[level])
        assert sum(part.size for part in received) == routing.payload[level]
        for extents, part in zip(routing.extents, received):
            assert tuple(extents[level]) == part.shape
        for place in range(level + 1):
            assert np.all(cache.dims[place] <= routing.envelope_dims[level])
            own = layout.cut(weights, cache.dims[place])
            for part, expected in zip(layout.cut(received, cache.dims[place]), own):
                np.testing.assert_array_equal(part, expected)


@given(caches())
@settings(max_examples=30, deadline=None)
def test_envelopes_are_no_larger_than_needed(cache):
    routing = Routing(cache)
    for level in range(routing.num_levels):
        affordable = cache.variants[: level + 1]
        envelope = routing.envelope(level)
        assert envelope.d == tuple(np.max([v.d for v in affordable], axis=0))
        assert envelope.w == tuple(np.max([v.w for v in affordable], axis=0))
        full = Variant(envelope.d, (cache.spec.expansions[-1],) * len(envelope.d), envelope.w)
        assert envelope.payload == params(cache.spec, full)
