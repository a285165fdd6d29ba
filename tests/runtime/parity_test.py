"""The TFF language: the same computation gives the same values in process as in TFF's own worker."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

AT_CLIENTS, AT_SERVER = tff.CLIENTS, tff.SERVER
INT, FLOAT = tff.TensorType(np.int32), tff.TensorType(np.float32)
INTS = tff.SequenceType(np.int32)
NO_DATA = "federated value with no data"

federated, graph = tff.federated_computation, tff.tensorflow.computation


def at(placement, *types, **options):
    return [tff.FederatedType(type_spec, placement, **options) for type_spec in types]


def add(one, other):
    return one + other


# --- placements


def test_sums_means_and_extremes(same_results):
    @federated(at(AT_CLIENTS, FLOAT, FLOAT))
    def statistics(values):
        value, weight = values
        return (tff.federated_sum(value), tff.federated_mean(value),
                tff.federated_mean(value, weight), tff.federated_min(value),
                tff.federated_max(value))

    same_results(lambda: statistics([[1.5, -2.0, 4.25], [1.0, 2.0, 5.0]]))


@pytest.mark.parametrize("clients", [1, 2, 5])
def test_every_client_is_folded_once(clients, same_results):
    values = [10**client for client in range(clients)]
    total = same_results(lambda: federated(lambda x: tff.federated_sum(x), *at(AT_CLIENTS, INT))(
        values))
    assert total == sum(values)


def test_general_aggregate(same_results):
    accumulator = collections.OrderedDict(total=np.int32, count=np.int32)

    @federated(*at(AT_CLIENTS, INT))
    def mean_of_squares(values):
        zero = graph(lambda: collections.OrderedDict(total=0, count=0))()
        accumulate = graph(lambda a, x: collections.OrderedDict(
            total=a["total"] + x * x, count=a["count"] + 1), accumulator, np.int32)
        merge = graph(lambda a, b: collections.OrderedDict(
            total=a["total"] + b["total"], count=a["count"] + b["count"]), accumulator, accumulator)
        report = graph(lambda a: a["total"] / a["count"], accumulator)
        return tff.federated_aggregate(values, zero, accumulate, merge, report)

    assert same_results(lambda: mean_of_squares([1, 2, 3, 4])) == 7.5


def test_an_aggregate_that_needs_another(same_results):
    @federated(*at(AT_CLIENTS, FLOAT))
    def variance(values):
        mean = tff.federated_broadcast(tff.federated_mean(values))
        deviation = graph(lambda x, m: (x - m)**2, np.float32, np.float32)
        return tff.federated_mean(tff.federated_map(deviation, (values, mean))), mean

    assert same_results(lambda: variance([1.0, 2.0, 6.0]))[1] == 3.0


def test_values_of_clients_are_results(same_results):
    @federated(*at(AT_CLIENTS, INT), *at(AT_SERVER, INT))
    def results(x, y):
        both = tff.federated_zip((x, tff.federated_broadcast(y)))
        return x, tff.federated_map(graph(add, np.int32, np.int32), both), both

    assert same_results(lambda: results([1, 2, 4], 10))[1] == [11, 12, 14]


def test_a_client_value_used_before_and_after_an_aggregate(same_results):
    @federated(*at(AT_CLIENTS, INT))
    def centred(x):
        squares = tff.federated_map(graph(lambda v: v * v, np.int32), x)
        total = tff.federated_broadcast(tff.federated_sum(squares))
        share = tff.federated_map(graph(lambda a, b: a / b, np.int32, np.int32), (squares, total))
        return tff.federated_sum(squares), tff.federated_sum(share), share

    same_results(lambda: centred([1, 2, 3]))


def test_values_that_are_equal_everywhere(same_results):
    @federated(*at(AT_CLIENTS, INT, all_equal=True), *at(AT_CLIENTS, INT))
    def results(same, own):
        increment = graph(lambda x: x + 1, np.int32)
        return (same, tff.federated_sum(same), tff.federated_map(increment, same),
                tff.federated_zip((same, own)), tff.federated_zip((same, same)),
                tff.federated_value(3, AT_CLIENTS))

    assert same_results(lambda: results(5, [1, 2, 3]))[2] == [6, 6, 6]


def test_evaluations_at_both_placements(same_results):
    @federated(*at(AT_CLIENTS, INT))
    def results(x):
        seven = graph(lambda: (7, "seven"))
        at_clients = tff.federated_eval(seven, AT_CLIENTS)
        return tff.federated_eval(seven, AT_SERVER), at_clients, tff.federated_value(2, AT_SERVER)

    assert same_results(lambda: results([0, 0]))[1] == [(7, b"seven")] * 2


def test_server_values(same_results):
    @federated(*at(AT_SERVER, INT, FLOAT))
    def results(x, y):
        return (tff.federated_map(graph(lambda a, b: [a, b], np.int32, np.float32), (x, y)),
                tff.federated_zip((x, y)), (x, (y,)))

    same_results(lambda: results(2, 0.5))


# --- structures


def test_nested_named_and_empty_structures(same_results):
    member = tff.StructWithPythonType(
        [("b", np.float32), ("a", [np.int32, ()]), ("c", tff.TensorType(np.int32, [2]))],
        collections.OrderedDict)
    clients = [collections.OrderedDict(b=1.5, a=[1, ()], c=np.array([1, 2], np.int32)),
               collections.OrderedDict(b=2.5, a=[2, ()], c=np.array([3, 4], np.int32))]

    @federated(*at(AT_CLIENTS, member))
    def results(x):
        turned = graph(lambda v: collections.OrderedDict(z=v["c"], y=(), x=[v["b"]]), member)
        return x, tff.federated_map(turned, x), tff.federated_sum(x.c)

    same_results(lambda: results(clients))


def test_python_containers_come_back(same_results):
    point = collections.namedtuple("Point", ["x", "y"])
    computation = graph(lambda p: (p, [p.y], collections.OrderedDict(x=p.x)),
                        tff.to_type(point(np.int32, np.float32)))
    result = same_results(lambda: computation(point(1, 2.5)))
    assert result[0] == point(1, 2.5)


@pytest.mark.parametrize("make", [
    lambda: federated(lambda: ()), lambda: graph(lambda: ()),
    lambda: federated(lambda: [(), collections.OrderedDict()])])
def test_empty_results(make, same_results):
    computation = make()
    same_results(computation)


def test_computations_without_arguments(same_results):
    constants = federated(lambda: (10, 0.5, True, np.array([1, 2], np.int64), "text"))
    same_results(constants)
    placed = federated(lambda: (tff.federated_value(2, AT_SERVER), tff.federated_value(
        [1, 2.5], AT_SERVER), tff.federated_eval(graph(lambda: tf.range(3)), AT_SERVER)))
    same_results(placed)


def test_computations_in_computations(same_results):
    inner = federated(lambda x, y: (y, graph(add, np.int32, np.int32)(x, y)), INT, INT)
    outer = federated(lambda x: inner(inner(x, x)[1], x), INT)
    assert same_results(lambda: outer(3)) == (3, 9)


def test_a_lambda_at_clients(same_results):
    double = federated(lambda v: graph(add, np.int32, np.int32)(v, v), INT)
    computation = federated(lambda x: tff.federated_map(double, x), *at(AT_CLIENTS, INT))
    assert same_results(lambda: computation([1, 4])) == [2, 8]


def test_a_lambda_that_captures(same_results):
    @federated(INT, *at(AT_CLIENTS, INT))
    def shifted(by, x):
        shift = federated(lambda v: graph(add, np.int32, np.int32)(v, by), INT)
        return tff.federated_map(shift, x)

    same_results(lambda: shifted(100, [1, 2]), stock_fails="Could not find reference",
                 expected=[np.int32(101), np.int32(102)])


# --- tensors


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int64, np.float16, np.float64,
                                   np.complex64])
def test_dtypes(dtype, same_results):
    value = np.array([[1, 0], [3, 7]]).astype(dtype)
    computation = graph(lambda x: (x, tf.transpose(x)), tff.TensorType(dtype, [None, 2]))
    same_results(lambda: computation(value))


def test_strings(same_results):
    @federated(*at(AT_CLIENTS, tff.TensorType(np.str_)), *at(
        AT_SERVER, tff.TensorType(np.str_, [None])))
    def results(own, shared):
        joined = graph(lambda a, b: tf.strings.join([a, tf.strings.reduce_join(b)]), np.str_,
                       tff.TensorType(np.str_, [None]))
        return tff.federated_map(joined, (own, tff.federated_broadcast(shared))), own, shared

    same_results(lambda: results(["a", "bc"], np.array(["d", "ef"], object)))


def test_shapes_that_differ_from_client_to_client(same_results):
    size = graph(lambda x: tf.size(x), tff.TensorType(np.float32, [None, 2]))
    computation = federated(lambda x: (tff.federated_sum(tff.federated_map(size, x)), x),
                            *at(AT_CLIENTS, tff.TensorType(np.float32, [None, 2])))
    clients = [np.ones([rows, 2], np.float32) for rows in (3, 0, 1)]
    assert same_results(lambda: computation(clients))[0] == 8


# --- federated_select


def test_select_with_equal_shapes(same_results):
    @federated(*at(AT_CLIENTS, tff.TensorType(np.int32, [3])), *at(
        AT_SERVER, tff.TensorType(np.float32, [4, 2]), FLOAT))
    def chosen(keys, table, factor):
        pick = graph(lambda value, key: value[0][key] * value[1],
                     (tff.TensorType(np.float32, [4, 2]), np.float32), np.int32)
        return tff.federated_select(keys, tff.federated_value(4, AT_SERVER), (table, factor), pick)

    table = np.arange(8, dtype=np.float32).reshape(4, 2)
    keys = [np.array(k, np.int32) for k in ([0, 1, 1], [3, 2, 0])]
    results = same_results(lambda: chosen(keys, table, 2.0))
    np.testing.assert_array_equal(np.stack(list(results[1])), [[12, 14], [8, 10], [0, 2]])


def test_select_with_shapes_that_depend_on_the_key(same_results):
    table_type = tff.TensorType(np.float32, [3, 3])
    table = np.arange(9, dtype=np.float32).reshape(3, 3)
    cut = graph(lambda value, key: tf.slice(value, [0, 0], [key, key + 1]), table_type, np.int32)

    def prefixes(number_of_keys):
        @federated(*at(AT_CLIENTS, tff.TensorType(np.int32, [number_of_keys])),
                   *at(AT_SERVER, table_type))
        def computation(keys, table):
            slices = tff.federated_select(keys, tff.federated_value(3, AT_SERVER), table, cut)
            total = graph(lambda data: data.reduce(0.0, lambda a, x: a + tf.reduce_sum(x)),
                          slices.type_signature.member)
            return tff.federated_map(total, slices), slices

        return computation

    one_key = [np.array([key], np.int32) for key in (1, 2, 0)]
    results = same_results(lambda: prefixes(1)(one_key, table))
    assert results[0] == [1.0, 15.0, 0.0]
    two_keys = [np.array(keys, np.int32) for keys in ([1, 2], [2, 0])]
    same_results(lambda: prefixes(2)(two_keys, table)[0], stock_fails="different dimensions",
                 expected=[np.float32(16), np.float32(15)])


# --- sequences


def dataset(*values) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(np.array(values, np.int32))


@pytest.mark.parametrize("data", [lambda: dataset(1, 2, 5), lambda: [1, 2, 5], lambda: [],
                                  lambda: dataset(3).take(0)])
def test_data_sets_in_and_out(data, same_results):
    computation = graph(lambda d: (d.map(lambda x: 2 * x), d.reduce(0, add)), INTS)
    same_results(lambda: computation(data()))


def test_data_sets_at_clients(same_results):
    total = graph(lambda d: d.reduce(0, add), INTS)
    computation = federated(lambda x: (x, tff.federated_sum(tff.federated_map(total, x))),
                            *at(AT_CLIENTS, INTS))
    same_results(lambda: computation([dataset(1, 2), [], dataset(5)]))


def test_elements_of_data_sets_keep_their_names_and_order(same_results):
    element = tff.StructWithPythonType([("y", np.int32), ("x", (np.float32, np.str_))],
                                       collections.OrderedDict)
    data = tf.data.Dataset.from_tensor_slices(collections.OrderedDict(
        y=np.array([1, 2], np.int32), x=(np.array([0.5, 1.5], np.float32), ["a", "b"])))
    computation = graph(lambda d: d.map(lambda e: (e["x"][1], e["y"])), tff.SequenceType(element))
    same_results(lambda: computation(data))
    pair = tff.to_type(collections.OrderedDict(b=np.int32, a=np.int32))
    first = graph(lambda d: d.map(lambda e: e["b"]), tff.SequenceType(pair))
    result = same_results(lambda: first([collections.OrderedDict(b=2, a=1)] * 2))
    assert list(result.as_numpy_iterator()) == [2, 2]


def test_batches_whose_last_one_is_smaller(same_results):
    batches = [np.array(batch, np.int32) for batch in ([1, 2], [3, 4], [5])]
    sizes = graph(lambda d: d.map(tf.size), tff.SequenceType(tff.TensorType(np.int32, [None])))
    for data in (dataset(1, 2, 3, 4, 5).batch(2), batches):
        assert list(same_results(lambda: sizes(data)).as_numpy_iterator()) == [2, 2, 1]


def test_sequence_intrinsics(same_results):
    double = graph(lambda x: 2 * x, np.int32)
    horner = graph(lambda total, x: 10 * total + x, np.int32, np.int32)

    @federated(INTS)
    def results(data):
        doubled = tff.sequence_map(double, data)
        return doubled, tff.sequence_reduce(doubled, 0, horner), tff.sequence_sum(data)

    for values in ((1, 2, 3), ()):
        same_results(lambda: results(dataset(*values)), stock_fails="(?i)seq", expected=(
            dataset(*[2 * value for value in values]),
            np.int32(int("0" + "".join(str(2 * value) for value in values))),
            np.int32(sum(values))))


def test_sequence_intrinsics_at_clients(same_results):
    total = federated(lambda data: tff.sequence_sum(data), INTS)
    computation = federated(lambda x: tff.federated_map(total, x), *at(AT_CLIENTS, INTS))
    same_results(lambda: computation([dataset(1, 2), dataset(4)]), stock_fails="sequence_sum",
                 expected=[np.int32(3), np.int32(4)])


def test_sequence_sum_of_structures(same_results):
    element = tff.StructWithPythonType([("a", np.int32), ("b", (np.float32,))],
                                       collections.OrderedDict)
    computation = federated(lambda data: tff.sequence_sum(data), tff.SequenceType(element))
    data = tf.data.Dataset.from_tensor_slices(collections.OrderedDict(
        a=np.array([1, 2], np.int32), b=(np.array([0.5, 1.0], np.float32),)))
    for count, expected in ((2, (3, 1.5)), (0, (0, 0.0))):
        same_results(lambda: computation(data.take(count)), stock_fails="sequence",
                     expected=collections.OrderedDict(a=np.int32(expected[0]),
                                                      b=(np.float32(expected[1]),)))


# --- what only one of the two can do


def test_nobody_in_the_cohort(same_results):
    computation = federated(lambda x: (tff.federated_sum(x), x), *at(AT_CLIENTS, INT))
    same_results(lambda: computation([]), stock_fails=NO_DATA, expected=(np.int32(0), []))


def test_a_broadcast_alone(same_results):
    computation = federated(lambda x: tff.federated_broadcast(x), *at(AT_SERVER, INT))
    same_results(lambda: computation(5), stock_fails=NO_DATA, expected=np.int32(5))


def test_stateless_and_seeded_randomness(same_results):
    @graph
    def drawn():
        return (tf.random.stateless_normal([3], [1, 2]),
                tf.random.Generator.from_seed(5).normal([2]))

    same_results(lambda: (drawn(), drawn()))
