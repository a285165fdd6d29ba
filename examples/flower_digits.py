"""FEAST in Flower on one machine: a SuperLink, and a SuperNode for each budget.

    python examples/flower_digits.py --rounds=2 0.7e6 1.3e6 3.5e6 6e6

The app is in examples/flower_app. Every part runs in a process of its own, as it would on several
machines, and ends with this one. Flower starts a process for each message, which imports TensorFlow
and traces the network: that, not the training, is most of the time of this example.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path
import subprocess
import sys
import tempfile

from background import background, free_ports, wait_for

APP = Path(__file__).resolve().parent / "flower_app"


def run(budgets: list[float], rounds: int, round_timeout: int) -> int:
    """Trains on nodes of these budgets (MACs); returns the exit code of `flwr run`."""
    link, *nodes = free_ports(1 + len(budgets))
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environment = {
            **os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "local"\n\n[superlink.local]\naddress = "127.0.0.1:{link}"\n'
            "insecure = true\n")
        log = home / "superlink.log"
        superlink = stack.enter_context(background(
            ["flower-superlink", "--insecure", f"--port={link}",
             "--disable-runtime-dependency-installation"], log, environment))
        wait_for(link, superlink, log)
        for number, (budget, port) in enumerate(zip(budgets, nodes)):
            stack.enter_context(background(
                ["flower-supernode", "--insecure", f"--superlink=127.0.0.1:{link}",
                 f"--port={port}", "--node-config", f"budget={budget:.1f} partition-id={number} "
                 f"num-partitions={len(budgets)}"], home / f"supernode{number}.log", environment))
        return subprocess.run(
            ["flwr", "run", str(APP), "local", "--stream", "--run-config",
             f"num-rounds={rounds} num-nodes={len(budgets)} round-timeout={round_timeout}"],
            env=environment).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("budgets", type=float, nargs="*", default=[0.7e6, 1.3e6, 3.5e6, 6e6],
                        help="MACs that each node affords")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--round_timeout", type=int, default=600, help="seconds")
    arguments = parser.parse_args()
    sys.exit(run(arguments.budgets, arguments.rounds, arguments.round_timeout))
