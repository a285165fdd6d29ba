"""The files of a run: what is written at its start and at its end, each whole or not at all."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import pathlib
from collections.abc import Sequence
from typing import Any, Optional

import ml_collections
import numpy as np

from feast_tf.files import write_whole
from feast_tf.serving import OperatingPoint, population_accuracy
from feast_tf.simulation.experiment import Experiment


@dataclasses.dataclass(frozen=True)
class BudgetGroup:
    """The clients that one variant serves; a row of the final table.

    Attributes:
      lowest, highest: their budgets in MACs.
      point: the served operating point.
      clients: how many they are.
    """

    lowest: float
    highest: float
    point: OperatingPoint
    clients: int


def _differences(old: Any, new: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [found for key in sorted({*old, *new})
                for found in _differences(old.get(key), new.get(key), f"{prefix}.{key}")]
    return [] if old == new else [(prefix[1:], old, new)]


def claim_folder(folder: pathlib.Path, config: ml_collections.ConfigDict) -> None:
    """Writes config.json to a new folder, or checks that the folder's run has the same settings.

    Raises:
      ValueError: another run's folder; the message names the first setting that differs.
    """
    text = json.dumps(config.to_dict(), indent=2, sort_keys=True)
    path = folder / "config.json"
    if path.exists():
        different = _differences(json.loads(path.read_text()), json.loads(text))
        if different:
            key, old, new = different[0]
            raise ValueError(f"{folder} holds a run with other settings ({key} is {old!r} there, "
                             f"{new!r} here); choose another --output_dir")
        return
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; --output_dir must be a folder")
    write_whole(path, lambda file: file.write(text.encode() + b"\n"))


def read_summary(folder: pathlib.Path) -> Optional[dict]:
    """summary.json of a finished run, else None."""
    path = folder / "summary.json"
    return json.loads(path.read_text()) if path.exists() else None


def _write_csv(path: pathlib.Path, columns: Sequence[str], rows: Sequence[Sequence]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    write_whole(path, lambda file: file.write(text.getvalue().encode()))


def write_operating_points(folder: pathlib.Path, points: Sequence[OperatingPoint]) -> None:
    """operating_points.csv."""
    _write_csv(folder / "operating_points.csv", ("variant", "macs", "params", "accuracy", "split"),
               [(p.variant, p.macs, p.params, f"{p.accuracy:.6f}", p.split) for p in points])


def write_clients(folder: pathlib.Path, experiment: Experiment,
                  points: Sequence[OperatingPoint]) -> None:
    """clients.csv: budget, n_i, served variant, accuracy, payload; `points` are of the whole cache."""
    rows = []
    for client, level in zip(experiment.clients, experiment.levels):
        point = points[level]
        envelope = experiment.routing.envelope(int(level))
        rows.append((client.id, f"{client.budget:.0f}", client.num_samples, point.variant,
                     point.macs, f"{point.accuracy:.6f}", envelope.payload,
                     envelope.payload_bytes))
    _write_csv(folder / "clients.csv",
               ("client", "budget_macs", "num_samples", "served_variant", "served_macs", "accuracy",
                "payload_params", "payload_bytes"), rows)


def summarize(experiment: Experiment, points: Sequence[OperatingPoint], *, rounds: int,
              best_round: int, bytes_down: int, bytes_up: int, seconds: float) -> dict:
    """summary.json: `points` are the test points of the whole cache, in its order."""
    accuracies = [point.accuracy for point in points]
    return {
        "dataset": experiment.config.dataset, "rule": experiment.config.training.rule,
        "seed": experiment.config.seed, "rounds": rounds, "best_round": best_round,
        "population_accuracy": population_accuracy(experiment.levels, accuracies),
        "smallest_accuracy": accuracies[0], "largest_accuracy": accuracies[-1],
        "recalibrated": bool(experiment.config.evaluation.recalibrate),
        "bytes_down": bytes_down, "bytes_up": bytes_up, "seconds": round(seconds, 3),
    }


def write_summary(folder: pathlib.Path, summary: dict) -> None:
    """summary.json, the last file of a run: where it is, the run is finished."""
    write_whole(folder / "summary.json",
                lambda file: file.write(json.dumps(summary, indent=2).encode() + b"\n"))


def budget_groups(experiment: Experiment, points: Sequence[OperatingPoint]) -> list[BudgetGroup]:
    """The clients by the variant that serves them; `points` are of the whole cache, in its order."""
    budgets = np.array([client.budget for client in experiment.clients])
    groups = []
    for level in np.unique(experiment.levels):
        members = budgets[experiment.levels == level]
        groups.append(BudgetGroup(members.min(), members.max(), points[level], len(members)))
    return groups


def format_table(groups: Sequence[BudgetGroup], population: float) -> str:
    """The final table for a terminal."""
    lines = [f"{'budget (M MACs)':>18}  {'served (M MACs)':>15}  {'params':>11}  {'clients':>7}  "
             f"{'test accuracy':>13}  variant"]
    for group in groups:
        low, high = group.lowest / 1e6, group.highest / 1e6
        budget = f"{low:.4g}" if low == high else f"{low:.4g} - {high:.4g}"
        point = group.point
        lines.append(f"{budget:>18}  {point.macs / 1e6:>15.4g}  {point.params:>11,}  "
                     f"{group.clients:>7}  {point.accuracy:>13.4f}  {point.variant}")
    lines.append(f"population-averaged test accuracy under largest-affordable serving: "
                 f"{population:.4f}")
    return "\n".join(lines)
