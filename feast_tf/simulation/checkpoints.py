"""Program state on disk: newest readable version first, best weights beside it."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import numpy as np
import tensorflow_federated as tff
from absl import logging

from feast_tf.serving import load_weights, save_weights

_PREFIX = "round_"


class ProgramState(NamedTuple):
    """All that a resumed run needs; everything else follows from (seed, round).

    Attributes:
      process: state of the learning process.
      round_num: rounds done.
      best_round, best_score: the best validation so far (-1: none yet), and the mean accuracy of the
        anchors there.
      bytes_down, bytes_up: sent in all rounds so far.
      seconds: spent in all rounds so far.
    """

    process: Any
    round_num: int
    best_round: int
    best_score: float
    bytes_down: int
    bytes_up: int
    seconds: float

    def python_numbers(self) -> "ProgramState":
        """The same with Python numbers where a checkpoint gives NumPy scalars."""
        return ProgramState(self.process, int(self.round_num), int(self.best_round),
                            float(self.best_score), int(self.bytes_down), int(self.bytes_up),
                            float(self.seconds))


class Checkpoints:
    """The checkpoints of one run: the newest program states, and the best weights."""

    def __init__(self, folder: pathlib.Path):
        self._folder, self._kept_best = folder, -1  # the best round of the state before the newest
        self._manager = tff.program.FileProgramStateManager(folder, prefix=_PREFIX, keep_total=2,
                                                            keep_first=False)

    async def load_latest(self, structure: ProgramState) -> Optional[ProgramState]:
        """The newest state that can be read, or None.

        A state that can't be read (a disk that was full, a damaged file) is set aside, with a
        warning, so that its round can be saved again.
        """
        for version in sorted(await self._manager.get_versions() or [], reverse=True):
            try:
                state = (await self._manager.load(version, structure)).python_numbers()
            except Exception as error:  # whatever TensorFlow's reader finds in a damaged folder
                path = self._folder / f"{_PREFIX}{version}"
                aside = self._folder / f"unreadable_{path.name}"
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
                logging.warning("checkpoint %s can't be read (%s) and is now %s; going back to an "
                                "older one", path, " ".join(str(error).split()), aside.name)
            else:
                self._kept_best = state.best_round
                return state
        return None

    async def save(self, state: ProgramState) -> None:
        """Saves a state, then drops best weights that neither of the two kept states refers to."""
        # As they are, Python floats would be stored with the seven digits of a float32.
        exact = state._replace(best_score=np.float64(state.best_score),
                               seconds=np.float64(state.seconds))
        await self._manager.save(exact, version=state.round_num)
        kept = {self._best_path(self._kept_best), self._best_path(state.best_round)}
        for path in set(self._folder.glob("best_*.npz")) - kept:
            path.unlink()
        self._kept_best = state.best_round

    def _best_path(self, round_num: int) -> pathlib.Path:
        return self._folder / f"best_{round_num}.npz"

    def save_best(self, round_num: int, weights: Sequence[np.ndarray]) -> None:
        """Keeps the weights after `round_num` rounds, before `save` of a state that names them."""
        save_weights(self._best_path(round_num), weights)

    def load_best(self, round_num: int) -> tuple[np.ndarray, ...]:
        """The weights that `save_best` kept."""
        return load_weights(self._best_path(round_num))
