"""FEAST in OpenFL: slices as tensors, an aggregation function, and a task runner.

Needs the package `openfl`; written for its 1.9 release and its task-runner workflow
(`fx plan initialize`, `fx aggregator start`, `fx collaborator start`).

OpenFL sends tensors whole, by name, and every collaborator of a task must return the same names. So
the model becomes one vector for each level, with the numbers that the level holds and no lower one
does. A collaborator fetches the vectors up to its level, which are its slice and nothing else, and
returns empty vectors for the others. `HoldersMean` averages each vector over those that hold it.

In the plan, `aggregation_type: {template: feast_tf.interop.openfl.HoldersMean}` for the training
task, and `use_delta_updates: false` for the aggregator and the collaborators, as a delta to nothing
has no meaning. Lossy compression pipelines, OpenFL's secure aggregation (which masks whole tensors
of equal shapes) and its other aggregation functions do not fit vectors that some collaborators
lack.

Of OpenFL's own: `save/last.pbuf` holds the model that *entered* the last round, so plan one round
more than are to count; and after a collaborator has died the aggregator finishes its rounds if the
plan has a `straggler_handling_policy`, but waits for the dead one's sign-off until it is stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import logging
from typing import Any

import numpy as np
from openfl.federated import DataLoader, TaskRunner
from openfl.interface.aggregation_functions.core import AggregationFunction
from openfl.utilities import LocalTensor, TensorKey

from feast_tf.datasets import Split
from feast_tf.interop.trainer import LocalTrainer
from feast_tf.routing import Routing, SliceMap
from feast_tf.supernet import initial_weights
from feast_tf.training import LocalTraining

_log = logging.getLogger(__name__)


class LevelVectors:
    """A model's arrays as one vector for each level, for slice maps whose levels are nested.

    Attributes:
      names: of the vectors, lowest level first; levels that add nothing have none.
    """

    def __init__(self, slices: SliceMap):
        """Raises ValueError where a level lacks what a lower one holds."""
        for name, extents in zip(slices.names, slices.extents):
            if np.any(np.diff(extents, axis=0) < 0):
                raise ValueError(f"{name}: a level must hold all that lower levels hold")
        self._slices = slices
        # The lowest level that holds a position, num_levels where nobody does.
        self._holders = []
        for shape, extents in zip(slices.shapes, slices.extents):
            holder = np.full(shape, slices.num_levels, np.int32)
            for level in reversed(range(slices.num_levels)):
                holder[(*map(slice, extents[level]), ...)] = level
            self._holders.append(holder)
        sizes = np.diff(slices.payload, prepend=0)
        self._levels = {f"level{level:03d}": level for level in np.flatnonzero(sizes)}
        self.names = tuple(self._levels)

    def held(self, level: int) -> list[str]:
        """The names of the vectors that make up a level's slice."""
        return [name for name, lowest in self._levels.items() if lowest <= level]

    def split(self, arrays: Sequence[np.ndarray], level: int) -> dict[str, np.ndarray]:
        """The vectors in a level's slice (see `SliceMap.cut`); those of others are empty."""
        holders = self._slices.cut(self._holders, level)
        return {name: np.concatenate([array[holder == lowest] for array, holder
                                      in zip(arrays, holders)]).astype(np.float32)
                for name, lowest in self._levels.items()}

    def join(self, vectors: Mapping[str, np.ndarray], level: int) -> list[np.ndarray]:
        """The slice of a level, float32, of the vectors that it holds.

        Raises:
          ValueError: a vector is not of its size.
        """
        holders = self._slices.cut(self._holders, level)
        arrays = [np.zeros(holder.shape, np.float32) for holder in holders]
        for name in self.held(level):
            places = [np.flatnonzero(holder == self._levels[name]) for holder in holders]
            sizes = [len(place) for place in places]
            if np.shape(vectors[name]) != (sum(sizes),):
                raise ValueError(f"{name} must hold {sum(sizes)} numbers, but is of shape "
                                 f"{np.shape(vectors[name])}")
            parts = np.split(vectors[name], np.cumsum(sizes)[:-1])
            for array, place, part in zip(arrays, places, parts):
                array.reshape(-1)[place] = part
        return arrays

    def restore(self, vectors: Mapping[str, np.ndarray], initial: Sequence[np.ndarray]
                ) -> list[np.ndarray]:
        """The whole model of all vectors; what no level holds is as in `initial`."""
        weights = [np.array(weight) for weight in initial]
        top = self._slices.num_levels - 1
        for part, trained in zip(self._slices.cut(weights, top), self.join(vectors, top)):
            part[...] = trained
        return weights


class HoldersMean(AggregationFunction):
    """The mean of a vector over the collaborators that hold it, weighted by their examples.

    Where nobody holds it, it keeps its value. A collaborator that returned anything that is not
    finite or of a wrong size in this round is left out with all that it returned, and logged.
    """

    def call(self, local_tensors: list[LocalTensor], db_iterator: Iterator[Any], tensor_name: str,
             fl_round: int, tags: tuple[str, ...]) -> np.ndarray:
        """The new value of the vector `tensor_name`."""
        rows = [row for row in db_iterator if row["round"] == fl_round]
        before = {row["tensor_name"]: row["nparray"] for row in rows if row["tags"] == ("model",)}
        if tensor_name not in before:
            raise ValueError(f"{tensor_name} is not part of the model of round {fl_round}")
        reasons = {}
        for row in rows:
            if "trained" in row["tags"] and row["tensor_name"] in before:
                reason = _reason(row["nparray"], before[row["tensor_name"]])
                if reason:
                    reasons.update(dict.fromkeys(set(row["tags"]) - {"trained"},
                                                 f"{row['tensor_name']} {reason}"))
        for name, reason in reasons.items():
            _log.warning("round %d: %s refused: %s", fl_round, name, reason)
        change, weight = np.zeros(before[tensor_name].shape, np.float64), 0.0
        for tensor in local_tensors:
            if np.size(tensor.tensor) and tensor.weight > 0 and tensor.col_name not in reasons:
                change += tensor.weight * (np.float64(tensor.tensor) - before[tensor_name])
                weight += tensor.weight
        return np.float32(before[tensor_name] + change / weight if weight else before[tensor_name])


class PictureLoader(DataLoader):
    """What a collaborator has.

    Attributes:
      budget: the MACs that it affords.
      pictures: its own.
      client: its number, which tells its random draws from those of others.
    """

    def __init__(self, budget: float, pictures: Split, client: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.budget, self.pictures, self.client = budget, pictures, client

    def get_feature_shape(self) -> tuple[int, ...]:
        """[height, width, channels] of a picture."""
        return self.pictures.images.shape[1:]

    def get_train_data_size(self) -> int:
        """n_i, the weight of the collaborator."""
        return len(self.pictures)


class FeastTaskRunner(TaskRunner):
    """Trains the slice of a collaborator's budget on its pictures.

    A workspace's own runner derives from it and gives the constructor what it needs.
    """

    def __init__(self, data_loader: PictureLoader, *, routing: Routing,
                 training: LocalTraining, total_rounds: int, batch_size: int = 32,
                 local_epochs: int = 1, seed: int = 0, **kwargs: Any):
        """Args:
          data_loader: the collaborator's, or that of a machine which initialises the plan.
          routing: of the federation's variant cache, the same everywhere.
          training: what is done with a mini-batch.
          total_rounds: length of the learning rate's schedule.
          batch_size, local_epochs: how the pictures are dealt out.
          seed: of the initial weights and of all local randomness.
          **kwargs: OpenFL's.
        """
        super().__init__(data_loader, **kwargs)
        self.routing, self.vectors = routing, LevelVectors(routing.slices)
        self._total_rounds, self._seed = total_rounds, seed
        self._trainer = LocalTrainer(routing, training, batch_size=batch_size,
                                     local_epochs=local_epochs)

    def get_tensor_dict(self, with_opt_vars: bool = False) -> dict[str, np.ndarray]:
        """The initial model; optimisers have no state between rounds."""
        top = self.routing.num_levels - 1
        weights = [weight.numpy() for weight in initial_weights(self.routing.layout, self._seed)]
        return self.vectors.split(self.routing.slices.cut(weights, top), top)

    def initialize_tensorkeys_for_functions(self, with_opt_vars: bool = False) -> None:
        """Nothing: what a task needs follows from the level."""

    def get_required_tensorkeys_for_function(self, func_name: str, **kwargs: Any
                                             ) -> list[TensorKey]:
        """The vectors of the collaborator's level."""
        return [TensorKey(name, "GLOBAL", 0, False, ("model",))
                for name in self.vectors.held(self._level())]

    def train_task(self, col_name: str, round_num: int, input_tensor_dict: dict[str, np.ndarray],
                   **kwargs: Any) -> tuple[dict[TensorKey, np.ndarray], dict]:
        """One round of local training; (tensors for the aggregator, tensors kept here)."""
        level = self._level()
        weights = self.vectors.join(input_tensor_dict, level)
        result = self._trainer.train(
            weights, self.data_loader.pictures, client=self.data_loader.client, level=level,
            round_num=round_num, total_rounds=self._total_rounds, seed=self._seed)
        trained = self.vectors.split(
            [weight + change for weight, change in zip(weights, result.update)], level)
        tensors = {TensorKey(name, col_name, round_num, False, ("trained",)): vector
                   for name, vector in trained.items()}
        tensors.update({TensorKey(name, col_name, round_num, True, ("metric",)): np.float32(value)
                        for name, value in result.metrics.items()})
        return tensors, {}

    def _level(self) -> int:
        return self.routing.cache.level(self.data_loader.budget)


def _reason(vector: np.ndarray, before: np.ndarray) -> str:
    """Why a trained vector cannot be used, empty where it can."""
    if np.size(vector) and np.shape(vector) != before.shape:
        return f"must be of shape {before.shape}, but is of shape {np.shape(vector)}"
    return "" if np.all(np.isfinite(vector)) else "holds values that are not finite"
