"""report.html: one page with the tables and plots of a run, readable without a network."""

from __future__ import annotations

import csv
import pathlib
from collections.abc import Sequence

from feast_tf.files import write_whole
from feast_tf.report_html import heading, page, plot, table
from feast_tf.serving import OperatingPoint
from feast_tf.simulation.experiment import Experiment
from feast_tf.simulation.outputs import BudgetGroup


def _columns(rows: Sequence[dict], prefix: str) -> dict[str, tuple[list[int], list[float]]]:
    """Columns of metrics.csv that start with `prefix`: name -> (rounds, values)."""
    found = {}
    for name in rows[0] if rows else ():
        if name.startswith(prefix):
            pairs = [(int(float(row["round_num"])), float(row[name])) for row in rows
                     if row.get(name)]
            found[name[len(prefix):]] = tuple(map(list, zip(*pairs))) or ([], [])
    return found


def write_report(folder: pathlib.Path, experiment: Experiment, points: Sequence[OperatingPoint],
                 groups: Sequence[BudgetGroup], summary: dict) -> None:
    """Writes report.html to a run's folder, from its results and its metrics.csv.

    Args:
      folder: the run's.
      experiment: what was run.
      points: test points of the whole cache, in its order.
      groups: the budget groups of the final table.
      summary: what summary.json says.
    """
    with open(folder / "metrics.csv", newline="") as file:
        rounds = list(csv.DictReader(file))

    def accuracy_by_macs(axes):
        axes.plot([p.macs / 1e6 for p in points], [p.accuracy for p in points], "o-",
                  label="cached variants")

    def lines(prefix):
        def draw(axes):
            for name, (x, y) in _columns(rounds, prefix).items():
                axes.plot(x, y, label=name.replace("_", " "))
        return draw

    parts = [
        table(("setting", "value"), [(key, f"{value:.4f}" if isinstance(value, float) else value)
                                     for key, value in summary.items()]),
        heading("Test accuracy of the operating points"),
        plot(accuracy_by_macs, "MACs of one example (millions)", "test accuracy"),
        heading("What each budget is served"),
        table(("budgets (M MACs)", "served (M MACs)", "parameters", "clients", "accuracy",
               "variant"),
              [(f"{g.lowest / 1e6:.4g} - {g.highest / 1e6:.4g}", f"{g.point.macs / 1e6:.4g}",
                f"{g.point.params:,}", g.clients, f"{g.point.accuracy:.4f}", g.point.variant)
               for g in groups]),
        heading("Training"),
        plot(lines("client_work/train/loss_"), "round", "supervised loss on the clients"),
        plot(lines("validation/accuracy_"), "round", "validation accuracy of the anchors"),
        heading("All cached variants"),
        table(("variant", "MACs", "parameters", "test accuracy"),
              [(p.variant, f"{p.macs:,}", f"{p.params:,}", f"{p.accuracy:.4f}") for p in points]),
    ]
    write_whole(folder / "report.html", lambda file: file.write(
        page(f"FEAST on {experiment.config.dataset}", parts)))
