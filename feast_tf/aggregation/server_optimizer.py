"""Server optimisers that leave alone what nobody reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff


def hold_unreported(optimizer: tff.learning.optimizers.Optimizer
                    ) -> tff.learning.optimizers.Optimizer:
    """An optimiser that holds weights and state, bit for bit, where the gradient is exactly 0.

    At a server the gradient is the aggregated update, and `SlicedMeanFactory` gives exactly 0 where
    nobody reports. A plain optimiser would go on from old momentum there, or decay it. All of the
    optimiser's state that has the structure and the shapes of the weights is held position by
    position (momenta, preconditioners); scalars such as step counts advance.

    A 0 on which all clients agree looks the same, and is held as well.

    Args:
      optimizer: any `tff.learning.optimizers.Optimizer` whose state is made of scalars and of
        structures like the weights: all of TFF's but Adafactor.

    Returns:
      An optimiser with the same state and hyperparameters, for `server_optimizer_fn` of
      `tff.learning.algorithms` and for `tff.learning.templates.build_apply_optimizer_finalizer`.

    Raises:
      TypeError: `optimizer` is no `tff.learning.optimizers.Optimizer`; or, from `initialize`, its
        state has a tensor that belongs to no single position, as Adafactor's sums over rows.
    """
    if not isinstance(optimizer, tff.learning.optimizers.Optimizer):
        raise TypeError(f"optimizer must be a tff.learning.optimizers.Optimizer, but is a "
                        f"{type(optimizer).__name__}")
    return _HoldUnreported(optimizer)


class _HoldUnreported(tff.learning.optimizers.Optimizer):
    """See `hold_unreported`."""

    def __init__(self, optimizer: tff.learning.optimizers.Optimizer):
        self._optimizer = optimizer

    def initialize(self, specs):
        state = self._optimizer.initialize(specs)
        _check_state("state", state, specs)
        return state

    def next(self, state, weights, gradients):
        gradients = tff.learning.optimizers.handle_indexed_slices_gradients(gradients)
        new_state, new_weights = self._optimizer.next(state, weights, gradients)
        reported = tf.nest.map_structure(
            lambda gradient: False if gradient is None else tf.not_equal(gradient, 0), gradients)

        def hold(new, old):
            if _is_like(old, weights):
                return tf.nest.map_structure(tf.where, reported, new, old)
            if isinstance(old, Mapping):
                return type(old)((name, hold(new[name], old[name])) for name in old)
            return new

        return hold(new_state, state), hold(new_weights, weights)

    def get_hparams(self, state):
        return self._optimizer.get_hparams(state)

    def set_hparams(self, state, hparams):
        return self._optimizer.set_hparams(state, hparams)


def _is_like(entry: Any, weights: Any) -> bool:
    """Whether an entry of the state has a value for each position of the weights."""
    try:
        tf.nest.assert_same_structure(entry, weights)
    except (TypeError, ValueError):
        return False
    return all(tf.is_tensor(part) and part.shape == weight.shape and part.dtype == weight.dtype
               for part, weight in zip(tf.nest.flatten(entry), tf.nest.flatten(weights)))


def _check_state(name: str, entry: Any, specs: Any) -> None:
    """Raises a TypeError that names the entry whose positions cannot be held."""
    if _is_like(entry, specs):
        return
    if isinstance(entry, Mapping):
        for key, part in entry.items():
            _check_state(key, part, specs)
    elif any(np.ndim(part) if not tf.is_tensor(part) else part.shape.rank
             for part in tf.nest.flatten(entry)):
        raise TypeError(f"hold_unreported cannot hold {name!r} of the optimizer's state position "
                        "by position, since it is not of the weights' shapes")
