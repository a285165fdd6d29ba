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
    "debug measurements": lambda: tff.learning.robust_aggregator(
        debug_measurements_fn=tff.learning.add_debug_measurements),
}

SECURE = {
    "secure sum": lambda: _aggregators.SecureSumFactory(2.0, -2.0),
    "adaptive secure sum": lambda: _aggregators.SecureSumFactory(quantile_norm()),
}


@pytest.mark.parametrize("name", UNWEIGHTED)
def test_unweighted(name, same_results):
    process = UNWEIGHTED[name]().create(_VALUE)
    same_results(lambda: two_rounds(process, updates()))


@pytest.mark.parametrize("name", WEIGHTED)
def test_weighted(name, same_results):
    process = WEIGHTED[name]().create(_VALUE, _WEIGHT)
    same_results(lambda: two_rounds(process, updates(), _WEIGHTS))


def test_compression(same_results):
    """It quantises only tensors of more than 20,000 elements."""
    vector = tff.TensorType(np.float32, [20_001])
    process = tff.learning.compression_aggregator(stochastic=False).create(vector, _WEIGHT)
    clients = [np.random.default_rng(seed).normal(size=20_001).astype(np.float32)
               for seed in range(3)]
    same_results(lambda: two_rounds(process, clients, _WEIGHTS))


@pytest.mark.parametrize("name", [*SECURE, pytest.param("learning's", marks=pytest.mark.slow)])
def test_secure_sums_are_simulated(name, same_results, stock_context):
    """As TFF's tests have them: secure sums are replaced by plain ones."""
    replace = tff.backends.test.replace_secure_intrinsics_with_bodies
    compile_plain = tff.backends.native.desugar_and_transform_to_native
    context = stock_context(tff.framework.SyncExecutionContext,
                            compiler_fn=lambda comp: compile_plain(replace(comp)))
    factory = SECURE.get(name, lambda: tff.learning.secure_aggregator(weighted=False))
    process = factory().create(_VALUE)
    run = lambda: two_rounds(process, updates())
    with tff.framework.get_context_stack().install(context):
        expected = run()
    same_results(run, stock_fails="Cannot embed a federated value", expected=expected)


# --- aggregators that draw seeds from the clock: only what they must give is the same


@pytest.mark.parametrize("factory", [_aggregators.HadamardTransformFactory,
                                     _aggregators.DiscreteFourierTransformFactory])
def test_rotations(factory, same_results):
    process = factory().create(_VALUE)
    clients = updates()[:2]
    result = same_results(lambda: process.next(process.initialize(), clients).result,
                          tolerance=1e-5)
    np.testing.assert_allclose(result["bias"], clients[0]["bias"] + clients[1]["bias"], atol=1e-5)


def test_samples_of_clients(same_results):
    process = _aggregators.UnweightedReservoirSamplingFactory(sample_size=9).create(_WEIGHT)
    values = [4.0, 1.0, 2.0]
    assert same_results(lambda: sorted(
        process.next(process.initialize(), values).result)) == sorted(values)
    computation = tff.federated_computation(
        lambda x: tff.aggregators.federated_sample(x, 9), tff.FederatedType(_WEIGHT, tff.CLIENTS))
    assert same_results(lambda: sorted(computation(values))) == sorted(values)


@pytest.mark.slow
def test_distributed_dp_is_too_deep_for_protobuf(in_process):
    process = tff.learning.ddp_secure_aggregator(0.0, 3).create(_VALUE)
    with tff.framework.get_context_stack().install(in_process):
        state = process.initialize()
        with pytest.raises(NotImplementedError, match="nested too deeply for TFF to simulate"):
            process.next(state, updates())


# --- tff.analytics


def test_count_distinct(same_results):
    computation = tff.analytics.count_distinct.create_federated_hyperloglog_computation()
    clients = [tf.data.Dataset.from_tensor_slices(words) for words in (
        ["a", "b", "c"], ["b", "c", "d"], ["a", "e"])]
    same_results(lambda: computation(clients))


@pytest.mark.parametrize("clip", ["sub-sampling", "distinct"])
def test_hierarchical_histogram(clip, same_results):
    process = tff.analytics.build_hierarchical_histogram_process(
        0.0, 4.0, 4, clip_mechanism=clip, max_records_per_user=10, enable_secure_sum=False)
    clients = [tf.data.Dataset.from_tensor_slices(np.array(values, np.float32)) for values in (
        [0.5, 1.5, 1.6], [3.5], [2.5, 2.6, 0.1])]
    same_results(lambda: process.next(process.initialize(), clients)[1])


@pytest.mark.parametrize("multiple", [True, False])
def test_heavy_hitters(multiple, same_results):
    computation = tff.analytics.heavy_hitters.iblt.build_iblt_computation(
        capacity=20, string_max_bytes=8, max_words_per_user=5, multi_contribution=multiple,
        max_heavy_hitters=3, seed=1)
    clients = [tf.data.Dataset.from_tensor_slices(words).batch(1) for words in (
        ["cat", "dog", "cat"], ["dog", "owl"], ["cat", "dog"])]

    def decoded():
        found = computation(clients)  # the words are decoded in a random order
        words = sorted(zip(found.heavy_hitters, found.heavy_hitters_counts,
                           found.heavy_hitters_unique_counts))
        return words, found.clients, found.num_not_decoded

    words, *_ = same_results(decoded)
    assert [word for word, *_ in words] == [b"cat", b"dog", b"owl"]


@pytest.mark.parametrize("take", ["get_all_elements", "get_unique_elements"])
def test_elements_of_a_data_set(take, same_results):
    computation = tff.tensorflow.computation(
        lambda data: getattr(tff.analytics.data_processing, take)(data),
        tff.SequenceType(tff.TensorType(np.str_, [None])))
    same_results(lambda: computation(tf.data.Dataset.from_tensor_slices(["a", "b", "a"]).batch(2)))
