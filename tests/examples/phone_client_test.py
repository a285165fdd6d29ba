"""Tests of examples/phone_client.py, and of exported files on another interpreter."""

from __future__ import annotations

import os
from pathlib import Path
import subprocess
import sys

import numpy as np
from PIL import Image
import pytest

from feast_tf import datasets
from feast_tf.serving import Choice, Exporter, ExportSettings, load_supernet

CLIENT = Path(__file__).resolve().parents[2] / "examples" / "phone_client.py"
KINDS = ("tflite", "tflite_int8")
PICTURES = {"grey.png": 0, "large.jpg": 3, "turned.png": 2}  # places in the test split


@pytest.fixture(scope="module")
def digits():
    return datasets.load("digits", image_size=16, held_out=0.2, server_samples=160, seed=0)


@pytest.fixture(scope="module")
def folder(trained_run, digits, tmp_path_factory):
    """Files of the largest variant, <format>.tflite, and three pictures in files."""
    folder = tmp_path_factory.mktemp("phone")
    saved = load_supernet(trained_run / "model")
    exporter = Exporter(saved, digits, ExportSettings(formats=KINDS, test_pictures=20))
    for record in exporter.export([Choice(saved.cache.variants[3], 3, "largest")], folder):
        (folder / record.path).rename(folder / f"{record.format}.tflite")
    grey, large, turned = map(Image.fromarray, digits.test.images[list(PICTURES.values())])
    grey.convert("L").save(folder / "grey.png")
    large.resize((64, 64), Image.Resampling.BICUBIC).save(folder / "large.jpg", quality=95)
    # A phone's camera notes how it was held: here upside down, which makes a 6 of a 9.
    exif = Image.Exif()
    exif[0x0112] = 3
    turned.transpose(Image.Transpose.ROTATE_180).save(folder / "turned.png", exif=exif)
    (folder / "text.png").write_text("no picture")
    return folder


def client(folder, *arguments, python=sys.executable):
    return subprocess.run(
        [python, str(CLIENT), *arguments], cwd=folder, capture_output=True, text=True, timeout=120,
        env={"PATH": os.environ["PATH"], "TF_CPP_MIN_LOG_LEVEL": "3"})


def check_answers(result, digits):
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line[:2] for line in lines] == [
        [f"{name}:", str(digits.test.labels[place])] for name, place in PICTURES.items()]
    assert all(0.3 < float(line[2].strip("()")) <= 1 for line in lines)


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_are_told(folder, digits, kind):
    check_answers(client(folder, f"{kind}.tflite", *PICTURES), digits)


def test_what_is_no_picture_is_named_and_the_rest_is_told(folder):
    result = client(folder, "tflite.tflite", "text.png", "grey.png", "none.png")
    assert result.returncode == 1 and len(result.stdout.splitlines()) == 1
    errors = [line for line in result.stderr.splitlines() if "is not a picture: " in line]
    assert [line.split()[0] for line in errors] == ["text.png", "none.png"]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("name", ["text.png", "none.tflite"])
def test_what_is_no_network_is_named(folder, name):
    result = client(folder, name, "grey.png")
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith(f"{name} is not a network of tff_programs.export: ")
    assert len(result.stderr.splitlines()) == 1


LOGITS = """
import sys
import numpy as np
from ai_edge_litert.interpreter import Interpreter

interpreter = Interpreter(model_path=sys.argv[1])
interpreter.allocate_tensors()
entry, end = interpreter.get_input_details()[0], interpreter.get_output_details()[0]
found = []
for image in np.load("images.npy"):
    interpreter.set_tensor(entry["index"], image[None])
    interpreter.invoke()
    found.append(interpreter.get_tensor(end["index"])[0])
np.save("found.npy", found)
"""


@pytest.mark.slow
def test_litert_agrees(folder, digits, tmp_path):
    """TFLite's successor, in an environment without TensorFlow: a phone has none either."""
    import tensorflow as tf

    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    installed = subprocess.run([python, "-m", "pip", "install", "--quiet", "ai-edge-litert",
                                "pillow"], capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"ai-edge-litert cannot be installed: {installed.stderr[-300:]}")
    np.save(folder / "images.npy", digits.test.images[:100])
    for kind in KINDS:
        check_answers(client(folder, f"{kind}.tflite", *PICTURES, python=python), digits)
        subprocess.run([python, "-c", LOGITS, f"{kind}.tflite"], cwd=folder, check=True)
        found = np.load(folder / "found.npy").astype(np.float32)
        own = tf.lite.Interpreter(model_path=str(folder / f"{kind}.tflite"))
        own.allocate_tensors()
        expected = []
        for image in digits.test.images[:100]:
            own.set_tensor(own.get_input_details()[0]["index"], image[np.newaxis])
            own.invoke()
            expected.append(own.get_tensor(own.get_output_details()[0]["index"])[0])
        expected = np.float32(expected)
        # Of a quantised network: steps, of which other kernels may round to the next.
        assert np.abs(found - expected).max() <= (1e-4 if kind == "tflite" else 2)
        assert np.mean(found.argmax(axis=1) == expected.argmax(axis=1)) >= 0.98
