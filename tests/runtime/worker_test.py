"""The owned worker: it starts or says why, works anywhere, and never outlives its program."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest
import tensorflow_federated as tff

from feast_tf.runtime import worker as worker_lib
from feast_tf.runtime import Worker, use_worker

ROOT = Path(__file__).resolve().parents[2]
SECONDS_TO_END = 5


@tff.tensorflow.computation(np.int32)
def add_one(x):
    return x + 1


@pytest.fixture
def worker():
    worker = use_worker()
    yield worker
    worker.stop()


def test_memory_that_the_workers_threads_free_is_shared(worker):
    assert psutil.Process(worker.process.pid).environ()["MALLOC_ARENA_MAX"] == "2"


# How a program may end: what it does last (None: it waits for the signal), and its exit code.
ENDINGS = {
    "normal": ("", 0),
    "exception": ("raise RuntimeError('on purpose')", 1),
    "sys.exit": ("sys.exit(3)", 3),
    "os._exit": ("os._exit(4)", 4),
    "SIGTERM": (None, -signal.SIGTERM),
    "SIGINT": (None, -signal.SIGINT),
    "SIGKILL": (None, -signal.SIGKILL),
}

WHOLE_PROGRAM = """
import os, sys, time
import numpy as np
import tensorflow_federated as tff
from feast_tf.runtime import use_worker

worker = use_worker()
print(worker.process.pid, int(tff.tensorflow.computation(lambda x: x + 1, np.int32)(41)),
      flush=True)
sys.stdin.readline()
"""

# TensorFlow's import, of which there is none here, costs seconds for each program.
PROGRAM = """
import importlib.util, os, runpy, sys, time, types

federated = types.ModuleType("tensorflow_federated")
federated.__file__ = importlib.util.find_spec("tensorflow_federated").origin
sys.modules["tensorflow_federated"] = federated
runtime = types.ModuleType("feast_tf.runtime")
channel = types.SimpleNamespace(close=lambda: None)
runtime.remote = types.SimpleNamespace(open_channel=lambda address: channel)
sys.modules["feast_tf.runtime"] = runtime
Worker = runpy.run_path("feast_tf/runtime/worker.py")["Worker"]
{before}
worker = Worker()
print(worker.process.pid, 42, flush=True)
sys.stdin.readline()
"""


def check_worker_ends_with(code: str, ending: str, before: str = "") -> None:
    last, exit_code = ENDINGS[ending]
    code = code.replace("{before}", before) + ("time.sleep(600)" if last is None else last)
    program = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    try:
        pid, answer = map(int, program.stdout.readline().split())
        child = psutil.Process(pid)
        assert answer == 42 and child.name() == "worker_binary"
        if last is None:
            program.send_signal(signal.Signals[ending])
        # Reads to the end of both streams: a worker that held one open would keep it waiting.
        _, errors = program.communicate("\n", timeout=60)
        assert program.returncode == exit_code, errors
        _, alive = psutil.wait_procs([child], timeout=SECONDS_TO_END)
        assert not alive
    finally:
        program.kill()


@pytest.mark.parametrize("ending", ENDINGS)
def test_worker_ends_with_its_program(ending):
    check_worker_ends_with(PROGRAM, ending)


@pytest.mark.parametrize("ending", ["normal", "exception", "sys.exit"])
def test_worker_is_ended_even_without_the_kernel_s_help(ending):
    launcher = "import os, sys; os.execv(sys.argv[2], sys.argv[2:])"
    check_worker_ends_with(PROGRAM, ending,
                           before=f"Worker._start.__globals__['_LAUNCHER'] = {launcher!r}")


def test_worker_ends_with_a_program_that_computes():
    check_worker_ends_with(WHOLE_PROGRAM, "normal")


@pytest.mark.slow
@pytest.mark.parametrize("ending", sorted(set(ENDINGS) - {"normal"}))
def test_worker_ends_with_every_program_that_computes(ending):
    check_worker_ends_with(WHOLE_PROGRAM, ending)


def test_worker_outlives_the_thread_that_started_it(worker):
    # Linux takes the starting thread, not the program, for the parent whose death ends a child.
    started = []
    thread = threading.Thread(target=lambda: started.append(Worker()))
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert started[0].process.poll() is None
    started[0].stop()


def test_ctrl_c_in_the_terminal_does_not_reach_the_worker(worker):
    assert os.getpgid(worker.process.pid) != os.getpgid(0)


def test_launcher_starts_nothing_for_a_parent_that_is_gone():
    command = [sys.executable, "-ISc", worker_lib._LAUNCHER, "{}", "/bin/echo", "started"]
    run = lambda parent: subprocess.run([part.format(parent) for part in command],
                                        capture_output=True, text=True).stdout
    assert run(os.getpid()) == "started\n"
    assert run(os.getpid() + 1) == ""


def test_program_talks_to_the_worker_through_loopback(worker):
    assert add_one(1) == 2
    peers = {connection.raddr.ip.removeprefix("::ffff:")
             for connection in psutil.Process().net_connections("tcp")
             if connection.raddr and connection.raddr.port == worker.port}
    assert peers == {"127.0.0.1"}


@pytest.mark.xfail(strict=True, reason="the worker of TFF 0.87.0 has no flag for the address")
def test_worker_listens_on_loopback_only(worker):
    addresses = {connection.laddr.ip
                 for connection in psutil.Process(worker.process.pid).net_connections("tcp")
                 if connection.status == psutil.CONN_LISTEN}
    assert addresses and addresses <= {"127.0.0.1", "::1"}


def stub(folder: Path, code: str, mode: int = 0o755) -> Path:
    path = folder / "stub worker"
    path.write_text(code)
    path.chmod(mode)
    return path


SHELL = "#!/bin/sh\n"


@pytest.mark.parametrize(
    "code, mode, message",
    [
        pytest.param(SHELL + "exit 1", 0o755, "ended with exit code 1;", id="exits"),
        pytest.param(SHELL + "echo first; echo GLIBC_2.31 not found >&2; exit 127", 0o755,
                     r"ended with exit code 127 \(its last words: GLIBC_2.31 not found\);",
                     id="last words"),
        pytest.param(SHELL + "kill -SEGV $$", 0o755, "ended with exit code -11;", id="signal"),
        pytest.param(SHELL + "exit 0", 0o644, "ended with exit code 1 .*Permission denied",
                     id="no x permission"),
        pytest.param("\0", 0o755, "ended with exit code 1 .*Exec format error", id="no program"),
    ],
)
def test_worker_that_cannot_start_is_an_error(tmp_path, code, mode, message):
    path = stub(tmp_path, code, mode)
    with pytest.raises(RuntimeError, match=message) as error:
        Worker(path)
    assert str(error.value).startswith(f"TFF's worker {path} ended with exit code ")
    assert str(error.value).endswith(
        "; the worker needs Linux on x86-64 with glibc 2.31 or newer")
    assert "\n" not in str(error.value)


def test_missing_binary_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="/nowhere ended with exit code 1 .*No such file"):
        Worker(tmp_path / "nowhere")


def test_worker_that_never_answers_is_an_error_and_ended(tmp_path):
    path = stub(tmp_path, SHELL + f"echo $$ > '{tmp_path}/pid'; exec sleep 600")
    with pytest.raises(RuntimeError, match="did not answer within 0.5 s; the worker needs Linux"):
        Worker(path, start_seconds=0.5)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_port_is_claimed_while_the_worker_starts(tmp_path):
    path = stub(tmp_path, f"""#!{sys.executable}
import socket, sys
try:
    socket.socket().bind(("127.0.0.1", int(sys.argv[1].partition("=")[2])))
except OSError as error:
    sys.exit(error.strerror)
""")
    with pytest.raises(RuntimeError, match="its last words: Address already in use"):
        Worker(path)


def test_runs_where_the_standard_streams_are_replaced():
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        worker = use_worker()
        assert add_one(2) == 3
        worker.stop()
    assert out.getvalue() == ""


def test_stop_twice_is_fine():
    worker = Worker()
    worker.stop()
    worker.stop()
    assert worker.process.returncode == -signal.SIGTERM


def test_stop_of_a_worker_that_is_gone_is_fine():
    worker = Worker()
    worker.process.kill()
    worker.stop()
    assert worker.process.returncode == -signal.SIGKILL


def test_worker_that_ignores_termination_is_killed(tmp_path, monkeypatch):
    worker = Worker(stub(tmp_path, f"""#!{sys.executable}
import signal, socket, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
listener.bind(("127.0.0.1", int(sys.argv[1].partition("=")[2])))
listener.listen()
signal.pause()
"""))
    monkeypatch.setattr(worker_lib, "STOP_SECONDS", 0.5)
    worker.stop()
    assert worker.process.returncode == -signal.SIGKILL


def test_fork_of_the_program_leaves_the_worker_alone(worker, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        worker.stop()
    assert worker.process.poll() is None and add_one(3) == 4


def test_two_workers_in_one_program():
    first = use_worker()
    assert add_one(1) == 2
    second = use_worker()
    assert first.port != second.port and first.process.pid != second.process.pid
    assert add_one(2) == 3
    first.stop()
    assert add_one(3) == 4
    second.stop()
