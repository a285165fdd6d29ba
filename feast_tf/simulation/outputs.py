"""The files of a run: what is written at its start and at its end, each whole or not at all."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import fcntl
import io
import json
import pathlib
import re
import shutil
from collections.abc import Iterator, Sequence
from typing import Any, Optional

import ml_collections
import numpy as np
import tensorflow_federated as tff

from feast_tf.files import write_whole
from feast_tf.serving import OperatingPoint, population_accuracy
from feast_tf.simulation.experiment import Experiment


# Names of files and folders that `write_whole` and TFF's managers rename when they are complete.
_UNFINISHED = re.compile(r"\..+\.(csv|html|json|npz)\.\d+|(metrics\.csv|round_\d+)_temp\d+")


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

    def budget_text(self) -> str:
        """The budgets in millions of MACs, for people."""
        low, high = (f"{budget / 1e6:.4g}" for budget in (self.lowest, self.highest))
        return low if low == high else f"{low} - {high}"


def _differences(old: Any, new: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [found for key in sorted({*old, *new})
                for found in _differences(old.get(key), new.get(key), f"{prefix}.{key}")]
    return [] if old == new else [(prefix[1:], old, new)]


def _read_json(path: pathlib.Path) -> Optional[dict]:
    """The object in a file, None where there is no file; ValueError, naming it, for all else."""
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); choose another --output_dir") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a file of this program; choose another --output_dir")
    return found


def check_folder(folder: pathlib.Path, config: ml_collections.ConfigDict) -> None:
    """Checks that a folder is new, or of a run with the same settings.

    Raises:
      ValueError: it is not; the message names the first setting that differs.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; --output_dir must be a folder")
    there = _read_json(folder / "config.json")
    if there is None:
        if (folder / "summary.json").exists():
            raise ValueError(f"{folder} holds a summary.json but no config.json of a run; choose "
                             "another --output_dir")
        return
    here = json.loads(json.dumps(config.to_dict()))
    for key, old, new in _differences(there, here)[:1]:
        raise ValueError(f"{folder} holds a run with other settings ({key} is {old!r} there, "
                         f"{new!r} here); choose another --output_dir")


def remove_unfinished(folder: pathlib.Path) -> None:
    """Removes what was being written to a folder when a program was killed."""
    for path in [*folder.glob("*"), *folder.glob("checkpoints/*"), *folder.glob("model/*")]:
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextlib.contextmanager
def claimed(folder: pathlib.Path, config: ml_collections.ConfigDict) -> Iterator[None]:
    """Keeps other runs out of a folder, which is made, with config.json, where it is new.

    Removes what was being written when this run, or an earlier one, was stopped. The lock ends with
    the process, however that ends.

    Raises:
      ValueError: a run is at work in the folder, or `check_folder` refuses it.
      OSError: nothing can be written there.
    """
    check_folder(folder, config)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another run is at work in {folder}; wait for it, or choose another "
                             "--output_dir") from error
        check_folder(folder, config)  # again, now that nobody else can change it
        remove_unfinished(folder)  # of a run that was killed
        if not (folder / "config.json").exists():
            text = json.dumps(config.to_dict(), indent=2, sort_keys=True)
            write_whole(folder / "config.json", lambda file: file.write(text.encode() + b"\n"))
        try:
            yield
        finally:
            remove_unfinished(folder)


def metrics_manager(path: pathlib.Path) -> tff.program.CSVFileReleaseManager:
    """Writes metrics.csv, one row a round.

    Raises:
      ValueError: the file is there and is not such a table; the message names it.
    """
    # Appending is not atomic: half a row of a full disk would stay.
    mode = tff.program.CSVSaveMode.WRITE
    try:
        return tff.program.CSVFileReleaseManager(path, mode, key_fieldname="round_num")
    except (ValueError, tff.program.CSVKeyFieldnameNotFoundError) as error:
        raise ValueError(f"{path} is damaged: it has no whole numbers round_num; move it away to "
                         "go on without the metrics of earlier rounds") from error


def read_summary(folder: pathlib.Path) -> Optional[dict]:
    """summary.json of a finished run, else None; ValueError where it is damaged."""
    return _read_json(folder / "summary.json")


def write_csv(path: pathlib.Path, columns: Sequence[str], rows: Sequence[Sequence]) -> None:
    """A CSV file, whole or not at all."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    write_whole(path, lambda file: file.write(text.getvalue().encode()))


def write_operating_points(folder: pathlib.Path, points: Sequence[OperatingPoint]) -> None:
    """operating_points.csv."""
    write_csv(folder / "operating_points.csv", ("variant", "macs", "params", "accuracy", "split"),
               [(p.variant, p.macs, p.params, f"{p.accuracy:.6f}", p.split) for p in points])


def write_clients(folder: pathlib.Path, experiment: Experiment,
                  points: Sequence[OperatingPoint]) -> None:
    """clients.csv: budget, n_i, served variant, accuracy, payload; `points`: of the whole cache."""
    rows = []
    for client, level in zip(experiment.clients, experiment.levels):
        point = points[level]
        envelope = experiment.routing.envelope(int(level))
        rows.append((client.id, f"{client.budget:.0f}", client.num_samples, point.variant,
                     point.macs, f"{point.accuracy:.6f}", envelope.payload,
                     envelope.payload_bytes))
    write_csv(folder / "clients.csv",
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
    """The clients by the variant that serves them; `points`: of the whole cache, in its order."""
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
        point = group.point
        lines.append(f"{group.budget_text():>18}  {point.macs / 1e6:>15.4g}  {point.params:>11,}  "
                     f"{group.clients:>7}  {point.accuracy:>13.4f}  {point.variant}")
    lines.append(f"population-averaged test accuracy under largest-affordable serving: "
                 f"{population:.4f}")
    return "\n".join(lines)
