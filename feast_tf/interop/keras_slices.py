"""Any Keras model as one elastic network: clients of lower levels train narrower layers.

    levels = [{"hidden": 16}, {"hidden": 0.5}, {}]  # units (int) or a share of them (float)
    slices = slice_map(model, levels)               # for routing, aggregation and plain rounds
    small = submodel(model, levels[0])              # what a client of level 0 trains

A level names the layers that it cuts. The narrower model is an ordinary one: Keras builds it from
the layers' configurations, so following layers take the narrower input by themselves, and a layer
that normalises over its channels does so over those that are there. Only what is a *prefix* of the
whole model's arrays can share weights with it; each layer that an elastic axis passes is checked.

The map is of the trainable weights, in the order of `model.trainable_weights`. Everything else,
such as frozen layers and the moments of batch normalisation, is neither sent nor averaged: moments
of networks of different widths are moments of different features. `submodel` cuts them along for a
start, and `recalibrate` gives a trained sub-model moments of its own.

Keras 2 and 3, Sequential and functional models.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Union

import numpy as np
import tensorflow as tf

from feast_tf.routing import SliceMap

Widths = Mapping[str, Union[int, float]]


def _layer_types(*names: str) -> tuple[type, ...]:
    """The Keras layers of these names that the installed version has."""
    return tuple(getattr(tf.keras.layers, name) for name in names
                 if hasattr(tf.keras.layers, name))


_CONVOLUTIONS = _layer_types(
    "Conv1D", "Conv2D", "Conv3D", "Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose",
    "SeparableConv1D", "SeparableConv2D")
# The key of a layer's configuration that is its width.
_WIDTH_KEYS = {
    **dict.fromkeys(_CONVOLUTIONS, "filters"),
    **dict.fromkeys(_layer_types("Dense", "SimpleRNN"), "units"),
    **dict.fromkeys(_layer_types("Embedding"), "output_dim"),
    **dict.fromkeys(_layer_types("MultiHeadAttention"), "num_heads"),
}
# These take every position by itself, or normalise: whichever axis is elastic stays so.
_POSITION_WISE = _layer_types(
    "Activation", "ReLU", "LeakyReLU", "ELU", "PReLU", "Softmax", "Dropout", "SpatialDropout1D",
    "SpatialDropout2D", "SpatialDropout3D", "GaussianNoise", "GaussianDropout", "AlphaDropout",
    "ActivityRegularization", "Identity", "Masking", "Rescaling", "Add", "Subtract", "Multiply",
    "Average", "Maximum", "Minimum", "BatchNormalization", "LayerNormalization",
    "GroupNormalization", "RMSNormalization", "UnitNormalization")
# These keep channels apart, or read all of them into outputs that no level cuts.
_CHANNEL_WISE = (*_WIDTH_KEYS, *_layer_types(
    "DepthwiseConv1D", "DepthwiseConv2D", "LSTM", "GRU", "Attention", "AdditiveAttention",
    "RepeatVector", *(f"{kind}{rank}D" for rank in (1, 2, 3) for kind in (
        "MaxPooling", "AveragePooling", "GlobalMaxPooling", "GlobalAveragePooling", "ZeroPadding",
        "Cropping", "UpSampling"))))


def slice_map(model: tf.keras.Model, levels: Sequence[Widths], *, trusted: Collection[str] = ()
              ) -> SliceMap:
    """The prefixes of a model's trainable weights that clients of each level hold.

    Args:
      model: Sequential or functional, with known input shapes. It is not changed.
      levels: for each level the widths of the layers it cuts, by layer name: an int, or a float in
        (0, 1] that is a share of the layer's own, rounded to the nearest (1 is one unit, 1.0 the
        whole layer). Widths are the units of Dense and SimpleRNN, the filters of convolutions, the
        output_dim of Embedding and the num_heads of MultiHeadAttention. Layers without a width of
        their own follow. An empty mapping is the whole model.
      trusted: names of layers that are not checked: you vouch that leading positions of their
        outputs depend on leading positions of their inputs and weights only.

    Returns:
      A `SliceMap` of one array for each of `model.trainable_weights`.

    Raises:
      ValueError: there are no levels or no trainable weights; a width is not one; a level's model is
        no prefix of the whole one, with the name of the layer where and what to do.
    """
    if not levels:
        raise ValueError("levels must name at least one level")
    whole = _clone(model, {})
    shapes = []
    for level, widths in enumerate(levels):
        try:
            part = _clone(model, widths)
            _check_prefixes(whole, part, trusted)
        except ValueError as error:
            raise ValueError(f"level {level}: {error}") from None
        shapes.append([tuple(weight.shape) for weight in part.trainable_weights])
    weights = whole.trainable_weights
    if not weights:
        raise ValueError(f"{model.name} has no trainable weights")
    return SliceMap(tuple(getattr(weight, "path", weight.name).split(":")[0] for weight in weights),
                    tuple(tuple(weight.shape) for weight in weights),
                    tuple(np.int32(extents).reshape(len(levels), -1) for extents in zip(*shapes)))


def submodel(model: tf.keras.Model, widths: Widths, *, trusted: Collection[str] = ()
             ) -> tf.keras.Model:
    """The narrower model of one level, with the prefixes of the model's weights.

    Its `trainable_weights` are `slice_map(model, levels).cut(model.trainable_weights, level)`.

    Args:
      model, widths, trusted: as for `slice_map`.

    Returns:
      A model with variables of its own, not compiled.

    Raises:
      ValueError: as `slice_map`.
    """
    part = _clone(model, widths)
    _check_prefixes(_clone(model, {}), part, trusted)
    for target, source in zip(part.weights, model.weights):
        target.assign(np.asarray(source)[(*(slice(0, size) for size in target.shape), ...)])
    return part


def recalibrate(model: tf.keras.Model, batches: Iterable[Any]) -> None:
    """Sets the moments of batch normalisation to the mean of those of `batches`, in place.

    Args:
      model: usually a `submodel` with trained weights; layers that are frozen stay as they are.
      batches: inputs of the model, such as the server's own data in mini-batches of equal size.
    """
    layers = [layer for layer in _all_layers(model)
              if isinstance(layer, tf.keras.layers.BatchNormalization)]
    momenta = [layer.momentum for layer in layers]
    try:
        for seen, batch in enumerate(batches):
            for layer in layers:
                layer.momentum = seen / (seen + 1)
            model(batch, training=True)
    finally:
        for layer, momentum in zip(layers, momenta):
            layer.momentum = momentum


def _all_layers(model: tf.keras.Model) -> Iterator[tf.keras.layers.Layer]:
    for layer in model.layers:
        yield layer
        if isinstance(layer, tf.keras.Model):
            yield from _all_layers(layer)


def _clone(model: tf.keras.Model, widths: Widths) -> tf.keras.Model:
    """A model of the same layers, narrower where `widths` says so, with new weights."""
    try:
        tf.keras.Model(model.inputs, model.outputs)  # fails where there is no graph between them
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"{model.name} must be a Sequential or functional model with known input "
                         "shapes; write a SliceMap by hand for others") from None
    layers = {layer.name: layer for layer in model.layers}
    values = {}
    for name, width in widths.items():
        if name not in layers:
            raise ValueError(f"the model has no layer {name!r}; its layers are {', '.join(layers)}")
        values[name] = _width(layers[name], width)

    def narrower(layer):
        config = layer.get_config()
        if layer.name in values:
            config[_WIDTH_KEYS[type(layer)]] = values[layer.name]
        if isinstance(layer, tf.keras.layers.MultiHeadAttention):
            # In Keras 2 its `from_config` would build it for the shapes of before.
            return type(layer)(**{key: value for key, value in config.items()
                                  if key not in ("query_shape", "key_shape", "value_shape")})
        return type(layer).from_config(config)

    try:
        return tf.keras.models.clone_model(model, clone_function=narrower)
    except (TypeError, ValueError) as error:  # such as a sum of branches of different widths
        reason = " ".join(str(error).split())
        raise ValueError(f"Keras cannot build the model of widths {dict(widths)}: {reason}"
                         ) from None


def _width(layer: tf.keras.layers.Layer, width: Union[int, float]) -> int:
    """The width of a layer as a number of units; ValueError where it cannot have that."""
    if type(layer) not in _WIDTH_KEYS:
        reason = ("its gates lie side by side in one array, so leading units are no leading columns"
                  if isinstance(layer, _layer_types("LSTM", "GRU")) else
                  f"only {', '.join(kind.__name__ for kind in _WIDTH_KEYS)} have one")
        raise ValueError(f"{_name(layer)} has no width to cut: {reason}")
    full = layer.get_config()[_WIDTH_KEYS[type(layer)]]
    if isinstance(width, (float, np.floating)) and 0 < width <= 1:
        return max(1, int(full * width + 0.5))
    if isinstance(width, (int, np.integer)) and not isinstance(width, bool) and 1 <= width <= full:
        return int(width)
    raise ValueError(f"{_name(layer)}: the width must be an int in 1..{full} or a float in (0, 1], "
                     f"but is {width!r}")


def _check_prefixes(whole: tf.keras.Model, part: tf.keras.Model, trusted: Collection[str]) -> None:
    """Raises ValueError at the first layer whose narrower arrays would be no prefixes."""
    for ours, theirs in zip(_operations(whole), _operations(part)):
        if ours.name in trusted:
            continue
        # Keras has no public way to the shapes of every call of a shared layer.
        for wide, narrow in zip(ours._inbound_nodes, theirs._inbound_nodes):
            _check_call(ours, *_shapes(wide), *_shapes(narrow))
    for wide, narrow in zip(whole.outputs, part.outputs):
        if _axes(wide.shape, narrow.shape):
            raise ValueError("the outputs of the model must keep their shape, but would become "
                             f"{tuple(narrow.shape)} instead of {tuple(wide.shape)}")


def _operations(model: tf.keras.Model) -> Sequence[Any]:
    """Layers, and in Keras 3 also the bare operations between them."""
    return getattr(model, "operations", model.layers)


def _shapes(node: Any) -> tuple[list[tuple], list[tuple]]:
    """The shapes of the (inputs, outputs) of one call of a layer."""
    inputs = node.keras_inputs if hasattr(node, "keras_inputs") else node.input_tensors
    return ([tuple(tensor.shape) for tensor in inputs],
            [tuple(tensor.shape) for tensor in tf.nest.flatten(node.outputs)])


def _axes(wide: Sequence[Any], narrow: Sequence[Any]) -> set[int]:
    """The axes on which a narrower tensor differs."""
    return {axis for axis, sizes in enumerate(zip(wide, narrow)) if sizes[0] != sizes[1]}


def _check_call(layer: Any, inputs: list[tuple], outputs: list[tuple], narrow_inputs: list[tuple],
                narrow_outputs: list[tuple]) -> None:
    """Raises ValueError unless a layer maps prefixes to prefixes in one call."""
    wide = [*inputs, *outputs]
    elastic = [_axes(*pair) for pair in zip(wide, [*narrow_inputs, *narrow_outputs])]
    if not any(elastic) or type(layer) in _POSITION_WISE:
        return
    if type(layer) in _CHANNEL_WISE:
        first = getattr(layer, "data_format", None) == "channels_first"
        if any(axes - {1 if first else len(shape) - 1} for axes, shape in zip(elastic, wide)):
            raise ValueError(f"{_name(layer)}: only channels can be elastic, but the axes of its "
                             f"inputs and outputs that change are {elastic}")
        if type(layer) in _CONVOLUTIONS and getattr(layer, "groups", 1) > 1:
            raise ValueError(f"{_name(layer)}: a convolution in groups cannot be elastic; keep its "
                             "inputs and filters whole")
    elif isinstance(layer, tf.keras.layers.Flatten):
        if any(size != 1 for axis in elastic[0] for size in inputs[0][1:axis]):
            raise ValueError(f"{_name(layer)}: leading channels are not leading once they are "
                             "flattened with positions; pool globally instead")
    elif isinstance(layer, tf.keras.layers.Concatenate):
        axis = layer.axis % len(outputs[0])
        if any(axis in axes for axes in elastic[:len(inputs) - 1]):
            raise ValueError(f"{_name(layer)}: only its last input can be elastic, because what "
                             "follows a narrower one moves; add the inputs instead, or cut each "
                             "one's own Dense layer behind it")
    else:
        raise ValueError(_unknown(layer))


def _name(layer: Any) -> str:
    return f"{layer.name} ({type(layer).__name__})"


def _unknown(layer: Any) -> str:
    return (f"{_name(layer)} is not known to keep leading positions in front; keep its inputs and "
            "weights whole, or name it in `trusted` if you know that it does")
