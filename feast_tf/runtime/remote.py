"""TFF workers on other machines: the cohort is split over them.

A worker is TFF's own binary (`python -m tff_programs.worker --port=...` starts one). **It has no
authentication and runs whatever graph it is sent**: see the README on how to protect it.
"""

from __future__ import annotations

import asyncio
import collections
import re
import threading
from collections.abc import Sequence
from typing import Any

import grpc
import tensorflow_federated as tff
from absl import logging

_MAX_MESSAGE_BYTES = 2**31 - 1
# A machine that vanishes is noticed within the sum of these.
_WATCH_SECONDS = 10.0
_ANSWER_SECONDS = 20.0
_DISPOSE_OF_NOTHING = "/tensorflow_federated.v0.ExecutorGroup/Dispose"


def open_channel(address: str, *options: tuple[str, int]) -> grpc.Channel:
    """A gRPC channel to host:port that takes messages of any size that gRPC can send."""
    return grpc.insecure_channel(address, options=[*options, *(
        (f"grpc.max_{kind}message_length", _MAX_MESSAGE_BYTES)
        for kind in ("receive_", "send_", ""))])


def parse_address(address: str) -> tuple[str, int]:
    """(host, port) of "host:port".

    Raises:
      ValueError: it has another form; the message names it.
    """
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"a worker's address is host:port, e.g. 10.0.0.2:10000, not {address!r}")
    return host.strip("[]"), int(port)


def _reason(call: grpc.Call) -> str:
    """The telling part of the first line of a failed call's details."""
    lines = (call.details() or "").splitlines() or [call.code().name]
    return re.sub(r"^failed to connect.*: ", "", lines[0])


def check_reachable(address: str) -> None:
    """Raises ConnectionError, naming the worker, where no worker answers at `address`."""
    parse_address(address)
    # A connection of its own.
    channel = open_channel(address, ("grpc.use_local_subchannel_pool", 1))
    try:
        # A call, since there are networks that accept connections for machines that are gone.
        channel.unary_unary(_DISPOSE_OF_NOTHING)(b"", timeout=_ANSWER_SECONDS)
    except grpc.RpcError as error:
        raise ConnectionError(
            f"TFF worker {address} does not answer ({_reason(error)}); start it with "
            "python -m tff_programs.worker, or go on without it (--workers)") from error
    finally:
        channel.close()


class _NamedErrors(grpc.UnaryUnaryClientInterceptor):
    """Makes errors name the worker, and final: TFF repeats a call to a lost one without end."""

    def __init__(self, address: str):
        self._address = address

    def intercept_unary_unary(self, continuation, details, request):
        call = continuation(details, request)
        # A worker that is gone has nothing to dispose of, and one that was started again does not
        # know its executors: TFF deals with both.
        if (call.code() is grpc.StatusCode.OK or "/Dispose" in details.method
                or "No executor found" in (call.details() or "")):
            return call
        if call.code() is grpc.StatusCode.UNAVAILABLE:
            raise ConnectionError(f"TFF worker {self._address} is gone ({_reason(call)})")
        raise RuntimeError(f"TFF worker {self._address}: {_reason(call)}")


def executor_factory(address: str, channel: grpc.Channel) -> tff.framework.ExecutorFactory:
    """Executors on the worker at `address`; their errors are one line that names it."""
    stub = tff.framework.RemoteExecutorGrpcStub(
        grpc.intercept_channel(channel, _NamedErrors(address)))

    def stack(cardinalities):
        cardinalities = collections.defaultdict(int, cardinalities)
        cardinalities.setdefault(tff.CLIENTS, 0)
        executor = tff.framework.RemoteExecutor(stub)
        executor.set_cardinalities(cardinalities)
        return executor

    return tff.framework.ResourceManagingExecutorFactory(executor_stack_fn=stack)


# What TFF's own contexts do to computations, arguments and results.
CONTEXT_OPTIONS: dict[str, Any] = dict(
    compiler_fn=tff.backends.native.desugar_and_transform_to_native,
    transform_args=tff.tensorflow.transform_args,
    transform_result=tff.tensorflow.transform_result)


class _WorkerContext(tff.framework.AsyncContext):
    """One worker's context, with a thread of its own."""

    def __init__(self, address: str):
        self._address = address
        self._context = tff.framework.AsyncExecutionContext(
            executor_factory(address, open_channel(address)), **CONTEXT_OPTIONS)
        # TFF waits for a worker inside of the event loop: in one loop they would work in turn.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=f"tff-{address}", daemon=True).start()

    async def invoke(self, comp: Any, arg: Any) -> Any:
        result = asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self._context.invoke(comp, arg), self._loop))
        # What is dropped, here or by TFF when another worker fails, may still fail; asyncio would
        # print that.
        for dropped in (result, asyncio.current_task()):
            dropped.add_done_callback(lambda future: future.cancelled() or future.exception())
        # A process that ends closes its connections; a machine or network that goes does not.
        while not (await asyncio.wait([result], timeout=_WATCH_SECONDS))[0]:
            await asyncio.to_thread(check_reachable, self._address)
        return result.result()


def _is_cohort(type_spec: tff.Type) -> bool:
    return (isinstance(type_spec, tff.FederatedType) and type_spec.placement is tff.CLIENTS
            and not type_spec.all_equal)


def _ends_with_cohort(type_spec: tff.Type) -> bool:
    if isinstance(type_spec, tff.StructType) and len(type_spec):
        return _ends_with_cohort(type_spec[len(type_spec) - 1])
    return _is_cohort(type_spec)


def check_splittable(type_signature: tff.FunctionType) -> None:
    """Refuses what TFF 0.87 does not split, or splits wrongly without a word.

    Raises:
      NotImplementedError: the clients' values are not the last argument (TFF would send the first
        clients to all workers and the others to none), or are a result (TFF would return them in
        the order in which workers end).
    """
    parameter, result = type_signature.parameter, type_signature.result
    if parameter is not None and tff.types.contains(parameter, _is_cohort) and (
            not _ends_with_cohort(parameter)):
        raise NotImplementedError("the runtime tff_workers needs the clients' values as the last "
                                  "argument of a computation")
    if tff.types.contains(result, _is_cohort):
        raise NotImplementedError("the runtime tff_workers can't return values of single clients")


class _WorkersContext(tff.framework.SyncContext):
    """Splits the cohort of every computation over workers and merges their partial sums."""

    def __init__(self, addresses: Sequence[str]):
        self._context = tff.backends.native.create_mergeable_comp_execution_context(
            [_WorkerContext(address) for address in addresses])

    def invoke(self, comp: Any, arg: Any) -> Any:
        check_splittable(comp.type_signature)
        try:
            return self._context.invoke(comp, arg)
        except ValueError as error:  # e.g. an aggregate that needs another; lists all of them
            what = str(error).partition(". Examples are")[0]
            raise ValueError(f"the runtime tff_workers: {what}") from error


def use_workers(addresses: Sequence[str]) -> None:
    """Makes workers at "host:port" the default TFF runtime; each takes its share of every cohort.

    Raises:
      ValueError: there is no address, or one has another form.
      ConnectionError: a worker does not answer; the message names it.
    """
    if not addresses:
        raise ValueError("the runtime tff_workers needs --workers=host:port[,host:port...]")
    for address in addresses:
        check_reachable(address)
    tff.framework.set_default_context(_WorkersContext(addresses))
    logging.info("TFF runtime: workers at %s, CPU only", ", ".join(addresses))
