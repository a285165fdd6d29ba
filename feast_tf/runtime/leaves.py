"""TensorFlow and XLA computations as callables of this process.

A leaf of a TFF computation is a serialised graph, meant to run in a session of its own. Here it
becomes one function of the eager context, which brings three differences that are evened out on
import: function names are shared by the whole process, variables and other resources are shared by
name, and initialisers must run before everything else.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from feast_tf.runtime import values

# tensorflow::ResourceHandle::ANONYMOUS_NAME: every execution makes a variable of its own, which
# goes with its last reference, after errors too.
_ANONYMOUS = b"cd2c89b7-88b7-44c8-ad83-06c2a9158347"
_ANONYMOUS_TABLES = {
    "HashTableV2": "AnonymousHashTable",
    "MutableHashTableV2": "AnonymousMutableHashTable",
    "MutableHashTableOfTensorsV2": "AnonymousMutableHashTableOfTensors",
    "MutableDenseHashTableV2": "AnonymousMutableDenseHashTable"}
_imports = itertools.count()


def _binding_names(binding) -> list[str]:
    kind = binding.WhichOneof("binding")
    if kind == "struct":
        return [name for element in binding.struct.element for name in _binding_names(element)]
    if kind == "sequence":
        return [binding.sequence.variant_tensor_name]
    return [binding.tensor.tensor_name] if kind == "tensor" else []


def _node_name(reference: str) -> str:
    return reference.lstrip("^").partition(":")[0]


def _all_nodes(graph: tf.compat.v1.GraphDef):
    yield from graph.node
    for function in graph.library.function:
        yield from function.node_def


def _rename_functions(graph: tf.compat.v1.GraphDef, suffix: str) -> None:
    """Makes the names of library functions unique in this process."""
    renamed = {f.signature.name: f.signature.name + suffix for f in graph.library.function}

    def rename_in(attributes):
        for attribute in attributes.values():
            functions = list(attribute.list.func)
            if attribute.HasField("func"):
                functions.append(attribute.func)
            for function in functions:
                function.name = renamed.get(function.name, function.name)
                rename_in(function.attr)

    for node in _all_nodes(graph):
        node.op = renamed.get(node.op, node.op)
        node.attr.pop("_gradient_op_type", None)  # names a Python gradient of the exporting process
        rename_in(node.attr)
    for function in graph.library.function:
        function.signature.name = renamed[function.signature.name]
        for key in ("forward_function_name", "backward_function_name"):
            function.attr.pop(key, None)
    for gradient in graph.library.gradient:
        gradient.function_name = renamed.get(gradient.function_name, gradient.function_name)
        gradient.gradient_func = renamed.get(gradient.gradient_func, gradient.gradient_func)


def _own_resources(graph: tf.compat.v1.GraphDef, suffix: str) -> None:
    """Gives every call variables and hash tables of its own."""
    for node in _all_nodes(graph):
        if node.op == "VarHandleOp":
            node.attr["shared_name"].s = _ANONYMOUS
        elif node.op in _ANONYMOUS_TABLES:
            node.op = _ANONYMOUS_TABLES[node.op]
            for key in ("container", "shared_name", "use_node_name_sharing"):
                node.attr.pop(key, None)
        elif "shared_name" in node.attr:  # rare ones, such as queues: one for each leaf
            node.attr["shared_name"].s += (node.name + suffix).encode()
        if "Iterator" in node.op:
            node.device = values.CPU


def _framed_nodes(graph: tf.compat.v1.GraphDef) -> set[str]:
    """Nodes inside the frames of lowered loops, where no control edge may enter from outside."""
    users: dict[str, list] = {}
    for node in graph.node:
        for reference in node.input:
            users.setdefault(_node_name(reference), []).append(node)
    depths = dict.fromkeys((node.name for node in graph.node), 0)
    queue = [node for node in graph.node if node.op in ("Enter", "RefEnter")]
    while queue:
        node = queue.pop()
        depth = (depths[node.name] + (node.op in ("Enter", "RefEnter"))
                 - (node.op in ("Exit", "RefExit")))
        for user in users.get(node.name, []):
            if depth > depths[user.name]:
                depths[user.name] = depth
                queue.append(user)
    return {name for name, depth in depths.items() if depth}


def _initialize_first(graph: tf.compat.v1.GraphDef, initializer: str) -> None:
    """Makes every node that `initializer` does not need wait for it."""
    by_name = {node.name: node for node in graph.node}
    initializer = _node_name(initializer)
    needed, queue = {initializer}, [initializer]
    while queue:
        for reference in by_name[queue.pop()].input:
            name = _node_name(reference)
            if name not in needed:
                needed.add(name)
                queue.append(name)
    framed = _framed_nodes(graph)
    for node in graph.node:
        if node.op not in ("Placeholder", "Const") and node.name not in needed | framed:
            node.input.append(f"^{initializer}")


class TensorFlowLeaf:
    """A TensorFlow computation; callable from several threads, on any device.

    Calls on one device wait for each other. oneDNN's batch normalisation keeps the shape of its
    input in the kernel, of which there is one for each function and device: two calls at once with
    different numbers of channels write past the end of their buffers (seen with TensorFlow 2.14.1).
    """

    def __init__(self, proto, type_signature: tff.FunctionType):
        leaf = proto.tensorflow
        self.type_signature = type_signature
        inputs = _binding_names(leaf.parameter) if leaf.HasField("parameter") else []
        outputs = _binding_names(leaf.result)
        self._locks: dict[str, threading.Lock] = {}
        self._on_cpu = tff.types.contains(
            type_signature.result, lambda t: isinstance(t, tff.SequenceType))
        if not outputs:
            self._function = None
            return
        graph = tf.compat.v1.GraphDef.FromString(leaf.graph_def.value)
        suffix = f"_leaf{next(_imports)}"
        _rename_functions(graph, suffix)
        _own_resources(graph, suffix)
        if leaf.initialize_op:
            _initialize_first(graph, leaf.initialize_op)
        wrapped = tf.compat.v1.wrap_function(
            lambda: tf.graph_util.import_graph_def(graph, name=""), signature=[])
        tensor = wrapped.graph.as_graph_element
        names = {node.name for node in graph.node}
        token = leaf.session_token_tensor_name
        self._token = [tf.constant("")] if token and _node_name(token) in names else []
        feeds = [tensor(name) for name in inputs + [token] * len(self._token)]
        self._function = wrapped.prune(feeds=feeds, fetches=[tensor(name) for name in outputs])

    def __call__(self, argument: Any, device: str) -> Any:
        if self._function is None:
            return values.pack(self.type_signature.result, iter(()))
        arguments = ([] if argument is None else values.flatten(argument)) + self._token
        device = values.CPU if self._on_cpu else device
        with self._locks.setdefault(device, threading.Lock()), tf.device(device):
            # Flat on purpose: the structured call formats every argument for an error message
            # first, which took two fifths of a round of a tiny model.
            results = self._function._call_flat(arguments, self._function.captured_inputs)
        return values.pack(self.type_signature.result, iter(results))


class XlaLeaf:
    """A JAX computation, compiled by the XLA client of the installed jaxlib; runs on its device."""

    def __init__(self, proto, type_signature: tff.FunctionType):
        from jax.lib import xla_bridge, xla_client  # only where JAX computations are used

        self.type_signature = type_signature
        self._backend = xla_bridge.get_backend()
        module = xla_client._xla.mlir.xla_computation_to_mlir_module(
            xla_client.XlaComputation(proto.xla.hlo_module.value))
        self._executable = self._backend.compile(module)
        parameter = proto.xla.parameter if proto.xla.HasField("parameter") else None
        self._inputs = [] if parameter is None else self._indices(parameter)
        self._outputs = self._indices(proto.xla.result)

    def _indices(self, binding) -> list[int]:
        if binding.WhichOneof("binding") == "tensor":
            return [binding.tensor.index]
        return [index for element in binding.struct.element for index in self._indices(element)]

    def __call__(self, argument: Any, device: str) -> Any:
        buffers = [None] * len(self._inputs)
        given = [] if argument is None else values.flatten(argument)
        for index, tensor in zip(self._inputs, given):
            buffers[index] = self._backend.buffer_from_pyval(np.asarray(tensor))
        results = [np.asarray(buffer) for buffer in self._executable.execute(buffers)]
        with tf.device(device):
            return values.pack(self.type_signature.result,
                               iter([tf.constant(results[index]) for index in self._outputs]))


def load_leaf(proto, type_signature: tff.FunctionType):
    """The callable of a compiled computation.

    Raises:
      NotImplementedError: it is neither TensorFlow nor XLA.
    """
    kind = proto.WhichOneof("computation")
    if kind == "tensorflow":
        return TensorFlowLeaf(proto, type_signature)
    if kind == "xla":
        return XlaLeaf(proto, type_signature)
    raise NotImplementedError(f"the in-process runtime runs TensorFlow and JAX, not {kind!r}")
