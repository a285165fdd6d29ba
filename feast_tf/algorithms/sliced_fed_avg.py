"""Federated averaging of any Keras model, whose clients hold narrower prefixes of it.

Operating points    the model at the widths of each level (`interop.keras_slices`).
Budget -> point     yours: a client brings its level.
Routing             the prefixes of its level, cut out by `federated_select` (paper 3.3).
Local objective     the given loss, minimised by the given optimizer; no distillation.
Aggregation         position-wise mean, weighted by n_i, over the clients that hold a place (3.3).
Serving             `keras_slices.submodel` of a level, with the trained weights.

With one level that is the whole model this is `tff.learning.algorithms.build_weighted_fed_avg`.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import contextlib
from typing import Any, Optional

import tensorflow as tf
import tensorflow_federated as tff

from feast_tf.algorithms import parts
from feast_tf.interop.keras_slices import Widths, slice_map, submodel
from feast_tf.training import LocalResult

# From labels and outputs to a number for each example, or to their mean.
Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def build_sliced_fed_avg(
        model: tf.keras.Model, levels: Sequence[Widths], *, element_spec: Any, loss: Loss,
        optimizer: tff.learning.optimizers.Optimizer,
        metrics: Optional[Mapping[str, Loss]] = None, trusted: Collection[str] = (),
        aggregator: Optional[tff.aggregators.WeightedAggregationFactory] = None,
        server_optimizer: Optional[tff.learning.optimizers.Optimizer] = None
        ) -> tff.learning.templates.LearningProcess:
    """Builds the learning process.

    Type signatures:

        initialize: ( -> S@SERVER)
        next: (<state=S@SERVER, clients={D}@CLIENTS> -> <state=S@SERVER, metrics=M@SERVER>)

      S: `LearningAlgorithmState`; `global_model_weights.trainable` holds the model's trainable
         weights in Keras' order, `client_work` the number of the round.
      D: <client=int32, level=int32, data=B*>, B of `element_spec`.
      M: <distributor=<bytes_down=int64>,
          client_work=<train=<loss=float32, float32 for each of `metrics`, examples=int64>>,
          aggregator=<...>, finalizer=<...>>, see `parts.compose_sliced_process`. Means over the
         examples of all clients whose numbers are finite, at the weights before each step.

    Args:
      model: Sequential or functional; its weights are the initial ones. Frozen layers go to the
        clients as constants.
      levels, trusted: as for `keras_slices.slice_map`.
      element_spec: of a client's mini-batches: a pair of inputs and labels, or a mapping of "x" and
        "y", of `tf.TensorSpec`.
      loss: a `tf.keras.losses.Loss` or a function of (labels, outputs).
      optimizer: of the clients; starts afresh in every round. Layers that draw random numbers, such
        as Dropout, use TensorFlow's global generator.
      metrics: functions of (labels, outputs) by name, such as
        `tf.keras.metrics.sparse_categorical_accuracy`.
      aggregator, server_optimizer: as for `parts.build_sliced_process`.

    Raises:
      ValueError: as `slice_map`; the model has batch normalisation that trains, or regularisers; or
        `element_spec` is neither of the two.
      TypeError: `loss`, one of `metrics`, `optimizer`, `aggregator` or `server_optimizer` is of a
        wrong kind.
    """
    slices = slice_map(model, levels, trusted=trusted)
    if not isinstance(optimizer, tff.learning.optimizers.Optimizer):
        raise TypeError(f"optimizer must be a tff.learning.optimizers.Optimizer, but is a "
                        f"{type(optimizer).__name__}")
    if not (set(element_spec) == {"x", "y"} if isinstance(element_spec, Mapping)
            else isinstance(element_spec, Sequence) and len(element_spec) == 2):
        raise ValueError("element_spec must be a pair of inputs and labels, or a mapping of x and y, "
                         f"but is {str(element_spec):.100}")
    metrics = metrics or {}
    for name, function in (("loss", loss), *metrics.items()):
        if not callable(function) or isinstance(function, tf.keras.metrics.Metric):
            raise TypeError(f"{name} must be a function of (labels, outputs), but is a "
                            f"{type(function).__name__}")
    calls = [stateless_call(submodel(model, widths, trusted=trusted)) for widths in levels]
    start = tuple(weight.numpy() for weight in model.trainable_weights)

    @tff.tensorflow.computation
    def initial():
        return tff.learning.models.ModelWeights(tuple(map(tf.constant, start)), ())

    # --- client work: each level has a graph of its own, of static shapes
    def train(received, client, level, data, round_num):
        del client, round_num
        branches = []
        for call, shapes in zip(calls, map(slices.slice_shapes, range(slices.num_levels))):
            work = tf.function(lambda weights, batches, call=call: local_steps(
                call, loss, metrics, optimizer, weights, batches))
            weights = lambda shapes=shapes: tuple(map(tf.ensure_shape, received, shapes))
            branches.append(lambda work=work, weights=weights: work(weights(), data))
        return LocalResult(*tf.switch_case(level, branches))

    def means(sums):
        names = ("loss", *metrics)
        return collections.OrderedDict((name, tf.math.divide_no_nan(sums[place], sums[-1]))
                                       for place, name in enumerate(names))

    with _usable_afterwards(model):
        client_work = parts.build_client_work(
            slices, train, means,
            batches=tff.SequenceType(tff.types.tensorflow_to_type(element_spec)))
    return parts.build_sliced_process(initial, slices, client_work, aggregator=aggregator,
                                      server_optimizer=server_optimizer)


def stateless_call(model: tf.keras.Model) -> Callable[[Sequence[tf.Tensor], Any], Any]:
    """A Keras model as a function of its trainable weights.

    Keras 2 has no such call. So every call, which must be in a graph, builds a copy of the model in
    which tensors take the place of new variables, as TFF's `functional_model_from_keras` does; but
    frozen layers, and any order of the weights, are fine here.

    Args:
      model: Sequential or functional.

    Returns:
      (tensors in the order of `model.trainable_weights`, inputs) -> outputs in training mode.

    Raises:
      ValueError: the model has batch normalisation that trains, or regularisers.
    """
    for layer in model.layers:
        if isinstance(layer, tf.keras.layers.BatchNormalization) and layer.trainable:
            raise ValueError(f"{layer.name} (BatchNormalization) updates its moments as it trains, "
                             "which needs variables; use GroupNormalization or LayerNormalization")
    if model.losses:
        raise ValueError("regularisers of layers are not minimised here; use an optimizer with "
                         "weight decay")
    created = []

    def record(next_creator, **kwargs):
        created.append(next_creator(**kwargs))
        return created[-1]

    with _usable_afterwards(model), tf.Graph().as_default(), tf.variable_creator_scope(record):
        copy = tf.keras.models.clone_model(model)
    trained = {id(weight): place for place, weight in enumerate(copy.trainable_weights)}
    frozen = {id(weight): value.numpy() for weight, value in zip(copy.weights, model.weights)
              if id(weight) not in trained}

    def call(weights, inputs):
        tensors = iter([weights[trained[id(variable)]] if id(variable) in trained
                        else tf.constant(frozen[id(variable)]) for variable in created])
        with tf.variable_creator_scope(lambda *_, **__: next(tensors)):
            return tf.keras.models.clone_model(model)(inputs, training=True)

    return call


@contextlib.contextmanager
def _usable_afterwards(model: tf.keras.Model) -> Iterator[None]:
    """Lets copies of a model be made in graphs.

    There Keras 2 turns the classes of layers, and with them all their layers, into those of
    TensorFlow 1. A copy that is made outside turns them back.
    """
    try:
        yield
    finally:
        tf.keras.models.clone_model(model)


def local_steps(call: Callable[[Sequence[tf.Tensor], Any], Any], loss: Loss,
                metrics: Mapping[str, Loss], optimizer: tff.learning.optimizers.Optimizer,
                weights: Sequence[tf.Tensor], batches: tf.data.Dataset) -> LocalResult:
    """One client's epoch; call it in a `tf.function` (it is autographed).

    Args:
      call: (weights, inputs) -> outputs.
      loss, metrics, optimizer: as for `build_sliced_fed_avg`.
      weights: the received tensors, of static shapes.
      batches: pairs of inputs and labels, or mappings of "x" and "y".

    Returns:
      A `LocalResult` whose metrics are float32[1 + len(metrics) + 1] sums over the examples: the
      loss, the metrics, and 1.
    """
    received = weights = tuple(weights)
    state = tf.nest.map_structure(tf.convert_to_tensor, optimizer.initialize(
        tuple(tf.TensorSpec(weight.shape, weight.dtype) for weight in weights)))
    sums, examples = tf.zeros([len(metrics) + 2]), tf.constant(0)
    for batch in iter(batches):
        inputs, labels = (batch["x"], batch["y"]) if isinstance(batch, Mapping) else batch
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            outputs = call(weights, inputs)
            value = tf.reduce_mean(loss(labels, outputs))
        gradient = tape.gradient(value, weights, unconnected_gradients="zero")
        state, weights = optimizer.next(state, weights, gradient)
        size = tf.shape(tf.nest.flatten(labels)[0])[0]
        scores = [tf.reduce_mean(metric(labels, outputs)) for metric in metrics.values()]
        sums += tf.cast(size, tf.float32) * tf.stack([value, *scores, 1.0])
        examples += size
    return LocalResult(tuple(tf.nest.map_structure(tf.subtract, weights, received)), examples, sums)
