"""FEAST in OpenFL on one machine: an aggregator and four collaborators of different budgets.

    python examples/openfl_digits.py --output_dir=runs/openfl

The workspace is examples/openfl_workspace; a copy of it is used. Every part runs in a process of
its own, as it would on several machines, and ends with this one. At the end the operating points of
the aggregated model are measured.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path
import shutil
import subprocess
import sys
import tempfile
import time

from background import background
import numpy as np
from openfl.pipelines import NoCompressionPipeline
from openfl.protocols import utils
import yaml

from feast_tf import serving, supernet
from feast_tf.interop.openfl import LevelVectors

WORKSPACE = Path(__file__).resolve().parent / "openfl_workspace"


def train(folder: Path) -> None:
    """Runs the federation of a copied workspace; OpenFL leaves the model in save/last.pbuf."""
    environment = {**os.environ,
                   "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    (folder / "save").mkdir()
    with open(folder / "initialize.log", "wb") as log:
        subprocess.run(["fx", "plan", "initialize", "-a", "localhost"], cwd=folder, check=True,
                       env=environment, stdout=log, stderr=log)
    collaborators = yaml.safe_load((folder / "plan" / "cols.yaml").read_text())["collaborators"]
    with contextlib.ExitStack() as stack:
        commands = {"aggregator": ["fx", "aggregator", "start"], **{
            name: ["fx", "collaborator", "start", "-n", name] for name in collaborators}}
        processes = {name: stack.enter_context(background(command, folder / f"{name}.log",
                                                          environment, cwd=folder))
                     for name, command in commands.items()}
        while processes["aggregator"].poll() is None or any(
                process.poll() for process in processes.values()):
            for name, process in processes.items():
                if process.poll():
                    log = (folder / f"{name}.log").read_text()
                    raise ChildProcessError(f"{name} ended with code {process.returncode}:\n"
                                            f"{log[-2000:]}")
            time.sleep(1)


def measure(folder: Path) -> list[serving.OperatingPoint]:
    """The operating points of the aggregated model, on the test pictures."""
    sys.path.insert(0, str(WORKSPACE))
    from src import federation

    vectors, _ = utils.deconstruct_model_proto(
        utils.load_proto(str(folder / "save" / "last.pbuf")), NoCompressionPipeline())
    routes, data = federation.ROUTES, federation.digits()
    initial = [np.asarray(weight) for weight in supernet.initial_weights(routes.layout, seed=0)]
    weights = LevelVectors(routes.slices).restore(vectors, initial)
    evaluator = serving.Evaluator(routes, data.server.images, mean=federation.TRAINING.mean,
                                  std=federation.TRAINING.std)
    return evaluator.operating_points(weights, range(routes.num_levels), data.test.images,
                                      data.test.labels, "test")


def main(output_dir: str | None) -> None:
    """Trains and measures; the logs of all processes are left in `output_dir`."""
    with contextlib.ExitStack() as stack:
        folder = Path(output_dir or stack.enter_context(tempfile.TemporaryDirectory()))
        folder = folder / "federation"
        shutil.copytree(WORKSPACE, folder)
        train(folder)
        for point in measure(folder):
            print(f"accuracy at {point.macs:,} MACs: {point.accuracy:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", help="a folder for the workspace and the logs")
    main(parser.parse_args().output_dir)
