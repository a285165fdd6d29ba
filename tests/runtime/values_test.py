"""The way in and out of the in-process runtime."""

from __future__ import annotations

import collections
import time

import attrs
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from feast_tf.runtime import values

CPU, OTHER_CPU = "/device:CPU:0", "/device:CPU:1"
PAIR = tff.to_type(collections.OrderedDict(b=np.int32, a=np.float32))


@attrs.define
class Point:
    b: int
    a: float


@pytest.mark.parametrize("container", [
    collections.OrderedDict(b=1, a=2.5), {"a": 2.5, "b": 1}, (1, 2.5), [1, 2.5], Point(1, 2.5),
    tff.structure.Struct([("b", 1), ("a", 2.5)]),
    collections.namedtuple("Pair", ["b", "a"])(1, 2.5)])
def test_containers_of_structures(container):
    one, other = values.ingest(container, PAIR, CPU)
    assert (int(one), one.dtype, float(other), other.dtype) == (1, tf.int32, 2.5, tf.float32)


@pytest.mark.parametrize("container", [
    (1, 2.5, 3), (1,), {"a": 2.5, "c": 1}, {"a": 2.5}, collections.namedtuple("P", "a d")(1, 2.5)])
def test_a_container_with_other_elements_is_refused(container):
    with pytest.raises(TypeError, match=r"a structure needs the elements \['b', 'a'\], not \["):
        values.ingest(container, PAIR, CPU)


@pytest.mark.parametrize("value, dtype", [
    (np.int8(3), np.int32), (np.float16(3), np.float32), (3, np.float32), ([3, 4], np.int64),
    (tf.constant(3, tf.int32), np.int64), (tf.constant(3), np.int32), (True, np.bool_)])
def test_values_that_fit(value, dtype):
    type_spec = tff.TensorType(dtype, np.shape(value))
    tensor = values.ingest(value, type_spec, OTHER_CPU)
    assert tensor.dtype.as_numpy_dtype is dtype and tensor.device.endswith(OTHER_CPU)
    np.testing.assert_array_equal(values.emit(tensor, type_spec, True), np.asarray(value))


@pytest.mark.parametrize("value, dtype", [
    (np.int64(3), np.int32), (np.float64(3), np.float32), (np.float32(3), np.int32),
    (np.int32(3), np.float32), (np.uint8(3), np.int8), (np.array("x"), np.int32),
    (tf.constant("x"), np.float32)])
def test_values_that_would_lose_something_are_refused(value, dtype):
    """The same rule as TFF's own runtime."""
    with pytest.raises(TypeError, match="does not fit"):
        values.ingest(value, tff.TensorType(dtype), CPU)


def test_tensors_are_moved_only_where_they_must():
    here, text = tf.constant([1, 2]), tf.constant("x")
    assert values.move(here, CPU) is here
    moved = values.move((here, (text,)), OTHER_CPU)
    assert moved[0].device.endswith(OTHER_CPU) and moved[1][0] is text
    data = values.sequence_of([here], tff.TensorType(np.int32, [2]))
    assert values.move(data, OTHER_CPU) is data


def plain(item):
    return (tuple(map(plain, item)) if isinstance(item, tuple) else np.asarray(item).tolist())


def items(sequence, element_type):
    return [plain(item) for item in values.sequence_items(sequence, element_type)]


@pytest.mark.parametrize("arrays", [
    [], [[1]], [[1, 2], [3, 4]], [[1, 2], [3, 4], [5]], [[1], [2, 3], [4, 5], [6], []]])
def test_sequences_of_arrays_of_any_lengths(arrays):
    element = tff.TensorType(np.int32, [None])
    sequence = values.sequence_of([tf.constant(a, tf.int32) for a in arrays], element)
    assert items(sequence, element) == arrays


def test_sequences_of_structures_keep_the_order_of_the_type():
    element = tff.to_type(collections.OrderedDict(b=np.int32, a=(np.int32, np.str_)))
    given = [(tf.constant(1), (tf.constant(2), tf.constant("x"))),
             (tf.constant(3), (tf.constant(4), tf.constant("y")))]
    sequence = values.sequence_of(given, element)
    assert items(sequence, element) == [(1, (2, b"x")), (3, (4, b"y"))]


def test_long_lists_become_data_sets_in_no_time():
    start = time.monotonic()
    sequence = values.ingest(list(range(5000)), tff.SequenceType(np.int32), CPU)
    assert sum(items(sequence, tff.TensorType(np.int32))) == sum(range(5000))
    assert time.monotonic() - start < 20  # one `concatenate` for each took minutes on a busy machine


@pytest.mark.parametrize("data", [
    lambda: tf.data.Dataset.from_tensors({"a": 1, "b": 2}),  # tf.data sorts: a, b
    lambda: tf.data.Dataset.from_tensors(collections.OrderedDict(b=2, a=1)),
    lambda: tf.data.Dataset.from_tensors((2, 1)),
    lambda: tf.data.Dataset.from_tensors(collections.namedtuple("Pair", ["b", "a"])(2, 1)),
    lambda: [{"a": 1, "b": 2}], lambda: [(2, 1)],
    lambda: [collections.OrderedDict(b=2, a=1)]])
@pytest.mark.parametrize("container", [collections.OrderedDict,
                                       collections.namedtuple("Other", ["b", "a"])])
def test_names_that_are_not_sorted_survive_a_data_set(container, data):
    element = tff.StructWithPythonType([("b", np.int32), ("a", np.int32)], container)
    sequence = values.ingest(data(), tff.SequenceType(element), CPU)
    assert items(sequence, element) == [(2, 1)]
    emitted = values.emit(sequence, tff.SequenceType(element), True)
    assert [int(tff.structure.from_container(item).b) for item in emitted] == [2]


@pytest.mark.parametrize("data", [
    lambda: tf.data.Dataset.from_tensors({"a": 1, "c": 2}),
    lambda: tf.data.Dataset.from_tensors((1, 2, 3)),
    lambda: tf.data.Dataset.from_tensors({"a": 1, "b": 2.5}),
    lambda: tf.data.Dataset.from_tensors({"a": [1], "b": 2}),
    lambda: tf.data.Dataset.from_tensors({"a": tf.ragged.constant([[1]]), "b": 2}),
    lambda: tf.data.Dataset.range(3)])
def test_data_sets_of_other_elements_are_refused(data):
    element = tff.to_type(collections.OrderedDict(b=np.int32, a=np.int32))
    with pytest.raises(TypeError, match="a data set of .* is not a sequence of <b=int32,a=int32>"):
        values.ingest(data(), tff.SequenceType(element), CPU)
