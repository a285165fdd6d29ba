"""FEAST: federated shared-space training (Khan and Daneshtalab, arXiv:2608.09250).

Operating points    the variants of a fixed cache, ascending in MACs (3.2).
Budget -> point     the largest variant with MACs <= budget; its place is the client's level.
Routing             the envelope of the affordable variants, cut out by `federated_select` (3.3).
Local objective     min / random / max co-training with in-place distillation (3.4).
Aggregation         position-wise mean, weighted by n_i, over the clients that cover a place (3.3).
Serving             largest affordable variant, with batch-norm moments of its own (4.1).
"""

from __future__ import annotations

import collections
from typing import Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from feast_tf.algorithms import parts
from feast_tf.routing import Routing
from feast_tf.supernet import initial_weights
from feast_tf.training import ROLES, RULES, LocalTraining, local_seed, local_update
from feast_tf.training.local import STATISTICS


def client_type(routing: Routing) -> tff.StructType:
    """D: what a client brings to a round.

    <client=int32, level=int32, data=<x=uint8[?,size,size,3],y=int32[?]>*>: its id (for its random
    streams), its level, and its pictures in mini-batches.
    """
    return parts.member_type(_batches_type(routing))


def _batches_type(routing: Routing) -> tff.SequenceType:
    size = routing.cache.spec.image_size
    return tff.SequenceType(collections.OrderedDict(
        x=tff.TensorType(np.uint8, [None, size, size, 3]), y=tff.TensorType(np.int32, [None])))


def build_feast(routing: Routing, training: LocalTraining, *, total_rounds: int, seed: int = 0,
                aggregator: Optional[tff.aggregators.WeightedAggregationFactory] = None,
                server_optimizer: Optional[tff.learning.optimizers.Optimizer] = None
                ) -> tff.learning.templates.LearningProcess:
    """Builds FEAST as a learning process.

    Type signatures:

        initialize: ( -> S@SERVER)
        next: (<state=S@SERVER, clients={D}@CLIENTS> -> <state=S@SERVER, metrics=M@SERVER>)

      S: `tff.learning.templates.LearningAlgorithmState`; `global_model_weights.trainable` holds the
         whole supernet in the order of `Layout.parameters`, `client_work` the round number (int32).
      D: see `client_type`.
      M: <distributor=<bytes_down=int64>,
          client_work=<train=<for each trained role r: loss_r=float32, accuracy_r=float32 and, for
           students, distillation_r=float32; examples=int64>>,
          aggregator=<bytes_up=int64, clients_with_data=int32, clients_without_data=int32,
           clients_refused=int32>,
          finalizer=<>>.
         Losses and accuracies are means over the pictures of all clients whose losses are finite, 0
         where a role trained none. The bytes are counted from the tensors that were sent.

    Args:
      routing: envelopes of the variant cache.
      training: the local training.
      total_rounds: length of the learning rate's schedule.
      seed: of the initial weights and of all local randomness.
      aggregator: in place of `SlicedMeanFactory(routing.slices)`: one with inner factories, or one
        in wrappers such as `tff.aggregators.clipping_factory`. It sets `aggregator` in S and M.
      server_optimizer: takes the mean update as its gradient, in place of a step of rate 1. It
        is wrapped in `hold_unreported`, and sets `finalizer` in S and M.

    Returns:
      A `tff.learning.templates.LearningProcess`. A level outside the cache stops the round with an
      error that names the client (see also `check_cohort`). An empty cohort only counts the round.

    Raises:
      ValueError: `total_rounds` is not positive.
      TypeError: `aggregator` or `server_optimizer` is of a wrong kind, or the aggregator's result
        is not the whole model.
    """
    if total_rounds < 1:
        raise ValueError(f"total_rounds must be at least 1, but is {total_rounds}")
    layout, slices = routing.layout, routing.slices

    @tff.tensorflow.computation
    def initial():
        return tff.learning.models.ModelWeights(tuple(initial_weights(layout, seed)), ())

    # --- client work
    def train(received, client, level, data, round_num):
        return local_update(layout, training, tf.constant(routing.variant_dims), received, level,
                            data, local_seed(seed, round_num, client),
                            training.optimizer.rate(round_num, total_rounds))

    def role_metrics(sums):
        rows = collections.OrderedDict()
        for role in RULES[training.rule].roles:
            row = sums[ROLES.index(role)]
            mean = lambda name: tf.math.divide_no_nan(
                row[STATISTICS.index(name)], row[STATISTICS.index("examples")])
            rows[f"loss_{role}"] = mean("supervised_loss")
            rows[f"accuracy_{role}"] = mean("correct")
            if RULES[training.rule].distill and role != "largest":
                rows[f"distillation_{role}"] = mean("distillation_loss")
        return rows

    # --- routing, aggregation and the server's step
    return parts.build_sliced_process(
        initial, slices,
        parts.build_client_work(slices, train, role_metrics, batches=_batches_type(routing)),
        aggregator=aggregator, server_optimizer=server_optimizer)
