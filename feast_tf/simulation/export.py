"""Exports networks of a finished run to a folder: files, export.json, export.html, a table."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Optional, Union

import tqdm
from absl import logging

from feast_tf import report_html
from feast_tf.files import write_whole
from feast_tf.planning.text import format_table
from feast_tf.serving import (Exporter, ExportRecord, ExportRequest, ExportSettings, choose,
                              export_trainable, load_supernet)
from feast_tf.simulation import outputs
from feast_tf.simulation.stored_run import load_run, read_config

_COLUMNS = ("file", "format", "M MACs", "params", "bytes", "accuracy", "of Keras", "logits differ",
            "ms median", "ms p90", "peak MB")


def export_run(run: Union[str, os.PathLike], request: ExportRequest, settings: ExportSettings, *,
               trainable: bool = False,
               output_dir: Optional[Union[str, os.PathLike]] = None,
               data_dir: Optional[Union[str, os.PathLike]] = None) -> list[ExportRecord]:
    """Exports, checks and measures networks of a finished run; prints the table.

    Args:
      run: the run's folder.
      request: which networks.
      settings: which files.
      trainable: also write level_<place in the cache>_train.tflite for each network, with which a
        client of that budget trains on its device (see `serving.export_trainable`).
      output_dir: where to, by default <run>/export. All files appear at the end or not at all; of
        earlier exports only files of the same names are replaced.
      data_dir: see `datasets.load`.

    Returns:
      A record for each file, as in export.json.

    Raises:
      ValueError: the run, the request or the data do not fit; one line. Also, after everything was
        written, that a file exceeds its bound; the message names it.
    """
    run = pathlib.Path(run)
    if not run.is_dir():
        raise ValueError(f"there is no run {run}")
    read_config(run)
    if outputs.read_summary(run) is None:
        raise ValueError(f"{run} is not finished: it has no summary.json; the command that started "
                         "it goes on with it")
    saved, experiment = load_supernet(run / "model"), load_run(run, data_dir=data_dir).experiment
    settings = dataclasses.replace(settings, batch_size=experiment.config.evaluation.batch_size)
    exporter = Exporter(saved, experiment.dataset, settings)
    folder = pathlib.Path(output_dir or run / "export")
    with _staged(folder) as stage:
        with contextlib.ExitStack() as stack:
            scratch = stage / "trials"
            scratch.mkdir()
            stack.callback(shutil.rmtree, scratch)
            choices = choose(saved.cache, request, exporter.trials(scratch))
        uncached = [choice.variant for choice in choices if choice.level is None]
        if trainable and uncached:
            raise ValueError(f"{uncached[0]} is not in the run's cache, so no client trains it: "
                             "leave out --trainable, or name a cached variant")
        for choice in choices:
            logging.info("exporting %s: %s", choice.variant, choice.reason)
            if choice.level is None:
                logging.warning("%s is not in the run's cache: it was trained only as a part of "
                                "other variants", choice.variant)
        with tqdm.tqdm(total=len(choices) * len(settings.formats), desc="export", unit="file",
                       disable=not sys.stderr.isatty()) as bar:
            records = exporter.export(choices, stage, on_file=lambda record: _report(record, bar))
        for level in sorted({choice.level for choice in choices}) if trainable else ():
            export_trainable(saved, level, stage / f"level_{level}_train.tflite",
                             training=experiment.training)
        _write_report(stage, records)
    print(format_table(_COLUMNS, [_row(record) for record in records]))
    print(f"files: {folder}, records: {folder / 'export.json'}, report: {folder / 'export.html'}")
    problems = [f"{record.path}: {record.problem}" for record in records if record.problem]
    if problems:
        raise ValueError("; ".join(problems))
    return records


def _report(record: ExportRecord, bar: tqdm.tqdm) -> None:
    bar.update()
    if bar.disable:
        logging.info("%s: %d bytes, accuracy %.4f, %.3g ms", record.path, record.bytes,
                     record.accuracy, record.latency_ms_median)


@contextlib.contextmanager
def _staged(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder inside `folder` whose content moves to `folder` when all of it is there."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; --output_dir must be a folder")
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".export.*"):  # by an export that was killed
        if not pathlib.Path(f"/proc/{left.name.rpartition('.')[2]}").exists():
            shutil.rmtree(left)
    stage = folder / f".export.{os.getpid()}"
    try:
        stage.mkdir()
        yield stage
        for path in sorted(stage.iterdir(), key=lambda path: path.name.startswith("export.")):
            target = folder / path.name
            if target.is_dir():  # only an empty folder can be replaced
                shutil.rmtree(target)
            path.replace(target)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        if new:
            with contextlib.suppress(OSError):  # not empty: the files are there
                folder.rmdir()


def _row(record: ExportRecord) -> list[str]:
    memory = record.peak_memory_bytes
    return [record.path, record.format, f"{record.macs / 1e6:.4g}", f"{record.params:,}",
            f"{record.bytes:,}", f"{record.accuracy:.4f}", f"{record.keras_accuracy:.4f}",
            f"{record.max_logit_difference:.2g}", f"{record.latency_ms_median:.3g}",
            f"{record.latency_ms_p90:.3g}", "" if memory is None else f"{memory / 1e6:.1f}"]


def _write_report(folder: pathlib.Path, records: Sequence[ExportRecord]) -> None:
    """export.json and export.html."""
    text = json.dumps([dataclasses.asdict(record) for record in records], indent=2)
    write_whole(folder / "export.json", lambda file: file.write(text.encode() + b"\n"))

    def accuracy_by(value):
        def draw(axes):
            for name in dict.fromkeys(record.format for record in records):
                own = [record for record in records if record.format == name]
                areas = [20 + 400 * record.bytes / max(r.bytes for r in records) for record in own]
                axes.scatter([value(record) for record in own],
                             [record.accuracy for record in own], areas, alpha=0.6, label=name)
            axes.set_xscale("log")
        return draw

    threads = f"{records[0].threads} thread{'' if records[0].threads == 1 else 's'}"
    parts = [
        report_html.paragraph(
            f"Accuracy on {records[0].test_pictures:,} test pictures. Latency is that of one "
            f"picture on this machine with {threads}; peak memory is what loading and running the "
            "file adds to a process."),
        report_html.table(_COLUMNS, [_row(record) for record in records]),
        report_html.heading("Accuracy, latency and size (the area of a dot)"),
        report_html.plot(accuracy_by(lambda record: record.latency_ms_median),
                         "median latency of one picture (ms)", "test accuracy"),
        report_html.heading("Accuracy and size"),
        report_html.plot(accuracy_by(lambda record: record.bytes / 1e6), "size of the file (MB)",
                         "test accuracy"),
        report_html.heading("What each network was chosen for"),
        report_html.table(("variant", "M MACs", "chosen for"), list(dict.fromkeys(
            (record.variant, f"{record.macs / 1e6:.4g}", record.reason) for record in records)))]
    write_whole(folder / "export.html",
                lambda file: file.write(report_html.page("Exported networks", parts)))
