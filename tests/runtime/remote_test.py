"""Several workers: a cohort is split over them, and one that is gone is named at once."""

from __future__ import annotations

import gc
import os
from pathlib import Path
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from feast_tf import runtime
from feast_tf.runtime import Worker, remote

ROOT = Path(__file__).resolve().parents[2]
INT_AT_CLIENTS = tff.FederatedType(np.int32, tff.CLIENTS)
REFUSED = "needs the clients' values as the last argument"


@tff.tensorflow.computation(np.int32)
@tf.function
def slowly(steps):
    """The number of steps, one after the other: 100,000 take a second or so."""
    total = 0
    for _ in tf.range(steps):
        total += 1
    return total


@tff.federated_computation(tff.FederatedType(np.int32, tff.SERVER), INT_AT_CLIENTS)
def total(offset, steps):
    counted = tff.federated_map(slowly, steps)
    return offset, tff.federated_sum(counted), tff.federated_max(steps)


@pytest.fixture
def workers():
    """Two workers that a test may kill, as the default runtime."""
    started = [Worker() for _ in range(2)]
    runtime.use("tff_workers", addresses=[f"127.0.0.1:{worker.port}" for worker in started])
    yield started
    for worker in started:
        worker.stop()


def test_a_cohort_is_split_over_the_workers(workers):
    for clients in ([3], [3, 1], [5, 1, 2], [1, 2, 3, 4, 5]):
        assert total(7, clients) == (7, sum(clients), max(clients))


def test_computations_without_clients(workers):
    assert slowly(3) == 3
    assert tff.federated_computation(lambda: tff.federated_value(3, tff.SERVER))() == 3


def two_rounds(process, data):
    state = process.initialize()
    for _ in range(2):
        state, metrics = process.next(state, data)
    return process.get_model_weights(state), metrics["client_work"]


@pytest.mark.parametrize("clients", [2, 5])
def test_learning_is_the_same_as_in_process(clients, workers, assert_same, linear_fed_avg):
    process, data = linear_fed_avg(clients)
    on_workers = two_rounds(process, data)
    with tff.framework.get_context_stack().install(runtime.InProcessContext()):
        assert_same(on_workers, two_rounds(process, data))


def test_feast_is_the_same_as_on_one_worker(workers, assert_same, feast, stock_context):
    on_two = two_rounds(*feast)
    with tff.framework.get_context_stack().install(
            stock_context(tff.framework.SyncExecutionContext)):
        assert_same(on_two, two_rounds(*feast))


def test_workers_work_at_the_same_time(workers):
    """Both answer a call before the first one has ended."""
    running, most = [], []
    original = remote._NamedErrors.intercept_unary_unary

    def noted(self, continuation, details, request):
        running.append(self._address)
        most.append(len(set(running)))
        try:
            return original(self, continuation, details, request)
        finally:
            running.remove(self._address)

    total(0, [1, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote._NamedErrors, "intercept_unary_unary", noted)
        total(0, [50_000, 50_000])
    assert max(most) == 2


# --- what TFF would do wrongly


def test_clients_that_are_not_last_are_refused(workers):
    @tff.federated_computation(INT_AT_CLIENTS, tff.FederatedType(np.int32, tff.SERVER))
    def computation(x, y):
        return tff.federated_sum(x), y

    with pytest.raises(NotImplementedError, match=REFUSED):
        computation([1, 10], 5)


at_clients = tff.FederatedType(np.int32, tff.CLIENTS)
at_server = tff.FederatedType(np.int32, tff.SERVER)
everywhere = tff.FederatedType(np.int32, tff.CLIENTS, all_equal=True)


@pytest.mark.parametrize("parameter", [
    None, at_server, everywhere, at_clients, tff.StructType([at_server, at_clients]),
    tff.StructType([at_clients, tff.StructType([at_server, at_clients])])])
def test_parameters_that_can_be_split(parameter):
    remote.check_splittable(tff.FunctionType(parameter, at_server))


@pytest.mark.parametrize("parameter", [
    tff.StructType([at_clients, at_server]), tff.StructType([at_clients, everywhere]),
    tff.StructType([tff.StructType([at_server, at_clients]), np.int32]),
    tff.StructType([at_clients, tff.StructType([])])])
def test_parameters_that_cannot_be_split(parameter):
    with pytest.raises(NotImplementedError, match=REFUSED):
        remote.check_splittable(tff.FunctionType(parameter, at_server))


def test_results_of_single_clients_are_refused():
    with pytest.raises(NotImplementedError, match="can't return values of single clients"):
        remote.check_splittable(tff.FunctionType(
            at_clients, tff.StructType([at_server, at_clients])))


def test_an_aggregate_that_needs_another_is_refused_in_one_line(workers):
    @tff.federated_computation(INT_AT_CLIENTS)
    def computation(x):
        mean = tff.federated_broadcast(tff.federated_sum(x))
        return tff.federated_sum(tff.federated_map(tff.tensorflow.computation(
            lambda a, b: a * b, np.int32, np.int32), (x, mean)))

    with pytest.raises(ValueError) as error:
        computation([1, 2])
    assert str(error.value) == (
        "the runtime tff_workers: Detected one aggregate dependent on another")


# --- failures


def test_a_failing_computation_names_the_worker(workers):
    gather = tff.tensorflow.computation(lambda x: tf.gather([1, 2], x), np.int32)
    computation = tff.federated_computation(
        lambda x: tff.federated_sum(tff.federated_map(gather, x)), INT_AT_CLIENTS)
    with pytest.raises(RuntimeError, match=f"^TFF worker 127.0.0.1:{workers[1].port}: "
                                           r"Failed to run computation: indices = 9 is not in"):
        computation([0, 1, 0, 9])
    assert computation([0, 1, 1, 0]) == 6


def test_a_failed_precondition_is_not_retried_for_ever(worker, stock_context):
    """TFF takes a client's error of this kind for a lost worker."""
    @tff.tensorflow.computation(np.int32)
    def uninitialised(x):
        handle = tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name="nobody")
        return x + tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int32)

    with tff.framework.get_context_stack().install(
            stock_context(tff.framework.SyncExecutionContext)):
        with pytest.raises(RuntimeError, match=r"TFF worker 127.0.0.1:\d+: .*nobody"):
            uninitialised(1)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_killed_in_a_round_is_named_and_the_other_goes_on(victim, workers, caplog):
    total(0, [1, 1])
    other = workers[1 - victim]
    threading.Timer(1.0, workers[victim].process.kill).start()
    start = time.monotonic()
    with pytest.raises(ConnectionError,
                       match=f"^TFF worker 127.0.0.1:{workers[victim].port} is gone"):
        total(0, [300_000] * 4)
    assert time.monotonic() - start < 60
    with pytest.raises(ConnectionError, match=f"127.0.0.1:{workers[victim].port} is gone"):
        total(0, [1, 1])  # and stays gone
    with pytest.raises(ConnectionError, match=f"{workers[victim].port} does not answer .*start it"):
        runtime.use("tff_workers", addresses=[f"127.0.0.1:{w.port}" for w in workers])
    runtime.use("tff_workers", addresses=[other.address])
    assert total(7, [1, 2, 3]) == (7, 6, 3)
    gc.collect()
    assert "never retrieved" not in caplog.text  # asyncio's complaint about the other's failure


def test_a_worker_that_comes_back_is_used_again(workers):
    """Its executors are gone with it; new ones are made."""
    total(0, [1, 1])
    port = workers[0].port
    workers[0].stop()
    with pytest.raises(ConnectionError, match="is gone"):
        total(0, [1, 2])
    workers[0] = Worker(port=port)
    deadline = time.monotonic() + 30  # gRPC waits before it connects again
    while True:
        try:
            assert total(0, [1, 2])[1] == 3
            break
        except ConnectionError:
            assert time.monotonic() < deadline
            time.sleep(0.5)


def test_a_machine_that_vanishes_is_noticed(workers, monkeypatch, caplog):
    """What answers nothing and closes nothing: only a new connection tells."""
    monkeypatch.setattr(remote, "_WATCH_SECONDS", 0.5)
    monkeypatch.setattr(remote, "_ANSWER_SECONDS", 2.0)
    total(0, [1, 1])
    process = psutil.Process(workers[0].process.pid)
    process.suspend()
    try:
        with pytest.raises(ConnectionError, match=f"{workers[0].address} does not answer"):
            total(0, [2, 1])
    finally:
        process.resume()
    workers[0].stop()
    time.sleep(0.5)
    gc.collect()
    assert "never retrieved" not in caplog.text


# --- addresses


@pytest.mark.parametrize("address, parts", [
    ("10.0.0.2:10000", ("10.0.0.2", 10000)), ("[::1]:80", ("::1", 80)),
    ("host.example:65535", ("host.example", 65535))])
def test_addresses(address, parts):
    assert remote.parse_address(address) == parts


@pytest.mark.parametrize("address", ["host", "host:", ":80", "host:http", "host:0", "host:65536",
                                     "host:-1", ""])
def test_addresses_that_are_refused(address):
    with pytest.raises(ValueError, match=f"a worker's address is host:port.*{address!r}"):
        remote.parse_address(address)


def test_no_addresses():
    with pytest.raises(ValueError, match="needs --workers=host:port"):
        runtime.use("tff_workers", addresses=[])


def test_an_address_where_something_else_listens(monkeypatch):
    monkeypatch.setattr(remote, "_ANSWER_SECONDS", 0.5)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=f"TFF worker {address} does not answer .Deadline"):
            runtime.use("tff_workers", addresses=[address])


def test_an_address_where_nobody_listens():
    with socket.socket() as claim:
        claim.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{claim.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=f"TFF worker {address} does not answer .Connection ref"):
            runtime.use("tff_workers", addresses=[address])


# --- python -m tff_programs.worker


@pytest.fixture
def free_port():
    with socket.socket() as claim:
        claim.bind(("127.0.0.1", 0))
        return claim.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize("sent, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130),
                                        (signal.SIGKILL, -signal.SIGKILL)])
def test_the_program_ends_its_worker(sent, code, free_port):
    program = subprocess.Popen(
        [sys.executable, "-m", "tff_programs.worker", f"--port={free_port}"], cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ})
    try:
        assert program.stdout.readline() == (
            f"TFF worker ready on port {free_port}; it has no authentication, keep it private\n")
        children = psutil.Process(program.pid).children(recursive=True)
        assert children
        runtime.use("tff_workers", addresses=[f"127.0.0.1:{free_port}"])
        assert total(7, [1, 2]) == (7, 3, 2)
        program.send_signal(sent)
        _, errors = program.communicate(timeout=30)
    finally:
        program.kill()
    assert program.returncode == code
    assert "Traceback" not in errors
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive


def test_a_port_in_use_is_refused(worker):
    """Two workers could share it, and would get the calls of one program in turn."""
    with pytest.raises(OSError, match=f"port {worker.port} can't be used: Address already in use"):
        Worker(port=worker.port)
