"""The elastic ResNet as a Keras model, and plain Keras networks extracted from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Optional, Union

import numpy as np
import tensorflow as tf

from feast_tf.space import SupernetSpec, Variant, layout_of
from feast_tf.supernet.forward import BN_EPSILON, Moments, forward, initial_weights

keras = tf.keras


@keras.utils.register_keras_serializable("feast_tf")
class ElasticResNet(keras.Model):
    """The supernet M(theta): call it with a variant to run that variant's slice.

        model = ElasticResNet(space.paper_spec())
        logits = model(images, variant=model.spec.variant(d=2, e=0.25, w=0.5))

    Without a variant the whole supernet runs. Batch normalisation uses the moments of the batch, or
    those given (see `ElasticRunner.recalibrate`): the model itself holds none, because each
    operating point has its own (paper 4.1).

    Attributes:
      spec: the `SupernetSpec`.
      layout: its `Layout`; the model's weights are in the order of `layout.parameters`.
    """

    def __init__(self, spec: SupernetSpec, *, execution: str = "slice", seed: int = 0, **kwargs):
        super().__init__(**kwargs)
        self.spec = spec
        self.layout = layout_of(spec)
        self.execution, self.seed = execution, seed
        self._theta = []
        for parameter, value in zip(self.layout.parameters, initial_weights(self.layout, seed)):
            variable = self.add_weight(name=parameter.name.replace("/", "_"),
                                       shape=parameter.shape, initializer="zeros")
            variable.assign(value)
            self._theta.append(variable)
        self.built = True

    def dims(self, variant: Union[Variant, tf.Tensor, None]) -> tf.Tensor:
        """The `dims` tensor of a variant (of the whole supernet for None)."""
        if variant is None:
            return tf.constant(self.layout.full_dims)
        if isinstance(variant, Variant):
            return tf.constant(self.layout.dims(variant))
        return tf.cast(variant, tf.int32)

    def call(self, inputs, variant=None, moments: Optional[Moments] = None, training=None):
        """Logits float32[batch, classes] of pictures.

        Args:
          inputs: float32[batch, height, width, 3], normalised.
          variant: a `Variant`, its `dims` as an int32[1 + 3S] tensor, or None.
          moments: fixed moments from `recalibrate`.
          training: taken for Keras' sake; batch moments are used whenever `moments` is None.
        """
        del training
        weights = [tf.convert_to_tensor(variable) for variable in self._theta]
        return forward(self.layout, weights, self.dims(variant), inputs,
                       execution=self.execution if moments is None else "slice", moments=moments)

    def get_config(self):
        """The constructor's arguments, in types of JSON."""
        return {**super().get_config(), "name": self.name, "spec": dataclasses.asdict(self.spec),
                "execution": self.execution, "seed": self.seed}

    @classmethod
    def from_config(cls, config):
        """The model of a configuration that `get_config` gave, with its initial weights."""
        config = dict(config)
        return cls(SupernetSpec(**config.pop("spec")), **config)


def extract(spec: SupernetSpec, weights: Sequence[np.ndarray], variant: Variant,
            moments: Optional[Moments] = None, *,
            normalization: Optional[tuple[Sequence[float], Sequence[float]]] = None,
            name: str = "subnetwork") -> keras.Model:
    """A plain fixed-width Keras network with the variant's slice of the weights.

    The result is a functional model of stock layers, without any trace of the elastic machinery.

    Args:
      spec: the space.
      weights: NumPy arrays of the whole supernet, in the order of the layout's parameters.
      variant: what to extract; any of the space, cached or not.
      moments: the operating point's recalibrated moments. None leaves Keras' initial mean 0 and
        variance 1: then only `training=True` gives meaningful logits.
      normalization: per-channel (mean, std) of pictures scaled to 0..1; the network then takes raw
        RGB values in 0..255 and normalises them itself.
      name: of the model.

    Returns:
      A `keras.Model` from float32[batch, size, size, 3] (normalised, or raw with `normalization`)
      to logits float32[batch, classes].

    Raises:
      ValueError: the variant is not in the space.
    """
    layout = layout_of(spec)
    dims = layout.dims(variant)
    slices = layout.cut(weights, dims)
    values: list[tuple[keras.layers.Layer, list]] = []

    # Every layer gets a name: Keras would count them in each process, and files would differ.
    def label(unit):
        return unit.name.replace("/", "_")

    def conv_bn(x, unit, stride):
        prefix, kernel = label(unit), slices[unit.kernel]
        if stride > 1:
            x = keras.layers.ZeroPadding2D(1, name=f"{prefix}_pad")(x)
        conv = keras.layers.Conv2D(kernel.shape[-1], kernel.shape[0], strides=stride,
                                   padding="valid" if stride > 1 else "same", use_bias=False,
                                   name=f"{prefix}_conv")
        norm = keras.layers.BatchNormalization(epsilon=BN_EPSILON, name=f"{prefix}_bn")
        x = norm(conv(x))
        mean, variance = norm.get_weights()[2:] if moments is None else moments[unit.norm]
        values.append((conv, [kernel]))
        values.append((norm, [slices[unit.gamma], slices[unit.beta],
                              np.asarray(mean), np.asarray(variance)]))
        return x

    def conv_bn_relu(x, unit):
        return keras.layers.ReLU(name=f"{label(unit)}_relu")(conv_bn(x, unit, unit.stride))

    inputs = keras.Input((spec.image_size, spec.image_size, 3), name="image")
    x = inputs
    if normalization is not None:
        mean, std = (np.asarray(numbers, np.float64) for numbers in normalization)
        x = keras.layers.Rescaling((1 / (255 * std)).tolist(), (-mean / std).tolist(),
                                   name="normalization")(x)
    x = conv_bn_relu(x, layout.stem)
    for blocks in layout.stages:
        for block in blocks:
            if block.gate is not None and dims[block.gate[0]] < block.gate[1]:
                continue
            y = conv_bn_relu(conv_bn_relu(x, block.conv1), block.conv2)
            if block.shortcut is not None:
                stride = block.shortcut.stride
                if stride > 1:
                    pool = f"{label(block.shortcut)}_pool"
                    x = keras.layers.AveragePooling2D(stride, name=pool)(x)
                x = conv_bn(x, block.shortcut, 1)
            x = keras.layers.Add(name=f"{label(block.conv2)}_add")([y, x])
            x = keras.layers.ReLU(name=f"{label(block.conv2)}_add_relu")(x)
    head = keras.layers.Dense(spec.classes, name="head")
    outputs = head(keras.layers.GlobalAveragePooling2D(name="pool")(x))
    values.append((head, [slices[layout.head_kernel], slices[layout.head_bias]]))
    model = keras.Model(inputs, outputs, name=name)
    for layer, arrays in values:
        layer.set_weights(arrays)
    return model
