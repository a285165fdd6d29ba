"""The sparse sample-weighted mean as a `tff.aggregators` factory."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from feast_tf.aggregation import federated, fold
from feast_tf.routing import SliceMap

_Sum = tff.aggregators.UnweightedAggregationFactory


class SlicedMeanFactory(tff.aggregators.WeightedAggregationFactory):
    """Aggregation factory for the mean of updates that cover different positions (paper 3.3).

    The created `tff.templates.AggregationProcess` computes, for every position u of every array,

        sum_i weight_i * value_i[u] / sum_i weight_i    over the clients i whose value covers u,

    and exactly 0 where nobody does. The result has the containers of `value_type` and the full
    shapes of the slice map. What a client covers is said by its value:

    - where `value_type` has the map's elastic shapes, values are slices, and their shapes name the
      level (shapes of no level stop the round with an error);
    - where it has the full shapes, as in a process of `tff.learning.algorithms` whose clients all
      hold the whole model and train a part of it, the level is the smallest one that holds all
      nonzeros of the update, in all arrays together (`coverage.by_nonzeros`). An update of zeros
      alone counts for nothing.

    Without inner factories the sum is a `federated_aggregate` with one accumulator at the server. A
    client whose value would make a sum infinite or NaN is left out whole and counted. The state is
    empty; the measurements are

        <bytes_up=int64, clients_with_data=int32, clients_without_data=int32, clients_refused=int32>

    where `bytes_up` is the size of all values and clients without data are those of weight 0.

    With inner factories (the other one is then `tff.aggregators.SumFactory`):

    - at CLIENTS, the value is multiplied by its weight and padded with zeros to the full shapes,
      and the weight is put at the client's level in a float32[levels]; both are 0 for a client
      whose value is not finite;
    - `value_sum_factory` sums the former (numerators) and `weight_sum_factory` the latter, so with
      secure sums the server learns neither a client's update nor its weight or level;
    - at SERVER, the sum of the weights is expanded to positions and divides the numerators.

    The state then is that of the inner processes, <value_sum_process=..., weight_sum_process=...>,
    and so are the measurements, <mean_value=..., mean_weight=...>.

    `fixed_denominator` replaces the sum of the weights by given numbers. Differentially private
    sums need it: their noise is calibrated to what one client can change of the numerators, and a
    denominator made of the clients' own weights and levels would tell of them without any noise.
    """

    def __init__(self, slices: SliceMap, value_sum_factory: Optional[_Sum] = None,
                 weight_sum_factory: Optional[_Sum] = None, *,
                 fixed_denominator: Optional[Sequence[float]] = None):
        """Initializes `SlicedMeanFactory`.

        Args:
          slices: which positions the clients of each level hold.
          value_sum_factory: sums the weighted, padded values.
          weight_sum_factory: sums the weights of each level. A sum of zeros must be exactly 0.
          fixed_denominator: for each level what to put in place of the sum of its clients' weights
            in a round; positions where no level has any get 0. TFF's Gaussian factories divide
            their sum by `clients_per_round`, so with them it is the level's share of the clients
            times their mean weight.

        Raises:
          TypeError: an argument is of a wrong kind, or holds a factory that does not sum; the
            message names it.
          ValueError: `fixed_denominator` is not a non-negative number for each level.
        """
        if not isinstance(slices, SliceMap):
            raise TypeError(f"slices must be a feast_tf.routing.SliceMap (a Routing has one as its "
                            f"`slices`), but is a {type(slices).__name__}")
        self._slices = slices
        self._fixed = None
        if fixed_denominator is not None:
            if weight_sum_factory is not None:
                raise TypeError("weight_sum_factory has nothing to sum beside fixed_denominator")
            self._fixed = np.asarray(fixed_denominator, np.float32)
            if (self._fixed.shape != (slices.num_levels,)
                    or not np.all(np.isfinite(self._fixed) & (self._fixed >= 0))):
                raise ValueError("fixed_denominator must hold a finite number >= 0 for each of the "
                                 f"{slices.num_levels} levels, but is {fixed_denominator}")
        self._folds = (value_sum_factory is None and weight_sum_factory is None
                       and fixed_denominator is None)
        self._value_sum = value_sum_factory or tff.aggregators.SumFactory()
        self._weight_sum = weight_sum_factory or tff.aggregators.SumFactory()
        _check_sums("value_sum_factory", self._value_sum, private=self._fixed is not None)
        _check_sums("weight_sum_factory", self._weight_sum, private=False)
        _check_exact_zeros(self._weight_sum)

    def create(self, value_type: tff.Type, weight_type: tff.Type
               ) -> tff.templates.AggregationProcess:
        """Creates the process.

        Type signatures:

            initialize: ( -> S@SERVER)
            next: (<S@SERVER, {V}@CLIENTS, {N}@CLIENTS> ->
                   <state=S@SERVER, result=R@SERVER, measurements=M@SERVER>)

          S, M: the state and the measurements, see the class.
          V: `value_type`, float32 tensors of the map's elastic shapes, or of its full shapes, in
             the order of the map and in any containers.
          N: `weight_type`, a real scalar.
          R: V with full shapes.

        Raises:
          TypeError: the types are of another kind, or an inner factory's sum is of another type
            than its summands.
        """
        covered = federated.coverage_of(self._slices, value_type)
        if not (isinstance(weight_type, tff.TensorType) and weight_type.shape == ()
                and np.issubdtype(weight_type.dtype, np.number)
                and not np.issubdtype(weight_type.dtype, np.complexfloating)):
            raise TypeError(f"weight_type must be a real scalar, but is {str(weight_type):.100}")
        return self._create_fold(value_type, weight_type) if self._folds else self._create_sums(
            covered, value_type, weight_type)

    def _create_fold(self, value_type, weight_type) -> tff.templates.AggregationProcess:
        sparse_sum = federated.build_sparse_sum(self._slices, value_type, weight_type)

        @tff.tensorflow.computation(sparse_sum.type_signature.result.member)
        def finish(sums):
            means = fold.mean(self._slices, sums.numerator, sums.mass)
            counts = ("bytes_up", "clients_with_data", "clients_without_data", "clients_refused")
            return (federated.pack(means, value_type),
                    collections.OrderedDict((name, getattr(sums, name)) for name in counts))

        @tff.federated_computation
        def init_fn():
            return tff.federated_value((), tff.SERVER)

        @tff.federated_computation(init_fn.type_signature.result,
                                   tff.FederatedType(value_type, tff.CLIENTS),
                                   tff.FederatedType(weight_type, tff.CLIENTS))
        def next_fn(state, value, weight):
            clients = tff.federated_zip(collections.OrderedDict(update=value, weight=weight))
            result, measurements = tff.federated_map(finish, sparse_sum(clients))
            return tff.templates.MeasuredProcessOutput(state, result, measurements)

        return tff.templates.AggregationProcess(init_fn, next_fn)

    def _create_sums(self, covered, value_type, weight_type) -> tff.templates.AggregationProcess:
        slices, fixed = self._slices, self._fixed

        @tff.tensorflow.computation(value_type, weight_type)
        def as_summands(value, weight):
            update = federated.flatten(value, value_type)
            level, weight = covered(update, tf.cast(weight, tf.float32))
            summands = [fold.pad(weight * part, shape)
                        for part, shape in zip(update, slices.shapes)]
            used = tf.logical_and(weight > 0, fold.all_finite(summands))
            only_used = lambda tensor: tf.where(used, tensor, tf.zeros_like(tensor))
            return (federated.pack([only_used(part) for part in summands], value_type),
                    only_used(weight * tf.one_hot(level, slices.num_levels)))

        numerator_type, mass_type = as_summands.type_signature.result
        processes = collections.OrderedDict(
            value_sum_process=_create_sum("value_sum_factory", self._value_sum, numerator_type))
        if fixed is None:
            processes["weight_sum_process"] = _create_sum(
                "weight_sum_factory", self._weight_sum, mass_type)

        @tff.tensorflow.computation(numerator_type, mass_type)
        def divide(numerators, mass):
            means = fold.mean(slices, federated.flatten(numerators, value_type), mass)
            return federated.pack(means, value_type)

        @tff.federated_computation
        def init_fn():
            return tff.federated_zip(collections.OrderedDict(
                (name, process.initialize()) for name, process in processes.items()))

        @tff.federated_computation(init_fn.type_signature.result,
                                   tff.FederatedType(value_type, tff.CLIENTS),
                                   tff.FederatedType(weight_type, tff.CLIENTS))
        def next_fn(state, value, weight):
            summands = tff.federated_map(as_summands, (value, weight))
            outputs = collections.OrderedDict(
                (name, process.next(state[name], summand))
                for (name, process), summand in zip(processes.items(), summands))
            mass = (tff.federated_eval(tff.tensorflow.computation(lambda: tf.constant(fixed)),
                                       tff.SERVER)
                    if fixed is not None else outputs["weight_sum_process"].result)
            result = tff.federated_map(divide, (outputs["value_sum_process"].result, mass))
            measurements = collections.OrderedDict(
                ("mean_" + name.partition("_")[0], output.measurements)
                for name, output in outputs.items())
            return tff.templates.MeasuredProcessOutput(
                tff.federated_zip(collections.OrderedDict(
                    (name, output.state) for name, output in outputs.items())),
                result, tff.federated_zip(measurements))

        return tff.templates.AggregationProcess(init_fn, next_fn)


def _parts(factory: Any) -> Iterator[Any]:
    """A factory and all that it wraps, in its attributes or, as TFF's wrappers do, in a closure."""
    yield factory
    cells = getattr(type(factory).create, "__closure__", None) or ()
    for held in [*vars(factory).values(), *(cell.cell_contents for cell in cells)]:
        if isinstance(held, (_Sum, tff.aggregators.WeightedAggregationFactory)):
            yield from _parts(held)


def _check_sums(name: str, factory: Any, *, private: bool) -> None:
    """Refuses what is known not to sum; `private` allows for differential privacy."""
    if not isinstance(factory, _Sum):
        raise TypeError(f"{name} must be a tff.aggregators.UnweightedAggregationFactory, but is a "
                        f"{type(factory).__name__}")
    for part in _parts(factory):
        kind = type(part).__name__
        if not isinstance(part, _Sum) or isinstance(part, (
                tff.aggregators.UnweightedMeanFactory,
                tff.aggregators.UnweightedReservoirSamplingFactory)):
            raise TypeError(f"{name} must sum, but holds a {kind}")
        if isinstance(part, tff.aggregators.DifferentiallyPrivateFactory) and not private:
            raise TypeError(f"{name} holds a {kind}, which goes with the values and with "
                            f"fixed_denominator alone: weights summed in the clear are not private")


def _check_exact_zeros(factory: Any) -> None:
    """Refuses secure sums of weights whose range is symmetric: there 0 has no exact integer."""
    for part in _parts(factory):
        if (isinstance(part, tff.aggregators.SecureSumFactory)
                and vars(part).get("_lower_bound_threshold", 0.0) is None):
            raise TypeError("weight_sum_factory must sum zeros to exactly 0, which a "
                            "SecureSumFactory does with lower_bound_threshold=0.0 alone")


def _create_sum(name: str, factory: _Sum, value_type: tff.Type
                ) -> tff.templates.AggregationProcess:
    process = factory.create(value_type)
    if process.next.type_signature.result.result.member != value_type:
        raise TypeError(f"{name} must sum, but the result of its {type(factory).__name__} is of "
                        f"another type than its summands")
    return process
