"""The TensorFlow fold against the NumPy reference, and what it must never touch."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf

from feast_tf.aggregation import fold, sparse_mean
from feast_tf.routing import Routing, SliceMap
from feast_tf.space import SupernetSpec, VariantCache

SPEC = SupernetSpec(stem=4, bases=(4, 8), depths=(0, 1), widths=(0.5, 1.0), expansions=(0.5, 1.0),
                    strides=(1, 2), classes=3, image_size=8, divisor=2)
# Four nested envelopes; the lower ones lack blocks, and none is the whole supernet but the last.
ROUTING = Routing(VariantCache(SPEC, [
    SPEC.variant(d=0, e=0.5, w=0.5),
    SPEC.variant(d=(0, 1), e=0.5, w=(0.5, 0.5, 1.0)),
    SPEC.variant(d=(1, 0), e=0.5, w=(0.5, 1.0, 0.5)),
    SPEC.variant(d=1, e=(0.5, 1.0), w=1.0),
]))
SLICES, TOP = ROUTING.slices, ROUTING.num_levels - 1
PARAMETERS = ROUTING.layout.parameters


def random_arrays(shapes, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


shapes = SLICES.slice_shapes
WEIGHTS = random_arrays([parameter.shape for parameter in PARAMETERS], seed=0)


def constant_update(level: int, value: float) -> list[np.ndarray]:
    return [np.full(shape, value, np.float32) for shape in shapes(level)]


def accumulate(cohort, accumulator=None) -> fold.Accumulator:
    """Folds (level, n_i, update) one after the other."""
    accumulator = accumulator or fold.zero(SLICES)
    for level, count, update in cohort:
        accumulator = fold.accumulate(accumulator, [tf.constant(part) for part in update],
                                      tf.constant(count, tf.float32), tf.constant(level))
    return accumulator


def step(weights, means):
    """The server's step: the weights plus the means, where these are not 0."""
    return [np.where(part != 0, weight + part, weight) for weight, part in zip(weights, means)]


def mean(accumulator, weights=WEIGHTS) -> list[np.ndarray]:
    means = fold.mean(SLICES, accumulator.numerator, accumulator.mass)
    return step(weights, [part.numpy() for part in means])


def counts(accumulator) -> tuple[int, int, int]:
    """(with data, without data, refused)"""
    return tuple(int(count) for count in accumulator[3:])


def assert_same_bits(ours, theirs):
    assert [np.asarray(a).tobytes() for a in ours] == [np.asarray(b).tobytes() for b in theirs]


def assert_close(ours, theirs):
    for a, b in zip(ours, theirs):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


cohorts = st.lists(
    st.tuples(st.integers(0, TOP), st.sampled_from([0, 1, 7, 64, 1000]), st.integers(1, 10**6)),
    min_size=1, max_size=6,
).map(lambda drawn: [(level, count, random_arrays(shapes(level), seed))
                     for level, count, seed in drawn])
few_examples = hypothesis.settings(max_examples=15, deadline=None)


def test_lower_envelopes_lack_blocks():
    assert [sum(0 in shape for shape in shapes(level)) for level in range(TOP + 1)] == [12, 6, 0, 0]
    assert shapes(TOP) == [parameter.shape for parameter in PARAMETERS]


def test_mean_by_hand():
    result = mean(accumulate([(0, 3, constant_update(0, 1.0)), (TOP, 5, constant_update(TOP, 2.0)),
                              (2, 8, constant_update(2, -0.5))]))
    inside = lambda place, level: np.s_[tuple(slice(size) for size in shapes(level)[place])]
    for place, (new, old) in enumerate(zip(result, WEIGHTS)):
        change = np.full(old.shape, 2.0)
        change[inside(place, 2)] = (5 * 2 + 8 * -0.5) / 13
        change[inside(place, 0)] = (3 * 1 + 5 * 2 + 8 * -0.5) / 16
        np.testing.assert_allclose(new, old + change, rtol=1e-6, atol=1e-6)


@few_examples
@hypothesis.given(cohorts)
def test_fold_is_the_reference(cohort):
    accumulator = accumulate(cohort)
    expected = sparse_mean(WEIGHTS, [(count, update) for _, count, update in cohort])
    assert_close(mean(accumulator), expected)
    with_data = sum(count > 0 for _, count, _ in cohort)
    assert counts(accumulator) == (with_data, len(cohort) - with_data, 0)


@few_examples
@hypothesis.given(cohorts, st.randoms(use_true_random=False))
def test_order_of_clients_is_irrelevant(cohort, random):
    shuffled = list(cohort)
    random.shuffle(shuffled)
    assert_close(mean(accumulate(cohort)), mean(accumulate(shuffled)))


@few_examples
@hypothesis.given(cohorts, st.integers(0, 6))
def test_merge_of_two_groups_is_the_whole(cohort, cut):
    merged = fold.merge(accumulate(cohort[:cut]), accumulate(cohort[cut:]))
    whole = accumulate(cohort)
    assert_close(mean(merged), mean(whole))
    np.testing.assert_allclose(merged.mass, whole.mass)
    assert counts(merged) == counts(whole)


def test_full_envelopes_give_federated_averaging():
    sizes = [3, 11, 26]
    trained = [random_arrays(shapes(TOP), seed) for seed in (5, 6, 7)]
    cohort = [(TOP, size, [new - old for new, old in zip(client, WEIGHTS)])
              for size, client in zip(sizes, trained)]
    for place, new in enumerate(mean(accumulate(cohort))):
        expected = np.average([client[place] for client in trained], axis=0, weights=sizes)
        np.testing.assert_allclose(new, expected, rtol=1e-5, atol=1e-6)


# Values whose bits an addition of 0 would change, and the largest ones.
DELICATE = np.array([-0.0, 1e-42, -1e-45, 3.4e38, -3.4e38, 1 / 3], np.float32)
DELICATE_WEIGHTS = [np.resize(DELICATE, parameter.shape) for parameter in PARAMETERS]


@pytest.mark.parametrize("level", range(TOP))
def test_positions_that_nobody_covers_keep_their_bits(level):
    result = mean(accumulate([(level, 5, constant_update(level, 1.0))]), DELICATE_WEIGHTS)
    outside = 0
    for shape, new, old in zip(shapes(level), result, DELICATE_WEIGHTS):
        mask = np.ones(old.shape, bool)
        mask[tuple(slice(size) for size in shape)] = False
        outside += np.count_nonzero(mask)
        assert new[mask].tobytes() == old[mask].tobytes()
    assert outside == ROUTING.payload[TOP] - ROUTING.payload[level] > 0


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_updates_of_zero_keep_all_bits(zero):
    # What learning rate 0 sends.
    cohort = [(level, 5 + level, constant_update(level, zero)) for level in range(TOP + 1)]
    assert_same_bits(mean(accumulate(cohort), DELICATE_WEIGHTS), DELICATE_WEIGHTS)


def test_cohort_without_pictures_changes_nothing():
    accumulator = accumulate([(level, 0, constant_update(level, 9.0)) for level in (0, TOP, 2)])
    assert_same_bits(mean(accumulator, DELICATE_WEIGHTS), DELICATE_WEIGHTS)
    assert counts(accumulator) == (0, 3, 0)


def test_nobody_at_all_changes_nothing():
    assert_same_bits(mean(fold.zero(SLICES), DELICATE_WEIGHTS), DELICATE_WEIGHTS)


def test_client_without_pictures_changes_nothing_for_the_others():
    cohort = [(0, 4, random_arrays(shapes(0), 1)), (TOP, 9, random_arrays(shapes(TOP), 2))]
    among = accumulate([cohort[0], (TOP, 0, constant_update(TOP, 9.0)), cohort[1]])
    assert_same_bits(mean(among), mean(accumulate(cohort)))
    assert counts(among) == (2, 1, 0)


def with_value(level: int, place: int, value: float) -> list[np.ndarray]:
    update = constant_update(level, 0.5)
    update[place].flat[-1] = value
    return update


@pytest.mark.parametrize(
    "client",
    [
        pytest.param((TOP, 4, with_value(TOP, 0, np.nan)), id="nan in the first tensor"),
        pytest.param((0, 4, with_value(0, -1, np.inf)), id="infinity in the last"),
        pytest.param((2, 4, with_value(2, 9, -np.inf)), id="minus infinity"),
        pytest.param((1, 0, with_value(1, 3, np.nan)), id="nan without pictures"),
        pytest.param((1, np.nan, constant_update(1, 0.5)), id="nan pictures"),
        pytest.param((1, np.inf, constant_update(1, 0.5)), id="infinite pictures"),
        pytest.param((1, 100, with_value(1, 3, 1e37)), id="overflow when weighted"),
        pytest.param((1, 10, with_value(1, 0, 3e37)), id="overflow when added"),
    ],
)
def test_client_that_would_spoil_the_sums_is_left_out_whole(client):
    large = with_value(1, 0, 3e37)
    before = accumulate([(1, 10, large), (TOP, 3, random_arrays(shapes(TOP), 4))])
    assert all(np.all(np.isfinite(part)) for part in before.numerator)
    after = accumulate([client], before)
    assert_same_bits([*after.numerator, after.mass], [*before.numerator, before.mass])
    assert counts(after) == (2, 0, 1)
    # The next one is added as if nothing had been.
    good = 2, 6, random_arrays(shapes(2), 5)
    assert_same_bits(accumulate([good], after).numerator, accumulate([good], before).numerator)


def test_accumulate_leaves_its_input_alone():
    # Its raw op may write in place where nobody else holds the buffer.
    before = accumulate([(0, 3, random_arrays(shapes(0), 1))])
    copies = [part.numpy().copy() for part in before.numerator]
    accumulate([(TOP, 5, random_arrays(shapes(TOP), 2))], before)
    assert_same_bits(before.numerator, copies)


@pytest.mark.parametrize("place", range(len(PARAMETERS)), ids=[p.name for p in PARAMETERS])
def test_mass_is_expanded_to_the_positions_of_each_envelope(place):
    mass = np.array([1, 20, 300, 4000], np.float32)
    parameter, extents = PARAMETERS[place], ROUTING.extents[place]
    expected = np.zeros(parameter.shape)
    for level, extent in enumerate(extents):
        for position in np.ndindex(*extent):
            expected[position] += mass[level]
    found = fold.expand_mass(parameter.shape, extents, tf.constant(mass))
    assert found.shape.rank == len(parameter.shape)
    np.testing.assert_array_equal(np.broadcast_to(found, parameter.shape), expected)
    assert all(size == 1 for size, dim in zip(found.shape, parameter.axes) if dim is None)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 2), (2, 2, 3, 2, 2)], ids=str)
def test_arrays_of_any_rank_with_any_elastic_axes(shape):
    rng = np.random.default_rng(len(shape))
    extents = np.stack([rng.integers(0, np.array(shape) + 1) for _ in range(4)]).astype(np.int32)
    slices = SliceMap(("array",), (shape,), (extents,))
    cohort = [(level, count, [rng.normal(size=extents[level]).astype(np.float32)])
              for level, count in [(0, 3), (2, 5), (3, 8), (1, 2)]]
    accumulator = accumulate(cohort, fold.zero(slices))
    [found] = fold.mean(slices, accumulator.numerator, accumulator.mass)
    [expected] = sparse_mean([np.zeros(shape, np.float32)],
                             [(count, update) for _, count, update in cohort])
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("count", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_refused_where_the_update_is_empty_too(count):
    slices = SliceMap(("array",), ((3,),), (np.array([[0], [3]], np.int32),))
    accumulator = accumulate([(0, count, [np.zeros([0], np.float32)]),
                              (1, 4, [np.ones([3], np.float32)])],
                             fold.zero(slices))
    assert accumulator.mass.numpy().tolist() == [0, 4] and counts(accumulator) == (1, 0, 1)


def test_bytes_are_those_of_all_updates():
    cohort = [(0, 3, constant_update(0, 1.0)), (TOP, 0, constant_update(TOP, 2.0)),
              (1, 5, constant_update(1, np.nan))]
    assert accumulate(cohort).bytes_up == 4 * ROUTING.payload[[0, TOP, 1]].sum()


def test_a_graph_of_the_first_kind_gives_the_same():
    # TFF traces in such graphs, where `==` and `!=` on tensors compare identities.
    cohort = [(0, 3, random_arrays(shapes(0), 1)), (2, 0, random_arrays(shapes(2), 2)),
              (1, 5, with_value(1, 2, np.nan)), (2, 4, random_arrays(shapes(2), 3))]
    expected = accumulate(cohort)
    with tf.Graph().as_default():
        accumulator = accumulate(cohort)
        means = fold.mean(SLICES, accumulator.numerator, accumulator.mass)
        with tf.compat.v1.Session() as session:
            means, found = session.run((means, accumulator[3:]))
    assert_same_bits(step(DELICATE_WEIGHTS, means), mean(expected, DELICATE_WEIGHTS))
    assert tuple(found) == counts(expected) == (2, 1, 1)
