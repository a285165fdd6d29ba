"""Classifies picture files with an exported .tflite file, the way a phone does.

    python examples/phone_client.py runs/digits/export/digits_1.176M_int8.tflite three.png seven.jpg

Needs NumPy, Pillow and an interpreter only: `pip install numpy pillow ai-edge-litert`, or
TensorFlow. What the file takes and returns is in docs/deploy.md.
"""

from __future__ import annotations

import argparse
import sys
import zipfile

import numpy as np
from PIL import Image, ImageOps


def load_interpreter(path: str):
    """An interpreter of LiteRT, TFLite's successor, or else of TensorFlow."""
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError:
        import tensorflow

        Interpreter = tensorflow.lite.Interpreter
    interpreter = Interpreter(model_path=path)
    interpreter.allocate_tensors()
    return interpreter


def read_labels(path: str) -> list[str]:
    """Names of the classes: they are in a ZIP archive at the end of the file."""
    with zipfile.ZipFile(path) as archive:
        return archive.read("labels.txt").decode().splitlines()


def read_picture(path: str, height: int, width: int) -> np.ndarray:
    """uint8[1, height, width, 3]: RGB, upright, squeezed to the network's size."""
    with Image.open(path) as image:
        image = ImageOps.exif_transpose(image).convert("RGB")
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    return np.asarray(image)[np.newaxis]


def classify(interpreter, picture: np.ndarray) -> np.ndarray:
    """float32[classes] probabilities of one picture."""
    entry, = interpreter.get_input_details()
    end, = interpreter.get_output_details()
    interpreter.set_tensor(entry["index"], picture.astype(entry["dtype"]))
    interpreter.invoke()
    logits = interpreter.get_tensor(end["index"])[0].astype(np.float32)
    scale, zero_point = end["quantization"]
    if scale:  # a quantised network's logits are bytes
        logits = scale * (logits - zero_point)
    exponentials = np.exp(logits - logits.max())
    return exponentials / exponentials.sum()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Classifies pictures with a .tflite file.")
    parser.add_argument("network", help="a .tflite file that tff_programs.export wrote")
    parser.add_argument("pictures", nargs="+", help="picture files")
    given = parser.parse_args(arguments)
    try:
        labels = read_labels(given.network)
        interpreter = load_interpreter(given.network)
    except (OSError, ValueError, KeyError, RuntimeError, zipfile.BadZipFile) as error:
        print(f"{given.network} is not a network of tff_programs.export: {error}", file=sys.stderr)
        return 1
    except ImportError as error:
        print(f"install ai-edge-litert or tensorflow: {error}", file=sys.stderr)
        return 1
    _, height, width, _ = interpreter.get_input_details()[0]["shape"]
    failed = False
    for path in given.pictures:
        try:
            probabilities = classify(interpreter, read_picture(path, height, width))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            print(f"{path} is not a picture: {error}", file=sys.stderr)
            failed = True
            continue
        best = int(probabilities.argmax())
        print(f"{path}: {labels[best]} ({probabilities[best]:.3f})")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
