"""Conversion of plain networks to TFLite, and the metadata in the file.

Metadata is in TFLite's own format: a flatbuffer of the schema "M001" in the model, for MediaPipe,
Android Studio and the like, and associated files as a ZIP archive behind it, which any unzip reads.
It is written with the modules that come with TensorFlow, because tflite-support, the usual writer,
needs protobuf 3 and TensorFlow Federated protobuf 4.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional

import flatbuffers
import numpy as np
import tensorflow as tf

KINDS = ("float32", "float16", "dynamic", "int8")
LABELS_FILE, DETAILS_FILE = "labels.txt", "metadata.json"

# Enumerators of TFLite's metadata schema.
_IMAGE_PROPERTIES, _RGB, _TENSOR_AXIS_LABELS = 2, 1, 2


def serving_function(network: tf.keras.Model, *, batch: Optional[int],
                     dtype: tf.DType = tf.uint8) -> tuple[tf.Module, Any]:
    """A network as a function from "image", dtype[batch, size, size, 3], to float32 "logits".

    Args:
      network: takes raw RGB values 0..255.
      batch: pictures in a call; None for any number.
      dtype: of the pictures.

    Returns:
      (a module that owns the variables, the concrete function). Without Keras' own objects, whose
      saving takes ten times as long as the conversion.
    """
    module = tf.Module()
    # Keras 3 wraps TensorFlow's variables.
    module.kept = [variable if isinstance(variable, tf.Variable) else variable.value
                   for variable in network.variables]
    image = tf.TensorSpec([batch, *network.input_shape[1:]], dtype, name="image")
    function = tf.function(
        lambda image: {"logits": network(tf.cast(image, tf.float32), training=False)},
        input_signature=[image], autograph=False)
    return module, function.get_concrete_function()


def convert(network: tf.keras.Model, kind: str, *, samples: np.ndarray,
            batch: Optional[int] = 1, int8_input: str = "uint8") -> bytes:
    """A TFLite file of built-in operations only.

    Args:
      network: a plain Keras network that takes raw RGB values 0..255 and returns logits.
      kind: "float32"; "float16" weights; "dynamic", int8 weights and float32 activations; or
        "int8", weights and activations.
      samples: uint8[n, size, size, 3], the pictures whose activations give the ranges of "int8".
      batch: pictures in a call; None for any number.
      int8_input: "uint8" pictures and logits for "int8", or "float32" ones. All other kinds take
        uint8 pictures and return float32 logits.

    Raises:
      ValueError: an unknown kind or type, or no samples.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, but is {kind!r}")
    if int8_input not in ("uint8", "float32"):
        raise ValueError(f"int8_input must be uint8 or float32, but is {int8_input!r}")
    whole = kind == "int8"
    if whole and not len(samples):
        raise ValueError("int8 needs at least one server-held picture to find its ranges with")
    # The input of a quantised network is float32 before conversion: a cast could not be quantised.
    module, function = serving_function(network, batch=batch,
                                        dtype=tf.float32 if whole else tf.uint8)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([function], module)
    if kind != "float32":
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if kind == "float16":
        converter.target_spec.supported_types = [tf.float16]
    if whole:
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
        converter.representative_dataset = lambda: ([picture] for picture in _calibration(samples))
        converter.inference_input_type = converter.inference_output_type = tf.as_dtype(int8_input)
    with native_messages_dropped():
        return converter.convert()


@contextlib.contextmanager
def native_messages_dropped() -> Iterator[None]:
    """The converter's C++ code writes notes to stderr; its errors come as exceptions."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _calibration(samples: np.ndarray) -> list[np.ndarray]:
    """float32[1, size, size, 3] pictures that together use the whole range of a byte.

    So the input's scale is 1 and its zero point 0: a raw byte is its own quantised value.
    """
    pictures = [picture[np.newaxis].astype(np.float32) for picture in samples]
    pictures[0][0, 0, 0], pictures[0][0, -1, -1] = 0, 255
    return pictures


def with_metadata(content: bytes, *, labels: Sequence[str], details: Mapping[str, Any]) -> bytes:
    """A TFLite file with its labels and details in it.

    Args:
      content: what `convert` returned.
      labels: names of the classes, in the order of the logits.
      details: for metadata.json; its "name", "description", "version" and "license" also stand in
        TFLite's own fields.

    Returns:
      The file, which interpreters read as before. labels.txt has one line for each class.
    """
    from tensorflow.lite.python import schema_py_generated as schema
    from tensorflow.lite.tools import flatbuffer_utils

    model = flatbuffer_utils.convert_bytearray_to_object(bytearray(content))
    size = model.subgraphs[0].tensors[model.subgraphs[0].inputs[0]].shape[1]
    entry, buffer = schema.MetadataT(), schema.BufferT()
    entry.name, entry.buffer = "TFLITE_METADATA", len(model.buffers)
    buffer.data = np.frombuffer(_fields(details, int(size)), np.uint8)
    model.buffers.append(buffer)
    model.metadata = [*(model.metadata or ()), entry]
    file = io.BytesIO(flatbuffer_utils.convert_object_to_bytearray(model))
    # Stored without compression, as Android's reader wants them, and without the time of day.
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(zipfile.ZipInfo(LABELS_FILE), "".join(f"{name}\n" for name in labels))
        archive.writestr(zipfile.ZipInfo(DETAILS_FILE), json.dumps(details, indent=2) + "\n")
    return file.getvalue()


def _fields(details: Mapping[str, Any], size: int) -> bytes:
    """The flatbuffer ModelMetadata; slots are numbered as in TFLite's metadata_schema.fbs."""
    builder = flatbuffers.Builder(0)

    def table(references=(), *, enumerators=(), integers=()) -> int:
        """A table of (slot, value) pairs."""
        builder.StartObject(8)
        for prepend, pairs in ((builder.PrependUOffsetTRelativeSlot, references),
                               (builder.PrependInt8Slot, enumerators),
                               (builder.PrependUint32Slot, integers)):
            for slot, value in pairs:
                prepend(slot, value, 0)
        return builder.EndObject()

    def vector(*offsets: int) -> int:
        builder.StartVector(4, len(offsets), 4)
        for offset in reversed(offsets):
            builder.PrependUOffsetTRelative(offset)
        return builder.EndVector()

    text = builder.CreateString
    pixels = table(integers=[(0, size), (1, size)])
    picture = table([(1, pixels)], enumerators=[(0, _RGB)])
    image = table([(1, picture)], enumerators=[(0, _IMAGE_PROPERTIES)])
    labels = table([(0, text(LABELS_FILE)), (1, text("names of the classes, a line each"))],
                   enumerators=[(2, _TENSOR_AXIS_LABELS)])
    inputs = table([(0, text("image")), (1, text("RGB values 0..255")), (3, image)])
    outputs = table([(0, text("logits")), (1, text("one a class; softmax gives probabilities")),
                     (6, vector(labels))])
    graph = table([(2, vector(inputs)), (3, vector(outputs))])
    root = table([(0, text(details["name"])), (1, text(details["description"])),
                  (2, text(details["version"])), (3, vector(graph)),
                  (5, text(details["license"])), (7, text("1.0.0"))])
    builder.Finish(root, file_identifier=b"M001")
    return bytes(builder.Output())
