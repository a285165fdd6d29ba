"""TFF's own worker process, owned: bound to loopback, quiet, and never left behind.

TFF's default context starts a worker that listens on all interfaces, outlives the program on every
exit path, keeps its standard output open, and is waited for without end when it cannot start. Here the
worker dies with this process, even when this is killed, and a worker that does not start is an error.
"""

from __future__ import annotations

import atexit
import collections
import ctypes
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Optional

import grpc
import tensorflow_federated as tff
from absl import logging

START_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1
_MAX_MESSAGE_BYTES = 2**31 - 1
_NEEDS = "the worker needs Linux on x86-64 with glibc 2.31 or newer"


def worker_path() -> pathlib.Path:
    """The worker binary that comes with TensorFlow Federated."""
    return pathlib.Path(tff.__file__).parent / "data" / "worker_binary"


class Worker:
    """A running worker process.

    Attributes:
      port: where it listens, on 127.0.0.1.
      process: its `subprocess.Popen`.
      channel: the gRPC channel to it.
    """

    def __init__(self, binary: Optional[os.PathLike] = None, start_seconds: float = START_SECONDS):
        """Starts a worker and waits until it answers.

        Args:
          binary: the program, by default TFF's.
          start_seconds: how long it may take to answer.

        Raises:
          RuntimeError: it can't be started, ends, or does not answer in time; the message names the
            binary, what happened and what the platform must be.
        """
        binary = pathlib.Path(binary or worker_path())
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        libc, parent = ctypes.CDLL(None), os.getpid()

        def die_with_parent():
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # the parent died before the line above
                os._exit(1)

        self._log = tempfile.TemporaryFile()
        try:
            # A session of its own: Ctrl-C reaches this program alone, which then ends the worker.
            self.process = subprocess.Popen(
                [str(binary), f"--port={self.port}"], stdin=subprocess.DEVNULL, stdout=self._log,
                stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=die_with_parent if sys.platform == "linux" else None)
        except OSError as error:
            raise RuntimeError(f"TFF's worker {binary} can't be started: {error.strerror}; "
                               f"{_NEEDS}") from error
        atexit.register(self.stop)
        self._wait(binary, start_seconds)
        self.channel = grpc.insecure_channel(
            f"127.0.0.1:{self.port}",
            options=[(f"grpc.max_{kind}message_length", _MAX_MESSAGE_BYTES)
                     for kind in ("receive_", "send_", "")])

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
        atexit.unregister(self.stop)
        if hasattr(self, "channel"):
            self.channel.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()


def _executor_factory(worker: Worker) -> tff.framework.ExecutorFactory:
    stub = tff.framework.RemoteExecutorGrpcStub(worker.channel)

    def stack(cardinalities):
        cardinalities = collections.defaultdict(int, cardinalities)
        cardinalities.setdefault(tff.CLIENTS, 0)
        executor = tff.framework.RemoteExecutor(stub)
        executor.set_cardinalities(cardinalities)
        return executor

    return tff.framework.ResourceManagingExecutorFactory(executor_stack_fn=stack)


def use_worker(worker: Optional[Worker] = None) -> Worker:
    """Makes an owned worker the default TFF runtime of this process.

    Returns:
      The worker; `stop` it, or leave that to the end of the program.
    """
    worker = worker or Worker()
    context = tff.framework.SyncExecutionContext(
        _executor_factory(worker),
        compiler_fn=tff.backends.native.desugar_and_transform_to_native,
        transform_args=tff.tensorflow.transform_args,
        transform_result=tff.tensorflow.transform_result)
    tff.framework.set_default_context(context)
    logging.info("TFF runtime: worker process %d on 127.0.0.1:%d, CPU only", worker.process.pid,
                 worker.port)
    return worker
