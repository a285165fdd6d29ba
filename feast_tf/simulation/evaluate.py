"""Evaluates a run: a table, operating_points.csv, classes.csv, evaluation.json, evaluation.html."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, Optional, Union

import tqdm

from feast_tf.files import write_whole
from feast_tf.planning.text import format_table
from feast_tf.report_html import heading, page, paragraph, plot, table
from feast_tf.serving import worst_classes
from feast_tf.simulation import outputs
from feast_tf.simulation.measured import Evaluation, MeasuredPoint, measure_points
from feast_tf.simulation.stored_run import StoredRun, load_run

_COLUMNS = ("variant", "M MACs", "params", "clients", "accuracy", "ECE", "gap")


def evaluate_run(run: Union[str, os.PathLike], *, split: str = "test", uncached: int = 0,
                 draw: str = "random", seed: int = 0,
                 data_dir: Optional[Union[str, os.PathLike]] = None,
                 output_dir: Optional[Union[str, os.PathLike]] = None) -> Evaluation:
    """Evaluates a finished or interrupted run, prints a table and writes the files.

    Nothing is trained, so no TFF runtime is needed: the networks run in this process, on a GPU
    where there is one.

    Args:
      run: the run's folder.
      split, uncached, draw, seed: see `measure_points`.
      data_dir: see `datasets.load`.
      output_dir: where the files go, by default <run>/evaluation. Each is written whole or not at
        all, once everything is measured.

    Raises:
      ValueError: an argument, the run or the data do not fit; one line that names it.
    """
    folder = pathlib.Path(output_dir or pathlib.Path(run) / "evaluation")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; --output_dir must be a folder")
    stored = load_run(run, data_dir=data_dir)
    print(f"{run}: {_weights_text(stored)}", flush=True)
    with tqdm.tqdm(desc=f"{split} accuracy", unit="variant",
                   disable=not sys.stderr.isatty()) as bar:
        evaluation = measure_points(stored, split=split, uncached=uncached, draw=draw,
                                    seed=seed, on_variants=bar.reset, on_point=bar.update)
    outputs.remove_unfinished(folder)  # by an evaluation that was killed
    # Written last: where it is, the other files belong to it.
    (folder / "evaluation.json").unlink(missing_ok=True)
    _write_tables(folder, stored, evaluation)
    write_whole(folder / "evaluation.html", lambda file: file.write(_page(stored, evaluation)))
    content = json.dumps(to_json(stored, evaluation), indent=2)
    write_whole(folder / "evaluation.json", lambda file: file.write(content.encode() + b"\n"))
    print(format_table(_COLUMNS, _rows(evaluation)))
    print("\n".join(_sentences(stored, evaluation)))
    print(f"report: {folder / 'evaluation.html'}")
    return evaluation


def to_json(run: StoredRun, evaluation: Evaluation) -> dict[str, Any]:
    """What evaluation.json holds."""
    config, gap, points = run.experiment.config, evaluation.gap, _points(evaluation)
    records = []
    for measured, curve, difference in zip(points, *_against_curve(evaluation)):
        point, bins = measured.point, measured.reliability
        record = {
            "variant": str(point.variant), "macs": point.macs, "params": point.params,
            "cached": measured.clients is not None, "clients": measured.clients,
            "accuracy": point.accuracy, "ece": bins.error,
            "reliability": {"count": bins.count.tolist(), "confidence": bins.confidence.tolist(),
                            "accuracy": bins.accuracy.tolist()},
            "worst_classes": _named_classes(run, measured)}
        if curve is not None:
            record.update(curve_accuracy=curve, gap=difference)
        records.append(record)
    return {
        "dataset": config.dataset, "rule": config.training.rule, "seed": config.seed,
        "complete": run.complete, "rounds": run.rounds, "weights": run.source,
        "split": evaluation.split, "pictures": int(points[0].confusion.sum()),
        "recalibrated": bool(config.evaluation.recalibrate),
        "population_accuracy": evaluation.population_accuracy,
        "post_hoc": None if gap is None else {
            "variants": len(evaluation.uncached), "draw": evaluation.draw, "seed": evaluation.seed,
            "mean_absolute_gap": gap.mean_absolute, "mean_signed_gap": gap.mean_signed},
        "points": records,
    }


def _weights_text(run: StoredRun) -> str:
    return run.source if run.complete else f"the run is NOT COMPLETE; {run.source}"


def _points(evaluation: Evaluation) -> list[MeasuredPoint]:
    return [*evaluation.cached, *evaluation.uncached]


def _against_curve(evaluation: Evaluation) -> tuple[list, list]:
    """(accuracy of the cached curve, gap from it) of every point; None for cached ones."""
    gap, nothing = evaluation.gap, [None] * len(evaluation.cached)
    if gap is None:
        return nothing, nothing
    return nothing + gap.curve.tolist(), nothing + gap.gap.tolist()


def _named_classes(run: StoredRun, measured: MeasuredPoint) -> list[dict[str, Any]]:
    """The worst classes of a point, by name."""
    names = run.experiment.dataset.classes
    return [{"class": names[found.label], "pictures": found.pictures, "accuracy": found.accuracy,
             "taken_for": {names[other]: share for other, share in found.confusions}}
            for found in worst_classes(measured.confusion)]


def _rows(evaluation: Evaluation) -> list[list[str]]:
    """The rows of the table, with the columns `_COLUMNS`."""
    rows = []
    for measured, difference in zip(_points(evaluation), _against_curve(evaluation)[1]):
        point = measured.point
        rows.append([
            str(point.variant), f"{point.macs / 1e6:.4g}", f"{point.params:,}",
            "uncached" if measured.clients is None else str(measured.clients),
            f"{point.accuracy:.4f}", f"{measured.reliability.error:.4f}",
            "" if difference is None else f"{difference:+.4f}"])
    return rows


def _sentences(run: StoredRun, evaluation: Evaluation) -> list[str]:
    """The results that are no points."""
    lines = [f"population-averaged {evaluation.split} accuracy under largest-affordable serving: "
             f"{evaluation.population_accuracy:.4f}"]
    if evaluation.gap is not None:
        lines.append(
            f"post-hoc gap of {len(evaluation.uncached)} uncached variants ({evaluation.draw}) to "
            "the cached curve: "
            f"{evaluation.gap.mean_absolute:.4f} mean absolute, "
            f"{evaluation.gap.mean_signed:+.4f} mean signed")
    for name, measured in _ends(evaluation):
        worst = "; ".join(
            f"{found['class']} {found['accuracy']:.2f}" + (
                f" (taken for {_taken_for(found)})" if found["taken_for"] else "")
            for found in _named_classes(run, measured)[:3])
        lines.append(f"worst classes of the {name} variant: {worst}")
    return lines


def _ends(evaluation: Evaluation) -> list[tuple[str, MeasuredPoint]]:
    """The smallest and the largest cached variant."""
    cached = evaluation.cached
    return [("smallest", cached[0]), ("largest", cached[-1])][:len(cached)]


def _taken_for(found: dict[str, Any]) -> str:
    return ", ".join(f"{name} {share:.2f}" for name, share in found["taken_for"].items())


def _write_tables(folder: pathlib.Path, run: StoredRun, evaluation: Evaluation) -> None:
    """operating_points.csv, a row for each point, and classes.csv, its worst classes."""
    points, classes = [], []
    number = lambda value: "" if value is None else f"{value:.6f}"
    for measured, curve, difference in zip(_points(evaluation), *_against_curve(evaluation)):
        point = measured.point
        points.append((point.variant, point.macs, point.params, number(point.accuracy), point.split,
                       measured.clients, number(measured.reliability.error), number(curve),
                       number(difference)))
        classes += [(point.variant, point.macs, found["class"], found["pictures"],
                     number(found["accuracy"]), _taken_for(found))
                    for found in _named_classes(run, measured)]
    outputs.write_csv(folder / "operating_points.csv", (
        "variant", "macs", "params", "accuracy", "split", "clients", "ece", "curve_accuracy",
        "gap"), points)
    outputs.write_csv(folder / "classes.csv", (
        "variant", "macs", "class", "pictures", "accuracy", "taken_for"), classes)


def _page(run: StoredRun, evaluation: Evaluation) -> bytes:
    """evaluation.html."""
    def accuracy_by_macs(axes):
        for points, style, label in ((evaluation.cached, ".-", "cached variants"),
                                     (evaluation.uncached, "x", "uncached variants")):
            if points:
                axes.plot([measured.point.macs / 1e6 for measured in points],
                          [measured.point.accuracy for measured in points], style, label=label)

    def reliability(axes):
        axes.plot([0, 1], [0, 1], ":", color="gray")
        for name, measured in _ends(evaluation):
            bins = measured.reliability
            used = bins.count > 0
            axes.plot(bins.confidence[used], bins.accuracy[used], ".-", label=f"{name} variant")

    split = evaluation.split
    parts = [
        *(paragraph(line) for line in (_weights_text(run), *_sentences(run, evaluation))),
        heading("Accuracy by cost"),
        plot(accuracy_by_macs, "MACs of one example (millions)", f"{split} accuracy"),
        heading("Calibration"),
        paragraph("A dot is a bin of predictions of similar confidence; on the dotted line they "
                  "are right as often as they are sure. ECE is the mean distance from it, over "
                  f"{len(evaluation.cached[0].reliability.count)} bins of equal width."),
        plot(reliability, "confidence", f"{split} accuracy"),
        heading("All variants"),
        table(_COLUMNS, _rows(evaluation)),
    ]
    for name, measured in _ends(evaluation):
        parts += [heading(f"Worst classes of the {name} variant"),
                  table(("class", "pictures", f"{split} accuracy", "taken for"),
                        [(found["class"], found["pictures"], f"{found['accuracy']:.4f}",
                          _taken_for(found)) for found in _named_classes(run, measured)])]
    return page(f"Evaluation of FEAST on {run.experiment.config.dataset}", parts)
