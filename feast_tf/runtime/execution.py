"""One run of a plan: clients on lanes, one client's values at a time on each."""

from __future__ import annotations

import concurrent.futures
import re
import threading
from collections.abc import Sequence
from typing import Any, Callable

from feast_tf.runtime import values
from feast_tf.runtime.plan import (CLIENTS, SERVER, Aggregate, Argument, Node, Plan, Wave,
                                   server_sources)


class ComputationError(RuntimeError):
    """A TFF computation failed; the message names it, the client where there is one, and the cause."""


def cause(error: BaseException) -> str:
    """The telling line of an error; TensorFlow's has a list of nodes before and after it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    node = next((place for place, line in enumerate(lines) if line.startswith("[[")), 0)
    line = re.sub(r"^\(\d+\) [A-Z_]+: +| \[Op:\w+\]$", "", lines[max(0, node - 1)])
    return f"{type(error).__name__}: {line}"


def _run_lanes(count: int, work: Callable[[int], None], stop: threading.Event) -> None:
    """work(lane) on every lane at once; raises the error of the lowest lane that failed.

    `stop` is set as soon as one fails, or Ctrl-C is pressed: the others end after their client.
    """
    if count == 1:  # in this thread: nothing to wait for, and errors have a shorter trace
        work(0)
        return
    # Threads of this wave alone: a client's data may be a generator that runs computations itself.
    with concurrent.futures.ThreadPoolExecutor(count, "feast-lane") as pool:
        lanes = [pool.submit(work, lane) for lane in range(count)]
        try:
            for lane in lanes:
                lane.result()
        finally:
            stop.set()


class Run:
    """The values of one invocation of a plan.

    Attributes:
      num_clients: size of the cohort.
    """

    def __init__(self, plan: Plan, lanes: Sequence[str], server_device: str, num_clients: int,
                 argument: Callable[[Argument, int, str], Any]):
        """Args:
          plan: what to run.
          lanes: devices where clients run. Lane k takes clients k, k + n, k + 2n, ..., one after the
            other, and partial sums are merged in the order of the lanes, so that a run can be repeated
            to the bit.
          server_device: where the server's values are.
          num_clients: size of the cohort.
          argument: (node, client, device) -> value; the client is -1 for one that all share.
        """
        self._plan, self._lanes, self._server_device = plan, lanes, server_device
        self.num_clients, self._argument = num_clients, argument
        self._uses = dict(plan.uses)
        self._server: dict[Node, Any] = {}
        self._client: list[dict[Node, Any]] = [{} for _ in range(num_clients)]
        self._aggregated: dict[Aggregate, Any] = {}
        self._collected: dict[Node, list[Any]] = {}
        self._waves = iter(plan.waves)
        # What the lanes of the current pass share.
        self._sources: dict[Node, Any] = {}
        self._everywhere: dict[tuple[Node, str], Any] = {}
        self._lock = threading.RLock()

    def server_value(self, node: Node) -> Any:
        """The value of a server node; dropped when the plan has no more use for it."""
        if node not in self._server:
            self._server[node] = self._compute_at_server(node)
        self._uses[node] -= 1
        return self._server[node] if self._uses[node] else self._server.pop(node)

    def client_values(self, node: Node) -> list[Any]:
        """The values of a client node that is a result."""
        while node not in self._collected:
            self._run_wave(next(self._waves))
        return self._collected[node]

    def everywhere_value(self, node: Node) -> Any:
        """A value that all clients share, as the first lane sees it."""
        self._sources = {source: self.server_value(source) for source in server_sources(node)}
        return self._everywhere_on(node, self._lanes[0])

    def _compute_at_server(self, node: Node) -> Any:
        if isinstance(node, Aggregate):
            while node not in self._aggregated:
                self._run_wave(next(self._waves))
            return self._at_server(node.report, self._aggregated.pop(node))
        if isinstance(node, Argument):
            return self._at_server(lambda node, device: self._argument(node, -1, device), node)
        return self._at_server(node.compute, [self.server_value(n) for n in node.inputs])

    def _at_server(self, function, argument) -> Any:
        try:
            return function(argument, self._server_device)
        except Exception as error:
            raise ComputationError(f"{self._plan.name}: at the server: {cause(error)}") from error

    def _run_wave(self, wave: Wave) -> None:
        """One pass over the clients."""
        # First and in this thread: lanes only read what the server has. May run earlier waves.
        sources = {node: self.server_value(node) for node in wave.sources}
        zeros = [self.server_value(node.inputs[1]) for node in wave.aggregates]
        self._sources, self._everywhere = sources, {}
        num_lanes = len(self._lanes)
        sums = [list(zeros) for _ in range(num_lanes)]
        del zeros  # as large as a sum; the lanes let go of it with their first client
        collected = {node: [None] * self.num_clients for node in wave.collected}
        stop = threading.Event()

        def run_lane(lane: int) -> None:
            for client in range(lane, self.num_clients, num_lanes):
                if stop.is_set():
                    return
                try:
                    self._run_client(wave, client, self._lanes[lane], sums[lane],
                                     collected)
                except Exception as error:
                    stop.set()
                    raise ComputationError(
                        f"{self._plan.name}: client {client} of {self.num_clients}: "
                        f"{cause(error)}") from error

        _run_lanes(num_lanes, run_lane, stop)
        self._sources, self._everywhere = {}, {}
        for place, node in enumerate(wave.aggregates):
            # A lane that had no client holds the zero, which must not be added twice.
            first, *others = [lane[place] for lane in sums[: max(1, self.num_clients)]]
            for other in others:
                first = self._at_server(node.merge, (self._to_server(first),
                                                     self._to_server(other)))
            self._aggregated[node] = self._to_server(first)
        self._collected.update(collected)

    def _to_server(self, value: Any) -> Any:
        return values.move(value, self._server_device)

    def _run_client(self, wave: Wave, client: int, device: str, sums: list,
                    collected: dict[Node, list]) -> None:
        known = self._client[client]
        for place, node in enumerate(wave.aggregates):
            value = self._client_value(node.inputs[0], client, device, known)
            # Not in `known`: the sum before this client must be freed as soon as it is replaced.
            sums[place] = node.accumulate((values.move(sums[place], device), value), device)
        for node in wave.collected:
            collected[node][client] = self._client_value(node, client, device, known)
        self._client[client] = {node: known[node] for node in wave.kept}

    def _client_value(self, node: Node, client: int, device: str, known: dict[Node, Any]) -> Any:
        if node.placement != CLIENTS:
            return self._everywhere_on(node, device)
        if node not in known:
            if isinstance(node, Argument):
                known[node] = self._argument(node, client, device)
            else:
                known[node] = node.compute(
                    [self._client_value(source, client, device, known) for source in node.inputs],
                    device)
        return known[node]

    def _everywhere_on(self, node: Node, device: str) -> Any:
        """A value that all clients share, on one device."""
        if node.placement == SERVER:
            return self._sources[node]
        with self._lock:
            if (node, device) not in self._everywhere:
                self._everywhere[node, device] = (
                    self._argument(node, -1, device) if isinstance(node, Argument) else
                    node.compute([self._everywhere_on(source, device) for source in node.inputs],
                                 device))
            return self._everywhere[node, device]
