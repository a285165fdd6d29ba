"""The sparse mean as a `federated_aggregate`: orchestration only, the maths is in `fold`."""

from __future__ import annotations

import numpy as np
import tensorflow_federated as tff

from feast_tf.aggregation import fold
from feast_tf.routing import Routing


def slices_type(routing: Routing) -> tff.StructType:
    """W_slice: a float32 tensor for each parameter, of unknown size on elastic axes.

    A tuple, without names: tf.data sorts the keys of mappings and TFF does not.
    """
    return tff.StructWithPythonType(
        [tff.TensorType(np.float32, parameter.elastic_shape)
         for parameter in routing.layout.parameters], tuple)


def build_sparse_sum(routing: Routing) -> tff.Computation:
    """Builds the sum over clients of sample-weighted slices.

    Type signature:

        ({<update=W_slice, weight=float32, level=int32>}@CLIENTS -> Accumulator@SERVER)

      W_slice: see `slices_type`; `weight` is n_i; `level` names the envelope that `update` covers.

    Placement: `fold.accumulate` runs at the server once for each client; `fold.merge` joins the
    sums of several executors.
    """
    zero = tff.tensorflow.computation(lambda: fold.zero(routing))
    sums_type = zero.type_signature.result
    client_type = tff.StructType([("update", slices_type(routing)), ("weight", np.float32),
                                  ("level", np.int32)])

    @tff.tensorflow.computation(sums_type, client_type)
    def accumulate(sums, client):
        return fold.accumulate(sums, client["update"], client["weight"], client["level"])

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
