"""Two logical CPU devices, and the check that TFF's own runtime and ours give the same results."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from typing import Any, Optional

import numpy as np
import pytest
import tensorflow as tf

CPUS = ("/device:CPU:0", "/device:CPU:1")
TOLERANCE = 1e-6


def assert_same(found: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    """Checks containers, names, types and numbers."""
    if isinstance(expected, tf.data.Dataset):
        assert isinstance(found, tf.data.Dataset)
        assert_same(list(found.as_numpy_iterator()), list(expected.as_numpy_iterator()),
                    tolerance)
    elif isinstance(expected, dict):
        assert type(found) is type(expected) and list(found) == list(expected)
        assert_same(list(found.values()), list(expected.values()), tolerance)
    elif hasattr(type(expected), "__attrs_attrs__"):
        assert type(found) is type(expected)
        for attribute in type(expected).__attrs_attrs__:
            assert_same(getattr(found, attribute.name), getattr(expected, attribute.name),
                        tolerance)
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected) and len(found) == len(expected)
        for one, other in zip(found, expected):
            assert_same(one, other, tolerance)
    else:
        one, other = np.asarray(found), np.asarray(expected)
        assert one.dtype == other.dtype and one.shape == other.shape
        if other.dtype.kind in "fc":
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
        else:
            np.testing.assert_array_equal(one, other)


@pytest.fixture(scope="session", name="assert_same")
def assert_same_fixture():
    return assert_same


@pytest.fixture(scope="session")
def worker():
    """TFF's own worker process, which ends with the session."""
    from feast_tf.runtime import Worker

    worker = Worker()
    yield worker
    worker.stop()


@pytest.fixture(scope="session")
def stock_context(worker):
    """stock_context(kind, **options): TFF's own runtime as a synchronous or asynchronous context."""
    from feast_tf.runtime import remote

    factory = remote.executor_factory(worker.address, worker.channel)
    return lambda kind, **options: kind(factory, **{**remote.CONTEXT_OPTIONS, **options})


@pytest.fixture(scope="session", params=[1, 2], ids=["one lane", "two lanes"])
def in_process(request):
    """The in-process runtime on one device and on two."""
    from feast_tf.runtime import InProcessContext

    return InProcessContext(devices=CPUS[:request.param])


@pytest.fixture(scope="session")
def same_results(stock_context):
    """Checks a call against TFF's own runtime, on one lane and on two."""
    import tensorflow_federated as tff

    from feast_tf.runtime import InProcessContext

    stock = stock_context(tff.framework.SyncExecutionContext)
    contexts = [InProcessContext(devices=CPUS[:lanes]) for lanes in (1, 2)]
    run_in = tff.framework.get_context_stack().install

    def check(run: Callable[[], Any], *, stock_fails: Optional[str] = None,
              expected: Any = None, tolerance: float = TOLERANCE) -> Any:
        """Args:
          run: calls TFF computations.
          stock_fails: what the error of TFF's own runtime says, where that can't run it.
          expected: the result, where TFF's own runtime has none.
          tolerance: relative and absolute, of floating-point numbers.
        """
        with run_in(stock):
            if stock_fails is None:
                expected = run()
            else:
                with pytest.raises(Exception, match=re.compile(stock_fails, re.DOTALL)):
                    run()
        for context in contexts:
            with run_in(context):
                assert_same(run(), expected, tolerance)
        return expected

    return check


@pytest.fixture(scope="session")
def linear_fed_avg():
    """linear_fed_avg(clients): a FedAvg process on a linear model, and the clients' data."""
    import tensorflow_federated as tff

    @tf.function
    def predict(weights, x, training):
        return x @ weights[0][0]

    @tf.function
    def squared_error(output, label, sample_weight=None):
        return tf.reduce_mean(tf.square(output - label))

    process = tff.learning.algorithms.build_weighted_fed_avg(
        tff.learning.models.FunctionalModel(
            initial_weights=((np.array([[0.5], [0.25]], np.float32),), ()),
            predict_on_batch_fn=predict, loss_fn=squared_error,
            input_spec=(tf.TensorSpec([None, 2]), tf.TensorSpec([None, 1]))),
        tff.learning.optimizers.build_sgdm(0.1))

    def make(clients: int):
        rng = np.random.default_rng(0)
        return process, [tf.data.Dataset.from_tensor_slices((
            rng.normal(size=(size, 2)).astype(np.float32),
            rng.normal(size=(size, 1)).astype(np.float32))).batch(2)
            for size in range(2, 2 + clients)]

    return make


@pytest.fixture(scope="session")
def feast():
    """FEAST with three levels, and a cohort with two clients of one of them and one without data."""
    from feast_tf.algorithms import build_feast
    from feast_tf.routing import Routing
    from feast_tf.space import SupernetSpec, VariantCache
    from feast_tf.training import Augmentation, LocalTraining

    spec = SupernetSpec(stem=4, bases=(4, 8), depths=(0, 1), widths=(0.5, 1.0),
                        expansions=(0.5, 1.0), strides=(1, 2), classes=3, image_size=8, divisor=2)
    routing = Routing(VariantCache(spec, [spec.variant(d=0, e=0.5, w=0.5),
                                          spec.variant(d=(1, 0), e=0.5, w=1.0),
                                          spec.variant(d=1, e=1.0, w=1.0)]))
    process = build_feast(routing, LocalTraining(augmentation=Augmentation.none()), total_rounds=4)
    rng = np.random.default_rng(0)
    clients = [collections.OrderedDict(
        client=np.int32(number), level=np.int32(level),
        data=tf.data.Dataset.from_tensor_slices(collections.OrderedDict(
            x=rng.integers(0, 256, [pictures, 8, 8, 3], np.uint8),
            y=rng.integers(0, 3, pictures, np.int32))).batch(4))
        for number, (level, pictures) in enumerate([(2, 5), (0, 6), (1, 4), (0, 3), (2, 0)])]
    return process, clients
