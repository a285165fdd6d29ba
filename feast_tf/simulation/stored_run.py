"""A run's folder, read back: its experiment and the weights that it serves."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pathlib
import re
from typing import Optional, Union

import ml_collections
import numpy as np

from feast_tf import runtime
from feast_tf.algorithms import build_feast
from feast_tf.serving import load_supernet, load_weights
from feast_tf.simulation import outputs
from feast_tf.simulation.checkpoints import Checkpoints, ProgramState
from feast_tf.simulation.experiment import Experiment, build_experiment
from feast_tf.simulation.training_program import trained_weights


@dataclasses.dataclass(frozen=True)
class StoredRun:
    """What is known of a finished or interrupted run.

    Attributes:
      experiment: built anew from the run's config.json.
      weights: arrays of the supernet, in the order of the layout's parameters.
      rounds: how many rounds these weights were trained for.
      complete: whether the run is finished; else the weights are its latest checkpoint's.
      source: which weights these are, for people.
    """

    experiment: Experiment
    weights: tuple[np.ndarray, ...]
    rounds: int
    complete: bool
    source: str


def read_config(folder: pathlib.Path) -> ml_collections.ConfigDict:
    """The configuration of the run in a folder.

    Raises:
      ValueError: there is none, or its file is damaged; the message names the file.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not the folder of a run: it has no config.json")
    try:
        return ml_collections.ConfigDict(json.loads(path.read_text()))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error})") from error


def load_run(folder: Union[str, os.PathLike], *,
             data_dir: Optional[Union[str, os.PathLike]] = None) -> StoredRun:
    """Reads a run: its model where it is finished, else the best weights of its checkpoints.

    Nothing is trained, and the folder stays as it is; the run may even be at work.

    Args:
      folder: the run's, `--output_dir` of `tff_programs.run`.
      data_dir: see `datasets.load`; the run does not keep where its pictures were.

    Raises:
      ValueError: it is no run, has nothing to serve yet, or its files are damaged or do not fit;
        one line that names the file. Errors of the data set as `datasets.load` describes them.
    """
    folder = pathlib.Path(folder)
    config, summary = read_config(folder), outputs.read_summary(folder)
    try:
        if summary is None:
            experiment = build_experiment(config, data_dir=data_dir)
            return _interrupted(folder, experiment)
        saved = load_supernet(folder / "model")
        config.cache = str(folder / "model" / "cache.csv")  # the configuration's may be gone
        experiment = build_experiment(config, data_dir=data_dir)
        best = int(summary["best_round"])
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} was not written by this version of the program "
                         f"({error})") from error
    if saved.spec != experiment.routing.cache.spec or saved.classes != experiment.dataset.classes:
        raise ValueError(f"{folder / 'model' / 'spec.json'} is of another space, or of other "
                         f"classes, than {folder / 'config.json'} and its data set")
    return StoredRun(experiment, saved.weights, best, True,
                     f"the best of {summary['rounds']} rounds in validation, round {best}")


def _interrupted(folder: pathlib.Path, experiment: Experiment) -> StoredRun:
    """The best weights so far; before the first validation those of the newest checkpoint."""
    checkpoints, total = folder / "checkpoints", experiment.config.rounds
    best = {int(match[1]): path for path in checkpoints.glob("best_*.npz")
            if (match := re.fullmatch(r"best_(\d+)\.npz", path.name))}
    if best:
        rounds = max(best)
        return StoredRun(experiment, load_weights(best[rounds]), rounds, False,
                         f"the best in validation so far, round {rounds} of {total}")
    if not list(checkpoints.glob("round_*")):
        raise ValueError(f"{folder} has no checkpoint yet; the run saves one every "
                         f"{experiment.config.checkpoint_every} rounds")
    runtime.use("in_process")
    process = build_feast(experiment.routing, experiment.training, total_rounds=total,
                          seed=experiment.config.seed)
    state = asyncio.run(Checkpoints(checkpoints).load_latest(
        ProgramState(process.initialize(), 0, -1, -1.0, 0, 0, 0.0)))
    if state is None:
        raise ValueError(f"{checkpoints} has no checkpoint that can be read")
    return StoredRun(experiment, tuple(trained_weights(state.process)), state.round_num, False,
                     f"the newest checkpoint, round {state.round_num} of {total}")
