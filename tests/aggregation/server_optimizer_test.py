"""hold_unreported: what nobody reports keeps its bits, all else is the wrapped optimiser's."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from feast_tf.aggregation import hold_unreported

optimizers = tff.learning.optimizers
WRAPPED = {
    "SGD": lambda: optimizers.build_sgdm(0.1),
    "momentum": lambda: optimizers.build_sgdm(0.1, momentum=0.5),
    "Adagrad": lambda: optimizers.build_adagrad(0.1),
    "Adam": lambda: optimizers.build_adam(0.1),
    "AdamW": lambda: optimizers.build_adamw(0.1, weight_decay=0.2),
    "RMSprop": lambda: optimizers.build_rmsprop(0.1),
    "Yogi": lambda: optimizers.build_yogi(0.1),
    "scheduled": lambda: optimizers.schedule_learning_rate(
        optimizers.build_adam(0.1), lambda step: 0.1 / tf.cast(step + 1, tf.float32)),
}
# Values whose bits an addition of 0 would change are among the weights that nobody reports.
WEIGHTS = ([[1.0, -0.0], [1e-42, 4.0]], [0.5, -0.25, 3.0])
ROUNDS = (([[2.0, 5.0], [-3.0, 7.0]], [1.0, -2.0, 0.5]),
          ([[-4.0, 0.0], [0.0, 1.0]], [0.0, 3.0, -0.0]),
          ([[1.0, 3.0], [2.0, -6.0]], [4.0, 1.0, 2.0]))


def tensors(values):
    return tuple(map(tf.constant, values))


def run(optimizer, rounds, weights=WEIGHTS):
    """[(state, weights)] before the first round and after each."""
    weights = tensors(weights)
    state = optimizer.initialize(tuple(tf.TensorSpec(w.shape, w.dtype) for w in weights))
    history = [(state, weights)]
    for gradients in rounds:
        history.append(optimizer.next(*history[-1], tensors(gradients)))
    return history


def bits(structure) -> list[bytes]:
    return [np.asarray(part).tobytes() for part in tf.nest.flatten(structure)]


def positions(state) -> list[np.ndarray]:
    """The state's entries that are like the weights, as one vector each."""
    found = [np.asarray(part) for part in tf.nest.flatten(state) if np.ndim(part)]
    return [np.concatenate([kernel.ravel(), bias]) for kernel, bias in zip(found[::2], found[1::2])]


def vector(values) -> np.ndarray:
    return np.concatenate([np.ravel(value) for value in values])


def test_momentum_by_hand():
    history = run(hold_unreported(WRAPPED["momentum"]()), [([4.0, 8.0],), ([2.0, 0.0],)],
                  weights=([1.0, 2.0],))
    np.testing.assert_allclose(history[1][1], [[0.6, 1.2]])
    # v = [0.5 * 4 + 2, held]; w = [0.6 - 0.1 * 4, held]; plain momentum would go on to 0.8.
    np.testing.assert_allclose(history[2][0]["accumulator"], [[4.0, 8.0]])
    np.testing.assert_allclose(history[2][1], [[0.2, 1.2]])


def test_adam_by_hand():
    """The step count advances where nobody reports: the bias correction is of the round."""
    state, weights = run(hold_unreported(optimizers.build_adam(0.1, 0.9, 0.99, 0.0)),
                         [([4.0, 8.0],), ([2.0, 0.0],), ([0.0, 2.0],)], weights=([1.0, 2.0],))[-1]
    assert state["step"] == 3
    m, v = 0.9 * 0.4 + 0.1 * 2, 0.99 * 0.16 + 0.01 * 4  # of the first position, in round 2
    first = 1 - 0.1 - 0.1 * np.sqrt(1 - 0.99**2) / (1 - 0.9**2) * m / np.sqrt(v)
    m, v = 0.9 * 0.8 + 0.1 * 2, 0.99 * 0.64 + 0.01 * 4  # of the second, in round 3
    second = 2 - 0.1 - 0.1 * np.sqrt(1 - 0.99**3) / (1 - 0.9**3) * m / np.sqrt(v)
    np.testing.assert_allclose(weights, [[first, second]], rtol=1e-5)


@pytest.mark.parametrize("name", WRAPPED)
def test_unreported_positions_keep_their_bits_and_the_others_are_the_plain_optimiser_s(name):
    held, plain = (run(optimizer, ROUNDS) for optimizer in (
        hold_unreported(WRAPPED[name]()), WRAPPED[name]()))
    assert bits(held[0]) == bits(plain[0]) and bits(held[1]) == bits(plain[1])
    unreported = vector(ROUNDS[1]) == 0
    assert unreported.tolist() == [False, True, True, False, True, False, True]
    before, after, expected = held[1], held[2], plain[2]
    for old, new, free in zip([vector(before[1]), *positions(before[0])],
                              [vector(after[1]), *positions(after[0])],
                              [vector(expected[1]), *positions(expected[0])]):
        assert new[unreported].tobytes() == old[unreported].tobytes()
        np.testing.assert_array_equal(new[~unreported], free[~unreported])
    scalars = lambda state: [part for part in tf.nest.flatten(state) if not np.ndim(part)]
    np.testing.assert_array_equal(scalars(held[3][0]), scalars(plain[3][0]))
    np.testing.assert_array_equal(vector(held[3][1])[~unreported],
                                  vector(plain[3][1])[~unreported])


def test_nobody_reports_anything():
    history = run(hold_unreported(WRAPPED["AdamW"]()), [tuple(map(np.zeros_like, map(
        np.float32, WEIGHTS)))])
    assert bits(history[1][1]) == bits(history[0][1])


@pytest.mark.parametrize("name", ["momentum", "Adam", "scheduled"])
def test_in_tff_s_finalizer(name, in_process):
    model_type = tff.to_type(tff.learning.models.ModelWeights(
        tuple(tff.TensorType(np.float32, np.shape(w)) for w in WEIGHTS), ()))
    finalizer = tff.learning.templates.build_apply_optimizer_finalizer(
        hold_unreported(WRAPPED[name]()), model_type)
    model = tff.learning.models.ModelWeights(tuple(map(np.float32, WEIGHTS)), ())
    state = finalizer.initialize()
    for gradients, (_, expected) in zip(ROUNDS, run(hold_unreported(WRAPPED[name]()), ROUNDS)[1:]):
        output = finalizer.next(state, model, tuple(map(np.float32, gradients)))
        state, model = output.state, output.result
        np.testing.assert_allclose(vector(model.trainable), vector(expected), rtol=1e-6)
        assert output.measurements["update_non_finite"] == 0


def test_hyperparameters_are_those_of_the_wrapped():
    optimizer = hold_unreported(WRAPPED["momentum"]())
    [(state, _)] = run(optimizer, [])
    assert optimizer.get_hparams(state) == dict(learning_rate=0.1, momentum=0.5)
    changed = optimizer.set_hparams(state, collections.OrderedDict(learning_rate=0.7))
    assert changed["learning_rate"] == 0.7 and changed["momentum"] == 0.5


def test_gradients_that_are_missing_or_sparse():
    optimizer = hold_unreported(WRAPPED["momentum"]())
    state, weights = run(optimizer, ROUNDS[:1])[-1]
    sparse = tf.IndexedSlices(tf.constant([[2.0, 5.0]]), tf.constant([1]), tf.constant([2, 2]))
    new_state, new_weights = optimizer.next(state, weights, (sparse, None))
    assert bits(new_weights[1]) == bits(weights[1])
    assert bits(new_state["accumulator"][1]) == bits(state["accumulator"][1])
    np.testing.assert_array_equal(new_weights[0][0], weights[0][0])
    assert np.all(new_weights[0][1] != weights[0][1])


def test_a_gradient_that_is_not_finite_is_the_wrapped_optimiser_s_matter():
    history = run(hold_unreported(WRAPPED["SGD"]()), [([np.nan, 0.0],)], weights=([1.0, 2.0],))
    np.testing.assert_array_equal(history[1][1], [[np.nan, 2.0]])


def test_state_that_belongs_to_no_position_is_refused():
    optimizer = hold_unreported(optimizers.build_adafactor(0.1))
    with pytest.raises(TypeError, match="^hold_unreported cannot hold 'moments' of the "):
        optimizer.initialize((tf.TensorSpec([2, 3]),))


@pytest.mark.parametrize("optimizer", [0.1, tf.keras.optimizers.SGD(), optimizers.build_adam],
                         ids=["float", "keras", "builder"])
def test_other_kinds_are_refused(optimizer):
    with pytest.raises(TypeError, match="^optimizer must be a tff.learning.optimizers.Optimizer, "):
        hold_unreported(optimizer)
