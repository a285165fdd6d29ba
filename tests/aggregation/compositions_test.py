"""What SlicedMeanFactory composes with: the table of docs/embedding.md, two rounds each.

Most numbers are those of the NumPy reference on updates changed by hand. Where all clients hold the
whole model, the mean is a plain one and TFF's own aggregators give the same.
"""

from __future__ import annotations

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from feast_tf.aggregation import SlicedMeanFactory, slices_type, sparse_mean, weights_type
from tests.aggregation.conftest import (COUNTS, NOTHING, SLICES, UPDATES, arrays, assert_arrays,
                                        padded)

pytestmark = pytest.mark.usefixtures("in_process")

aggregators = tff.aggregators
DP = aggregators.DifferentiallyPrivateFactory
N = tff.TensorType(np.float32)
KINDS = {"slices": (slices_type(SLICES), arrays), "whole arrays": (weights_type(SLICES), padded)}


def quantile(**options):
    return aggregators.PrivateQuantileEstimationProcess.no_noise(
        initial_estimate=2.0, target_quantile=0.5, learning_rate=0.3, **options)


def secure_weights():
    return aggregators.SecureSumFactory(float(2**20 - 1), 0.0)


def two_rounds(process, values, counts=COUNTS):
    state, outputs = process.initialize(), []
    for _ in range(2):
        outputs.append(process.next(state, values, list(counts)))
        state = outputs[-1].state
    return outputs


def mean_of(updates, counts=COUNTS):
    return sparse_mean(padded(NOTHING), list(zip(counts, updates)))


def norm(update):
    return np.sqrt(sum(np.sum(np.square(part)) for part in update))


def clipped(update, bound):
    return tuple(part * min(1, bound / norm(update)) for part in update)


# --- around the mean: each client's update is changed, its weight and what it covers are not

OUTER = {
    "zeroing": (lambda mean: aggregators.zeroing_factory(500.0, mean),
                lambda update: clipped(update, 0) if max(map(np.max, update)) > 500 else update),
    "clipping": (lambda mean: aggregators.clipping_factory(60.0, mean),
                 lambda update: clipped(update, 60)),
    "measurements": (lambda mean: aggregators.add_measurements(
        mean, client_measurement_fn=lambda value, weight: collections.OrderedDict(
            heaviest=tff.federated_max(weight))), lambda update: update),
    "debug measurements": (tff.learning.add_debug_measurements, lambda update: update),
}


@pytest.mark.parametrize("name", OUTER)
def test_around_the_mean(name):
    wrap, change = OUTER[name]
    process = wrap(SlicedMeanFactory(SLICES)).create(slices_type(SLICES), N)
    updates = list(map(arrays, UPDATES))
    for output in two_rounds(process, updates):
        assert_arrays(output.result, mean_of([change(update) for update in updates]), 1e-5)


def test_measurements_are_added_to_ours():
    process = OUTER["measurements"][0](SlicedMeanFactory(SLICES)).create(slices_type(SLICES), N)
    output = two_rounds(process, list(map(arrays, UPDATES)))[-1]
    assert output.measurements == dict(bytes_up=4 * 20, clients_with_data=3,
                                       clients_without_data=0, clients_refused=0, heaviest=5.0)


def test_wrappers_that_lose_the_shapes_are_refused():
    """By us, or by TFF before us."""
    factory = aggregators.concat_factory(SlicedMeanFactory(SLICES))
    with pytest.raises(TypeError, match="^value_type must have the 3 arrays of the slice map, but"):
        factory.create(weights_type(SLICES), N)
    with pytest.raises(TypeError):
        factory.create(slices_type(SLICES), N)
    with pytest.raises(TypeError):
        aggregators.HadamardTransformFactory(SlicedMeanFactory(SLICES))


# --- inside: the sums, with plain ones and with secure ones (simulated)

INNER = {
    "sum": (aggregators.SumFactory, 1e-6),
    "one sum of all": (lambda: aggregators.concat_factory(aggregators.SumFactory()), 1e-6),
    "secure sum": (lambda: aggregators.SecureSumFactory(8192.0), 1e-5),
    "quantised": (lambda: aggregators.EncodedSumFactory.quantize_above_threshold(
        quantization_bits=16, threshold=1, stochastic=False), 1e-3),
    "rotated": (aggregators.HadamardTransformFactory, 1e-5),
    "rotated, by Fourier": (aggregators.DiscreteFourierTransformFactory, 1e-5),
}


@pytest.mark.parametrize("name, kind", [*((name, "slices") for name in INNER),
                                        ("sum", "whole arrays"), ("secure sum", "whole arrays")])
def test_inside_the_mean(name, kind):
    build, tolerance = INNER[name]
    value_type, value = KINDS[kind]
    process = SlicedMeanFactory(SLICES, build(), secure_weights()).create(value_type, N)
    for output in two_rounds(process, [value(update) for update in UPDATES]):
        assert_arrays(output.result, mean_of(map(arrays, UPDATES)), tolerance)


@pytest.mark.parametrize("name", ["sum", "secure sum"])
def test_inside_the_mean_nobody_reports_gives_0(name):
    """Also where quantised zeros do not sum to 0: the sum of the weights does."""
    process = SlicedMeanFactory(SLICES, INNER[name][0](), secure_weights()).create(
        slices_type(SLICES), N)
    output = two_rounds(process, [arrays(UPDATES[0])] * 3, [1.0, 2.0, 4.0])[-1]
    assert_arrays(output.result, padded(UPDATES[0]), 1e-5)
    for part, places in zip(output.result, (np.s_[:, 2], np.s_[1:])):
        assert not np.any(part[places])


def test_inside_the_mean_clipping_is_of_weighted_updates():
    process = SlicedMeanFactory(SLICES, aggregators.clipping_factory(
        60.0, aggregators.SumFactory())).create(slices_type(SLICES), N)
    updates = [clipped(update, 60 / count) for update, count in zip(map(arrays, UPDATES), COUNTS)]
    for output in two_rounds(process, list(map(arrays, UPDATES))):
        assert_arrays(output.result, mean_of(updates), 1e-5)
        assert output.measurements["mean_value"]["clipped_count"] == 2


def test_secure_sums_in_tff_s_test_backend():
    from feast_tf.runtime import Worker, remote

    process = SlicedMeanFactory(SLICES, aggregators.SecureSumFactory(quantile()),
                                secure_weights()).create(slices_type(SLICES), N)
    values = list(map(arrays, UPDATES))
    ours = two_rounds(process, values)
    plain = tff.backends.test.replace_secure_intrinsics_with_bodies
    compiled = tff.backends.native.desugar_and_transform_to_native
    worker = Worker()
    try:
        context = tff.framework.SyncExecutionContext(
            remote.executor_factory(worker.address, worker.channel), **{
                **remote.CONTEXT_OPTIONS, "compiler_fn": lambda comp: compiled(plain(comp))})
        with tff.framework.get_context_stack().install(context):
            theirs = two_rounds(process, values)
    finally:
        worker.stop()
    for one, other in zip(ours, theirs):
        assert_arrays(one.result, other.result)
    assert np.any(ours[0].result[0] != ours[1].result[0])  # the bounds have moved


# --- the same as TFF's own aggregators, where all clients hold the whole model

UPDATES_OF_ALL = [arrays(scale * part for part in arrays(UPDATES[2]))
                  for scale in (0.01, 0.02, -9)]


def robust(mean, **options):
    """The pieces of tff.learning.robust_aggregator, in its order, with its values."""
    clip = aggregators.PrivateQuantileEstimationProcess.no_noise(
        initial_estimate=1.0, target_quantile=0.8, learning_rate=0.2, **options)
    zero = aggregators.PrivateQuantileEstimationProcess.no_noise(
        initial_estimate=10.0, target_quantile=0.98, learning_rate=np.log(10.0), multiplier=2.0,
        increment=1.0, **options)
    return aggregators.zeroing_factory(zero, aggregators.clipping_factory(clip, mean))


def secure_bound():
    return aggregators.PrivateQuantileEstimationProcess.no_noise(
        initial_estimate=50.0, target_quantile=0.95, learning_rate=1.0, multiplier=2.0,
        secure_estimation=True)


STOCK = {
    "robust": (tff.learning.robust_aggregator, lambda: robust(SlicedMeanFactory(SLICES))),
    "robust, debug": (
        lambda: tff.learning.robust_aggregator(
            debug_measurements_fn=tff.learning.add_debug_measurements),
        lambda: robust(tff.learning.add_debug_measurements(SlicedMeanFactory(SLICES)))),
    "compression": (
        lambda: tff.learning.compression_aggregator(stochastic=False),
        lambda: robust(SlicedMeanFactory(
            SLICES, aggregators.EncodedSumFactory.quantize_above_threshold(
                quantization_bits=8, threshold=20000, stochastic=False)))),
    "secure": (
        tff.learning.secure_aggregator,
        lambda: robust(SlicedMeanFactory(SLICES, aggregators.SecureSumFactory(secure_bound()),
                                         secure_weights()), secure_estimation=True)),
}


@pytest.mark.parametrize("name", [*list(STOCK)[:3], pytest.param("secure",
                                                                 marks=pytest.mark.slow)])
def test_full_models_give_tff_s_own_aggregators(name):
    """The zeros of a zeroed client count too: its shapes say what it covers."""
    theirs, ours = (build().create(value_type, N) for build, value_type in zip(
        STOCK[name], (weights_type(SLICES), slices_type(SLICES))))
    for one, other in zip(*(two_rounds(process, UPDATES_OF_ALL) for process in (ours, theirs))):
        assert_arrays(one.result, other.result, 1e-5)


# --- differential privacy: fixed denominators, worked out without noise

SHARES = [0.5, 1.0, 2.5]  # of level: its share of 4 clients a round times their mean weight
DP_SUMS = {
    "fixed": lambda noise: DP.gaussian_fixed(noise, 4.0, clip=60.0),
    "adaptive": lambda noise: DP.gaussian_adaptive(noise, 4.0, initial_l2_norm_clip=60.0,
                                                   learning_rate=0.0, clipped_count_stddev=9.0),
    "tree": lambda noise: DP.tree_aggregation(
        noise, 4.0, 60.0, tff.types.type_conversions.type_to_tf_structure(weights_type(SLICES)),
        noise_seed=1),
    "learning's": lambda noise: aggregators.zeroing_factory(1e4, DP_SUMS["fixed"](noise)),
}


@pytest.mark.parametrize("name, kind", [*((name, "slices") for name in DP_SUMS),
                                        ("fixed", "whole arrays")])
def test_differential_privacy_without_noise(name, kind):
    value_type, value = KINDS[kind]
    process = SlicedMeanFactory(SLICES, DP_SUMS[name](0.0), fixed_denominator=SHARES).create(
        value_type, N)
    weighted = [clipped(tuple(count * part for part in update), 60)
                for count, update in zip(COUNTS, map(arrays, UPDATES))]
    total = [sum(parts) / 4 for parts in zip(*map(padded, weighted))]
    kernel = np.array([[4.0, 4.0, 2.5], [3.5, 3.5, 2.5]])  # sums over the levels that hold a place
    bias = np.array([4.0, 2.5, 2.5])
    for output in two_rounds(process, [value(update) for update in UPDATES]):
        assert_arrays(output.result, [total[0] / kernel, total[1] / bias, total[2] / 4.0], 1e-5)


@pytest.mark.parametrize("name", ["fixed", "tree"])
def test_differential_privacy_adds_noise_wherever_the_denominator_is_not_0(name):
    """Also where nobody reports: that nobody does is not told."""
    process = SlicedMeanFactory(SLICES, DP_SUMS[name](1.0),
                                fixed_denominator=[0.5, 1.0, 0.0]).create(slices_type(SLICES), N)
    kernel, bias, _ = two_rounds(process, [arrays(UPDATES[0])], [2.0])[-1].result
    assert np.all(kernel[1, :2] != 0)  # of level 1, which did not report
    assert not np.any(kernel[:, 2]) and not np.any(bias[1:])


def test_one_client_changes_a_private_sum_by_no_more_than_the_clipping_norm():
    """What the noise is calibrated to: nothing of the result depends on a client but its clipped,
    weighted update, whichever its level and its weight are."""
    process = SlicedMeanFactory(SLICES, DP.gaussian_fixed(0.0, 1.0, clip=60.0),
                                fixed_denominator=[0, 0, 1.0]).create(slices_type(SLICES), N)
    others = [arrays(UPDATES[1])]
    without = process.next(process.initialize(), others, [3.0]).result
    for update in UPDATES:
        among = process.next(process.initialize(), [*others, arrays(update)], [3.0, 1e6]).result
        change = norm([one - other for one, other in zip(among, without)])
        assert change == pytest.approx(60, rel=1e-4)
