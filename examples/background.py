"""Programs that run while another one does: for examples that put a federation on one machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import ctypes
import os
from pathlib import Path
import signal
import socket
import subprocess
import time

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl


def _end_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def background(command: Sequence[str], log: Path, environment: Mapping[str, str], **settings
               ) -> Iterator[subprocess.Popen]:
    """Starts a program; it ends with the block and with this process, whatever ends them."""
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment,
                                   start_new_session=True, preexec_fn=_end_with_parent,
                                   **settings)
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def wait_for(port: int, process: subprocess.Popen, log: Path) -> None:
    """Returns when the program listens on a port of this machine.

    Raises:
      ChildProcessError: it ended instead; the message is the end of its log.
    """
    while process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.2)
    raise ChildProcessError(f"{process.args[0]} ended:\n{log.read_text()[-2000:]}")
