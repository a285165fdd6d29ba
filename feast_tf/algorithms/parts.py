"""The parts of a method whose clients hold slices of one model, and what joins them.

    distributor ──► client work ──► aggregator ──► finalizer

As in `tff.learning.templates`, each part is a process of its own with a state at the server, and
updates have the sign of gradients: received minus trained weights. Client work, aggregator and
finalizer are TFF's templates. The distributor can't be: a `DistributionProcess` sends all clients
the same and takes no key of theirs.

Types in the signatures below:

    W        tuple of float32 tensors, the whole model (`aggregation.weights_type`)
    W_slice  the same with unknown sizes where a level cuts (`aggregation.slices_type`)
    K        <client=int32, level=int32>, a client's id and its level
    B        its mini-batches
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from feast_tf.aggregation import (SlicedMeanFactory, hold_unreported, slices_type,
                                  weights_type)
from feast_tf.routing import SliceMap

templates = tff.learning.templates

KEY_TYPE = tff.StructWithPythonType([("client", np.int32), ("level", np.int32)],
                                    collections.OrderedDict)


def check_cohort(clients: Sequence[Mapping[str, Any]], num_levels: int) -> None:
    """Says in Python what TFF would report as an internal error of its runtime, or not at all.

    Args:
      clients: the cohort of a round.
      num_levels: of the slice map.

    Raises:
      ValueError: nobody is in the cohort, or a client's level is not in the cache.
    """
    if not clients:
        raise ValueError("the cohort is empty: a round needs at least one client")
    for client in clients:
        if not 0 <= client["level"] < num_levels:
            raise ValueError(f"client {client['client']} has the level {client['level']}, but "
                             f"levels lie in 0..{num_levels - 1}")


def member_type(batches: tff.SequenceType) -> tff.StructType:
    """D: what a client brings to a round, <client=int32, level=int32, data=B*>."""
    return tff.StructWithPythonType(
        [("client", np.int32), ("level", np.int32), ("data", batches)], collections.OrderedDict)


def _received_type(slices: tff.Type) -> tff.StructType:
    """What client work takes: <slices=..., key=K>."""
    return tff.StructWithPythonType([("slices", slices), ("key", KEY_TYPE)],
                                    collections.OrderedDict)


def build_distributor(slices: SliceMap) -> tff.templates.MeasuredProcess:
    """Builds the routing: `federated_select` cuts each client's slices out of the model (3.3).

    Type signatures:

        initialize: ( -> <>@SERVER)
        next: (<state=<>@SERVER, weights=W@SERVER, keys={K}@CLIENTS> ->
               <state=<>@SERVER, result={W_slice}@CLIENTS,
                measurements=<bytes_down=int64>@SERVER>)

    The bytes are counted from the tensors that arrive. A level that the slice map does not have
    stops the round with an error that names the client.
    """
    num_levels = slices.num_levels

    @tff.tensorflow.computation(KEY_TYPE)
    def routing_key(key):
        level = key["level"]
        check = tf.debugging.Assert(
            tf.logical_and(level >= 0, level < num_levels),
            ["client", key["client"], "has the level", level,
             f"but levels lie in 0..{num_levels - 1}"])
        with tf.control_dependencies([check]):
            return tf.reshape(level, [1])

    @tff.tensorflow.computation(weights_type(slices), np.int32)
    def cut(weights, level):
        return tuple(
            tf.ensure_shape(
                tf.slice(weight, tf.zeros_like(extents[0]), tf.constant(extents)[level]), shape)
            for weight, extents, shape in zip(weights, slices.extents, slices.elastic_shapes))

    @tff.tensorflow.computation(tff.SequenceType(slices_type(slices)))
    def receive(routed):
        parts = routed.get_single_element()
        return parts, tf.add_n([tf.size(part, tf.int64) * part.dtype.size for part in parts])

    @tff.federated_computation
    def init_fn():
        return tff.federated_value((), tff.SERVER)

    @tff.federated_computation(init_fn.type_signature.result,
                               tff.FederatedType(weights_type(slices), tff.SERVER),
                               tff.FederatedType(KEY_TYPE, tff.CLIENTS))
    def next_fn(state, weights, keys):
        routed = tff.federated_select(tff.federated_map(routing_key, keys),
                                      tff.federated_value(np.int32(num_levels), tff.SERVER),
                                      weights, cut)
        parts, sizes = tff.federated_map(receive, routed)
        return tff.templates.MeasuredProcessOutput(
            state, parts,
            tff.federated_zip(collections.OrderedDict(bytes_down=tff.federated_sum(sizes))))

    return tff.templates.MeasuredProcess(init_fn, next_fn)


def build_client_work(slices: SliceMap, train: Callable, report: Callable, *,
                      batches: tff.SequenceType) -> templates.ClientWorkProcess:
    """Builds the clients' work, whose state is the number of the round.

    Type signatures:

        initialize: ( -> int32@SERVER)
        next: (<state=int32@SERVER, weights={<slices=W_slice, key=K>}@CLIENTS, data={B*}@CLIENTS> ->
               <state=int32@SERVER,
                result={ClientResult(update=W_slice, update_weight=float32)}@CLIENTS,
                measurements=<train=M>@SERVER>)

    Args:
      slices: what the clients of each level hold.
      train: (slices, client, level, data, round number) -> `training.LocalResult`; traced once as a
        `tf.function`, so one graph must serve all levels.
      report: from the sum over clients of `LocalResult.metrics` to an ordered mapping of scalars, M
        without its last entry, examples=int64. A client's metrics that are not finite count as 0,
        so that one that diverges does not hide those of all others.
      batches: B*, the type of a client's data.
    """
    traced = tf.function(train)
    received_type = _received_type(slices_type(slices))

    @tff.tensorflow.computation(received_type, batches, np.int32)
    def work(received, data, round_num):
        key = received["key"]
        result = traced(received["slices"], key["client"], key["level"], data, round_num)
        finite = tf.reduce_all(tf.math.is_finite(result.metrics))
        update = tuple(tf.ensure_shape(-part, shape)
                       for part, shape in zip(result.update, slices.elastic_shapes))
        return (templates.ClientResult(update, tf.cast(result.num_examples, tf.float32)),
                collections.OrderedDict(metrics=tf.where(finite, result.metrics, 0.0),
                                        examples=tf.cast(result.num_examples, tf.int64)))

    @tff.tensorflow.computation(work.type_signature.result[1])
    def as_measurements(sums):
        rows = report(sums["metrics"])
        return collections.OrderedDict(
            train=collections.OrderedDict(rows, examples=sums["examples"]))

    @tff.federated_computation
    def init_fn():
        return tff.federated_value(np.int32(0), tff.SERVER)

    @tff.federated_computation(init_fn.type_signature.result,
                               tff.FederatedType(received_type, tff.CLIENTS),
                               tff.FederatedType(batches, tff.CLIENTS))
    def next_fn(state, weights, data):
        result, sums = tff.federated_map(work, (weights, data, tff.federated_broadcast(state)))
        return tff.templates.MeasuredProcessOutput(
            tff.federated_map(tff.tensorflow.computation(lambda n: n + 1, np.int32), state),
            result, tff.federated_map(as_measurements, tff.federated_sum(sums)))

    return templates.ClientWorkProcess(init_fn, next_fn)


def build_mean_finalizer(model_weights_type: tff.StructType) -> templates.FinalizerProcess:
    """Builds the server's step of the paper: the mean update, with learning rate 1.

    Without state and measurements. A position whose mean is 0, because nobody covers it or nobody
    changed it, keeps its bits, -0.0 included.

    Args:
      model_weights_type: of `tff.learning.models.ModelWeights`.
    """
    @tff.tensorflow.computation(model_weights_type, model_weights_type.trainable)
    def step(weights, update):
        # tf.not_equal: inside a TFF computation `!=` on tensors compares identities.
        trainable = tuple(tf.where(tf.not_equal(part, 0.0), weight - part, weight)
                          for weight, part in zip(weights.trainable, update))
        return tff.learning.models.ModelWeights(trainable, weights.non_trainable)

    @tff.federated_computation
    def init_fn():
        return tff.federated_value((), tff.SERVER)

    @tff.federated_computation(init_fn.type_signature.result,
                               tff.FederatedType(model_weights_type, tff.SERVER),
                               tff.FederatedType(model_weights_type.trainable, tff.SERVER))
    def next_fn(state, weights, update):
        return tff.templates.MeasuredProcessOutput(
            state, tff.federated_map(step, (weights, update)), tff.federated_value((), tff.SERVER))

    return templates.FinalizerProcess(init_fn, next_fn)


def compose_sliced_process(
        initial_weights: tff.Computation, distributor: tff.templates.MeasuredProcess,
        client_work: templates.ClientWorkProcess, aggregator: tff.templates.AggregationProcess,
        finalizer: templates.FinalizerProcess) -> templates.LearningProcess:
    """Joins the parts of a method: `compose_learning_process`, for clients that hold slices.

    Type signatures:

        initialize: ( -> S@SERVER)
        next: (<state=S@SERVER, clients={D}@CLIENTS> -> <state=S@SERVER, metrics=M@SERVER>)

      S: `LearningAlgorithmState` of the model's weights and the states of the four parts.
      D: <client=int32, level=int32, data=B*>, see `member_type`.
      M: <distributor=..., client_work=..., aggregator=..., finalizer=...>, their measurements.

    Hyperparameters are those of the client work and of the finalizer.

    Args:
      initial_weights: ( -> ModelWeights) whose trainable weights are W.
      distributor: as `build_distributor`; sends a client what it trains.
      client_work: as `build_client_work`.
      aggregator: of `aggregation.SlicedMeanFactory`, or any weighted one from W_slice to W.
      finalizer: as `build_mean_finalizer`, or
        `tff.learning.templates.build_apply_optimizer_finalizer(aggregation.hold_unreported(...))`.

    Raises:
      TypeError: a part is of another kind, or does not fit the one before it; the message names it.
    """
    _check_parts(initial_weights, distributor, client_work, aggregator, finalizer)
    model_type = initial_weights.type_signature.result
    data_type = client_work.next.type_signature.parameter[2].member

    @tff.federated_computation
    def initialize():
        return tff.federated_zip(templates.LearningAlgorithmState(
            tff.federated_eval(initial_weights, tff.SERVER), distributor.initialize(),
            client_work.initialize(), aggregator.initialize(), finalizer.initialize()))

    @tff.federated_computation(initialize.type_signature.result,
                               tff.FederatedType(member_type(data_type), tff.CLIENTS))
    def next_round(state, clients):
        keys = tff.federated_zip(collections.OrderedDict(client=clients["client"],
                                                         level=clients["level"]))
        sent = distributor.next(state.distributor, state.global_model_weights.trainable, keys)
        received = tff.federated_zip(collections.OrderedDict(slices=sent.result, key=keys))
        work = client_work.next(state.client_work, received, clients["data"])
        mean = aggregator.next(state.aggregator, work.result.update, work.result.update_weight)
        step = finalizer.next(state.finalizer, state.global_model_weights, mean.result)
        return templates.LearningProcessOutput(
            tff.federated_zip(templates.LearningAlgorithmState(
                step.result, sent.state, work.state, mean.state, step.state)),
            tff.federated_zip(collections.OrderedDict(
                distributor=sent.measurements, client_work=work.measurements,
                aggregator=mean.measurements, finalizer=step.measurements)))

    state_type = initialize.type_signature.result.member

    @tff.tensorflow.computation(state_type)
    def get_model_weights(state):
        return state.global_model_weights

    @tff.tensorflow.computation(state_type, model_type)
    def set_model_weights(state, weights):
        return state._replace(global_model_weights=weights)

    @tff.tensorflow.computation(state_type)
    def get_hparams(state):
        return collections.OrderedDict(client_work=client_work.get_hparams(state.client_work),
                                       finalizer=finalizer.get_hparams(state.finalizer))

    @tff.tensorflow.computation(state_type, get_hparams.type_signature.result)
    def set_hparams(state, hparams):
        return state._replace(
            client_work=client_work.set_hparams(state.client_work, hparams["client_work"]),
            finalizer=finalizer.set_hparams(state.finalizer, hparams["finalizer"]))

    return templates.LearningProcess(initialize, next_round, get_model_weights, set_model_weights,
                                     get_hparams_fn=get_hparams, set_hparams_fn=set_hparams)


def _check_parts(initial_weights, distributor, client_work, aggregator, finalizer) -> None:
    """Raises the TypeError of `compose_sliced_process`; TFF's own print whole models' types."""
    for name, part, kind in (("initial_weights", initial_weights, tff.Computation),
                             ("distributor", distributor, tff.templates.MeasuredProcess),
                             ("client_work", client_work, templates.ClientWorkProcess),
                             ("aggregator", aggregator, tff.templates.AggregationProcess),
                             ("finalizer", finalizer, templates.FinalizerProcess)):
        if not isinstance(part, kind):
            raise TypeError(f"{name} must be a {kind.__name__}, but is a {type(part).__name__}")
    if not aggregator.is_weighted:
        raise TypeError("aggregator must be weighted")
    model_type = initial_weights.type_signature.result
    taken = {name: [argument.member for argument in part.next.type_signature.parameter]
             for name, part in (("distributor", distributor), ("client_work", client_work),
                                ("aggregator", aggregator), ("finalizer", finalizer))}
    if len(taken["distributor"]) != 3:
        raise TypeError("distributor must take a state, weights and the clients' keys")
    sent_type = distributor.next.type_signature.result.result.member
    work_type = client_work.next.type_signature.result.result.member
    mean_type = aggregator.next.type_signature.result.result.member
    for taker, place, giver, given in (
            ("distributor", 1, "initial_weights", model_type.trainable),
            ("distributor", 2, "the cohort", KEY_TYPE),
            ("client_work", 1, "distributor", _received_type(sent_type)),
            ("aggregator", 1, "client_work", work_type.update),
            ("aggregator", 2, "client_work", work_type.update_weight),
            ("finalizer", 1, "initial_weights", model_type),
            ("finalizer", 2, "aggregator", mean_type)):
        if not taken[taker][place].is_assignable_from(given):
            raise TypeError(f"{taker} does not take what {giver} gives: it takes "
                            f"{str(taken[taker][place]):.200}, but is given {str(given):.200}")


def build_sliced_process(
        initial_weights: tff.Computation, slices: SliceMap,
        client_work: templates.ClientWorkProcess, *,
        aggregator: Optional[tff.aggregators.WeightedAggregationFactory] = None,
        server_optimizer: Optional[tff.learning.optimizers.Optimizer] = None
        ) -> templates.LearningProcess:
    """Composes a method with the paper's routing, aggregation and server's step, or with others.

    Args:
      initial_weights, client_work: as for `compose_sliced_process`.
      slices: what the clients of each level hold.
      aggregator: in place of `SlicedMeanFactory(slices)`: one with inner factories, or one in
        wrappers such as `tff.aggregators.clipping_factory`.
      server_optimizer: takes the mean update as its gradient, in place of a step of rate 1. It
        is wrapped in `hold_unreported`.

    Returns:
      See `compose_sliced_process`.

    Raises:
      TypeError: an argument is of a wrong kind, or does not fit the others; the message names it.
    """
    if aggregator is None:
        aggregator = SlicedMeanFactory(slices)
    if not isinstance(aggregator, tff.aggregators.WeightedAggregationFactory):
        raise TypeError("aggregator must be a tff.aggregators.WeightedAggregationFactory, but is a "
                        f"{type(aggregator).__name__}")
    try:
        aggregation = aggregator.create(slices_type(slices), tff.TensorType(np.float32))
    except TypeError as error:
        raise TypeError(f"aggregator does not take slices: {str(error):.300}") from error
    model_type = initial_weights.type_signature.result
    if server_optimizer is None:
        finalizer = build_mean_finalizer(model_type)
    else:
        finalizer = templates.build_apply_optimizer_finalizer(hold_unreported(server_optimizer),
                                                              model_type)
    return compose_sliced_process(initial_weights, build_distributor(slices), client_work,
                                  aggregation, finalizer)


def compose_member_computation(member: tff.Computation, process: templates.LearningProcess
                               ) -> templates.LearningProcess:
    """The same process for clients who bring something from which their values can be made.

    TFF's programs need it: `tff.program.NativeFederatedContext`, and so
    `tff.learning.programs.train_model`, does not take values of clients that are structures, but
    takes ids.

    Args:
      member: (T -> D), run at the clients; for example from an id to <client, level, data>.
      process: of `compose_sliced_process`, whose clients bring D.

    Returns:
      A process whose `next` takes {T}@CLIENTS; all else is that of `process`.

    Raises:
      TypeError: the result of `member` is not what the clients of `process` bring.
    """
    state_type, clients_type = process.next.type_signature.parameter
    made = member.type_signature.result
    if not clients_type.member.is_assignable_from(made):
        raise TypeError(f"member must give {str(clients_type.member):.200}, but gives "
                        f"{str(made):.200}")

    @tff.federated_computation(state_type,
                               tff.FederatedType(member.type_signature.parameter, tff.CLIENTS))
    def next_round(state, clients):
        return process.next(state, tff.federated_map(member, clients))

    return templates.LearningProcess(
        process.initialize, next_round, process.get_model_weights, process.set_model_weights,
        get_hparams_fn=process.get_hparams, set_hparams_fn=process.set_hparams)
