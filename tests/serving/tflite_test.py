"""Tests of feast_tf.serving.tflite."""

from __future__ import annotations

import io
import json
import zipfile

import numpy as np
import pytest
import tensorflow as tf

from feast_tf.serving import tflite
from feast_tf.space import SupernetSpec, costs, layout_of
from feast_tf.supernet import extract

SPEC = SupernetSpec(stem=8, bases=(16, 24), depths=(0, 1), widths=(0.5, 1.0), expansions=(0.5, 1.0),
                    strides=(1, 2), classes=5, image_size=8)
VARIANT = SPEC.variant(d=(0, 1), e=(1.0, 0.5), w=(0.5, 1.0, 1.0))
CONVOLUTIONS = 9  # the stem, three blocks of two, and two shortcuts
IMAGES = np.random.default_rng(4).integers(0, 256, (8, 8, 8, 3), np.uint8)
# What no part of a network of fixed width needs.
FORBIDDEN = {"GATHER", "GATHER_ND", "SLICE", "STRIDED_SLICE", "BATCH_MATMUL", "RSQRT", "SUB"}
DETAILS = dict(name="A name", description="what it does", version="1.2", license="some terms",
               macs=3)


@pytest.fixture(scope="module")
def network():
    """A network of random weights and moments."""
    rng = np.random.default_rng(7)
    layout = layout_of(SPEC)
    weights = [np.float32(rng.normal(size=p.shape, scale=0.2) + (p.kind == "gamma"))
               for p in layout.parameters]
    extents = layout.extents(layout.dims(VARIANT))
    moments = [(np.float32(rng.normal(size=extents[unit.gamma])),
                np.float32(rng.uniform(0.5, 2, size=extents[unit.gamma])))
               for unit, _ in layout.units()]
    return extract(SPEC, weights, VARIANT, moments,
                   normalization=((0.5, 0.4, 0.3), (0.2, 0.25, 0.3)))


@pytest.fixture(scope="module")
def converted(network):
    """The file of each kind."""
    return {kind: tflite.convert(network, kind, samples=IMAGES) for kind in tflite.KINDS}


def interpreter(content):
    found = tf.lite.Interpreter(model_content=content)
    found.allocate_tensors()
    return found


def run(found, images):
    entry, end = found.get_input_details()[0], found.get_output_details()[0]
    found.set_tensor(entry["index"], images.astype(entry["dtype"]))
    found.invoke()
    return found.get_tensor(end["index"])


def operators(content):
    """Names of the operations in a file, in the order in which they run."""
    from tensorflow.lite.python import schema_py_generated as schema

    names = {number: name for name, number in vars(schema.BuiltinOperator).items()}
    model = schema.Model.GetRootAsModel(bytearray(content), 0)
    graph, found = model.Subgraphs(0), []
    for place in range(graph.OperatorsLength()):
        code = model.OperatorCodes(graph.Operators(place).OpcodeIndex())
        found.append(names[max(code.BuiltinCode(), code.DeprecatedBuiltinCode())])
    return found


@pytest.mark.parametrize("kind", tflite.KINDS)
def test_nothing_but_plain_built_in_operations(converted, kind):
    found = operators(converted[kind])
    if kind == "float16":  # of the weights, once
        found = [name for name in found if name != "DEQUANTIZE"]
    assert not FORBIDDEN & set(found) and "CUSTOM" not in found
    # Batch normalisation is in the convolutions: the only factor and the only other sums are those
    # of the input's normalisation and of the three blocks.
    assert found.count("CONV_2D") == CONVOLUTIONS
    assert found.count("MUL") == 1 and found.count("ADD") == 1 + 3
    assert found.count("FULLY_CONNECTED") == 1
    assert found[0] == ("QUANTIZE" if kind == "int8" else "CAST")


def test_float32_logits_are_those_of_keras(network, converted):
    expected = network(IMAGES.astype(np.float32), training=False).numpy()
    found = interpreter(converted["float32"])
    logits = np.concatenate([run(found, image[None]) for image in IMAGES])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
    assert np.abs(expected).max() > 0.5 and expected.std(axis=0).min() > 0.01


def test_the_size_is_that_of_the_parameters(converted):
    params = costs.params(SPEC, VARIANT)
    for kind, size in (("float32", 4), ("float16", 2)):
        assert abs(len(converted[kind]) - size * params) < 0.1 * size * params + 20_000
    assert len(converted["int8"]) < len(converted["float16"]) < len(converted["float32"])


@pytest.mark.parametrize("kind", ["float32", "float16", "dynamic"])
def test_one_picture_of_bytes_in_and_floats_out(converted, kind):
    found = interpreter(converted[kind])
    entry, = found.get_input_details()
    assert entry["shape"].tolist() == [1, 8, 8, 3] and entry["dtype"] == np.uint8
    assert found.get_signature_list() == {
        "serving_default": {"inputs": ["image"], "outputs": ["logits"]}}
    end, = found.get_output_details()
    assert end["shape"].tolist() == [1, 5] and end["dtype"] == np.float32


def test_int8_takes_raw_bytes_as_they_are(network, converted):
    found = interpreter(converted["int8"])
    entry, end = found.get_input_details()[0], found.get_output_details()[0]
    assert entry["dtype"] == end["dtype"] == np.uint8 and entry["quantization"] == (1.0, 0)
    scale, zero_point = end["quantization"]
    logits = scale * (run(found, IMAGES[:1]).astype(float) - zero_point)
    expected = network(IMAGES[:1].astype(np.float32), training=False).numpy()
    assert np.abs(logits - expected).max() < 0.1 * np.abs(expected).max()


def test_a_byte_is_itself_whatever_the_samples_hold(network):
    dull = (IMAGES // 4 + 90).astype(np.uint8)  # 90..153
    before = dull.copy()
    found = interpreter(tflite.convert(network, "int8", samples=dull))
    assert found.get_input_details()[0]["quantization"] == (1.0, 0)
    np.testing.assert_array_equal(dull, before)


def test_int8_with_floats_outside(network, converted):
    found = interpreter(tflite.convert(network, "int8", samples=IMAGES, int8_input="float32"))
    entry, end = found.get_input_details()[0], found.get_output_details()[0]
    assert entry["dtype"] == end["dtype"] == np.float32
    quantised = interpreter(converted["int8"])
    scale, zero_point = quantised.get_output_details()[0]["quantization"]
    np.testing.assert_allclose(run(found, IMAGES[:1]),
                               scale * (np.float32(run(quantised, IMAGES[:1])) - zero_point),
                               atol=1e-6)


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_any_number_of_pictures_on_request(network, converted, kind):
    content = tflite.convert(network, kind, samples=IMAGES, batch=None)
    assert not FORBIDDEN & set(operators(content))
    found = tf.lite.Interpreter(model_content=content)
    entry, = found.get_input_details()
    assert entry["shape_signature"].tolist() == [-1, 8, 8, 3]
    found.resize_tensor_input(entry["index"], [8, 8, 8, 3], strict=True)
    found.allocate_tensors()
    single = interpreter(converted[kind])
    # A quantised logit may be one step apart, where another kernel rounds the other way.
    np.testing.assert_allclose(np.float32(run(found, IMAGES)), np.concatenate(
        [np.float32(run(single, image[None])) for image in IMAGES]),
        atol=1 if kind == "int8" else 1e-5)


def test_mistakes_name_what_is_allowed(network):
    with pytest.raises(ValueError, match="kind must be one of float32, float16, dynamic, int8, but "
                                         "is 'int4'"):
        tflite.convert(network, "int4", samples=IMAGES)
    with pytest.raises(ValueError, match="int8_input must be uint8 or float32, but is 'int8'"):
        tflite.convert(network, "int8", samples=IMAGES, int8_input="int8")
    with pytest.raises(ValueError, match="int8 needs at least one server-held picture"):
        tflite.convert(network, "int8", samples=IMAGES[:0])


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_metadata_are_in_the_file_and_leave_the_logits(converted, kind):
    plain = converted[kind]
    labels = ["cat", "zèbre", "a b", "d", "e"]
    content = tflite.with_metadata(plain, labels=labels, details=DETAILS)
    archive = zipfile.ZipFile(io.BytesIO(content))
    assert archive.testzip() is None
    assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}
    assert archive.read("labels.txt").decode() == "cat\nzèbre\na b\nd\ne\n"
    assert json.loads(archive.read("metadata.json")) == DETAILS
    assert operators(content) == operators(plain)
    np.testing.assert_array_equal(run(interpreter(content), IMAGES[:1]),
                                  run(interpreter(plain), IMAGES[:1]))
    assert tflite.with_metadata(plain, labels=labels, details=DETAILS) == content


def test_metadata_have_tflites_own_fields(converted):
    from tensorflow.lite.tools import flatbuffer_utils

    content = tflite.with_metadata(converted["float32"], labels="abcde", details=DETAILS)
    model = flatbuffer_utils.convert_bytearray_to_object(bytearray(content))
    place, = (entry.buffer for entry in model.metadata if entry.name == b"TFLITE_METADATA")
    buffer = bytes(model.buffers[place].data)
    assert buffer[4:8] == b"M001"
    table = Table.root(buffer)
    assert [table.text(slot) for slot in (0, 1, 2, 5)] == [
        "A name", "what it does", "1.2", "some terms"]
    graph, = table.vector(3)
    (image,), (logits,) = graph.vector(2), graph.vector(3)
    assert (image.text(0), logits.text(0)) == ("image", "logits")
    content = image.table(3)
    assert content.byte(0) == 2  # ImageProperties
    assert content.table(1).byte(0) == 1  # RGB
    size = content.table(1).table(1)
    assert (size.integer(0), size.integer(1)) == (8, 8)
    labels, = logits.vector(6)
    assert (labels.text(0), labels.byte(2)) == ("labels.txt", 2)  # TENSOR_AXIS_LABELS


class Table:
    """Reads a flatbuffer's table by slots, as the format's specification says."""

    def __init__(self, buffer, place):
        self.buffer, self.place = buffer, place

    @classmethod
    def root(cls, buffer):
        return cls(buffer, int.from_bytes(buffer[:4], "little"))

    def _number(self, place, size, signed=False):
        return int.from_bytes(self.buffer[place: place + size], "little", signed=signed)

    def _field(self, slot):
        fields = self.place - self._number(self.place, 4, signed=True)
        return self.place + self._number(fields + 4 + 2 * slot, 2)

    def _target(self, place):
        return place + self._number(place, 4)

    def byte(self, slot):
        return self._number(self._field(slot), 1)

    def integer(self, slot):
        return self._number(self._field(slot), 4)

    def text(self, slot):
        place = self._target(self._field(slot))
        return self.buffer[place + 4: place + 4 + self._number(place, 4)].decode()

    def table(self, slot):
        return Table(self.buffer, self._target(self._field(slot)))

    def vector(self, slot):
        place = self._target(self._field(slot))
        return [Table(self.buffer, self._target(place + 4 + 4 * k))
                for k in range(self._number(place, 4))]
