"""A federated round in plain NumPy: lists of arrays and dictionaries, for any framework (3.3).

    cohort = {"phone": 0, "laptop": 2}                       # the level of each client
    for client, arrays in plan_round(slices, weights, cohort).items():
        ...                                                  # send it; the client trains it
    weights, summary = merge(slices, weights, cohort, results)

Nothing is kept from one round to the next, and nothing is random. `results` may be a generator: one
client's arrays are in memory at a time, next to one accumulator. Where results come in one by one,
as in the callback of a server, feed a `Merger`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
import operator
from typing import Any

import numpy as np

from feast_tf.routing import SliceMap

RETURNS = ("weights", "updates")
# Exact in float64. A larger claim is a mistake, or an attempt to outweigh everybody else.
_MOST_EXAMPLES = 2**53


def plan_round(slices: SliceMap, weights: Sequence[np.ndarray], cohort: Mapping[Hashable, int]
               ) -> dict[Hashable, list[np.ndarray]]:
    """What each client of a round is sent.

    Args:
      slices: which prefixes each level holds.
      weights: floating-point arrays of `slices.shapes`, the server's model.
      cohort: the level of each client.

    Returns:
      For each client, in the order of the cohort, the prefix of each weight: read-only views, to be
      copied where training works in place. An array that a level does not have is one of size 0.

    Raises:
      ValueError: the cohort is empty or holds a level that does not exist; the weights do not fit
        the map, are not floating-point or not finite.
    """
    plan = {}
    weights = _checked_weights(slices, weights)
    for client, level in _checked_cohort(slices, cohort).items():
        plan[client] = slices.cut(weights, level)
        for part in plan[client]:
            part.flags.writeable = False
    return plan


class Merger:
    """Takes the results of one round one by one; `result` is the new model.

    Every position becomes the mean of the trained weights of the clients that hold it, weighted by
    their examples:

        theta[u] <- sum_i n_i * theta_i[u] / sum_i n_i   over clients i that hold u.

    Where nobody reports, or nobody changed anything, the old value stays bit for bit. Sums are kept
    in float64, 8 bytes for each number of the whole model. The order of the results moves a sum by
    about 1e-16 of it; so float32 weights are nearly always the same to the bit in every order, but
    this is not guaranteed. Not to be used from two threads at once.
    """

    def __init__(self, slices: SliceMap, weights: Sequence[np.ndarray],
                 cohort: Mapping[Hashable, int], *, returns: str = "weights", strict: bool = True):
        """Starts a round.

        Args:
          slices, weights, cohort: as for `plan_round`. The weights must not change meanwhile.
          returns: what clients deliver, their trained "weights" or "updates", which are trained
            minus received weights.
          strict: whether a malformed result raises. Otherwise it is counted, for servers that must
            go on whatever a client sends.

        Raises:
          ValueError: as `plan_round`; or `returns` is neither.
        """
        if returns not in RETURNS:
            raise ValueError(f"returns must be one of {', '.join(RETURNS)}, but is {returns!r}")
        self._slices = slices
        self._weights = _checked_weights(slices, weights)
        self._cohort = _checked_cohort(slices, cohort)
        self._returns, self._strict = returns, strict
        self._sums = [np.zeros(shape, np.float64) for shape in slices.shapes]
        self._mass = dict.fromkeys(sorted(set(self._cohort.values())), 0)  # examples of each level
        self._with_data, self._without_data, self._refused = {}, {}, {}
        self._ignored = []
        self._bytes_up = 0

    def add(self, client: Hashable, arrays: Sequence[np.ndarray], num_examples: int) -> bool:
        """Takes one client's result; what is not used leaves no trace in the sums.

        Args:
          client: a member of the cohort.
          arrays: of the shapes that the client was sent, of any numeric dtype and byte order.
          num_examples: n_i; 0 where the client had nothing to train on.

        Returns:
          Whether the result went into the mean. Values that are not finite, or not in the range of
          the weights' dtype (of float32 at most), are refused and counted.

        Raises:
          ValueError: only where `strict`: the client is unknown or has reported before, the arrays
            do not have the shapes of its slice or are not numbers, or `num_examples` is not an
            integer in 0..2^53. After the last two the client may report again.
        """
        if client not in self._cohort:
            return self._ignore(f"client {client!r} is not in the cohort")
        if any(client in group for group in (self._with_data, self._without_data, self._refused)):
            return self._ignore(f"client {client!r} reported a second time")
        try:
            arrays, num_examples = self._checked_result(client, arrays, num_examples)
        except ValueError as error:
            if self._strict:
                raise
            self._refused[client] = str(error)
            return False
        self._bytes_up += sum(array.nbytes for array in arrays)
        places = range(len(arrays))
        for place in places:  # a second time below: all changes at once would be a second model
            if not self._in_range(place, arrays[place]):
                self._refused[client] = (f"client {client!r}: {self._slices.names[place]} holds "
                                         "values that are not finite or too large")
                return False
        if num_examples == 0:
            self._without_data[client] = 0
            return False
        for place in places:
            part = _prefix(self._sums[place], arrays[place].shape)
            part += num_examples * self._change(place, arrays[place])
        self._mass[self._cohort[client]] += num_examples
        self._with_data[client] = num_examples
        return True

    def result(self) -> tuple[list[np.ndarray], dict[str, Any]]:
        """The new model, of the results so far.

        Returns:
          (weights, summary): new arrays of the shapes and dtypes of the old ones, and
            with_data, without_data, missing: lists of clients: those in the mean, those that had
              no examples, those that have not reported;
            refused: for each client whose result was not used, the reason (every client of the
              cohort is in one of these four);
            ignored: a message for each result of a stranger, and for each second result;
            examples: int, in the mean;
            bytes_down: int, of all slices sent;
            bytes_up: int, of the well-formed results as they came in.
        """
        new = []
        for old, total, extents in zip(self._weights, self._sums, self._slices.extents):
            mass = np.zeros(old.shape, np.float64)
            for level, examples in self._mass.items():
                _prefix(mass, extents[level])[...] += examples
            moved = total != 0  # nowhere where nobody reports
            mean = np.divide(total, mass, out=np.zeros(old.shape, np.float64), where=moved)
            new.append(np.where(moved, old + mean, old).astype(old.dtype))
        reported = {**self._with_data, **self._without_data, **self._refused}
        return new, {
            "with_data": list(self._with_data),
            "without_data": list(self._without_data),
            "missing": [client for client in self._cohort if client not in reported],
            "refused": dict(self._refused),
            "ignored": list(self._ignored),
            "examples": sum(self._with_data.values()),
            "bytes_down": sum(part.nbytes for level in self._cohort.values()
                              for part in self._slices.cut(self._weights, level)),
            "bytes_up": self._bytes_up,
        }

    def _ignore(self, message: str) -> bool:
        if self._strict:
            raise ValueError(message)
        self._ignored.append(message)
        return False

    def _checked_result(self, client, arrays, num_examples) -> tuple[list[np.ndarray], int]:
        """The result as arrays of numbers of the right shapes; ValueError where it is not that."""
        try:
            count = operator.index(num_examples)
        except TypeError:
            count = -1
        if not 0 <= count <= _MOST_EXAMPLES:
            raise ValueError(f"client {client!r}: num_examples must be an integer in 0..2^53, but "
                             f"is {num_examples!r}")
        try:
            arrays = list(arrays)
        except TypeError:
            raise ValueError(f"client {client!r}: the result must be a list of arrays, but is a "
                             f"{type(arrays).__name__}") from None
        shapes = self._slices.slice_shapes(self._cohort[client])
        if len(arrays) != len(shapes):
            raise ValueError(f"client {client!r} returned {len(arrays)} arrays instead of "
                             f"{len(shapes)}")
        for place, (name, shape) in enumerate(zip(self._slices.names, shapes)):
            try:
                array = _real_numbers(arrays[place])
            except (TypeError, ValueError):
                raise ValueError(f"client {client!r}: {name} must be an array of real numbers"
                                 ) from None
            if array.shape != shape:
                raise ValueError(f"client {client!r}: {name} must be of shape {shape}, but is of "
                                 f"shape {array.shape}")
            arrays[place] = array
        return arrays, count

    def _change(self, place: int, array: np.ndarray) -> np.ndarray:
        """float64, trained minus received weights."""
        if self._returns == "updates":
            return array.astype(np.float64)
        return array.astype(np.float64) - _prefix(self._weights[place], array.shape)

    def _in_range(self, place: int, array: np.ndarray) -> bool:
        """Whether all trained weights are finite, in the dtype of the weights too.

        float32's range is the limit for float64 as well, so that no sum can overflow.
        """
        old = _prefix(self._weights[place], array.shape)
        limit = min(np.finfo(old.dtype).max, np.finfo(np.float32).max)
        with np.errstate(over="ignore", invalid="ignore"):
            trained = old + self._change(place, array)
        return bool(np.all(np.abs(trained) <= limit))  # False for NaN


def merge(slices: SliceMap, weights: Sequence[np.ndarray], cohort: Mapping[Hashable, int],
          results: Iterable[tuple[Hashable, Sequence[np.ndarray], int]], *,
          returns: str = "weights", strict: bool = True) -> tuple[list[np.ndarray], dict[str, Any]]:
    """The new model of a round: a `Merger` fed with `results`, (client, arrays, num_examples) each.

    Args, returned values and errors are those of `Merger`, `Merger.add` and `Merger.result`.
    """
    merger = Merger(slices, weights, cohort, returns=returns, strict=strict)
    for client, arrays, num_examples in results:
        merger.add(client, arrays, num_examples)
    return merger.result()


def _real_numbers(value: Any) -> np.ndarray:
    """`value` as an array; ValueError or TypeError where it does not hold real numbers."""
    array = np.asarray(value)
    if array.dtype.kind == "V":  # bfloat16 and its like, which other packages add to NumPy
        np.zeros((), array.dtype).astype(np.float64)
    elif array.dtype.kind not in "fiu":
        raise TypeError(array.dtype)
    return array


def _prefix(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The leading part of an array, as a view (also of an array without axes)."""
    return array[(*(slice(0, size) for size in shape), ...)]


def _checked_weights(slices: SliceMap, weights: Sequence[np.ndarray]) -> list[np.ndarray]:
    weights = [np.asarray(weight) for weight in weights]
    if len(weights) != len(slices.names):
        raise ValueError(f"the slice map has {len(slices.names)} arrays, but there are "
                         f"{len(weights)} weights")
    for name, shape, weight in zip(slices.names, slices.shapes, weights):
        if weight.shape != tuple(shape):
            raise ValueError(f"{name}: the weight must be of shape {tuple(shape)}, but is of shape "
                             f"{weight.shape}")
        if weight.dtype.kind != "f":
            raise ValueError(f"{name}: the weight must be floating-point, but is {weight.dtype}")
        if not np.all(np.isfinite(weight)):
            raise ValueError(f"{name}: the weight must be finite")
    return weights


def _checked_cohort(slices: SliceMap, cohort: Mapping[Hashable, int]) -> dict[Hashable, int]:
    if not cohort:
        raise ValueError("the cohort is empty: a round needs at least one client")
    checked = {}
    for client, level in cohort.items():
        try:
            checked[client] = slices.check_level(operator.index(level))
        except (TypeError, ValueError):
            raise ValueError(f"client {client!r}: level must be an integer in "
                             f"0..{slices.num_levels - 1}, but is {level!r}") from None
    return checked
