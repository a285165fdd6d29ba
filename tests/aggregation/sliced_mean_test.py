"""SlicedMeanFactory: its types, its numbers worked out by hand, and what it refuses."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from feast_tf.aggregation import SlicedMeanFactory, slices_type, weights_type
from tests.aggregation.conftest import (COUNTS, MEAN, NOTHING, SLICES, UPDATES, arrays,
                                        assert_arrays, padded)

pytestmark = pytest.mark.usefixtures("in_process")

W_SLICE, W = slices_type(SLICES), weights_type(SLICES)
N = tff.TensorType(np.float32)
FOLD = ("<bytes_up=int64,clients_with_data=int32,clients_without_data=int32,"
        "clients_refused=int32>")
KINDS = {"slices": (W_SLICE, arrays), "whole arrays": (W, padded)}


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    """(process, update) -> process of the default factory, and the client's value of an update."""
    value_type, value = KINDS[request.param]
    return SlicedMeanFactory(SLICES).create(value_type, N), value


def round_of(process, values, weights, state=None):
    return process.next(process.initialize() if state is None else state, values, weights)


def counts(output) -> tuple[int, ...]:
    """(bytes up, with data, without data, refused)"""
    return tuple(int(count) for count in output.measurements.values())


# --- types


@pytest.mark.parametrize("weight_dtype", [np.float32, np.float64, np.int32])
@pytest.mark.parametrize("value_type", [W_SLICE, W], ids=KINDS)
def test_type_signatures(value_type, weight_dtype):
    process = SlicedMeanFactory(SLICES).create(value_type, tff.TensorType(weight_dtype))
    assert process.is_weighted
    assert str(W_SLICE) == "<float32[?,?],float32[?],float32>"
    assert str(process.initialize.type_signature) == "( -> <>@SERVER)"
    assert str(process.next.type_signature) == (
        f"(<state=<>@SERVER,value={{{value_type}}}@CLIENTS,"
        f"weight={{{tff.TensorType(weight_dtype)}}}@CLIENTS> -> "
        f"<state=<>@SERVER,result={W}@SERVER,measurements={FOLD}@SERVER>)")


def test_type_signatures_with_inner_factories():
    factory = SlicedMeanFactory(SLICES, SumPlusOne(), SumPlusOne())
    process = factory.create(W_SLICE, N)
    state = "<value_sum_process=int32,weight_sum_process=int32>"
    measurements = "<mean_value=<rounds=int32>,mean_weight=<rounds=int32>>"
    assert process.is_weighted
    assert str(process.initialize.type_signature) == f"( -> {state}@SERVER)"
    assert str(process.next.type_signature) == (
        f"(<state={state}@SERVER,value={{{W_SLICE}}}@CLIENTS,weight={{float32}}@CLIENTS> -> "
        f"<state={state}@SERVER,result={W}@SERVER,measurements={measurements}@SERVER>)")


def test_type_signatures_with_a_fixed_denominator():
    process = SlicedMeanFactory(SLICES, fixed_denominator=[1, 2, 3]).create(W_SLICE, N)
    assert str(process.next.type_signature.result) == (
        f"<state=<value_sum_process=<>>@SERVER,result={W}@SERVER,"
        "measurements=<mean_value=<>>@SERVER>")


# --- numbers


def test_mean_by_hand(kind):
    process, value = kind
    output = round_of(process, [value(update) for update in UPDATES], COUNTS)
    assert_arrays(output.result, MEAN)
    sent = 4 * (4 + 6 + 10) if process.next.type_signature.parameter[1].member == W_SLICE else 120
    assert counts(output) == (sent, 3, 0, 0)


def test_exactly_0_where_nobody_reports(kind):
    process, value = kind
    output = round_of(process, [value(update) for update in UPDATES[:2]], COUNTS[:2])
    assert_arrays(output.result, (
        [[(2 * 1 + 3 * 10) / 5, (2 * 2 + 3 * 20) / 5, 0], [30, 40, 0]],
        [(2 * 3 + 3 * 50) / 5, 0, 0], (2 * 4 + 3 * 60) / 5))
    for part, places in zip(output.result, (np.s_[:, 2], np.s_[1:])):
        assert part[places].tobytes() == bytes(part[places].nbytes)


@pytest.mark.parametrize("weights", [[], [0.0, 0.0, 0.0]], ids=["nobody", "nobody has data"])
def test_nobody_at_all(kind, weights):
    process, value = kind
    output = round_of(process, [value(update) for update in UPDATES[:len(weights)]], weights)
    assert_arrays(output.result, padded(NOTHING))
    assert counts(output)[1:] == (0, len(weights), 0)


def test_client_that_is_not_finite_is_left_out_whole(kind):
    process, value = kind
    broken = value(UPDATES[1])
    broken[1][0] = np.inf
    values = [value(UPDATES[0]), broken, value(UPDATES[2])]
    output = round_of(process, values, COUNTS)
    without = round_of(process, [values[0], values[2]], [COUNTS[0], COUNTS[2]])
    assert_arrays(output.result, without.result, 0)
    assert counts(output)[1:] == (2, 0, 1)


@pytest.mark.parametrize("name", KINDS)
def test_inner_sums_leave_out_a_client_that_is_not_finite(name):
    value_type, value = KINDS[name]
    process = SlicedMeanFactory(SLICES, tff.aggregators.SumFactory()).create(value_type, N)
    broken = value(UPDATES[1])
    broken[2][...] = np.nan
    values = [value(UPDATES[0]), broken, value(UPDATES[2])]
    expected = round_of(process, [values[0], values[2]], [COUNTS[0], COUNTS[2]]).result
    assert expected[0][1, 0] == 400
    assert_arrays(round_of(process, values, COUNTS).result, expected, 0)
    assert_arrays(round_of(process, [broken], [np.inf]).result, padded(NOTHING), 0)


@pytest.mark.parametrize("inner", [None, tff.aggregators.SumFactory()], ids=["fold", "sums"])
def test_weights_below_0_count_for_nothing(inner):
    process = SlicedMeanFactory(SLICES, inner).create(W_SLICE, N)
    output = round_of(process, [arrays(UPDATES[2]), arrays(UPDATES[1])], [5.0, -3.0])
    assert_arrays(output.result, arrays(UPDATES[2]))


def test_updates_of_zeros_count_only_where_their_shapes_say_what_they_cover():
    zeros = tuple(np.zeros_like(part) for part in arrays(UPDATES[1]))
    for name, kernel in (("slices", 400 * 5 / 8), ("whole arrays", 400)):
        value_type, value = KINDS[name]
        process = SlicedMeanFactory(SLICES).create(value_type, N)
        output = round_of(process, [value(zeros), value(UPDATES[2])], COUNTS[1:])
        assert output.result[0][1, 0] == kernel


def test_update_whose_shapes_are_of_no_level_stops_the_round():
    process = SlicedMeanFactory(SLICES).create(W_SLICE, N)
    wrong = arrays(([[1, 2]], [3, 4, 5], 6))
    with pytest.raises(RuntimeError, match="shapes are those of no level"):
        round_of(process, [wrong], [1.0])


def test_integer_weights():
    process = SlicedMeanFactory(SLICES).create(W_SLICE, tff.TensorType(np.int32))
    output = round_of(process, [arrays(update) for update in UPDATES],
                      [np.int32(count) for count in COUNTS])
    assert_arrays(output.result, MEAN)


def test_containers_are_kept_in_the_order_of_the_type():
    """Not in that of the sorted names, which tf.nest would take."""
    value_type = tff.StructWithPythonType(
        [("z", W[0]), ("a", tff.StructWithPythonType([W[1], W[2]], tuple))],
        collections.OrderedDict)
    for factory in (SlicedMeanFactory(SLICES),
                    SlicedMeanFactory(SLICES, tff.aggregators.SumFactory())):
        process = factory.create(value_type, N)
        assert process.next.type_signature.result.result.member == value_type
        values = [collections.OrderedDict(z=kernel, a=(bias, scale))
                  for kernel, bias, scale in map(padded, UPDATES)]
        result = round_of(process, values, COUNTS).result
        assert list(result) == ["z", "a"] and isinstance(result["a"], tuple)
        assert_arrays((result["z"], *result["a"]), MEAN)


def test_an_array_alone():
    slices = type(SLICES)(("a",), ((3,),), (np.array([[1], [3]], np.int32),))
    for factory in (SlicedMeanFactory(slices),
                    SlicedMeanFactory(slices, tff.aggregators.SumFactory())):
        process = factory.create(tff.TensorType(np.float32, [None]), N)
        result = round_of(process, arrays([[4], [8, 16, 32]]), [1.0, 3.0]).result
        np.testing.assert_allclose(result, [(4 + 3 * 8) / 4, 16, 32])


class SumPlusOne(tff.aggregators.UnweightedAggregationFactory):
    """Sums, adds 1 for every round so far, and reports the number of the round."""

    def create(self, value_type):
        @tff.tensorflow.computation(value_type, np.int32)
        def add(value, rounds):
            return tf.nest.map_structure(lambda part: part + tf.cast(rounds, part.dtype), value)

        plus_one = tff.tensorflow.computation(lambda rounds: rounds + 1, np.int32)

        @tff.federated_computation
        def init_fn():
            return tff.federated_value(np.int32(0), tff.SERVER)

        @tff.federated_computation(init_fn.type_signature.result,
                                   tff.FederatedType(value_type, tff.CLIENTS))
        def next_fn(state, value):
            state = tff.federated_map(plus_one, state)
            return tff.templates.MeasuredProcessOutput(
                state, tff.federated_map(add, (tff.federated_sum(value), state)),
                tff.federated_zip(collections.OrderedDict(rounds=state)))

        return tff.templates.AggregationProcess(init_fn, next_fn)


@pytest.mark.parametrize("values_plus, weights_plus", [(1, 0), (0, 1), (1, 1)])
def test_inner_factories_are_called_and_their_states_kept(values_plus, weights_plus):
    factory = SlicedMeanFactory(SLICES, SumPlusOne() if values_plus else None,
                                SumPlusOne() if weights_plus else None)
    process, values = factory.create(W_SLICE, N), [arrays(update) for update in UPDATES]
    state = None
    for rounds in (1, 2):
        output = round_of(process, values, COUNTS, state)
        state = output.state
        # The weights of a level that reaches all others are added to theirs: 3 levels hold kernel
        # [0, 0], 1 holds [0, 2].
        kernel = output.result[0]
        more, mass = rounds * values_plus, rounds * weights_plus
        assert kernel[0, 0] == pytest.approx((532 + more) / (10 + 3 * mass))
        assert kernel[0, 2] == pytest.approx((5 * 300 + more) / (5 + mass))


def test_fixed_denominator_by_hand():
    process = SlicedMeanFactory(SLICES, fixed_denominator=[4, 6, 0]).create(W_SLICE, N)
    result = round_of(process, [arrays(update) for update in UPDATES], COUNTS).result
    assert_arrays(result, ([[532 / 10, 1064 / 10, 0], [2090 / 6, 2620 / 6, 0]],
                           [3656 / 10, 0, 0], 5188 / 10))


# --- what is refused


def refused(match, *args, **kwargs):
    with pytest.raises(TypeError, match=match):
        SlicedMeanFactory(*args, **kwargs)


_aggregators = tff.aggregators
_MEAN = _aggregators.UnweightedMeanFactory


def test_slice_map_of_another_kind():
    refused(r"^slices must be a feast_tf.routing.SliceMap .* but is a tuple$", (1, 2))


@pytest.mark.parametrize("name", ["value_sum_factory", "weight_sum_factory"])
@pytest.mark.parametrize("factory, match", [
    (_aggregators.SumFactory, "must be a tff.aggregators.UnweightedAgg.* but is a ABCMeta$"),
    (_aggregators.MeanFactory(), "must be a tff.aggregators.UnweightedAgg.* is a MeanFactory$"),
    (_MEAN(), "must sum, but holds a UnweightedMeanFactory$"),
    (_aggregators.clipping_factory(1.0, _MEAN()), "must sum, but holds a UnweightedMeanFactory$"),
    (_aggregators.HadamardTransformFactory(_aggregators.zeroing_factory(1.0, _MEAN())),
     "must sum, but holds a UnweightedMeanFactory$"),
    (_aggregators.UnweightedReservoirSamplingFactory(3),
     "must sum, but holds a UnweightedReservoirSamplingFactory$"),
    (_aggregators.DifferentiallyPrivateFactory.gaussian_fixed(1.0, 3.0, 1.0),
     "holds a DifferentiallyPrivateFactory, which goes with .* fixed_denominator alone"),
    (_aggregators.zeroing_factory(1.0, tff.learning.dp_aggregator(0.0, 9.0)),
     "holds a DifferentiallyPrivateFactory, which goes with .* fixed_denominator alone"),
], ids=["class", "weighted", "mean", "mean inside", "mean far inside", "sample", "DP", "DP inside"])
def test_inner_factories_that_do_not_sum(name, factory, match):
    refused(f"^{name} {match}", SLICES, **{name: factory})


def test_secure_sums_of_weights_need_an_exact_zero():
    match = "^weight_sum_factory must sum zeros to exactly 0, .* lower_bound_threshold=0.0 alone$"
    secure = _aggregators.SecureSumFactory(float(2**20 - 1))
    refused(match, SLICES, weight_sum_factory=secure)
    refused(match, SLICES, weight_sum_factory=_aggregators.clipping_factory(9.0, secure))
    SlicedMeanFactory(SLICES, secure, _aggregators.SecureSumFactory(float(2**20 - 1), 0.0))


def test_fixed_denominator_takes_the_place_of_weights():
    refused("^weight_sum_factory has nothing to sum beside fixed_denominator$", SLICES,
            weight_sum_factory=_aggregators.SumFactory(), fixed_denominator=[1, 2, 3])


@pytest.mark.parametrize("numbers", [[1, 2], [[1, 2, 3]], [1, -2, 3], [1, np.nan, 3]], ids=str)
def test_fixed_denominator_is_a_number_for_each_level(numbers):
    with pytest.raises(ValueError, match="^fixed_denominator must .* each of the 3 levels, but is"):
        SlicedMeanFactory(SLICES, fixed_denominator=numbers)


@pytest.mark.parametrize("value_type, match", [
    (tff.StructType([W[0], W[1]]), "must have the 3 arrays of the slice map, but has 2"),
    (tff.TensorType(np.float32, [2, 3]), "must have the 3 arrays .*, but has 1"),
    (tff.SequenceType(W), "must have the 3 arrays .*, but has 0"),
    (tff.StructType([W[0], tff.TensorType(np.float64, [3]), W[2]]),
     r"must have bias as float32\[\?\] where .* slices, or as float32\[3\] .* has float64\[3\]"),
    (tff.StructType([tff.TensorType(np.float32, [3, 2]), W[1], W[2]]),
     r"must have kernel as float32\[\?,\?\] where .* but has float32\[3,2\]"),
    (tff.StructType([W_SLICE[0], W[1], W[2]]), "must be either slices or whole arrays, but mixes"),
], ids=["too few", "tensor", "sequence", "float64", "shape", "mixed"])
def test_value_types_that_do_not_fit_the_map(value_type, match):
    with pytest.raises(TypeError, match=f"^value_type {match}"):
        SlicedMeanFactory(SLICES).create(value_type, N)


@pytest.mark.parametrize("weight_type", [tff.TensorType(np.float32, [3]), tff.TensorType(np.bool_),
                                         tff.TensorType(np.complex64), W], ids=str)
def test_weights_are_real_scalars(weight_type):
    with pytest.raises(TypeError, match="^weight_type must be a real scalar, but is"):
        SlicedMeanFactory(SLICES).create(W, weight_type)


def test_a_factory_makes_many_processes():
    factory = SlicedMeanFactory(SLICES)
    first, second = factory.create(W_SLICE, N), factory.create(W, N)
    for process, value in ((first, arrays), (second, padded), (first, arrays)):
        assert_arrays(round_of(process, [value(u) for u in UPDATES], COUNTS).result, MEAN)
