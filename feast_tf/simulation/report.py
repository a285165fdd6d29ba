"""report.html: one page with the tables and plots of a run, readable without a network."""

from __future__ import annotations

import csv
import pathlib
from collections.abc import Sequence

from feast_tf.files import write_whole
from feast_tf.report_html import heading, page, paragraph, plot, table
from feast_tf.serving import OperatingPoint
from feast_tf.simulation.experiment import Experiment
from feast_tf.simulation.outputs import BudgetGroup


def _columns(rows: Sequence[dict], prefix: str, missing: str = ""
             ) -> dict[str, tuple[list[int], list[float]]]:
    """Columns of metrics.csv that start with `prefix`: name -> (rounds, values).

    Cells that are empty or `missing` are left out.
    """
    found = {}
    for name in rows[0] if rows else ():
        if name.startswith(prefix):
            kept = [row for row in rows if row[name] not in ("", None, missing)]
            found[name[len(prefix):]] = ([int(row["round_num"]) for row in kept],
                                         [float(row[name]) for row in kept])
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
        for shown, style, label in ((points, ".-", "cached variants"),
                                    ([group.point for group in groups], "o", "served to clients")):
            axes.plot([p.macs / 1e6 for p in shown], [p.accuracy for p in shown], style,
                      label=label)

    def lines(columns, label):
        def draw(axes):
            for name, (x, y) in columns.items():
                axes.plot(x, y, ".-", label=label.format(name.replace("_", " ")))
        return draw

    # A role that no mini-batch of a round trained has a loss of exactly 0.
    losses = _columns(rounds, "client_work/train/loss_", missing="0.0")
    parts = [
        table(("result", ""), [
            ("population-averaged test accuracy", f"{summary['population_accuracy']:.4f}"),
            ("test accuracy of the smallest variant", f"{summary['smallest_accuracy']:.4f}"),
            ("test accuracy of the largest variant", f"{summary['largest_accuracy']:.4f}"),
            ("rounds (the best in validation)", f"{summary['rounds']} ({summary['best_round']})"),
            ("sent to clients, received from clients",
             f"{summary['bytes_down'] / 1e6:,.1f} MB, {summary['bytes_up'] / 1e6:,.1f} MB"),
            ("time of the rounds", f"{summary['seconds']:,.0f} s"),
            ("training rule", summary["rule"]), ("seed", summary["seed"]),
            ("moments recalibrated for each variant", "yes" if summary["recalibrated"] else "no")]),
        paragraph("The population average is over clients, each served its largest affordable "
                  "variant. All settings are in config.json, all rounds in metrics.csv."),
        heading("Test accuracy of the operating points"),
        plot(accuracy_by_macs, "MACs of one example (millions)", "test accuracy"),
        heading("What each budget is served"),
        table(("budget (M MACs)", "served (M MACs)", "parameters", "clients", "test accuracy",
               "variant"),
              [(group.budget_text(), f"{group.point.macs / 1e6:.4g}", f"{group.point.params:,}",
                group.clients, f"{group.point.accuracy:.4f}", group.point.variant)
               for group in groups]),
        heading("Training"),
        plot(lines(losses, "{} variant"), "round", "supervised loss on the clients"),
        plot(lines(_columns(rounds, "validation/accuracy_"), "{} MACs"), "round",
             "validation accuracy of the anchors"),
        heading("All cached variants"),
        table(("variant", "MACs", "parameters", "test accuracy"),
              [(p.variant, f"{p.macs:,}", f"{p.params:,}", f"{p.accuracy:.4f}") for p in points]),
    ]
    write_whole(folder / "report.html", lambda file: file.write(
        page(f"FEAST on {experiment.config.dataset}", parts)))
