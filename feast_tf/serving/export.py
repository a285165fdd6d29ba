"""Plain networks of any size out of one trained supernet, as files that are checked one by one.

The networks are fixed-width Keras models without a trace of the elastic machinery. They take raw
RGB values 0..255 and return logits; batch normalisation is that of the operating point,
recalibrated on server-held pictures (paper 4.1, "Post-hoc extraction").
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Optional

import numpy as np
import tensorflow as tf

import feast_tf
from feast_tf.datasets import Dataset, Split
from feast_tf.files import write_whole
from feast_tf.routing import Routing
from feast_tf.serving import check, tflite
from feast_tf.serving.choice import Choice, Trials
from feast_tf.serving.evaluation import Evaluator, share_correct
from feast_tf.serving.saved import SavedSupernet
from feast_tf.space import Variant, costs, layout_of
from feast_tf.supernet import extract


@dataclasses.dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
      ending: of the file's name.
      kind: of the TFLite conversion, None for Keras' and TensorFlow's own formats.
      bytes_per_weight: no file has fewer bytes for each weight of its kernels.
      bound: how far the file may be from the Keras network.
    """

    ending: str
    kind: Optional[str]
    bytes_per_weight: int
    bound: check.Bound


_EXACT = check.Bound(logit_difference=1e-4, accuracy_loss=0.0)
FORMATS = {
    "keras": Format(".keras", None, 4, _EXACT),
    "savedmodel": Format("_savedmodel", None, 4, _EXACT),
    "tflite": Format(".tflite", "float32", 4, _EXACT),
    "tflite_fp16": Format("_fp16.tflite", "float16", 2, check.Bound(math.inf, 0.003)),
    "tflite_dynamic": Format("_dynamic.tflite", "dynamic", 1, check.Bound(math.inf, 0.015)),
    "tflite_int8": Format("_int8.tflite", "int8", 1, check.Bound(math.inf, 0.015)),
}


@dataclasses.dataclass(frozen=True)
class ExportSettings:
    """How files are made and measured.

    Attributes:
      formats: names in `FORMATS`.
      batch: pictures in a call of a TFLite file; None for any number. Keras files and SavedModels
        take any number.
      int8_input: type of the pictures and logits of "tflite_int8", "uint8" or "float32".
      threads: of the TFLite interpreter.
      license: what the metadata say of the terms of use.
      calibration_pictures: most server-held pictures that the ranges of int8 are found with.
      test_pictures: most test pictures that files are checked with; None for all.
      batch_size: pictures in a batch of recalibration and of the Keras network's evaluation.

    Raises:
      ValueError: an unknown format or type, or none.
    """

    formats: tuple[str, ...] = ("keras", "tflite", "tflite_int8")
    batch: Optional[int] = 1
    int8_input: str = "uint8"
    threads: int = 1
    license: str = ""
    calibration_pictures: int = 200
    test_pictures: Optional[int] = None
    batch_size: int = 250

    def __post_init__(self):
        object.__setattr__(self, "formats", tuple(dict.fromkeys(self.formats)))
        if not self.formats:
            raise ValueError(f"formats must name at least one of {', '.join(FORMATS)}")
        for name in self.formats:
            if name not in FORMATS:
                raise ValueError(f"unknown format {name!r}; there are {', '.join(FORMATS)}")
        if self.int8_input not in ("uint8", "float32"):
            raise ValueError(f"int8_input must be uint8 or float32, but is {self.int8_input!r}")


@dataclasses.dataclass(frozen=True)
class ExportRecord:
    """One exported file and what was measured; an object in export.json.

    Attributes:
      path: of the file, in the export's folder.
      format: its name in `FORMATS`.
      variant, level, reason: as in `Choice`.
      macs, params: multiply-accumulates of one picture and parameters of the network.
      bytes, sha256: of the file; of a SavedModel, of all its files in the order of their names.
      max_logit_difference: to the Keras network before it was written, over all test pictures.
      accuracy, keras_accuracy: shares of test pictures that the file and the Keras network
        classify right, 0..1.
      test_pictures: how many there were.
      latency_ms_median, latency_ms_p90, latency_runs, threads, peak_memory_bytes: see
        `check.Timing`.
      litert_logit_difference: largest difference of ai-edge-litert's logits to those of
        TensorFlow's interpreter; None where that is not installed.
      problem: what is wrong with the file, or None.
    """

    path: str
    format: str
    variant: str
    level: Optional[int]
    reason: str
    macs: int
    params: int
    bytes: int
    sha256: str
    max_logit_difference: float
    accuracy: float
    keras_accuracy: float
    test_pictures: int
    latency_ms_median: float
    latency_ms_p90: float
    latency_runs: int
    threads: int
    peak_memory_bytes: Optional[int]
    litert_logit_difference: Optional[float]
    problem: Optional[str]


class Exporter:
    """Makes, checks and measures the files of one trained supernet."""

    def __init__(self, saved: SavedSupernet, dataset: Dataset,
                 settings: ExportSettings = ExportSettings()):
        """Args:
          saved: the supernet.
          dataset: the run's; its server split recalibrates and calibrates, its test split checks.
          settings: see there.

        Raises:
          ValueError: the data set is not the one that the supernet was trained on.
        """
        if saved.classes != dataset.classes:
            there, here = next(
                pair for pair in itertools.zip_longest(saved.classes, dataset.classes)
                if pair[0] != pair[1])
            raise ValueError(f"the run was trained on {len(saved.classes)} classes, but the data "
                             f"set has {len(dataset.classes)}; the first that differs is "
                             f"{there!r} there and {here!r} here")
        if not np.allclose([saved.mean, saved.std], [dataset.mean, dataset.std], rtol=0, atol=1e-6):
            raise ValueError(f"the pictures of {dataset.name} are not those that the run was "
                             "trained on: their mean or deviation differs; check the data folder")
        self.saved, self.dataset, self.settings = saved, dataset, settings
        self._test = _spread(dataset.test, settings.test_pictures or len(dataset.test))
        self._weights = [tf.convert_to_tensor(weight, tf.float32) for weight in saved.weights]
        self._evaluator = Evaluator(Routing(saved.cache), dataset.server.images, mean=saved.mean,
                                    std=saved.std, batch_size=settings.batch_size)

    def network(self, variant: Variant) -> tf.keras.Model:
        """The plain Keras network of a variant: float32[batch, size, size, 3] in 0..255 to logits.

        Raises:
          ValueError: the variant is not in the space.
        """
        moments = self._evaluator.moments(self._weights, layout_of(self.saved.spec).dims(variant))
        return extract(self.saved.spec, self.saved.weights, variant, moments,
                       normalization=(self.saved.mean, self.saved.std),
                       name=f"feast_{self.dataset.name}")

    def trials(self, scratch: pathlib.Path) -> Trials:
        """How `choose` tries candidates: by files of the first format, made in `scratch`."""
        name, threads = self.settings.formats[0], self.settings.threads

        def made(variant: Variant) -> pathlib.Path:
            path = scratch / f"trial{FORMATS[name].ending}"
            details = self._details(variant, 0.123456)  # as many digits as any accuracy has
            self._write(path, name, self.network(variant), details=details)
            return path

        return Trials(
            f"{name}, {threads} thread{'' if threads == 1 else 's'}",
            FORMATS[name].bytes_per_weight, lambda variant: _size(made(variant)),
            lambda variant: self._time(made(variant)).latency_ms_median)

    def export(self, choices: Sequence[Choice], folder: pathlib.Path,
               on_file: Callable[[ExportRecord], object] = lambda record: None
               ) -> list[ExportRecord]:
        """Writes a file of each format for each choice, and <name>.json with its metadata.

        Args:
          choices: what to export.
          folder: where to; it is filled file by file.
          on_file: called with each record as its file is done.
        """
        records, stems = [], set()
        for choice in choices:
            stem = f"{self.dataset.name}_{costs.macs(self.saved.spec, choice.variant) / 1e6:.6g}M"
            while stem in stems:  # networks of equal MACs
                stem += "_other"
            stems.add(stem)
            network = self.network(choice.variant)
            logits = self._logits(check.keras_classifier(network))
            details = self._details(choice.variant, share_correct(logits, self._test.labels))
            write_whole(folder / f"{stem}.json", lambda file: file.write(
                json.dumps(details, indent=2).encode() + b"\n"))
            for name in self.settings.formats:
                path = folder / f"{stem}{FORMATS[name].ending}"
                self._write(path, name, network, details=details)
                records.append(self._record(path, name, choice, logits))
                on_file(records[-1])
        return records

    def _logits(self, classify: check.Classifier) -> np.ndarray:
        return check.all_logits(classify, self._test.images, self.settings.batch_size)

    def _details(self, variant: Variant, accuracy: float) -> dict[str, Any]:
        """The metadata of a network, the same in all its files."""
        spec, data = self.saved.spec, self.dataset
        macs, params = costs.macs(spec, variant), costs.params(spec, variant)
        return {
            "name": f"FEAST on {data.name}, {macs / 1e6:.4g}M MACs",
            "description": f"Classifies pictures into the {len(data.classes)} classes of "
                           f"{data.name}. Input: one RGB picture of {spec.image_size}x"
                           f"{spec.image_size}, values 0..255. Output: logits.",
            "version": feast_tf.__version__,
            "license": self.settings.license or f"not stated; see the terms of {data.name}",
            "dataset": data.name, "labels": list(self.saved.classes),
            "variant": dataclasses.asdict(variant), "space": dataclasses.asdict(spec),
            "macs": macs, "params": params, "test_accuracy": round(accuracy, 6),
            "test_pictures": len(self._test)}

    def _write(self, path: pathlib.Path, name: str, network: tf.keras.Model, *,
               details: dict[str, Any]) -> None:
        """Writes one file."""
        kind, settings = FORMATS[name].kind, self.settings
        if name == "keras":
            network.save(path)
        elif name == "savedmodel":
            module, function = tflite.serving_function(network, batch=None)
            tf.saved_model.save(module, str(path), signatures=function)
        else:
            samples = _spread(self.dataset.server, settings.calibration_pictures).images
            content = tflite.convert(network, kind, samples=samples, batch=settings.batch,
                                     int8_input=settings.int8_input)
            content = tflite.with_metadata(content, labels=self.saved.classes, details=details)
            write_whole(path, lambda file: file.write(content))

    def _time(self, path: pathlib.Path) -> check.Timing:
        return check.time_file(path, self.saved.spec.image_size, threads=self.settings.threads)

    def _record(self, path: pathlib.Path, name: str, choice: Choice, expected: np.ndarray
                ) -> ExportRecord:
        """Runs a file on all test pictures, and measures it."""
        labels, threads = self._test.labels, self.settings.threads
        found, litert = self._logits(check.load_classifier(path, threads=threads)), None
        if path.suffix == ".tflite" and (interpreter := check.second_interpreter()):
            again = self._logits(check.load_classifier(path, threads=threads,
                                                       interpreter=interpreter))
            litert = float(np.abs(again - found).max())
        accuracy, keras_accuracy = share_correct(found, labels), share_correct(expected, labels)
        difference = float(np.abs(found - expected).max())
        timing = self._time(path)
        return ExportRecord(
            path=path.name, format=name, variant=str(choice.variant), level=choice.level,
            reason=choice.reason, macs=costs.macs(self.saved.spec, choice.variant),
            params=costs.params(self.saved.spec, choice.variant), bytes=_size(path),
            sha256=_sha256(path), max_logit_difference=difference, accuracy=accuracy,
            keras_accuracy=keras_accuracy, test_pictures=len(labels),
            latency_ms_median=timing.latency_ms_median, latency_ms_p90=timing.latency_ms_p90,
            latency_runs=timing.runs, threads=timing.threads,
            peak_memory_bytes=timing.peak_memory_bytes, litert_logit_difference=litert,
            problem=FORMATS[name].bound.problem(difference, accuracy, keras_accuracy))


def _spread(split: Split, count: int) -> Split:
    """At most `count` pictures, spread evenly over a split."""
    places = np.linspace(0, len(split) - 1, min(count, len(split)))
    return split.take(places.astype(int))


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def _size(path: pathlib.Path) -> int:
    return sum(file.stat().st_size for file in _files(path))


def _sha256(path: pathlib.Path) -> str:
    digest = hashlib.sha256()
    for file in _files(path):
        digest.update(file.read_bytes())
    return digest.hexdigest()
