"""The elastic forward pass: one traced graph serves every variant (paper 3.2).

A variant enters as data: its `dims` vector (see `feast_tf.space.layout`), so nothing is traced
again when it changes. Two executions compute the same numbers:

  "slice"  kernels are cut to the variant's prefix, blocks beyond its depth do not run: the cost is
           the variant's own;
  "mask"   every kernel and block runs at full size and channels beyond the prefix are zeroed:
           static shapes for XLA, and the oracle for "slice".

Block (the OFA-ResNet line): 3x3 conv (stride), BN, ReLU, 3x3 conv, BN, ReLU; plus the shortcut;
ReLU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional, Union

import tensorflow as tf

from feast_tf.seeding import stateless_seed
from feast_tf.space import Block, ConvUnit, Layout

BN_EPSILON = 1e-5
EXECUTIONS = ("slice", "mask")

# (mean, variance) of every batch normalisation, in the order of `ConvUnit.norm`.
Moments = Sequence[tuple[tf.Tensor, tf.Tensor]]


class _Pass:
    """One forward pass; holds what every layer needs."""

    def __init__(self, layout: Layout, weights, dims, execution: str,
                 moments: Optional[Moments], record: bool):
        self.layout, self.weights, self.dims = layout, weights, dims
        self.sliced = execution == "slice"
        self.moments, self.record = moments, record
        self.recorded: list = [None] * layout.num_norms

    def weight(self, place: int) -> tf.Tensor:
        """A parameter, cut to the variant's prefix in slice execution."""
        value = self.weights[place]
        axes = self.layout.parameters[place].axes
        if not self.sliced or all(axis is None for axis in axes):
            return value
        return value[tuple(slice(None) if axis is None else slice(self.dims[axis])
                           for axis in axes)]

    def masked(self, x: tf.Tensor, unit: ConvUnit) -> tf.Tensor:
        """Zeroes the channels beyond the variant's width in mask execution."""
        if self.sliced:
            return x
        axis = self.layout.parameters[unit.gamma].axes[0]
        return x * tf.sequence_mask(self.dims[axis], tf.shape(x)[-1], x.dtype)

    def normalize(self, x: tf.Tensor, unit: ConvUnit) -> tf.Tensor:
        gamma, beta = self.weight(unit.gamma), self.weight(unit.beta)
        if self.moments is not None:
            mean, variance = self.moments[unit.norm]
            return tf.nn.batch_normalization(x, mean, variance, beta, gamma, BN_EPSILON)
        if self.record:
            mean, variance = tf.nn.moments(x, axes=[0, 1, 2])
            self.recorded[unit.norm] = (mean, variance)
            return tf.nn.batch_normalization(x, mean, variance, beta, gamma, BN_EPSILON)
        # One fused kernel: moments and scaling as separate ops cost a third of a whole step.
        return tf.compat.v1.nn.fused_batch_norm(x, gamma, beta, epsilon=BN_EPSILON)[0]

    def convolve(self, x: tf.Tensor, unit: ConvUnit, stride: int) -> tf.Tensor:
        """conv, BN; strided 3x3 convolutions pad one pixel on every side ("SAME" would not)."""
        padding = "SAME"
        if stride > 1:
            padding = [[0, 0], [1, 1], [1, 1], [0, 0]]
        x = tf.nn.conv2d(x, self.weight(unit.kernel), strides=stride, padding=padding)
        return self.masked(self.normalize(x, unit), unit)

    def block(self, x: tf.Tensor, block: Block) -> tf.Tensor:
        y = tf.nn.relu(self.convolve(x, block.conv1, block.conv1.stride))
        y = tf.nn.relu(self.convolve(y, block.conv2, 1))
        shortcut = x
        if block.shortcut is not None:
            stride = block.shortcut.stride
            pooled = tf.nn.avg_pool2d(x, stride, stride, "VALID") if stride > 1 else x
            shortcut = self.convolve(pooled, block.shortcut, 1)
        return tf.nn.relu(y + shortcut)

    def gated_block(self, x: tf.Tensor, block: Block) -> tf.Tensor:
        """A block that runs only where the variant is deep enough."""
        position, least = block.gate
        active = self.dims[position] >= least
        if not self.sliced:
            if self.weights[block.conv1.kernel].shape[-1] == 0:
                return x  # an envelope that ends before this block: it holds nothing to run
            return tf.where(active, self.block(x, block), x)
        norms = [block.conv1.norm, block.conv2.norm]

        def run():
            return self.block(x, block), [self.recorded[norm] for norm in norms]

        def skip():
            nothing = tf.zeros([0], x.dtype)
            return x, [(nothing, nothing) if self.record else None for _ in norms]

        y, recorded = tf.cond(active, run, skip)
        for norm, moments in zip(norms, recorded):
            self.recorded[norm] = moments
        y.set_shape(x.shape)
        return y


def forward(layout: Layout, weights: Sequence[tf.Tensor], dims: tf.Tensor, images: tf.Tensor, *,
            execution: str = "slice", moments: Optional[Moments] = None,
            record_moments: bool = False) -> Union[tf.Tensor, tuple[tf.Tensor, Moments]]:
    """Logits of one variant.

    Args:
      layout: the supernet's layout.
      weights: a tensor for each of `layout.parameters`, of the whole supernet or of any envelope
        that contains the variant.
      dims: int32[1 + 3S], the variant.
      images: float32[batch, height, width, 3], normalised.
      execution: "slice" or "mask".
      moments: fixed (mean, variance) of every batch normalisation, as recalibration returns them
        (of the variant's own sizes: "slice" only); None normalises with this batch's moments.
      record_moments: also return the moments of this batch (population variance).

    Returns:
      float32[batch, classes]; with `record_moments` the pair (logits, moments), where the moments
      of blocks that did not run have length 0.

    Raises:
      ValueError: `execution` is unknown, or "mask" is asked for together with moments.
    """
    if execution not in EXECUTIONS:
        raise ValueError(f"execution must be one of {', '.join(EXECUTIONS)}, but is {execution!r}")
    if execution == "mask" and (moments is not None or record_moments):
        raise ValueError("moments belong to one variant's own sizes: use execution 'slice'")
    run = _Pass(layout, weights, dims, execution, moments, record_moments)
    x = tf.nn.relu(run.convolve(images, layout.stem, 1))
    for blocks in layout.stages:
        x = run.block(x, blocks[0])
        for block in blocks[1:]:
            x = run.gated_block(x, block)
    features = tf.reduce_mean(x, axis=[1, 2])
    logits = tf.matmul(features, run.weight(layout.head_kernel)) + weights[layout.head_bias]
    return (logits, run.recorded) if record_moments else logits


def initial_weights(layout: Layout, seed: int) -> list[tf.Tensor]:
    """Weights of the whole supernet, a function of `seed` alone.

    Kernels are He-normal in their full fan-in, the head uniform in +-1/sqrt(fan-in), gammas 1,
    betas and the head's bias 0.
    """
    weights = []
    for place, parameter in enumerate(layout.parameters):
        shape, stream = parameter.shape, stateless_seed(seed, "initial weights", place)
        if parameter.kind == "kernel":
            fan_in = shape[0] * shape[1] * shape[2]
            weights.append(tf.random.stateless_normal(shape, stream, stddev=(2 / fan_in) ** 0.5))
        elif parameter.kind == "head_kernel":
            limit = shape[0] ** -0.5
            weights.append(tf.random.stateless_uniform(shape, stream, -limit, limit))
        else:
            weights.append(tf.ones(shape) if parameter.kind == "gamma" else tf.zeros(shape))
    return weights
