"""The sparse sum as a `federated_aggregate`: orchestration only, the maths is in `fold`."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from feast_tf.aggregation import coverage, fold
from feast_tf.routing import SliceMap


def _tuple_type(shapes) -> tff.StructType:
    # A tuple, without names: tf.data sorts the keys of mappings and TFF does not.
    return tff.StructWithPythonType([tff.TensorType(np.float32, shape) for shape in shapes], tuple)


def slices_type(slices: SliceMap) -> tff.StructType:
    """W_slice: a float32 tensor for each array, of unknown size on axes that a level cuts."""
    return _tuple_type(slices.elastic_shapes)


def weights_type(slices: SliceMap) -> tff.StructType:
    """W: a float32 tensor of the full shape for each array."""
    return _tuple_type(slices.shapes)


def flatten(value: Any, value_type: tff.Type) -> list:
    """The tensors of a value in TFF's order; tf.nest would sort the keys of mappings."""
    if isinstance(value_type, tff.TensorType):
        return [value]
    return tff.structure.flatten(tff.structure.from_container(value, recursive=True))


def pack(tensors: Sequence, value_type: tff.Type) -> Any:
    """A value with the containers of `value_type`."""
    if isinstance(value_type, tff.TensorType):
        return tensors[0]
    packed = tff.structure.pack_sequence_as(value_type, list(tensors))
    return tff.types.type_to_py_container(packed, value_type)


def coverage_of(slices: SliceMap, value_type: tff.Type) -> coverage.Coverage:
    """How updates of a type say what they cover: slices by their shapes, whole arrays by nonzeros.

    Raises:
      TypeError: `value_type` is neither; the message names the array.
    """
    found = (tff.structure.flatten(value_type)
             if isinstance(value_type, (tff.StructType, tff.TensorType)) else [])
    if len(found) != len(slices.names):
        raise TypeError(f"value_type must have the {len(slices.names)} arrays of the slice map, "
                        f"but has {len(found)}")
    parts, wholes = list(slices_type(slices)), list(weights_type(slices))
    for kind, expected in ((coverage.by_shapes, parts), (coverage.by_nonzeros, wholes)):
        if found == expected:
            return kind(slices)
    for name, part, whole, leaf in zip(slices.names, parts, wholes, found):
        if leaf not in (part, whole):
            raise TypeError(f"value_type must have {name} as {part} where updates are slices, or "
                            f"as {whole} where they are whole arrays, but has {str(leaf):.100}")
    raise TypeError("value_type must be either slices or whole arrays, but mixes both")


def build_sparse_sum(slices: SliceMap, value_type: Optional[tff.Type] = None,
                     weight_type: tff.TensorType = tff.TensorType(np.float32)) -> tff.Computation:
    """Builds the sum over clients of sample-weighted updates, with one accumulator at the server.

    Type signature:

        ({<update=V, weight=N>}@CLIENTS -> Accumulator@SERVER)

      V: `value_type`, by default `slices_type(slices)`.
      N: `weight_type`, of n_i.

    Placement: `fold.accumulate` runs at the server once for each client; `fold.merge` joins the
    sums of several executors.

    Raises:
      TypeError: see `coverage_of`.
    """
    value_type = slices_type(slices) if value_type is None else value_type
    covered = coverage_of(slices, value_type)
    zero = tff.tensorflow.computation(lambda: fold.zero(slices))
    sums_type = zero.type_signature.result
    client_type = tff.StructWithPythonType([("update", value_type), ("weight", weight_type)],
                                           collections.OrderedDict)

    @tff.tensorflow.computation(sums_type, client_type)
    def accumulate(sums, client):
        update = flatten(client["update"], value_type)
        level, weight = covered(update, tf.cast(client["weight"], tf.float32))
        return fold.accumulate(sums, update, weight, level)

    @tff.tensorflow.computation(sums_type, sums_type)
    def merge(one, other):
        return fold.merge(one, other)

    @tff.tensorflow.computation(sums_type)
    def report(sums):
        return sums

    @tff.federated_computation(tff.FederatedType(client_type, tff.CLIENTS))
    def sparse_sum(clients):
        return tff.federated_aggregate(clients, zero(), accumulate, merge, report)

    return sparse_sum
