"""Tests of feast_tf.serving.export."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
import zipfile

import numpy as np
import pytest
import tensorflow as tf

from feast_tf import datasets
from feast_tf.routing import Routing
from feast_tf.serving import (FORMATS, Choice, Evaluator, Exporter, ExportSettings, check,
                              load_supernet)
from feast_tf.serving import export as export_module
from feast_tf.space import costs, layout_of
from feast_tf.supernet import ElasticRunner

# Stock layers only: a Keras user needs nothing of this project to load them.
LAYERS = {"InputLayer", "Rescaling", "Conv2D", "BatchNormalization", "ReLU", "ZeroPadding2D",
          "AveragePooling2D", "Add", "GlobalAveragePooling2D", "Dense"}


@pytest.fixture(scope="module")
def digits():
    return datasets.load("digits", image_size=16, held_out=0.2, server_samples=160, seed=0)


@pytest.fixture(scope="module")
def saved(trained_run):
    return load_supernet(trained_run / "model")


@pytest.fixture(scope="module")
def exporter(saved, digits):
    return Exporter(saved, digits, ExportSettings(formats=tuple(FORMATS), license="as you like"))


@pytest.fixture(scope="module")
def choices(saved):
    """A cached variant, and one that is not."""
    spec = saved.spec
    return [Choice(saved.cache.variants[2], 2, "the third"),
            Choice(spec.variant(d=(0, 1), e=(0.5, 1.0), w=(0.5, 1.0, 0.5)), None, "any")]


@pytest.fixture(scope="module")
def exported(exporter, choices, tmp_path_factory):
    """(folder, records) of the cached variant in all formats."""
    folder, done = tmp_path_factory.mktemp("export"), []
    records = exporter.export(choices[:1], folder, on_file=done.append)
    assert done == records
    return folder, records


@pytest.fixture(scope="module")
def evaluator(saved, digits):
    return Evaluator(Routing(saved.cache), digits.server.images, mean=saved.mean, std=saved.std)


def test_a_plain_network_with_the_logits_of_the_supernet(exporter, saved, digits, choices,
                                                         evaluator):
    layout = layout_of(saved.spec)
    weights = [tf.constant(weight) for weight in saved.weights]
    images = digits.test.images[:50]
    normalized, = evaluator.normalized_batches(images)
    for choice in choices:
        network = exporter.network(choice.variant)
        assert type(network) is type(tf.keras.Model(*[tf.keras.Input((2,))] * 2))
        assert {type(layer).__name__ for layer in network.layers} <= LAYERS
        assert sum(np.prod(w.shape) for w in network.trainable_weights) == costs.params(
            saved.spec, choice.variant)
        dims = layout.dims(choice.variant)
        expected = ElasticRunner(layout).logits(weights, dims, evaluator.moments(weights, dims),
                                                normalized).numpy()
        found = network(images.astype(np.float32), training=False).numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        assert np.abs(expected).max() > 3


def test_a_record_and_a_file_of_each_format(exported, choices):
    folder, records = exported
    assert [record.format for record in records] == list(FORMATS)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [record.path for record in records] + ["digits_0.724208M.json"])
    for record in records:
        assert (record.variant, record.level, record.reason) == (
            str(choices[0].variant), 2, "the third")
        assert (record.macs, record.params) == (724208, 18002)
        path = folder / record.path
        if path.is_file():
            assert record.bytes == path.stat().st_size
            assert record.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        assert record.test_pictures == 397 and record.threads == 1 and record.latency_runs >= 20
        assert 0 < record.latency_ms_median <= record.latency_ms_p90
        assert record.litert_logit_difference is None or record.litert_logit_difference < 1e-3
    assert [record.path for record in records] == ["digits_0.724208M" + ending for ending in (
        ".keras", "_savedmodel", ".tflite", "_fp16.tflite", "_dynamic.tflite", "_int8.tflite")]


def test_files_are_as_good_as_the_network(exported):
    # A well-trained network: what quantisation costs would show.
    for record in exported[1]:
        assert record.problem is None and record.keras_accuracy > 0.94
        loss = record.keras_accuracy - record.accuracy
        if record.format in ("keras", "savedmodel", "tflite"):
            assert record.max_logit_difference <= 1e-4 and loss == 0
        elif record.format == "tflite_fp16":
            assert 0 < record.max_logit_difference < 0.1 and loss <= 0.003
        else:
            assert 0 < record.max_logit_difference < 5 and loss <= 0.015


def test_keras_accuracy_is_that_of_the_operating_point(exported, saved, digits, evaluator):
    point, = evaluator.operating_points(saved.weights, [2], digits.test.images, digits.test.labels,
                                        "test")
    assert exported[1][0].keras_accuracy == point.accuracy


def test_sizes_follow_the_parameters(exported):
    for record in exported[1]:
        if record.format in ("tflite", "tflite_fp16"):
            size = FORMATS[record.format].bytes_per_weight * record.params
            assert abs(record.bytes - size) < 0.1 * size + 20_000


def test_metadata_in_the_files_and_beside_them(exported, saved):
    folder, records = exported
    beside = json.loads((folder / "digits_0.724208M.json").read_text())
    assert beside["labels"] == list("0123456789") and beside["license"] == "as you like"
    assert beside["variant"] == {"d": [1, 0], "e": [1.0, 1.0], "w": [1.0, 1.0, 1.0]}
    assert beside["space"]["bases"] == [16, 24] and beside["dataset"] == "digits"
    assert (beside["macs"], beside["params"]) == (724208, 18002)
    assert beside["test_accuracy"] == round(records[0].accuracy, 6)
    for record in records[2:6]:
        with zipfile.ZipFile(folder / record.path) as archive:
            assert json.loads(archive.read("metadata.json")) == beside
            assert archive.read("labels.txt").decode().split() == list("0123456789")


def test_the_same_supernet_gives_the_same_files(exporter, exported, choices, tmp_path):
    again = Exporter(exporter.saved, exporter.dataset, dataclasses.replace(
        exporter.settings, formats=("tflite", "tflite_int8"), test_pictures=3))
    records = again.export(choices[:1], tmp_path)
    assert [record.test_pictures for record in records] == [3, 3]
    # All but the metadata behind it, where the accuracy is one of fewer pictures here.
    for record in records:
        one, other = ((folder / record.path).read_bytes() for folder in (tmp_path, exported[0]))
        start = one.index(b"PK\x03\x04")
        assert one[:start] == other[:start] and start > 4000


def test_networks_of_equal_macs_get_files_of_their_own(exporter, saved, tmp_path):
    one = Exporter(exporter.saved, exporter.dataset, ExportSettings(formats=("tflite",),
                                                                    test_pictures=3))
    # Middle widths of 4 and of 8 both become 8 in the first stage.
    found = [Choice(saved.spec.variant(d=0, e=(e, 1.0), w=0.5), None, "named") for e in (0.5, 1.0)]
    records = one.export(found, tmp_path)
    assert len({record.path for record in records}) == 2
    assert all((tmp_path / record.path).is_file() for record in records)
    assert [record.level for record in records] == [None, None]


def test_trials_measure_what_is_exported(exporter, exported, choices, tmp_path, monkeypatch):
    measured = []

    def time_file(path, image_size, *, threads):
        measured.append((path.name, image_size, threads))
        return types.SimpleNamespace(latency_ms_median=2.5)

    monkeypatch.setattr(check, "time_file", time_file)
    one = Exporter(exporter.saved, exporter.dataset, dataclasses.replace(
        exporter.settings, formats=("tflite_fp16", "tflite"), threads=2))
    trials = one.trials(tmp_path)
    assert trials.description == "tflite_fp16, 2 threads" and trials.bytes_per_weight == 2
    fp16 = exported[1][3]
    assert 0 <= trials.size(choices[0].variant) - fp16.bytes < 10
    assert trials.latency_ms(choices[0].variant) == 2.5
    assert measured == [("trial_fp16.tflite", 16, 2)]


def test_a_file_beyond_its_bound_is_noted(exporter, choices, tmp_path, monkeypatch):
    strict = dataclasses.replace(FORMATS["tflite_int8"], bound=check.Bound(1e-3, 0.0))
    monkeypatch.setitem(export_module.FORMATS, "tflite_int8", strict)
    one = Exporter(exporter.saved, exporter.dataset,
                   ExportSettings(formats=("tflite_int8",), test_pictures=20))
    record, = one.export(choices[:1], tmp_path)
    assert record.problem.startswith("logits differ by ")


def test_another_data_set_is_refused(saved, digits):
    other = dataclasses.replace(digits, classes=(*digits.classes[:9], "nine"))
    with pytest.raises(ValueError, match="trained on 10 classes, but the data set has 10; the "
                                         "first that differs is '9' there and 'nine' here"):
        Exporter(saved, other)
    other = dataclasses.replace(digits, classes=digits.classes[:9])
    with pytest.raises(ValueError, match="but the data set has 9; .* '9' there and None here"):
        Exporter(saved, other)
    other = dataclasses.replace(digits, mean=np.asarray(digits.mean) + [0, 1e-4, 0])
    with pytest.raises(ValueError, match="the pictures of digits are not those that the run was "
                                         "trained on"):
        Exporter(saved, other)


@pytest.mark.parametrize("fields, message", [
    (dict(formats=("keras", "onnx")), "unknown format 'onnx'; there are keras, savedmodel, tflite"),
    (dict(formats=()), "formats must name at least one of keras, savedmodel"),
    (dict(int8_input="int8"), "int8_input must be uint8 or float32, but is 'int8'")])
def test_settings_that_do_not_exist_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ExportSettings(**fields)


@pytest.mark.slow
def test_bounds_hold_on_photographs(shared_data, trained_centrally, tmp_path):
    from feast_tf import space, training

    archive = shared_data / "cifar-10-batches-py-subset.tar.gz"
    if not archive.is_file():
        pytest.skip(f"there is no {archive}")
    data = datasets.load("cifar10", data_dir=archive)
    spec = space.SupernetSpec(stem=8, bases=(16, 32, 32), depths=(0, 1), widths=(0.5, 1.0),
                              expansions=(0.5,), strides=(2, 2, 2), classes=10, image_size=32)
    cache = space.VariantCache(spec, [spec.smallest(), spec.variant(d=(1, 0, 1), e=0.5, w=1.0)])
    pictures = tf.data.Dataset.from_tensor_slices({"x": data.train.images, "y": data.train.labels})
    saved = trained_centrally(
        cache, data, pictures.shuffle(5000, seed=1).repeat(3).batch(50), rate=0.05,
        augmentation=training.Augmentation(randaugment_layers=0, mixup_alpha=0.0,
                                           cutmix_alpha=0.0))
    exporter = Exporter(saved, data, ExportSettings(formats=tuple(FORMATS)[2:]))
    records = exporter.export([Choice(cache.variants[1], 1, "the largest")], tmp_path)
    assert [record.problem for record in records] == [None] * 4
    assert all(record.keras_accuracy > 0.25 and record.test_pictures == 1000 for record in records)
