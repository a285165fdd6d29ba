"""The plan of a federated computation: a graph of server and client nodes, made once.

A computation in call-dominant form is a list of intrinsics. Evaluated on symbols instead of values
it gives a graph of `Node`s, cut into *waves*: a wave is one pass over the clients, in which every
client's values are computed, folded into the aggregates of that wave and dropped before the next
client starts.
That is what keeps the memory at one client's worth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from feast_tf.runtime import functions, values

blocks = tff.framework

SERVER = "server"  # one value, at the server or unplaced
CLIENTS = "clients"  # a value for each client
EVERYWHERE = "everywhere"  # one value at all clients: kept once for each device


@dataclasses.dataclass(eq=False)
class Node:
    """A value of the plan.

    Attributes:
      placement: SERVER, CLIENTS or EVERYWHERE.
      inputs: nodes that must be known first.
      compute: from the inputs' values and a device to the value; None for arguments and aggregates.
      wave: number of passes over the clients that must be over before this node can be computed at
        the server, or before the pass in which it is computed at the clients.
    """

    placement: str
    inputs: tuple["Node", ...]
    compute: Optional[Callable[[list, str], Any]]
    wave: int = 0

    def __post_init__(self):
        self.wave = max([self.wave, *(node.wave + (self.placement == SERVER and
                                                  node.placement == CLIENTS)
                                      for node in self.inputs)])


@dataclasses.dataclass(eq=False)
class Argument(Node):
    """A leaf of the computation's parameter; `path` leads to it, `type_spec` is its member type."""

    path: tuple[int, ...] = ()
    type_spec: Optional[tff.Type] = None


@dataclasses.dataclass(eq=False)
class Aggregate(Node):
    """A `federated_aggregate`; inputs are (value at the clients, zero at the server)."""

    accumulate: Optional[Callable] = None
    report: Optional[Callable] = None


@dataclasses.dataclass(frozen=True)
class Wave:
    """One pass over the clients.

    Attributes:
      aggregates: that are folded in it.
      collected: client nodes whose values are results.
      kept: client nodes whose values stay known after the wave, for later ones.
      sources: server nodes that client nodes of this wave read.
    """

    aggregates: tuple[Aggregate, ...]
    collected: tuple[Node, ...]
    kept: tuple[Node, ...]
    sources: tuple[Node, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A computation, ready to run.

    Attributes:
      name: of the function that the user wrote, as far as it is known.
      arguments: leaves of the parameter.
      result: nested tuples of nodes.
      waves: in the order in which they run.
      uses: how often each server node's value is read; it is dropped after the last time.
    """

    name: str
    arguments: tuple[Argument, ...]
    result: Any
    waves: tuple[Wave, ...]
    uses: Mapping[Node, int]


def build_plan(block: blocks.ComputationBuildingBlock, load: functions.Loader, name: str) -> Plan:
    """Plans a computation in call-dominant form with placed values.

    Raises:
      NotImplementedError: it has an intrinsic that this runtime does not have; it is named.
    """
    arguments: list[Argument] = []
    scope = {}
    if isinstance(block, blocks.Lambda):
        if block.parameter_name is not None:
            scope[block.parameter_name] = _parameter(block.parameter_type, (), arguments)
        block = block.result
    result = _evaluate(block, scope, load)
    waves, uses = _schedule(result)
    return Plan(name, tuple(arguments), result, waves, uses)


def _parameter(type_spec: tff.Type, path: tuple[int, ...], found: list[Argument]) -> Any:
    if isinstance(type_spec, tff.StructType) and tff.types.contains(
            type_spec, lambda t: isinstance(t, tff.FederatedType)):
        return tuple(_parameter(element, (*path, place), found)
                     for place, (_, element) in enumerate(values.elements(type_spec)))
    placement, member = SERVER, type_spec
    if isinstance(type_spec, tff.FederatedType):
        member = type_spec.member
        if type_spec.placement is tff.CLIENTS:
            placement = EVERYWHERE if type_spec.all_equal else CLIENTS
    found.append(Argument(placement, (), None, path=path, type_spec=member))
    return found[-1]


def nodes_of(value: Any) -> list[Node]:
    """The nodes of nested tuples, in order."""
    if isinstance(value, tuple):
        return [node for element in value for node in nodes_of(element)]
    return [value] if isinstance(value, Node) else []


def _joined(value: Any) -> Node:
    """One node for nested tuples of nodes."""
    if isinstance(value, Node):
        return value
    if isinstance(value, _Capturing):
        return Node(SERVER, tuple(value.nodes.values()), lambda found, device: value.bind(found))
    if not isinstance(value, tuple):  # a function that captures nothing
        return Node(SERVER, (), lambda found, device: value)
    parts = [_joined(element) for element in value]
    placements = {part.placement for part in parts}
    placement = next((p for p in (CLIENTS, EVERYWHERE) if p in placements), SERVER)
    return Node(placement, tuple(parts), lambda found, device: tuple(found))


def _evaluate(block: blocks.ComputationBuildingBlock, scope: Mapping[str, Any],
              load: functions.Loader) -> Any:
    recurse = lambda inner: _evaluate(inner, scope, load)
    if isinstance(block, blocks.Reference):
        return scope[block.name]
    if isinstance(block, blocks.Struct):
        return tuple(recurse(element) for _, element in tff.structure.iter_elements(block))
    if isinstance(block, blocks.Selection):
        source, index = recurse(block.source), functions.selected_index(block)
        if isinstance(source, tuple):
            return source[index]
        return Node(source.placement, (source,), lambda found, device: found[0][index])
    if isinstance(block, blocks.Block):
        scope = dict(scope)
        for name, value in block.locals:
            scope[name] = _evaluate(value, scope, load)
        return _evaluate(block.result, scope, load)
    if isinstance(block, blocks.CompiledComputation):
        return load(block)
    if isinstance(block, blocks.Lambda):
        return _function(block, scope, load)
    if isinstance(block, blocks.Literal):
        return Node(SERVER, (), lambda found, device: functions.literal(block, device))
    if isinstance(block, blocks.Call):
        argument = None if block.argument is None else recurse(block.argument)
        if isinstance(block.function, blocks.Intrinsic) and block.function.uri in _INTRINSICS:
            return _INTRINSICS[block.function.uri](argument, block.type_signature)
        function = (functions.evaluate(block.function, {}, load, values.CPU)
                    if isinstance(block.function, blocks.Intrinsic) else recurse(block.function))
        return _applied(function, argument, SERVER)
    what = block.uri if isinstance(block, blocks.Intrinsic) else type(block).__name__
    raise NotImplementedError(f"the in-process runtime has no {what!r}")


def _blocks_of(block: blocks.ComputationBuildingBlock, kind: type) -> list:
    """All building blocks of a kind inside a block."""
    found = []

    def note(inner):
        if isinstance(inner, kind):
            found.append(inner)
        return inner, False

    blocks.transform_postorder(block, note)
    return found


def intrinsics(block: blocks.ComputationBuildingBlock) -> set[str]:
    """The names of the intrinsics that a computation uses."""
    return {intrinsic.uri for intrinsic in _blocks_of(block, blocks.Intrinsic)}


def _function(block: blocks.Lambda, scope: Mapping[str, Any], load: functions.Loader):
    """A lambda to hand to an intrinsic; what it captures from the plan becomes an input."""
    names = {reference.name for reference in _blocks_of(block, blocks.Reference)}
    captured = {name: scope[name] for name in names if name in scope}
    nodes = {name: _joined(value) for name, value in captured.items() if nodes_of(value)}
    others = {name: value for name, value in captured.items() if name not in nodes}
    if not nodes:
        return functions.Closure(block, others, load)
    return _Capturing(block, others, nodes, load)


@dataclasses.dataclass(frozen=True)
class _Capturing:
    block: blocks.Lambda
    others: Mapping[str, Any]
    nodes: Mapping[str, Node]
    load: functions.Loader

    def bind(self, found: Iterable[Any]) -> functions.Closure:
        return functions.Closure(self.block, {**self.others, **dict(zip(self.nodes, found))},
                                 self.load)


def _applied(function, argument: Any, placement: str) -> Node:
    """function(argument) at a placement; `argument` may be None."""
    if isinstance(argument, tuple) and not nodes_of(argument) and argument:
        argument, function = None, _partial(function, argument)
    inputs = () if argument is None else (_joined(argument),)
    if isinstance(function, _Capturing):
        count = len(inputs)
        return Node(placement, (*inputs, *function.nodes.values()),
                    lambda found, device: function.bind(found[count:])(
                        found[0] if count else None, device))
    return Node(placement, inputs,
                lambda found, device: function(found[0] if found else None, device))


def _partial(function, argument):
    return lambda _, device: function(argument, device)


def _mapped(argument, type_signature):
    function, value = argument
    value = _joined(value)
    return _applied(function, value, value.placement)


def _eval(placement):
    return lambda function, type_signature: _applied(function, None, placement)


def _broadcast(argument, type_signature):
    return Node(EVERYWHERE, (_joined(argument),),
                lambda found, device: values.move(found[0], device))


def _zipped(placement):
    def zip_nodes(argument, type_signature):
        node = _joined(argument)
        # An empty zip has no parts to tell where it is.
        return node if node.inputs or isinstance(argument, Node) else Node(
            placement, (), node.compute)
    return zip_nodes


def _aggregate(argument, type_signature):
    value, zero, *given = argument
    for function in given:
        if isinstance(function, _Capturing):
            raise NotImplementedError(
                "the in-process runtime has no federated_aggregate whose functions use values from "
                f"outside of them ({', '.join(function.nodes)}); put these into the client values")
    # Nothing to merge: clients are added to one sum, in their order, whatever device they run on.
    accumulate, _, report = given
    value = _joined(value)
    # Said here, since a value that is equal everywhere is folded once for each client as well.
    return Aggregate(SERVER, (value, _joined(zero)), None, wave=value.wave + 1,
                     accumulate=accumulate, report=report)


def _select(argument, type_signature):
    keys, _, value, function = argument
    element = type_signature.member.element
    value = _joined(value)
    picked = Node(EVERYWHERE, (value, _joined(function)),
                  lambda found, device: _Slices(found[0], found[1], device))

    def compute(found, device):
        chosen = np.asarray(found[0])
        if not len(chosen):
            raise ValueError("federated_select got no keys")
        return values.sequence_of([found[1](int(key)) for key in chosen], element)

    return Node(CLIENTS, (_joined(keys), picked), compute)


class _Slices:
    """select_fn's results for one server value; the last one is kept, for equal keys."""

    def __init__(self, value, function, device):
        self._value, self._function, self._device = value, function, device
        self._last: tuple = (None, None)

    def __call__(self, key: int) -> Any:
        known, slice_of_known = self._last  # one read: other threads may replace it
        if known == key:
            return slice_of_known
        with tf.device(self._device):
            result = self._function((self._value, tf.constant(key, tf.int32)), self._device)
        self._last = (key, result)
        return result


_INTRINSICS = {
    "federated_aggregate": _aggregate,
    "federated_apply": _mapped,
    "federated_broadcast": _broadcast,
    "federated_eval_at_clients": _eval(CLIENTS),
    "federated_eval_at_server": _eval(SERVER),
    "federated_map": _mapped,
    "federated_map_all_equal": _mapped,
    "federated_select": _select,
    "federated_value_at_clients": _broadcast,
    "federated_value_at_server": lambda argument, type_signature: _joined(argument),
    "federated_zip_at_clients": _zipped(EVERYWHERE),
    "federated_zip_at_server": _zipped(SERVER),
}


def server_sources(node: Node) -> list[Node]:
    """The server nodes that a value at all clients is made from."""
    if node.placement == EVERYWHERE:
        return [found for source in node.inputs for found in server_sources(source)]
    return [node]


def _needed(outputs: list[Node]) -> list[Node]:
    """All nodes that `outputs` depend on, inputs first."""
    order: dict[Node, None] = {}

    def visit(node):
        if node not in order:
            for source in node.inputs:
                visit(source)
            order[node] = None

    for node in outputs:
        visit(node)
    return list(order)


def _schedule(result: Any) -> tuple[tuple[Wave, ...], dict[Node, int]]:
    """Cuts the nodes that `result` needs into waves and counts how often server values are read."""
    outputs = nodes_of(result)
    needed = _needed(outputs)
    aggregates = [node for node in needed if isinstance(node, Aggregate)]
    collected = [node for node in outputs if node.placement == CLIENTS]
    numbers = sorted({node.wave - 1 for node in aggregates} | {node.wave for node in collected})
    computed: dict[Node, int] = {}  # client node -> the wave that computes it
    kept: dict[int, dict[Node, None]] = {number: {} for number in numbers}
    waves = []
    for number in numbers:
        folded = tuple(node for node in aggregates if node.wave - 1 == number)
        emitted = tuple(node for node in collected if node.wave == number)
        walked: set[Node] = set()
        sources: dict[Node, None] = {}

        def walk(node, number=number, walked=walked, sources=sources):
            if node in walked:
                return
            walked.add(node)
            if node.placement == SERVER:
                sources[node] = None
            elif computed.setdefault(node, number) < number and node.placement == CLIENTS:
                for earlier in numbers:
                    if computed[node] <= earlier < number:
                        kept[earlier][node] = None
            else:
                for source in node.inputs:
                    walk(source)

        for node in (*(aggregate.inputs[0] for aggregate in folded), *emitted):
            walk(node)
        waves.append((folded, emitted, number, tuple(sources)))

    uses = dict.fromkeys(needed, 0)
    readers = [node.inputs if node.placement == SERVER and not isinstance(node, Aggregate)
               else node.inputs[1:] if isinstance(node, Aggregate) else () for node in needed]
    readers += [sources for *_, sources in waves]
    readers += [server_sources(node) for node in outputs if node.placement != CLIENTS]
    for nodes in readers:
        for node in nodes:
            uses[node] += 1
    return tuple(Wave(folded, emitted, tuple(kept[number]), sources)
                 for folded, emitted, number, sources in waves), uses
