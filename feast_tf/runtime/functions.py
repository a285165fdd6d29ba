"""Unplaced TFF code: an interpreter of building blocks on concrete values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from feast_tf.runtime import values

blocks = tff.framework
# Gives the callable of a CompiledComputation; see `context.LeafCache`.
Loader = Callable[[blocks.CompiledComputation], Callable[[Any, str], Any]]


@dataclasses.dataclass(frozen=True)
class Closure:
    """A lambda with the scope it was made in; called like a leaf."""

    block: blocks.Lambda
    scope: Mapping[str, Any]
    load: Loader

    def __call__(self, argument: Any, device: str) -> Any:
        scope = dict(self.scope)
        if self.block.parameter_name is not None:
            scope[self.block.parameter_name] = argument
        return evaluate(self.block.result, scope, self.load, device)


def selected_index(block: blocks.Selection) -> int:
    """Which element a selection takes."""
    if block.index is not None:
        return block.index
    names = [name for name, _ in values.elements(block.source.type_signature)]
    return names.index(block.name)


def literal(block: blocks.Literal, device: str) -> tf.Tensor:
    """The tensor of a literal."""
    return values.ingest(block.value, block.type_signature, device)


def evaluate(block: blocks.ComputationBuildingBlock, scope: Mapping[str, Any], load: Loader,
             device: str) -> Any:
    """The value of an unplaced building block.

    Args:
      block: what to evaluate.
      scope: values of the names it refers to.
      load: gives the callable of a compiled computation.
      device: where tensors are made and TensorFlow runs.

    Raises:
      NotImplementedError: the block can't occur in unplaced code, or is unknown.
    """
    recurse = functools.partial(evaluate, scope=scope, load=load, device=device)
    if isinstance(block, blocks.Reference):
        return scope[block.name]
    if isinstance(block, blocks.Struct):
        return tuple(recurse(element) for _, element in tff.structure.iter_elements(block))
    if isinstance(block, blocks.Selection):
        return recurse(block.source)[selected_index(block)]
    if isinstance(block, blocks.Call):
        argument = None if block.argument is None else recurse(block.argument)
        return recurse(block.function)(argument, device)
    if isinstance(block, blocks.CompiledComputation):
        return load(block)
    if isinstance(block, blocks.Lambda):
        return Closure(block, scope, load)
    if isinstance(block, blocks.Block):
        scope = dict(scope)
        for name, value in block.locals:
            scope[name] = evaluate(value, scope, load, device)
        return evaluate(block.result, scope, load, device)
    if isinstance(block, blocks.Literal):
        return literal(block, device)
    if isinstance(block, blocks.Intrinsic) and block.uri in _SEQUENCE_INTRINSICS:
        return functools.partial(_SEQUENCE_INTRINSICS[block.uri], block.type_signature)
    what = block.uri if isinstance(block, blocks.Intrinsic) else type(block).__name__
    raise NotImplementedError(f"the in-process runtime has no {what!r} in unplaced code")


def _sequence_map(type_signature, argument, device):
    function, sequence = argument
    items = values.sequence_items(sequence, type_signature.parameter[1].element)
    return values.sequence_of([function(item, device) for item in items],
                              type_signature.result.element)


def _sequence_reduce(type_signature, argument, device):
    sequence, total, function = argument
    for item in values.sequence_items(sequence, type_signature.parameter[0].element):
        total = function((total, item), device)
    return total


def _sequence_sum(type_signature, argument, device):
    total = None
    add = lambda one, other: (tuple(map(add, one, other)) if isinstance(one, tuple)
                              else one + other)
    for item in values.sequence_items(argument, type_signature.parameter.element):
        total = item if total is None else add(total, item)
    if total is None:
        zeros = tff.types.type_conversions.type_to_tf_structure(type_signature.result)
        flat = [tf.zeros(spec.shape, spec.dtype) for spec in tf.nest.flatten(zeros)]
        total = values.pack(type_signature.result, iter(flat))
    return values.move(total, device)


_SEQUENCE_INTRINSICS = {"sequence_map": _sequence_map, "sequence_reduce": _sequence_reduce,
                        "sequence_sum": _sequence_sum}
