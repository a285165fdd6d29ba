"""The elastic network in TensorFlow Lite's built-in operations alone, gradients included.

Of a training step's operations TensorFlow Lite 2.14 lacks AvgPoolGrad, Conv2DBackpropFilter,
Conv2DBackpropInput with explicit padding, FusedBatchNormV3 with its gradient, ReluGrad,
BroadcastGradientArgs, and Conv2D with a kernel of unknown size. Here each of them is written with
operations that it has; a test compares the numbers with those of `supernet.forward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import tensorflow as tf

from feast_tf.space import Block, ConvUnit, Layout
from feast_tf.supernet import BN_EPSILON


def forward(layout: Layout, weights: Sequence[tf.Tensor], dims: tf.Tensor,
            images: tf.Tensor) -> tf.Tensor:
    """Logits of one variant, which runs at its own cost: `supernet.forward` with batch moments.

    Args:
      layout: the supernet's layout.
      weights: a tensor for each of `layout.parameters`, of an envelope's static shapes.
      dims: int32[1 + 3S], the variant.
      images: float32[batch, height, width, 3], normalised.

    Returns:
      float32[batch, classes].
    """
    def parts(unit: ConvUnit) -> tuple[tf.Tensor, ...]:
        return tuple(_prefix(weights[place], layout.parameters[place].axes, dims)
                     for place in (unit.kernel, unit.gamma, unit.beta))

    x = _relu(_convolve_and_normalize(images, parts(layout.stem), 1))
    for first, *gated in layout.stages:
        y = _residual(x, first, parts(first.conv1) + parts(first.conv2))
        stride = first.shortcut.stride
        pooled = _average_pool(x, stride) if stride > 1 else x
        x = _relu_of_sum(y, _convolve_and_normalize(pooled, parts(first.shortcut), 1))
        for block in gated:
            if weights[block.conv1.kernel].shape[-1]:  # else the envelope ends before it
                position, least = block.gate
                x = _gated_block(x, block, parts(block.conv1) + parts(block.conv2),
                                 dims[position] >= least)
    head = layout.head_kernel
    kernel = _prefix(weights[head], layout.parameters[head].axes, dims)
    return _dense(tf.reduce_mean(x, axis=[1, 2]), kernel, weights[layout.head_bias])


def _prefix(value: tf.Tensor, axes: Sequence[Optional[int]], dims: tf.Tensor) -> tf.Tensor:
    """The variant's part of a parameter; unlike a strided slice, the gradient is a padding."""
    if all(axis is None for axis in axes):
        return value
    sizes = [size if axis is None else dims[axis] for size, axis in zip(value.shape, axes)]
    return tf.slice(value, [0] * len(axes), tf.stack(sizes))


def _residual(x: tf.Tensor, block: Block, parts: Sequence[tf.Tensor]) -> tf.Tensor:
    y = _relu(_convolve_and_normalize(x, parts[:3], block.conv1.stride))
    return _relu(_convolve_and_normalize(y, parts[3:], 1))


def _gated_block(x: tf.Tensor, block: Block, parts: Sequence[tf.Tensor],
                 active: tf.Tensor) -> tf.Tensor:
    """A block that runs only where `active`; backwards it runs once more instead of being kept.

    The gradient of a condition would hand over tensors that exist in one branch only, which
    TensorFlow Lite can't express. It also saves a phone the memory of most activations.
    """
    run = lambda x, *parts: _relu_of_sum(_residual(x, block, parts), x)

    @tf.custom_gradient
    def gated(*inputs):
        y = tf.cond(active, lambda: run(*inputs), lambda: tf.identity(inputs[0]))
        y.set_shape(inputs[0].shape)

        def gradient(dy):
            def backwards():
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch(inputs)
                    again = run(*inputs)
                return tuple(tape.gradient(again, inputs, dy))

            return tf.cond(active, backwards, lambda: (
                tf.identity(dy), *(tf.zeros_like(value) for value in inputs[1:])))

        return y, gradient

    return gated(x, *parts)


def _convolve_and_normalize(x: tf.Tensor, parts: Sequence[tf.Tensor], stride: int) -> tf.Tensor:
    kernel, gamma, beta = parts
    return _normalize(_convolve(x, kernel, stride), gamma, beta)


def _convolve(x: tf.Tensor, kernel: tf.Tensor, stride: int) -> tf.Tensor:
    """A 3x3 convolution with a border of one pixel, or a 1x1 one, as a product of matrices."""
    window, height, width = kernel.shape[0], x.shape[1] // stride, x.shape[2] // stride
    if window > 1:
        x = tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]])
    channels, filters = tf.shape(kernel)[2], tf.shape(kernel)[3]
    batch = tf.shape(x)[0]
    rows, columns = batch * (height * width), channels * window**2

    def patches(x):
        """float32[rows, columns]: for each output pixel the input pixels under the kernel."""
        last = lambda start, count: start + (count - 1) * stride + 1
        taps = [x[:, row: last(row, height): stride, column: last(column, width): stride]
                for row in range(window) for column in range(window)]
        return tf.reshape(tf.concat(taps, axis=-1), tf.stack([rows, columns]))

    @tf.custom_gradient
    def convolve(x, kernel):
        y = tf.matmul(patches(x), tf.reshape(kernel, tf.stack([columns, filters])))

        def gradient(dy):
            dx = tf.nn.conv2d_transpose(dy, kernel, tf.shape(x), stride, "VALID")
            dkernel = tf.matmul(patches(x), tf.reshape(dy, tf.stack([rows, filters])),
                                transpose_a=True)
            return dx, tf.reshape(dkernel, tf.shape(kernel))

        y = tf.reshape(y, tf.stack([batch, height, width, filters]))
        y.set_shape([x.shape[0], height, width, kernel.shape[3]])
        return y, gradient

    return convolve(x, kernel)


@tf.custom_gradient
def _normalize(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor):
    """Batch normalisation by the batch's own moments."""
    axes = [0, 1, 2]
    centred = x - tf.reduce_mean(x, axes)
    scale = tf.math.rsqrt(tf.reduce_mean(centred * centred, axes) + BN_EPSILON)
    unit = centred * scale

    def gradient(dy):
        dgamma, dbeta = tf.reduce_sum(dy * unit, axes), tf.reduce_sum(dy, axes)
        count = tf.cast(tf.shape(x)[0] * (x.shape[1] * x.shape[2]), tf.float32)
        return gamma * scale * (dy - (dbeta + unit * dgamma) / count), dgamma, dbeta

    return unit * gamma + beta, gradient


@tf.custom_gradient
def _relu(x: tf.Tensor):
    y = tf.nn.relu(x)
    return y, lambda dy: dy * tf.cast(y > 0, tf.float32)


@tf.custom_gradient
def _relu_of_sum(a: tf.Tensor, b: tf.Tensor):
    """ReLU of the sum of two tensors of one shape, which a plain sum would find out at run time."""
    y = tf.nn.relu(a + b)
    return y, lambda dy: (dy * tf.cast(y > 0, tf.float32),) * 2


def _average_pool(x: tf.Tensor, stride: int) -> tf.Tensor:
    size = x.shape[1:3]

    @tf.custom_gradient
    def pool(x):
        return tf.nn.avg_pool2d(x, stride, stride, "VALID"), lambda dy: tf.image.resize(
            dy, size, "nearest") / float(stride**2)

    return pool(x)


@tf.custom_gradient
def _dense(features: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor):
    def gradient(dy):
        return (tf.matmul(dy, kernel, transpose_b=True),
                tf.matmul(features, dy, transpose_a=True), tf.reduce_sum(dy, axis=0))

    return tf.matmul(features, kernel) + bias, gradient
