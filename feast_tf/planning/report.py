"""plan.json and plan.html: a plan as files."""

from __future__ import annotations

import json
import pathlib

import numpy as np

from feast_tf import report_html
from feast_tf.files import write_whole
from feast_tf.planning import text
from feast_tf.planning.plan import Plan


def write_plan(folder: pathlib.Path, plan: Plan) -> None:
    """Writes plan.json and plan.html to a folder, each whole or not at all."""
    content = {**plan.to_json(), "notes": text.notes(plan.config)}
    write_whole(folder / "plan.json", lambda file: file.write(
        json.dumps(content, indent=2).encode() + b"\n"))
    write_whole(folder / "plan.html", lambda file: file.write(_page(plan)))


def _page(plan: Plan) -> bytes:
    groups, devices = plan.groups, plan.devices
    names = [group.name for group in plan.exposure]

    def budgets(axes):
        edges = np.histogram_bin_edges(devices.budget / 1e6, 40)
        axes.hist(devices.budget / 1e6, edges, weights=devices.count)

    def payload(axes):
        clients = np.cumsum([group.clients for group in groups]) / devices.num_clients
        axes.step([0, *(group.payload / 1e6 for group in groups)], [0, *clients], where="post")

    def exposure(axes):
        places = np.arange(len(names))
        axes.bar(places - 0.2, [group.routed for group in plan.exposure], 0.4, label="routed")
        axes.bar(places + 0.2, [group.activation for group in plan.exposure], 0.4,
                 label="activated")
        axes.set_xticks(places, [name.replace("stage", "").replace("block", "") for name in names],
                        rotation=90, fontsize=7)

    def data(axes):
        for gamma, share in plan.data_share.items():
            axes.plot([group.highest / 1e6 for group in groups], np.cumsum(share), "o-",
                      markersize=3, label=f"gamma {gamma:g}")

    def classes(axes):
        counts = np.array([group.class_counts for group in groups], np.float64)
        picture = axes.imshow(counts / counts.sum(axis=1, keepdims=True), aspect="auto",
                              interpolation="nearest")
        axes.figure.colorbar(picture, label="share of the group's samples")

    parts = [
        report_html.table(*text.figure_table(plan)),
        report_html.heading("Budget groups"),
        report_html.table(*text.group_table(groups)),
        report_html.heading("Budgets"),
        report_html.plot(budgets, "budget (M MACs)", "clients"),
        report_html.heading("Payload"),
        report_html.plot(payload, "payload (M parameters)", "share of the clients"),
        report_html.heading("Exposure by stage and block"),
        report_html.plot(exposure, "stage/block", "share of a round's samples"),
        report_html.table(*text.exposure_table(plan.exposure)),
        report_html.heading("Data by budget"),
        report_html.plot(data, "budgets up to (M MACs)", "share of the data"),
    ]
    if groups[0].class_counts is not None:
        parts += [report_html.heading("Classes by budget group, as drawn"),
                  report_html.plot(classes, "class", "budget group, from the lowest")]
    parts += [report_html.heading("Finite-horizon bound"),
              report_html.table(["term", "value"], [[name.replace("_", " "), f"{value:.6g}"]
                                                    for name, value in plan.bound.items()]),
              report_html.heading("Notes"), *map(report_html.paragraph, text.notes(plan.config))]
    return report_html.page(f"Plan of a federation on {plan.config.dataset}", parts)
