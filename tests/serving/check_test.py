"""Tests of feast_tf.serving.check."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import tensorflow as tf

from feast_tf.serving import check, tflite

IMAGES = np.random.default_rng(3).integers(0, 256, (5, 6, 6, 3), np.uint8)


@pytest.fixture(scope="module")
def network():
    """A network whose two logits are the means of red and of three times green, in 0..3."""
    image = tf.keras.Input((6, 6, 3))
    convolution = tf.keras.layers.Conv2D(2, 1, use_bias=False)
    x = tf.keras.layers.Rescaling([1 / 255] * 3, [0.0] * 3)(image)
    x = tf.keras.layers.GlobalAveragePooling2D()(convolution(x))
    network = tf.keras.Model(image, x)
    kernel = np.zeros((1, 1, 3, 2), np.float32)
    kernel[0, 0, 0, 0], kernel[0, 0, 1, 1] = 1, 3
    convolution.set_weights([kernel])
    return network


@pytest.fixture(scope="module")
def files(network, tmp_path_factory):
    """The network in every kind of file."""
    folder = tmp_path_factory.mktemp("files")
    network.save(folder / "network.keras")
    module, function = tflite.serving_function(network, batch=None)
    tf.saved_model.save(module, str(folder / "network"), signatures=function)
    for kind in ("float32", "int8"):
        (folder / f"{kind}.tflite").write_bytes(tflite.convert(network, kind, samples=IMAGES))
    return folder


EXPECTED = IMAGES.astype(np.float64).mean(axis=(1, 2))[:, :2] / 255 * [1, 3]


@pytest.mark.parametrize("name, tolerance", [("network.keras", 1e-6), ("network", 1e-6),
                                             ("float32.tflite", 1e-6), ("int8.tflite", 0.05)])
def test_every_kind_of_file_is_run(files, name, tolerance):
    classify = check.load_classifier(files / name)
    for batch_size in (2, 5):
        found = check.all_logits(classify, IMAGES, batch_size)
        assert found.shape == (5, 2) and found.dtype == np.float32
        np.testing.assert_allclose(found, EXPECTED, atol=tolerance)


def test_quantised_logits_are_dequantised(tmp_path):
    class Interpreter:
        def __init__(self, model_path, num_threads):
            assert model_path.endswith("x.tflite") and num_threads == 3

        def allocate_tensors(self):
            self.given = []

        def get_input_details(self):
            return [{"index": 4, "dtype": np.int8}]

        def get_output_details(self):
            return [{"index": 9, "quantization": (0.25, -3)}]

        def set_tensor(self, index, value):
            assert index == 4 and value.dtype == np.int8 and value.shape == (1, 1, 1, 3)
            self.value = value

        def invoke(self):
            self.result = np.int8([[self.value[0, 0, 0, 1], 7]])

        def get_tensor(self, index):
            assert index == 9
            return self.result

    classify = check.load_classifier(tmp_path / "x.tflite", threads=3, interpreter=Interpreter)
    images = np.array([[1, 20, 3], [4, 50, 6]], np.uint8).reshape(2, 1, 1, 3)
    np.testing.assert_allclose(classify(images), [[(20 + 3) / 4, 2.5], [(50 + 3) / 4, 2.5]])


@pytest.mark.parametrize("name", ["network.keras", "network", "float32.tflite"])
def test_a_file_is_timed_in_its_own_process(files, name):
    timing = check.time_file(files / name, 6, threads=1)
    assert 0 < timing.latency_ms_median <= timing.latency_ms_p90 < 1000
    assert timing.threads == 1 and timing.runs >= 20
    # TensorFlow itself, some 200 MB, does not count.
    assert timing.peak_memory_bytes is None or 0 < timing.peak_memory_bytes < 150e6


def test_memory_grows_with_the_file(tmp_path):
    def peak(units):
        image = tf.keras.Input((6, 6, 3))
        x = tf.keras.layers.Dense(units)(tf.keras.layers.Flatten()(image))
        content = tflite.convert(tf.keras.Model(image, tf.keras.layers.Dense(2)(x)), "float32",
                                 samples=IMAGES)
        (tmp_path / "x.tflite").write_bytes(content)
        return len(content), check.time_file(tmp_path / "x.tflite", 6, threads=1).peak_memory_bytes

    (small, less), (large, more) = peak(8), peak(200_000)
    if less is None:
        pytest.skip("the system does not tell how much memory a process takes")
    assert more - less > 0.8 * (large - small)


def test_a_file_that_cannot_be_read_is_an_error_here(tmp_path):
    (tmp_path / "x.tflite").write_bytes(b"no such thing")
    with pytest.raises(ValueError):
        check.time_file(tmp_path / "x.tflite", 6, threads=1)


def test_no_process_is_left(files):
    psutil = pytest.importorskip("psutil")
    before = set(psutil.Process().children(recursive=True))
    check.time_file(files / "float32.tflite", 6, threads=1)
    left = set(psutil.Process().children(recursive=True)) - before
    names = [" ".join(child.cmdline()) for child in left]
    # The one that others are forked from ends with this process.
    assert all("forkserver" in name or "resource_tracker" in name for name in names), names
    assert sum("forkserver" in name for name in names) <= 1


@pytest.mark.parametrize("difference, accuracy, problem", [
    (1e-4, 0.75, None), (0.0, 0.76, None), (1.01e-4, 0.75, "logits differ by 0.0001 from the Keras "
     "network's; at most 0.0001 is allowed"),
    (float("nan"), 0.75, "logits differ by nan"),
    (0.0, 0.74, "accuracy 0.7400 is below the Keras network's 0.7500 by more than 0.5 points"),
    (0.0, 0.745, None)])
def test_bounds(difference, accuracy, problem):
    found = check.Bound(1e-4, 0.005).problem(difference, accuracy, 0.75)
    assert (found is None) if problem is None else found.startswith(problem)


def test_the_second_interpreter_is_ai_edge_litert(monkeypatch):
    monkeypatch.setitem(sys.modules, "ai_edge_litert.interpreter", None)
    assert check.second_interpreter() is None
    module = types.SimpleNamespace(Interpreter="its class")
    monkeypatch.setitem(sys.modules, "ai_edge_litert", types.SimpleNamespace(interpreter=module))
    monkeypatch.setitem(sys.modules, "ai_edge_litert.interpreter", module)
    assert check.second_interpreter() == "its class"
