"""The in-process runtime: TFF computations run in this Python process, on CPUs or GPUs.

TFF's own runtime is a C++ process without GPU support that every value goes to and comes from as
serialised bytes. Here a computation is compiled once to a plan (`plan`), whose TensorFlow parts are
functions of this process (`leaves`), and run client by client on lanes (`execution`).
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import hashlib
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Optional

import tensorflow as tf
import tensorflow_federated as tff
from absl import logging
from google.protobuf import message

from feast_tf.runtime import functions, leaves, values
from feast_tf.runtime.execution import ComputationError, Run, cause
from feast_tf.runtime.plan import CLIENTS, EVERYWHERE, Plan, build_plan, intrinsics

_MAX_COMPILED = 64


@dataclasses.dataclass(frozen=True)
class _Compiled:
    """A computation, ready to run.

    Attributes:
      comp: the computation; kept, since it is known by its identity, which another could take over.
      name: of the function that the user wrote, as far as it is known.
      block: what to evaluate where there is no plan.
      plan: for a computation with placements.
      load: gives the callables of its leaves, and keeps them.
    """

    comp: tff.framework.ConcreteComputation
    name: str
    block: tff.framework.ComputationBuildingBlock
    plan: Optional[Plan]
    load: functions.Loader


def _without_cryptography(comp, name: str) -> tff.framework.ComputationBuildingBlock:
    """The computation with plain sums and selects in the place of secure ones."""
    logging.warning("%s: secure aggregation is simulated, without any cryptography", name)
    try:
        return tff.backends.test.replace_secure_intrinsics_with_bodies(comp).to_building_block()
    except message.DecodeError as error:  # protobuf's limit, e.g. of distributed DP
        raise NotImplementedError(
            f"{name}: nested too deeply for TFF to simulate its secure sums") from error


class InProcessContext(tff.framework.SyncContext):
    """Runs TFF computations in this process.

    Attributes:
      lanes: the device of each lane.
    """

    def __init__(self, *, devices: Optional[Sequence[str]] = None,
                 server_device: Optional[str] = None, materialize: bool = True,
                 reset_datasets: bool = False):
        """Args:
          devices: logical devices for client work, e.g. ["/device:GPU:0", "/device:GPU:1"]; by
            default all GPUs, or else the CPU. Each is a lane: clients on different devices overlap.
            Several lanes on one CPU are several logical devices (`cpu_lanes`): oneDNN's batch
            normalisation keeps state in its kernels, and two calls at once on one device corrupt
            memory (seen with TensorFlow 2.14.1).
          server_device: where server values live, by default the first of `devices`.
          materialize: results are NumPy arrays as TFF's own runtime gives them; False leaves
            tensors where they are, so that a server's state need not leave its device between rounds.
          reset_datasets: a data set that shuffles starts from the same state in every call, as
            in TFF's own runtime; False lets it go on, so that every round has another order.

        Raises:
          ValueError: a device does not exist, or is named twice; the message lists those that do.
        """
        known = [device.name for device in tf.config.list_logical_devices()]
        if devices is None:
            devices = [name for name in known if ":GPU:" in name] or [values.CPU]
        for device in (*devices, *([server_device] if server_device else ())):
            if device not in known:
                raise ValueError(f"there is no device {device!r}; there are {', '.join(known)}")
        if not devices or len(set(devices)) < len(devices):
            raise ValueError(f"devices must name at least one device, and each once; there are "
                             f"{', '.join(known)}")
        self.lanes = tuple(devices)
        self._server_device = server_device or devices[0]
        self._materialize, self._reset_datasets = materialize, reset_datasets
        self._compiled: collections.OrderedDict[int, _Compiled] = collections.OrderedDict()
        self._leaves: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
        self._lock = threading.RLock()

    def invoke(self, comp: tff.framework.ConcreteComputation, arg: Any) -> Any:
        """Runs a computation; TFF calls this.

        Raises:
          ComputationError: it failed, or a value is not of its type; the message names the
            computation, the client and the cause.
          NotImplementedError: it uses an intrinsic that this runtime does not have.
          TypeError, ValueError: the argument is no list with a value for each client.
        """
        compiled, type_signature = self._compile(comp), comp.type_signature
        plan = compiled.plan
        if plan is None:
            return self._invoke_local(compiled, type_signature, arg)
        found, num_clients = {}, None
        for node in plan.arguments:
            value, type_spec = arg, type_signature.parameter
            for place in node.path:
                value = values.children(value, type_spec)[place]
                type_spec = values.elements(type_spec)[place][1]
            if node.placement == CLIENTS:
                if not isinstance(value, (list, tuple)):
                    raise TypeError(f"{plan.name}: the values of {type_spec} must be a list with "
                                    f"one for each client, not {type(value).__name__}")
                if num_clients not in (None, len(value)):
                    raise ValueError(f"{plan.name}: {num_clients} clients in one argument, "
                                     f"{len(value)} in another")
                num_clients = len(value)
            found[node] = value

        def argument(node, client, device):
            value = found[node] if client < 0 else found[node][client]
            return values.ingest(value, node.type_spec, device, self._reset_datasets)

        run = Run(plan, self.lanes, self._server_device, num_clients or 0, argument)
        return self._emit(run, plan.result, type_signature.result)

    def _compile(self, comp) -> _Compiled:
        with self._lock:
            if id(comp) not in self._compiled:
                self._compiled[id(comp)] = self._compile_new(comp)
                if len(self._compiled) > _MAX_COMPILED:  # the one used longest ago
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(id(comp))
            return self._compiled[id(comp)]

    def _compile_new(self, comp) -> _Compiled:
        load, block = functools.partial(self._load, {}), comp.to_building_block()
        name = (getattr(block, "parameter_name", None) or "").removesuffix("_arg") or "computation"
        if any(uri.startswith("federated_secure") for uri in intrinsics(block)):
            block = _without_cryptography(comp, name)
        block, _ = tff.tensorflow.replace_intrinsics_with_bodies(block)
        plan = None
        if tff.types.contains(block.type_signature, lambda t: isinstance(t, tff.FederatedType)):
            plan = build_plan(tff.framework.to_call_dominant(block), load, name)
        return _Compiled(comp, name, block, plan, load)

    def _load(self, kept: dict, block: tff.framework.CompiledComputation):
        # By content: the same sum or zero occurs in many places of a computation. Kept by those who
        # use it, together with the block, whose identity another could take over.
        if id(block) not in kept:
            key = hashlib.sha256(block.proto.SerializeToString(deterministic=True)).digest()
            with self._lock:
                leaf = self._leaves.get(key)
                if leaf is None:
                    leaf = leaves.load_leaf(block.proto, block.type_signature)
                    self._leaves[key] = leaf
            kept[id(block)] = block, leaf
        return kept[id(block)][1]

    def _invoke_local(self, compiled: _Compiled, type_signature: tff.Type, arg: Any) -> Any:
        """A computation without placements."""
        device, argument = self._server_device, None
        is_function = isinstance(type_signature, tff.FunctionType)
        try:
            if is_function and type_signature.parameter is not None:
                argument = values.ingest(arg, type_signature.parameter, device,
                                         self._reset_datasets)
            value = functions.evaluate(compiled.block, {}, compiled.load, device)
            result = value(argument, device) if is_function else value
        except NotImplementedError:
            raise
        except Exception as error:
            raise ComputationError(f"{compiled.name}: {cause(error)}") from error
        return values.emit(result, type_signature.result if is_function else type_signature,
                           self._materialize)

    def _emit(self, run: Run, result: Any, type_spec: tff.Type) -> Any:
        if isinstance(type_spec, tff.StructType) and isinstance(result, tuple):
            named = [(name, self._emit(run, part, element)) for part, (name, element) in
                     zip(result, values.elements(type_spec))]
            return tff.types.type_to_py_container(tff.structure.Struct(named), type_spec)
        member, one_each = type_spec, False
        if isinstance(type_spec, tff.FederatedType):
            member = type_spec.member
            one_each = type_spec.placement is tff.CLIENTS and not type_spec.all_equal
        emit = lambda value: values.emit(value, member, self._materialize)
        if result.placement == CLIENTS:
            return [emit(value) for value in run.client_values(result)]
        value = (run.everywhere_value(result) if result.placement == EVERYWHERE
                 else run.server_value(result))
        return [emit(value) for _ in range(run.num_clients)] if one_each else emit(value)


class InProcessAsyncContext(tff.framework.AsyncContext):
    """The same for asynchronous programs, e.g. in a `tff.program.NativeFederatedContext`."""

    def __init__(self, context: InProcessContext):
        self._context = context

    async def invoke(self, comp: Any, arg: Any) -> Any:
        """Awaits the result of the computation, which runs in a thread of its own."""
        return await asyncio.to_thread(self._context.invoke, comp, arg)


def cpu_lanes(count: int) -> list[str]:
    """Divides the CPU into `count` logical devices, so that as many clients run at the same time.

    Returns:
      Their names, for `InProcessContext(devices=...)`.

    Raises:
      RuntimeError: TensorFlow has started with fewer logical devices, which can't be changed then.
    """
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(count)])
    except RuntimeError:
        found = len(tf.config.list_logical_devices("CPU"))
        if found < count:
            raise RuntimeError(f"{count} lanes need as many logical CPU devices, but TensorFlow "
                               f"has started with {found}; choose the runtime first") from None
    return [f"/device:CPU:{lane}" for lane in range(count)]


def _default_cpu_lanes() -> list[str]:
    """Two lanes where there are two cores, and TensorFlow has not started with fewer devices."""
    try:
        return cpu_lanes(min(2, len(os.sched_getaffinity(0))))
    except RuntimeError:
        return [values.CPU]


def use_in_process(*, lanes: Optional[int] = None, **options) -> InProcessContext:
    """Makes the in-process runtime the default of this thread's TFF.

    Args:
      lanes: clients that run at the same time on the CPU, each with the memory of one client; only
        where `devices` is not given and there is no GPU. By default 2 where there are as many
        cores; one client alone seldom keeps two busy. Results are the same with any number.
      **options: as for `InProcessContext`.
    """
    if "devices" not in options and not tf.config.list_physical_devices("GPU"):
        options["devices"] = cpu_lanes(lanes) if lanes else _default_cpu_lanes()
    for device in tf.config.list_physical_devices("GPU"):
        try:
            tf.config.experimental.set_memory_growth(device, True)
        except RuntimeError:
            logging.warning("%s is in use already; its memory growth can't be set", device.name)
    context = InProcessContext(**options)
    tff.framework.set_default_context(context)
    logging.info("TFF runtime: in process; clients run on %s", ", ".join(context.lanes))
    return context
