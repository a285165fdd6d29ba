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
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from feast_tf.aggregation import apply_mean, build_sparse_sum, slices_type
from feast_tf.routing import Routing
from feast_tf.seeding import stateless_seed
from feast_tf.supernet import initial_weights
from feast_tf.training import ROLES, RULES, LocalTraining, local_update
from feast_tf.training.local import STATISTICS


def client_type(routing: Routing) -> tff.StructType:
    """D: what a client brings to a round.

    <client=int32, level=int32, data=<x=uint8[?,size,size,3],y=int32[?]>*>: its id (for its random
    streams), its level, and its pictures in mini-batches.
    """
    size = routing.cache.spec.image_size
    batch = collections.OrderedDict(x=tff.TensorType(np.uint8, [None, size, size, 3]),
                                    y=tff.TensorType(np.int32, [None]))
    return tff.StructWithPythonType([("client", np.int32), ("level", np.int32),
                                     ("data", tff.SequenceType(batch))], collections.OrderedDict)


def check_cohort(clients: Sequence[Mapping[str, Any]], num_levels: int) -> None:
    """Says in Python what TFF would report as an internal error of its runtime, or not at all.

    Args:
      clients: the cohort of a round, values of `client_type`.
      num_levels: of the routing.

    Raises:
      ValueError: nobody is in the cohort, or a client's level is not in the cache.
    """
    if not clients:
        raise ValueError("the cohort is empty: a round needs at least one client")
    for client in clients:
        if not 0 <= client["level"] < num_levels:
            raise ValueError(f"client {client['client']} has the level {client['level']}, but "
                             f"levels lie in 0..{num_levels - 1}")


def build_feast(routing: Routing, training: LocalTraining, *, total_rounds: int,
                seed: int = 0) -> tff.learning.templates.LearningProcess:
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

    Returns:
      A `tff.learning.templates.LearningProcess`. A level outside the cache stops the round with an
      error that names the client (see also `check_cohort`). An empty cohort only counts the round.

    Raises:
      ValueError: `total_rounds` is not positive.
    """
    if total_rounds < 1:
        raise ValueError(f"total_rounds must be at least 1, but is {total_rounds}")
    layout, num_levels = routing.layout, routing.num_levels
    sparse_sum = build_sparse_sum(routing)
    slice_type = slices_type(routing)

    # --- the state, at the server
    @tff.tensorflow.computation
    def initial_state():
        return tff.learning.templates.LearningAlgorithmState(
            global_model_weights=tff.learning.models.ModelWeights(
                tuple(initial_weights(layout, seed)), ()),
            distributor=(), client_work=tf.constant(0), aggregator=(), finalizer=())

    state_type = initial_state.type_signature.result
    weights_type = state_type.global_model_weights
    round_type = state_type.client_work

    # --- routing: each client's envelope is cut out of the supernet
    @tff.tensorflow.computation(client_type(routing))
    def routing_key(client):
        level = client["level"]
        check = tf.debugging.Assert(
            tf.logical_and(level >= 0, level < num_levels),
            ["client", client["client"], "has the level", level,
             f"but levels lie in 0..{num_levels - 1}"])
        with tf.control_dependencies([check]):
            return tf.reshape(level, [1])

    @tff.tensorflow.computation(weights_type.trainable, np.int32)
    def cut_envelope(weights, level):
        return tuple(
            tf.ensure_shape(tf.slice(weight, tf.zeros_like(extent[0]), tf.constant(extent)[level]),
                            parameter.elastic_shape)
            for parameter, weight, extent in zip(layout.parameters, weights, routing.extents))

    # --- client work
    @tf.function
    def train(slices, client, round_num):
        stream = tf.constant(stateless_seed(seed, "local training"))
        for part in (round_num, client["client"]):
            stream = tf.random.experimental.stateless_fold_in(stream, part)
        return local_update(layout, training, tf.constant(routing.variant_dims), slices,
                            client["level"], client["data"], stream,
                            training.optimizer.rate(round_num, total_rounds))

    @tff.tensorflow.computation(tff.SequenceType(slice_type), client_type(routing), round_type)
    def client_work(routed, client, round_num):
        slices = routed.get_single_element()
        result = train(slices, client, round_num)
        # One client that diverges must not hide the losses of all others.
        metrics = tf.where(tf.reduce_all(tf.math.is_finite(result.metrics)), result.metrics, 0.0)
        size = lambda tensors: tf.add_n([tf.size(t, tf.int64) * t.dtype.size for t in tensors])
        return collections.OrderedDict(
            contribution=collections.OrderedDict(
                update=result.update, weight=tf.cast(result.num_examples, tf.float32),
                level=client["level"]),
            sums=collections.OrderedDict(
                metrics=metrics, examples=tf.cast(result.num_examples, tf.int64),
                bytes_down=size(slices), bytes_up=size(result.update)))

    # --- the server's update
    roles = RULES[training.rule].roles

    def role_metrics(sums):
        rows = collections.OrderedDict()
        for role in roles:
            row = sums["metrics"][ROLES.index(role)]
            mean = lambda name: tf.math.divide_no_nan(
                row[STATISTICS.index(name)], row[STATISTICS.index("examples")])
            rows[f"loss_{role}"] = mean("supervised_loss")
            rows[f"accuracy_{role}"] = mean("correct")
            if RULES[training.rule].distill and role != "largest":
                rows[f"distillation_{role}"] = mean("distillation_loss")
        rows["examples"] = sums["examples"]
        return rows

    @tff.tensorflow.computation(state_type, sparse_sum.type_signature.result.member,
                                client_work.type_signature.result.sums)
    def finish_round(state, accumulator, sums):
        weights = apply_mean(routing, state.global_model_weights.trainable, accumulator)
        state = tff.learning.templates.LearningAlgorithmState(
            tff.learning.models.ModelWeights(weights, ()), (), state.client_work + 1, (), ())
        metrics = collections.OrderedDict(
            distributor=collections.OrderedDict(bytes_down=sums["bytes_down"]),
            client_work=collections.OrderedDict(train=role_metrics(sums)),
            aggregator=collections.OrderedDict(
                bytes_up=sums["bytes_up"],
                clients_with_data=accumulator.clients_with_data,
                clients_without_data=accumulator.clients_without_data,
                clients_refused=accumulator.clients_refused),
            finalizer=())
        return state, metrics

    # --- orchestration
    @tff.federated_computation
    def initialize():
        return tff.federated_eval(initial_state, tff.SERVER)

    @tff.federated_computation(tff.FederatedType(state_type, tff.SERVER),
                               tff.FederatedType(client_type(routing), tff.CLIENTS))
    def next_round(state, clients):
        weights = tff.federated_map(
            tff.tensorflow.computation(lambda s: s.global_model_weights.trainable, state_type),
            state)
        round_num = tff.federated_map(
            tff.tensorflow.computation(lambda s: s.client_work, state_type), state)
        routed = tff.federated_select(tff.federated_map(routing_key, clients),
                                      tff.federated_value(np.int32(num_levels), tff.SERVER),
                                      weights, cut_envelope)
        results = tff.federated_map(client_work,
                                    (routed, clients, tff.federated_broadcast(round_num)))
        state, metrics = tff.federated_map(
            finish_round,
            (state, sparse_sum(results.contribution), tff.federated_sum(results.sums)))
        return tff.learning.templates.LearningProcessOutput(state, metrics)

    @tff.tensorflow.computation(state_type)
    def get_model_weights(state):
        return state.global_model_weights

    @tff.tensorflow.computation(state_type, weights_type)
    def set_model_weights(state, weights):
        return tff.learning.templates.LearningAlgorithmState(
            weights, state.distributor, state.client_work, state.aggregator, state.finalizer)

    return tff.learning.templates.LearningProcess(initialize, next_round, get_model_weights,
                                                  set_model_weights)
