"""tff.aggregators, tff.learning's aggregators and tff.analytics, in process and in TFF's own worker."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

_VALUE = tff.StructWithPythonType(
    [("kernel", tff.TensorType(np.float32, [3, 2])), ("bias", tff.TensorType(np.float32, [2]))],
    collections.OrderedDict)
_WEIGHT = tff.TensorType(np.float32)
_WEIGHTS = [1.0, 2.0, 5.0]
_NO_NOISE = dict(noise_multiplier=0.0, clients_per_round=3.0)


def updates() -> list:
    rng = np.random.default_rng(0)
    # The last client is an outlier: it is clipped, and zeroed in the second round.
    return [collections.OrderedDict(kernel=(scale * rng.normal(size=(3, 2))).astype(np.float32),
                                    bias=(scale * rng.normal(size=2)).astype(np.float32))
            for scale in (0.5, 1.0, 1000.0)]


def quantile_norm():
    return tff.aggregators.PrivateQuantileEstimationProcess.no_noise(
        initial_estimate=2.0, target_quantile=0.5, learning_rate=0.3)


def two_rounds(process: tff.templates.AggregationProcess, *arguments):
    state, outputs = process.initialize(), []
    for _ in range(2):
        outputs.append(process.next(state, *arguments))
        state = outputs[-1].state
    return [(output.state, output.result, output.measurements) for output in outputs]


_aggregators = tff.aggregators
UNWEIGHTED = {
    "sum": _aggregators.SumFactory,
    "unweighted mean": _aggregators.UnweightedMeanFactory,
    "fixed clipping": lambda: _aggregators.clipping_factory(1.0, _aggregators.SumFactory()),
    "adaptive clipping": lambda: _aggregators.clipping_factory(
        quantile_norm(), _aggregators.UnweightedMeanFactory()),
    "fixed zeroing": lambda: _aggregators.zeroing_factory(5.0, _aggregators.SumFactory()),
    "adaptive zeroing": lambda: _aggregators.zeroing_factory(
        quantile_norm(), _aggregators.SumFactory()),
    "concatenation": lambda: _aggregators.concat_factory(_aggregators.SumFactory()),
    "fixed DP": lambda: _aggregators.DifferentiallyPrivateFactory.gaussian_fixed(
        clip=1.0, **_NO_NOISE),
    "adaptive DP": lambda: _aggregators.DifferentiallyPrivateFactory.gaussian_adaptive(
        clipped_count_stddev=0.0, **_NO_NOISE),
    "tree DP": lambda: _aggregators.DifferentiallyPrivateFactory.tree_aggregation(
        l2_norm_clip=1.0, record_specs=tff.types.type_conversions.type_to_tf_structure(_VALUE),
        noise_seed=1, **_NO_NOISE),
    "learning's DP": lambda: tff.learning.dp_aggregator(**_NO_NOISE),
    "measurements": lambda: _aggregators.add_measurements(
        _aggregators.SumFactory(), client_measurement_fn=lambda value: {
            "largest": tff.federated_max(tff.federated_map(tff.tensorflow.computation(
                lambda v: tf.reduce_max(v["kernel"])), value))}),
    "quantised sum": lambda: _aggregators.EncodedSumFactory.quantize_above_threshold(
        quantization_bits=4, threshold=5, stochastic=False),
}

WEIGHTED = {
    "mean": _aggregators.MeanFactory,
    "mean without NaN": lambda: _aggregators.MeanFactory(no_nan_division=True),
    "robust": tff.learning.robust_aggregator,
    "compression": lambda: tff.learning.compression_aggregator(threshold=5, stochastic=False),
    "debug measurements": lambda: tff.learning.robust_aggregator(
        debug_measurements_fn=tff.learning.add_debug_measurements),
}

SECURE = {
    "secure sum": lambda: _aggregators.SecureSumFactory(2.0, -2.0),
    "adaptive secure sum": lambda: _aggregators.SecureSumFactory(quantile_norm()),
    "learning's secure mean": lambda: tff.learning.secure_aggregator(weighted=False),
    "distributed DP": lambda: tff.learning.ddp_secure_aggregator(0.0, 3),
}


@pytest.mark.parametrize("name", UNWEIGHTED)
def test_unweighted(name, same_results):
    process = UNWEIGHTED[name]().create(_VALUE)
    same_results(lambda: two_rounds(process, updates()))


@pytest.mark.parametrize("name", WEIGHTED)
def test_weighted(name, same_results):
    process = WEIGHTED[name]().create(_VALUE, _WEIGHT)
    same_results(lambda: two_rounds(process, updates(), _WEIGHTS))


@pytest.mark.parametrize("name", SECURE)
def test_secure(name, same_results):
    process = SECURE[name]().create(_VALUE)
    same_results(lambda: two_rounds(process, updates()))
