"""Two workers on two machines, as near as one machine gets to that: each in a network of its own."""

from __future__ import annotations

import os
from pathlib import Path
import shutil
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from feast_tf import runtime

ROOT = Path(__file__).resolve().parents[2]
PORT = 10000

pytestmark = [
    pytest.mark.slow,
    # Not by default: it changes the network of the machine while it runs.
    pytest.mark.skipif("FEAST_TF_NETWORK_TESTS" not in os.environ or os.geteuid() != 0
                       or shutil.which("ip") is None,
                       reason="set FEAST_TF_NETWORK_TESTS=1; needs root and iproute2")]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Machine:
    """A worker in a network namespace, joined to this one by a cable.

    Attributes:
      address: host:port of the worker.
      program: the process of tff_programs.worker.
    """

    def __init__(self, number: int):
        self._name, self._cable = f"feast-{os.getpid()}-{number}", f"feast{os.getpid() % 10**6}{number}"
        network = f"10.213.{os.getpid() % 250}.{4 * number}"
        here, there = (network.rpartition(".")[0] + f".{4 * number + end}" for end in (1, 2))
        self.address, self.program = f"{there}:{PORT}", None
        ip("netns", "add", self._name)
        try:
            ip("link", "add", self._cable, "type", "veth", "peer", "name", "eth0", "netns", self._name)
            ip("address", "add", f"{here}/30", "dev", self._cable)
            ip("link", "set", self._cable, "up")
            for command in (["address", "add", f"{there}/30", "dev", "eth0"],
                            ["link", "set", "eth0", "up"], ["link", "set", "lo", "up"]):
                ip("-n", self._name, *command)
            self.program = subprocess.Popen(
                ["ip", "netns", "exec", self._name, sys.executable, "-m", "tff_programs.worker",
                 f"--port={PORT}"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            assert b"TFF worker ready" in self.program.stdout.readline()
        except BaseException:
            self.close()
            raise

    def unplug(self) -> None:
        """What a cut cable or a power failure is to the others: silence."""
        ip("-n", self._name, "link", "set", "eth0", "down")

    def close(self) -> None:
        if self.program is not None:
            self.program.kill()
            self.program.wait()
        for kind, name in (("link", self._cable), ("netns", self._name)):
            subprocess.run(["ip", kind, "delete", name], capture_output=True)


@pytest.fixture
def machines():
    found = []
    try:
        try:
            for number in (1, 2):
                found.append(Machine(number))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        runtime.use("tff_workers", addresses=[machine.address for machine in found])
        yield found
    finally:
        for machine in found:
            machine.close()


@tff.tensorflow.computation(np.int32)
@tf.function
def slowly(steps):
    total = 0
    for _ in tf.range(steps):
        total += 1
    return total


@tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
def total(steps):
    return tff.federated_sum(tff.federated_map(slowly, steps))


@pytest.fixture
def rounds(linear_fed_avg):
    process, data = linear_fed_avg(5)

    def run(count, state=None):
        state = state or process.initialize()
        for _ in range(count):
            state = process.next(state, data).state
        return state

    return types.SimpleNamespace(run=run, weights=process.get_model_weights)


@pytest.mark.parametrize("failure", ["kill", "unplug"])
def test_a_machine_lost_in_a_round(failure, machines, rounds, assert_same):
    with tff.framework.get_context_stack().install(runtime.InProcessContext()):
        expected = rounds.run(2)
    state = rounds.run(1)
    lost, other = machines
    threading.Timer(1.0, lost.program.kill if failure == "kill" else lost.unplug).start()
    start = time.monotonic()
    with pytest.raises(ConnectionError) as error:
        total([600_000] * 4)
    seconds = time.monotonic() - start
    print(f"{failure}: {seconds:.1f} s: {error.value}")
    assert f"TFF worker {lost.address} " in str(error.value) and "\n" not in str(error.value)
    assert seconds < 60
    # The run goes on from its last state with the other one.
    runtime.use("tff_workers", addresses=[other.address])
    assert_same(rounds.weights(rounds.run(1, state)), rounds.weights(expected))
