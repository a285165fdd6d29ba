"""Tests of feast_tf.serving.on_device: a TensorFlow Lite file trains as `local_update` does."""

from __future__ import annotations

import types

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.lite.tools import flatbuffer_utils

from feast_tf.routing import Routing
from feast_tf.serving import (SavedSupernet, export_trainable, from_vector, to_vector,
                              train_on_device)
from feast_tf.space import SupernetSpec, VariantCache
from feast_tf.supernet import forward
from feast_tf.training import SGD, Augmentation, LocalTraining, local_update
from feast_tf.training.augment import normalize

SPEC = SupernetSpec(stem=4, bases=(4, 8), depths=(0, 1), widths=(0.5, 1.0), expansions=(0.5, 1.0),
                    strides=(1, 2), classes=3, image_size=8, divisor=2)
ROUTING = Routing(VariantCache(SPEC, [
    SPEC.variant(d=0, e=0.5, w=0.5),
    SPEC.variant(d=(0, 1), e=0.5, w=(0.5, 0.5, 1.0)),
    SPEC.variant(d=(1, 0), e=0.5, w=(0.5, 1.0, 0.5)),
    SPEC.variant(d=1, e=(0.5, 1.0), w=1.0),
]))
LEVEL, RATE = 2, 0.05  # of the file, whose envelope is not the whole supernet
TRAINING = LocalTraining(
    optimizer=SGD(momentum=0.8, weight_decay=0.01, clip_norm=2.0), rho_kd=0.4, temperature=2.0,
    label_smoothing=0.1, augmentation=Augmentation.none(), mean=(0.1, 0.2, 0.3),
    std=(0.5, 0.4, 0.25))
MEAN_AND_STD = dict(mean=TRAINING.mean, std=TRAINING.std)


def supernet():
    rng = np.random.default_rng(5)
    weights = [np.float32((p.kind == "gamma") + rng.normal(0, 0.3, p.shape))
               for p in ROUTING.layout.parameters]
    return SavedSupernet(ROUTING.cache, tuple(weights), ("a", "b", "c"), **MEAN_AND_STD)


SLICE = ROUTING.slices.cut(supernet().weights, LEVEL)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("on_device") / "client.tflite"
    # Mean and std are the supernet's, whatever the training says.
    export_trainable(supernet(), LEVEL, path, training=LocalTraining(
        **{**vars(TRAINING), "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}))
    return path


@pytest.fixture
def interpreter(file):
    return tf.lite.Interpreter(str(file))


@pytest.fixture(scope="module")
def keras_client():
    """keras_client(batches, seed): `local_update`, and the places that it drew."""
    @tf.function(input_signature=[
        [tf.TensorSpec(weight.shape) for weight in SLICE],
        tf.data.DatasetSpec({"x": tf.TensorSpec([None, 8, 8, 3], tf.uint8),
                             "y": tf.TensorSpec([None], tf.int32)}), tf.TensorSpec([2], tf.int32)])
    def run(weights, dataset, seed):
        return local_update(ROUTING.layout, TRAINING, tf.constant(ROUTING.variant_dims), weights,
                            tf.constant(LEVEL), dataset, seed, tf.constant(RATE))

    def client(batches, seed):
        x, y = (np.concatenate(arrays) for arrays in zip(*batches))
        data = tf.data.Dataset.from_tensor_slices({"x": x, "y": y}).batch(len(batches[0][1]))
        result = run([tf.constant(weight) for weight in SLICE], data, tf.constant(seed))
        split, fold = (tf.random.experimental.stateless_split,
                       tf.random.experimental.stateless_fold_in)
        drawn = [int(tf.random.stateless_uniform([], split(fold(seed, step), 2)[0], 0, LEVEL + 1,
                                                 tf.int32)) for step in range(len(batches))]
        return types.SimpleNamespace(drawn=drawn, **result._asdict())

    return client


def pictures(*sizes, seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.integers(0, 256, [size, 8, 8, 3], np.uint8),
             rng.integers(0, 3, size, np.int32)) for size in sizes]


def logits(interpreter, weights, variant, images):
    """(what the file infers, what the supernet does)"""
    expected = forward(
        ROUTING.layout, [tf.constant(weight) for weight in weights],
        tf.constant(ROUTING.variant_dims[variant]), normalize(images, **MEAN_AND_STD))
    infer = interpreter.get_signature_runner("infer")
    return infer(x=images, variant=np.int32(variant))["logits"], expected


def test_an_epoch_is_that_of_the_keras_client(interpreter, keras_client):
    # The last batch is smaller, and each draw comes once: no third pass, a third pass.
    batches, seed = pictures(6, 6, 6, 4), [7, 4]
    expected = keras_client(batches, seed)
    assert set(expected.drawn) == {0, 1, 2}
    found = train_on_device(interpreter, ROUTING.slices, LEVEL, SLICE, batches,
                            draw=iter(expected.drawn).__next__, learning_rate=RATE)
    for parameter, one, other in zip(ROUTING.layout.parameters, found.update, expected.update):
        np.testing.assert_allclose(one, other, atol=2e-6, err_msg=parameter.name)
    assert found.num_examples == expected.num_examples == 22
    np.testing.assert_allclose(found.metrics, expected.metrics, rtol=1e-5)
    assert max(np.abs(update).max() for update in found.update if update.size) > 0.05


def test_a_round_starts_afresh(interpreter, keras_client):
    batches, seed = pictures(6, 6, seed=1), [1, 2]
    expected = keras_client(batches, seed)
    for _ in range(2):  # without weights and momentum of the first time
        found = train_on_device(interpreter, ROUTING.slices, LEVEL, SLICE, batches,
                                draw=iter(expected.drawn).__next__, learning_rate=RATE)
        np.testing.assert_allclose(to_vector(found.update), to_vector(expected.update), atol=2e-6)


def test_the_file_starts_with_the_servers_weights(interpreter, keras_client):
    get_weights = interpreter.get_signature_runner("get_weights")
    np.testing.assert_array_equal(get_weights()["weights"], to_vector(SLICE))
    # And without momentum, although nobody called `set_weights`.
    (batch,), seed = pictures(6, seed=2), [5, 6]
    expected = keras_client([batch], seed)
    interpreter.get_signature_runner("train")(
        x=batch[0], y=batch[1], variant=np.int32(expected.drawn[0]), learning_rate=np.float32(RATE))
    np.testing.assert_allclose(get_weights()["weights"] - to_vector(SLICE),
                               to_vector(expected.update), atol=2e-6)


@pytest.mark.parametrize("variant", range(LEVEL + 1))
def test_inference_before_and_after_training(interpreter, variant):
    (images, _), *batches = pictures(9, 6, 6)
    np.testing.assert_allclose(*logits(interpreter, SLICE, variant, images), atol=1e-5)
    update = train_on_device(interpreter, ROUTING.slices, LEVEL, SLICE, batches, draw=lambda: 1,
                             learning_rate=RATE).update
    trained = [weight + change for weight, change in zip(SLICE, update)]
    found, expected = logits(interpreter, trained, variant, images)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.abs(found - logits(interpreter, SLICE, variant, images)[1]).max() > 0.1


def test_weights_in_weights_out(interpreter):
    vector = np.random.default_rng(3).normal(size=sum(w.size for w in SLICE)).astype(np.float32)
    assert interpreter.get_signature_runner("set_weights")(weights=vector) == {"steps": 0}
    found = interpreter.get_signature_runner("get_weights")()["weights"]
    np.testing.assert_array_equal(found, vector)
    parts = from_vector(ROUTING.slices, LEVEL, found)
    assert [part.shape for part in parts] == ROUTING.slices.slice_shapes(LEVEL)
    np.testing.assert_array_equal(to_vector(parts), vector)


def test_the_file_needs_built_in_operations_only_and_holds_the_weights_once(file):
    content = file.read_bytes()
    assert b"Flex" not in content
    buffers = flatbuffer_utils.convert_bytearray_to_object(bytearray(content)).buffers
    large = [bytes(buffer.data) for buffer in buffers
             if buffer.data is not None and len(buffer.data) >= to_vector(SLICE).nbytes]
    assert large == [to_vector(SLICE).tobytes()]  # neither zeros nor a second copy beside it


def test_shapes_that_do_not_fit(interpreter):
    def train(weights, *batches):
        train_on_device(interpreter, ROUTING.slices, LEVEL, weights, batches, draw=lambda: 0,
                        learning_rate=RATE)

    images, labels = pictures(4)[0]
    expected = r"a batch must be pictures of shape \(8, 8, 3\) and a label for each, but is of "
    for wrong in ((images[:, :7], labels), (images[..., :1], labels), (images, labels[:3]),
                  (images[:0], labels[:0])):
        with pytest.raises(ValueError, match=expected):
            train(SLICE, wrong)
    with pytest.raises(ValueError, match="expected type UINT8"):
        train(SLICE, (images.astype(np.float32), labels))
    with pytest.raises(ValueError, match="a client of level 2 has .* weights in one vector, but "
                                         "this is of shape"):
        train(ROUTING.slices.cut(supernet().weights, 3), (images, labels))
    with pytest.raises(ValueError, match="level must lie in 0..3, but is 4"):
        export_trainable(supernet(), 4, "never.tflite", training=TRAINING)
    with pytest.raises(RuntimeError, match="gather index out of bounds"):
        logits(interpreter, SLICE, 3, images)


@pytest.mark.slow
@pytest.mark.parametrize("rule, level", [("min", 1), ("max", 0), ("min_max", 1)])
def test_other_rules(tmp_path, rule, level):
    training = LocalTraining(**{**vars(TRAINING), "rule": rule, "gradients": "mean"})
    export_trainable(supernet(), level, tmp_path / "client.tflite", training=training)
    weights, (batch,) = ROUTING.slices.cut(supernet().weights, level), pictures(5)
    found = train_on_device(tf.lite.Interpreter(str(tmp_path / "client.tflite")), ROUTING.slices,
                            level, weights, [batch], draw=lambda: level, learning_rate=RATE)
    expected = tf.function(lambda: local_update(
        ROUTING.layout, training, tf.constant(ROUTING.variant_dims),
        [tf.constant(weight) for weight in weights], tf.constant(level),
        tf.data.Dataset.from_tensors({"x": batch[0], "y": batch[1]}), tf.constant([1, 2]),
        tf.constant(RATE)))()
    np.testing.assert_allclose(to_vector(found.update), to_vector(expected.update), atol=2e-6)
    np.testing.assert_allclose(found.metrics, expected.metrics, rtol=1e-5)
