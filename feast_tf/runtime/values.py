"""How TFF values look inside the in-process runtime, and the way in and out.

    tensor    tf.Tensor
    sequence  Sequence, the variant tensor of a tf.data.Dataset
    struct    tuple, in the order of the type
    function  functions.Leaf or functions.Closure

Nothing is serialised: a client's data set enters as the object that the caller made.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

CPU = "/device:CPU:0"
_fresh_names = itertools.count()


class Sequence(NamedTuple):
    """A data set by its scalar variant tensor."""

    variant: tf.Tensor


def elements(type_spec: tff.StructType) -> list[tuple[Optional[str], tff.Type]]:
    """(name, type) of a struct's elements."""
    return list(tff.structure.iter_elements(type_spec))


def flatten(value: Any) -> list[tf.Tensor]:
    """The tensors of a value, in order."""
    if isinstance(value, Sequence):
        return [value.variant]
    if isinstance(value, tuple):
        return [tensor for element in value for tensor in flatten(element)]
    return [value]


def pack(type_spec: tff.Type, tensors: Iterator[tf.Tensor]) -> Any:
    """The value of a type from its tensors; the inverse of `flatten`."""
    if isinstance(type_spec, tff.StructType):
        return tuple(pack(element, tensors) for _, element in elements(type_spec))
    if isinstance(type_spec, tff.SequenceType):
        return Sequence(next(tensors))
    return next(tensors)


def move(value: Any, device: str) -> Any:
    """A value on a device, copied where it is elsewhere; strings and data sets stay on the CPU."""
    if isinstance(value, Sequence):
        return value
    if isinstance(value, tuple):
        return tuple(move(element, device) for element in value)
    if value.dtype in (tf.string, tf.variant) or value.device.endswith(device):
        return value
    with tf.device(device):
        return tf.identity(value)


def _dtype(type_spec: tff.TensorType) -> tf.DType:
    kind = type_spec.dtype.type
    return tf.string if kind is np.str_ else tf.dtypes.as_dtype(kind)


def children(value: Any, type_spec: tff.StructType) -> list[Any]:
    """The elements of a Python container in the order of its type.

    Raises:
      TypeError: it has other elements than the type.
    """
    names = [name for name, _ in elements(type_spec)]
    found = tff.structure.from_container(value, recursive=False)
    own = tff.structure.name_list_with_nones(found)
    if len(own) != len(names) or (None not in own and None not in names
                                  and set(own) != set(names)):
        raise TypeError(f"a structure needs the elements {names}, not {own}")
    if None not in own and None not in names:
        return [getattr(found, name) for name in names]
    return [element for _, element in tff.structure.iter_elements(found)]


def _in_containers(type_spec: tff.Type, leaves: Iterator[Any]) -> Any:
    """Leaves in the containers in which tf.data has an element of this type.

    The order of `leaves` is the type's. tf.data's is that of sorted names.
    """
    if not isinstance(type_spec, tff.StructType):
        return next(leaves)
    parts = [(name, _in_containers(element, leaves)) for name, element in elements(type_spec)]
    if any(name is None for name, _ in parts) or not parts:  # tf.data makes tensors of lists
        return tuple(part for _, part in parts)
    return tff.types.type_to_py_container(tff.structure.Struct(parts), type_spec)


def _out_of_containers(type_spec: tff.Type, value: Any) -> Any:
    """The inverse: tuples in the type's order."""
    if not isinstance(type_spec, tff.StructType):
        if tf.nest.is_nested(value):
            raise TypeError(f"a structure is no {type_spec}")
        return value
    return tuple(_out_of_containers(element, child) for child, (_, element) in
                 zip(children(value, type_spec), elements(type_spec)))


def _element_spec(type_spec: tff.Type) -> Any:
    if isinstance(type_spec, tff.StructType):
        return tuple(_element_spec(element) for _, element in elements(type_spec))
    return tf.TensorSpec(type_spec.shape, _dtype(type_spec))


def _dataset(value: Any, type_spec: tff.SequenceType, reset: bool) -> tf.data.Dataset:
    element = type_spec.element
    refused = TypeError(f"a data set of {value.element_spec} is not a sequence of {element}")
    arrange = lambda item: _in_containers(element, iter(flatten(_out_of_containers(element, item))))
    try:
        found = arrange(value.element_spec)
    except TypeError as error:
        raise refused from error
    wanted = _in_containers(element, iter(flatten(_element_spec(element))))
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(wanted)):
        if not (isinstance(one, tf.TensorSpec) and one.dtype == other.dtype
                and other.shape.is_compatible_with(one.shape)):
            raise refused
    if reset:
        value = _reset(value)
    try:
        tf.nest.assert_same_structure(value.element_spec, wanted)
    except (TypeError, ValueError):
        whole = type(value.element_spec) is not tuple  # else `map` gives each part as an argument
        value = value.map(lambda *parts: arrange(parts[0] if whole else parts))
    return value


def _reset(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The data set with the state of its shuffles and random seeds as on the first iteration."""
    serialized = tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(dataset), external_state_policy=0,
        strip_device_assignment=True)
    graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
    for node in graph.node:
        if node.op == "Const":  # the handles of seed generators; unknown ones are made anew
            for handle in node.attr["value"].tensor.resource_handle_val:
                handle.name += f"_fresh{next(_fresh_names)}"
    return tf.data.experimental.from_variant(
        tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString()), dataset.element_spec)


def ingest(value: Any, type_spec: tff.Type, device: str, reset_datasets: bool = False) -> Any:
    """A caller's value of an unplaced type."""
    if isinstance(type_spec, tff.StructType):
        return tuple(ingest(child, element, device, reset_datasets) for child, (_, element) in
                     zip(children(value, type_spec), elements(type_spec)))
    if isinstance(type_spec, tff.SequenceType):
        if isinstance(value, (list, tuple)):
            return sequence_of([ingest(item, type_spec.element, CPU) for item in value],
                               type_spec.element)
        if not isinstance(value, tf.data.Dataset):
            raise TypeError(f"a sequence must be a tf.data.Dataset or a list, not {type(value)}")
        with tf.device(CPU):
            dataset = _dataset(value, type_spec, reset_datasets)
            return Sequence(tf.data.experimental.to_variant(dataset))
    dtype = _dtype(type_spec)
    # NumPy's dtypes would be cast whatever is lost; Python's numbers are checked below.
    found = getattr(value, "dtype", dtype)
    if not np.can_cast(tf.dtypes.as_dtype(found).as_numpy_dtype, dtype.as_numpy_dtype):
        raise TypeError(f"a value of {tf.dtypes.as_dtype(found).name} does not fit {type_spec}")
    with tf.device(CPU if dtype == tf.string else device):
        tensor = (move(tf.cast(value, dtype), device) if isinstance(value, tf.Tensor)
                  else tf.convert_to_tensor(value, dtype))
    if not tf.TensorShape(type_spec.shape).is_compatible_with(tensor.shape):
        raise TypeError(f"a tensor of shape {tensor.shape} does not fit {type_spec}")
    return tensor


def emit(value: Any, type_spec: tff.Type, materialize: bool) -> Any:
    """What the caller gets: the type's containers of NumPy arrays, or tensors as they are."""
    if isinstance(type_spec, tff.StructType):
        named = [(name, emit(child, element, materialize))
                 for child, (name, element) in zip(value, elements(type_spec))]
        return tff.types.type_to_py_container(tff.structure.Struct(named), type_spec)
    if isinstance(type_spec, tff.SequenceType):
        element = type_spec.element
        return tf.data.experimental.from_variant(
            value.variant, _in_containers(element, iter(flatten(_element_spec(element)))))
    return value.numpy() if materialize else value


def sequence_of(values: list[Any], element_type: tff.Type) -> Sequence:
    """A data set of values in memory, whose shapes may differ from element to element."""
    nest = lambda leaves: _in_containers(element_type, iter(leaves))
    with tf.device(CPU):
        if not values:
            zeros = [tf.zeros([size or 0 for size in leaf.shape], leaf.dtype)
                     for leaf in flatten(_element_spec(element_type))]
            dataset = tf.data.Dataset.from_tensors(nest(zeros)).take(0)
            return Sequence(tf.data.experimental.to_variant(dataset))
        datasets = []
        for _, group in itertools.groupby(map(flatten, values),
                                          lambda leaves: [leaf.shape for leaf in leaves]):
            first, *others = group
            if others:  # one data set of all: thousands of `concatenate`s take seconds
                stacked = [tf.stack(column) for column in zip(first, *others)]
                datasets.append(tf.data.Dataset.from_tensor_slices(nest(stacked)))
            else:
                datasets.append(tf.data.Dataset.from_tensors(
                    nest(tf.identity(leaf) for leaf in first)))
        dataset = functools.reduce(tf.data.Dataset.concatenate, datasets)
        return Sequence(tf.data.experimental.to_variant(dataset))


def sequence_items(sequence: Sequence, element_type: tff.Type) -> Iterator[Any]:
    """The values of a data set."""
    spec = _in_containers(element_type, iter(flatten(_element_spec(element_type))))
    with tf.device(CPU):  # not around the loop: the caller would run in its scope
        iterator = iter(tf.data.experimental.from_variant(sequence.variant, spec))
    for item in iterator:
        yield _out_of_containers(element_type, item)
