"""TFF's own worker process, owned: quiet, and never left behind.

TFF's default context starts a worker that outlives the program on every exit path, keeps its
standard output open, and is waited for without end when it cannot start. Here the worker dies with
this process, even when this is killed, and a worker that does not start is an error.

What can't be helped: the worker listens on all interfaces (it has no flag for the address), without
authentication, and runs any graph that it is sent. Use it on hosts whose network is trusted.
"""

from __future__ import annotations

import atexit
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent import futures
from typing import Optional

import tensorflow_federated as tff
from absl import logging

from feast_tf.runtime import remote

START_SECONDS = 60.0
STOP_SECONDS = 5.0
_NEEDS = "the worker needs Linux on x86-64 with glibc 2.31 or newer"

# Becomes the worker once the kernel is to kill it when its parent dies. A program of its own: code
# between fork and exec (`preexec_fn`) now and then hangs in a process whose gRPC has threads.
_LAUNCHER = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):  # else the parent is dead already
    os.execv(sys.argv[2], sys.argv[2:])
"""


def worker_path() -> pathlib.Path:
    """The worker binary that comes with TensorFlow Federated."""
    return pathlib.Path(tff.__file__).parent / "data" / "worker_binary"


def _check_free(port: int) -> None:
    """Two workers can share a port, and would get the calls of one program in turn."""
    with socket.socket() as probe:
        # What ended a minute ago may still hold the port, but nobody who listens.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise OSError(f"port {port} can't be used: {error.strerror}") from error


class Worker:
    """A running worker process.

    Attributes:
      port: where it listens.
      address: host:port, as this process reaches it.
      process: its `subprocess.Popen`.
      channel: the gRPC channel to it.
    """

    def __init__(self, binary: Optional[os.PathLike] = None, start_seconds: float = START_SECONDS,
                 port: int = 0):
        """Starts a worker and waits until it answers.

        Args:
          binary: the program, by default TFF's.
          start_seconds: how long it may take to answer.
          port: where it is to listen, by default one that is free.

        Raises:
          OSError: the port is in use, or not for this user.
          RuntimeError: it can't be started, ends, or does not answer in time; the message names the
            binary, what happened and what the platform must be.
        """
        binary = pathlib.Path(binary or worker_path())
        if port:
            _check_free(port)
        self._owner, self._stopped = os.getpid(), threading.Event()
        self._log = tempfile.TemporaryFile()
        with socket.socket() as claim:
            # The port stays ours until the worker, which sets the same option, has it: several
            # programs that start at once must not share one.
            claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            claim.bind(("127.0.0.1", port))
            self.port = claim.getsockname()[1]
            self.process = self._start(binary)
            atexit.register(self.stop)
            self._wait(binary, start_seconds)
        self.channel = remote.open_channel(self.address)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _start(self, binary: pathlib.Path) -> subprocess.Popen:
        command = [sys.executable, "-ISc", _LAUNCHER, str(self._owner), str(binary),
                   f"--port={self.port}"]
        started: futures.Future = futures.Future()

        def start():
            try:
                # A session of its own: Ctrl-C reaches this program alone, which ends the worker.
                # Few arenas: else what its many threads free comes back to none of the others, and
                # memory grows from round to round where cohorts change.
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT,
                    start_new_session=True, env={"MALLOC_ARENA_MAX": "2", **os.environ})
            except BaseException as error:  # raised below, in the caller's thread
                started.set_exception(error)
            else:
                started.set_result(process)
                self._stopped.wait()

        # To the kernel the parent is the *thread* that starts a child; the caller's may not last.
        threading.Thread(target=start, name="tff-worker", daemon=True).start()
        return started.result()

    def _wait(self, binary: pathlib.Path, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                code = self.process.poll()
                if code is None and time.monotonic() < deadline:
                    time.sleep(0.05)
                    continue
            self._log.seek(0)
            lines = self._log.read().decode(errors="replace").strip().splitlines()
            self.stop()
            what = (f"did not answer within {seconds:g} s" if code is None
                    else f"ended with exit code {code}")
            last = f" (its last words: {lines[-1]})" if lines else ""
            raise RuntimeError(f"TFF's worker {binary} {what}{last}; {_NEEDS}")

    def stop(self) -> None:
        """Ends the worker; may be called more than once."""
        if os.getpid() != self._owner:  # a fork of the program that runs into its own exit
            return
        atexit.unregister(self.stop)
        if hasattr(self, "channel"):
            self.channel.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._stopped.set()
        self._log.close()


def use_worker(worker: Optional[Worker] = None) -> Worker:
    """Makes an owned worker the default TFF runtime of this thread (TFF keeps one for each thread).

    Returns:
      The worker; `stop` it, or leave that to the end of the program.
    """
    worker = worker or Worker()
    tff.framework.set_default_context(tff.framework.SyncExecutionContext(
        remote.executor_factory(worker.address, worker.channel), **remote.CONTEXT_OPTIONS))
    logging.info("TFF runtime: worker process %d on port %d, CPU only", worker.process.pid,
                 worker.port)
    return worker
