"""Client work on a GPU, where there is one."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from feast_tf import runtime

GPUS = tf.config.list_physical_devices("GPU")
pytestmark = pytest.mark.skipif(not GPUS, reason="TensorFlow sees no GPU")


@tff.tensorflow.computation(tff.TensorType(np.float32, [2, 2]))
def squared(matrix):
    return tf.matmul(matrix, matrix)


@tff.federated_computation(tff.FederatedType(squared.type_signature.parameter, tff.CLIENTS))
def sum_of_squares(matrices):
    return tff.federated_sum(tff.federated_map(squared, matrices))


CLIENTS = [np.float32([[1, 2], [3, 4]]), np.float32([[0, 1], [5, -2]])]
# [[7, 10], [15, 22]] + [[5, -2], [-10, 9]]
EXPECTED = [[12, 8], [5, 31]]


def test_clients_run_on_all_gpus_by_default():
    context = runtime.use("in_process")
    assert len(context.lanes) == len(GPUS) and all(":GPU:" in lane for lane in context.lanes)
    assert all(tf.config.experimental.get_memory_growth(gpu) for gpu in GPUS)
    assert sum_of_squares(CLIENTS).tolist() == EXPECTED


def test_results_may_stay_there():
    runtime.use("in_process", materialize=False)
    result = sum_of_squares(CLIENTS)
    assert isinstance(result, tf.Tensor) and ":GPU:" in result.device
    assert result.numpy().tolist() == EXPECTED


def test_strings_stay_on_the_cpu():
    runtime.use("in_process")
    shout = tff.tensorflow.computation(lambda text: text + "!", tff.TensorType(np.str_))
    assert shout("here") == b"here!"


def test_feast_learns_the_same(feast):
    process, clients = feast

    def weights():
        state = process.initialize()
        return process.get_model_weights(process.next(state, clients).state)

    runtime.use("in_process")
    on_gpu = weights()
    runtime.use("in_process", devices=["/device:CPU:0"])
    for ours, theirs in zip(tf.nest.flatten(on_gpu), tf.nest.flatten(weights())):
        np.testing.assert_allclose(ours, theirs, atol=1e-3)
