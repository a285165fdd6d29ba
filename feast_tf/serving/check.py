"""Runs exported files as a phone would: logits, accuracy, latency, peak memory."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib
import multiprocessing
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Optional, Union

import numpy as np
import tensorflow as tf

_WARM_UP = 3
_LEAST_RUNS, _MOST_RUNS, _LEAST_SECONDS = 20, 200, 0.5

# uint8[n, size, size, 3] -> float32[n, classes]
Classifier = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Bound:
    """How far a file may be from the Keras network that it was made of.

    Attributes:
      logit_difference: largest absolute difference of a logit.
      accuracy_loss: largest loss of accuracy on the test pictures, as a fraction.
    """

    logit_difference: float
    accuracy_loss: float

    def problem(self, logit_difference: float, accuracy: float, keras_accuracy: float
                ) -> Optional[str]:
        """What is wrong with a file, or None."""
        if not logit_difference <= self.logit_difference:
            return (f"logits differ by {logit_difference:.2g} from the Keras network's; at most "
                    f"{self.logit_difference:g} is allowed")
        if keras_accuracy - accuracy > self.accuracy_loss + 1e-9:
            return (f"accuracy {accuracy:.4f} is below the Keras network's {keras_accuracy:.4f} by "
                    f"more than {100 * self.accuracy_loss:g} points")
        return None


@dataclasses.dataclass(frozen=True)
class Timing:
    """How fast a file is, one picture at a time, and what memory it takes.

    Attributes:
      latency_ms_median, latency_ms_p90: of `runs` calls, in milliseconds.
      runs: how many there were, after some that do not count.
      threads: the interpreter's.
      peak_memory_bytes: what loading and running the file adds to a process at its peak; None where
        the system does not tell.
    """

    latency_ms_median: float
    latency_ms_p90: float
    runs: int
    threads: int
    peak_memory_bytes: Optional[int]


def load_classifier(path: Union[str, os.PathLike], *, threads: int = 1,
                    interpreter: Any = None) -> Classifier:
    """An exported file as a function from pictures to logits.

    Args:
      path: a .tflite or .keras file or the folder of a SavedModel.
      threads: of the TFLite interpreter.
      interpreter: the class of the interpreter; None for TensorFlow's own.

    Returns:
      A function of uint8[n, size, size, 3]; quantised logits are dequantised. TFLite files run
      one picture after the other.
    """
    path = pathlib.Path(path)
    if path.suffix == ".tflite":
        runner = (interpreter or tf.lite.Interpreter)(model_path=str(path), num_threads=threads)
        runner.allocate_tensors()
        return lambda images: np.concatenate(
            [_interpret(runner, image[np.newaxis]) for image in images])
    if path.suffix == ".keras":
        return keras_classifier(tf.keras.models.load_model(path))
    loaded = tf.saved_model.load(str(path))  # kept by the function, which does not own it
    return lambda images: loaded.signatures["serving_default"](
        image=tf.constant(images))["logits"].numpy()


def keras_classifier(network: tf.keras.Model) -> Classifier:
    """A network that takes raw RGB values as a function from uint8 pictures to logits."""
    images = tf.TensorSpec([None, *network.input_shape[1:]], tf.uint8)
    run = tf.function(lambda images: network(tf.cast(images, tf.float32), training=False),
                      input_signature=[images], autograph=False)
    return lambda images: run(images).numpy()


def all_logits(classify: Classifier, images: np.ndarray, batch_size: int) -> np.ndarray:
    """float32[n, classes] of all pictures, `batch_size` at a time."""
    return np.concatenate([classify(images[start: start + batch_size])
                           for start in range(0, len(images), batch_size)])


def _interpret(runner: Any, images: np.ndarray) -> np.ndarray:
    entry, = runner.get_input_details()
    end, = runner.get_output_details()
    runner.set_tensor(entry["index"], images.astype(entry["dtype"]))
    runner.invoke()
    scale, zero_point = end["quantization"]
    found = runner.get_tensor(end["index"]).astype(np.float32)
    return (found - zero_point) * np.float32(scale) if scale else found


def second_interpreter() -> Any:
    """The interpreter class of ai-edge-litert, TFLite's successor, where that is installed."""
    try:
        return importlib.import_module("ai_edge_litert.interpreter").Interpreter
    except ImportError:
        return None


def time_file(path: Union[str, os.PathLike], image_size: int, *, threads: int) -> Timing:
    """The `Timing` of a file for one picture of random pixels.

    Each file has a process of its own, forked from one that has imported TensorFlow and nothing
    else, so that neither this process' memory nor an earlier file's counts.

    Raises:
      RuntimeError: the process died, for lack of memory say.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with concurrent.futures.ProcessPoolExecutor(1, context, _start) as pool:
        try:
            return pool.submit(_measure, str(path), image_size, threads).result()
        except concurrent.futures.process.BrokenProcessPool as error:
            raise RuntimeError(f"{path}: the process that measured it died; is there enough "
                               "memory?") from error


def _start() -> None:
    """Readies a measuring process: it leaves Ctrl-C to its parent and ends whenever that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # TensorFlow's notes; errors come as exceptions

    def follow():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _memory(field: str) -> int:
    """A field of this process' memory in bytes."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def _forget_peak() -> Optional[int]:
    """Lets the peak of this process' memory begin anew; returns it, None if that cannot be done."""
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        return _memory("VmHWM")
    except (OSError, StopIteration):
        return None


def _measure(path: str, image_size: int, threads: int) -> Timing:
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    image = np.random.default_rng(0).integers(0, 256, (1, image_size, image_size, 3), np.uint8)
    before = _forget_peak()
    classify = load_classifier(path, threads=threads)
    for _ in range(_WARM_UP):
        classify(image)
    seconds: list[float] = []
    while len(seconds) < _LEAST_RUNS or (
            len(seconds) < _MOST_RUNS and sum(seconds) < _LEAST_SECONDS):
        start = time.perf_counter()
        classify(image)
        seconds.append(time.perf_counter() - start)
    peak = None if before is None else _memory("VmHWM") - before
    milliseconds = 1e3 * np.array(seconds)
    return Timing(float(np.median(milliseconds)), float(np.percentile(milliseconds, 90)),
                  len(seconds), threads, peak)
