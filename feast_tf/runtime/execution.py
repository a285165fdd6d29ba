"""One run of a plan: clients on lanes, one client's values at a time on each."""

from __future__ import annotations

import concurrent.futures
import contextlib
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

from feast_tf.runtime import values
from feast_tf.runtime.plan import (CLIENTS, SERVER, Aggregate, Argument, Node, Plan, Wave,
                                   server_sources)


class ComputationError(RuntimeError):
    """A TFF computation failed; the message names it, the client if there is one, and the cause."""


def cause(error: BaseException) -> str:
    """The telling line of an error; TensorFlow's has a list of nodes before and after it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    node = next((place for place, line in enumerate(lines) if line.startswith("[[")), 0)
    line = re.sub(r"^\(\d+\) [A-Z_]+: +| \[Op:\w+\]$", "", lines[max(0, node - 1)])
    return f"{type(error).__name__}: {line}"


class _Cohort:
    """Deals the clients of one pass to lanes, and adds their results in the order of the clients.

    A lane that is free takes the next client, so none idles while another works through its share.
    Since sums grow client by client, results are the same to the bit on any number of lanes, and
    there is one sum, not one for each lane. A lane that is ahead of an unfinished client keeps what
    it has computed, but waits before that is more than two clients for each lane.
    """

    def __init__(self, num_clients: int, num_lanes: int, add: Callable[[int, list], None]):
        """`add(client, results)` is called for one client after the other."""
        self._num_clients, self._ahead, self._add = num_clients, 2 * num_lanes, add
        self._next, self._added = 0, 0
        self._finished: dict[int, list] = {}
        self._changed = threading.Condition()
        self._adding = threading.Lock()
        self._errors: dict[int, BaseException] = {}
        self._stopped = False

    def run(self, devices: Sequence[str], work: Callable[[int, str], list]) -> None:
        """work(client, device) for all clients; raises the error of the first client that failed.

        When one fails, or Ctrl-C is pressed, the lanes end after their current clients.
        """
        if len(devices) == 1:  # in this thread: nothing to wait for, and a shorter trace
            self._run_lane(devices[0], work)
        else:
            # Threads of this pass alone: a client's data may be a generator that runs computations.
            with concurrent.futures.ThreadPoolExecutor(len(devices), "feast-lane") as pool:
                lanes = [pool.submit(self._run_lane, device, work) for device in devices]
                try:
                    concurrent.futures.wait(lanes)
                finally:
                    self._stop()
            for lane in lanes:
                lane.result()
        if self._errors:
            raise self._errors[min(self._errors)]

    def _run_lane(self, device: str, work: Callable[[int, str], list]) -> None:
        while True:
            with self._changed:
                client = self._next
                self._next += 1
                self._changed.wait_for(
                    lambda: self._stopped or client - self._added < self._ahead)
                if self._stopped or client >= self._num_clients:
                    return
            try:
                self._finished[client] = work(client, device)
                with self._adding:
                    while self._added in self._finished and not self._stopped:
                        client = self._added
                        self._add(client, self._finished.pop(client))
                        with self._changed:
                            self._added += 1
                            self._changed.notify_all()
            except Exception as error:
                self._errors[client] = error
                self._stop()

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


class Run:
    """The values of one invocation of a plan.

    Attributes:
      num_clients: size of the cohort.
    """

    def __init__(self, plan: Plan, lanes: Sequence[str], server_device: str, num_clients: int,
                 argument: Callable[[Argument, int, str], Any]):
        """Args:
          plan: what to run.
          lanes: devices where clients run, one after the other on each.
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
        sums = [self.server_value(node.inputs[1]) for node in wave.aggregates]
        self._sources, self._everywhere = sources, {}
        collected = {node: [None] * self.num_clients for node in wave.collected}

        def work(client: int, device: str) -> list:
            known = self._client[client]
            with self._naming(client):
                results = [self._client_value(node.inputs[0], client, device, known)
                           for node in wave.aggregates]
                for node in wave.collected:
                    collected[node][client] = self._client_value(node, client, device, known)
            self._client[client] = {node: known[node] for node in wave.kept}
            return results

        def add(client: int, results: list) -> None:
            with self._naming(client):
                for place, node in enumerate(wave.aggregates):
                    # Not named: the sum before this client is freed as soon as it is replaced.
                    sums[place] = node.accumulate((sums[place], self._to_server(results[place])),
                                                  self._server_device)

        _Cohort(self.num_clients, len(self._lanes), add).run(self._lanes, work)
        self._sources, self._everywhere = {}, {}
        self._aggregated.update(zip(wave.aggregates, sums))
        self._collected.update(collected)

    def _to_server(self, value: Any) -> Any:
        return values.move(value, self._server_device)

    @contextlib.contextmanager
    def _naming(self, client: int):
        """Makes errors say which client failed, and why."""
        try:
            yield
        except Exception as error:
            raise ComputationError(f"{self._plan.name}: client {client} of {self.num_clients}: "
                                   f"{cause(error)}") from error

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
