"""The loop over rounds: train, watch the anchors, keep the best weights, save, resume.

Program logic in TFF's sense: asynchronous, without flags, and told where to release its metrics.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow_federated as tff
import tqdm
from absl import logging
from tqdm.contrib.logging import logging_redirect_tqdm

from feast_tf.algorithms import check_cohort
from feast_tf.serving import Evaluator, anchor_levels
from feast_tf.simulation.checkpoints import Checkpoints, ProgramState
from feast_tf.simulation.experiment import Experiment


def make_evaluator(experiment: Experiment) -> Evaluator:
    """The evaluator of an experiment: recalibration on the server split."""
    settings = experiment.config.evaluation
    return Evaluator(experiment.routing, experiment.dataset.server.images,
                     mean=experiment.dataset.mean, std=experiment.dataset.std,
                     batch_size=settings.batch_size, recalibrate=settings.recalibrate)


def trained_weights(state: Any) -> list:
    """NumPy weights of a state, in the order of the layout's parameters."""
    return [np.asarray(weight) for weight in state.global_model_weights.trainable]


def round_metrics(metrics: Any, seconds: float) -> collections.OrderedDict:
    """The row of one round: the process' metrics and how long the round took."""
    row = collections.OrderedDict(metrics)
    row.pop("finalizer", None)
    row["seconds"] = seconds
    return row


def evaluate_anchors(experiment: Experiment, evaluator: Evaluator,
                     weights: Sequence[np.ndarray]) -> tuple[float, collections.OrderedDict]:
    """(mean accuracy, accuracy of each anchor by its MACs) on the validation split.

    Where the MACs of several anchors read alike, all but the first also have their place in the
    cache.
    """
    levels = anchor_levels(experiment.routing.cache.macs, experiment.config.evaluation.anchors)
    validation = experiment.dataset.validation
    points = evaluator.operating_points(weights, levels, validation.images, validation.labels,
                                        "validation")
    accuracies = collections.OrderedDict()
    for level, point in zip(levels, points):
        name = f"accuracy_{point.macs / 1e6:.3g}M"
        accuracies[f"{name}_variant_{level}" if name in accuracies else name] = point.accuracy
    return float(np.mean([point.accuracy for point in points])), accuracies


async def train(experiment: Experiment, process: tff.learning.templates.LearningProcess,
                evaluator: Evaluator, checkpoints: Checkpoints,
                release_managers: Sequence[tff.program.ReleaseManager]) -> ProgramState:
    """Runs the rounds that are still to do.

    Args:
      experiment: what is trained on what.
      process: initialize: ( -> S@SERVER), next: (<S@SERVER, {D}@CLIENTS> -> <state=S, metrics=M>),
        with S and M as `algorithms.build_feast` describes them.
      evaluator: measures the anchors.
      checkpoints: where states and the best weights are kept, and resumed from.
      release_managers: get a structure of metrics for every round, keyed by the round (from 1).

    Returns:
      The state after the last round. With equal seeds a run that was interrupted and resumed
      returns the weights of an unbroken one.

    Raises:
      FloatingPointError: the updates of all clients with data of a round were not finite.
    """
    config = experiment.config
    initial = ProgramState(process.initialize(), 0, -1, -1.0, 0, 0, 0.0)
    state = await checkpoints.load_latest(initial) or initial
    if state.round_num:
        logging.info("resuming after round %d of %d", state.round_num, config.rounds)
    with contextlib.ExitStack() as stack:
        terminal = sys.stderr.isatty()
        if terminal:
            stack.enter_context(logging_redirect_tqdm())
        bar = stack.enter_context(tqdm.tqdm(total=config.rounds, initial=state.round_num,
                                            unit="round", disable=not terminal))
        while state.round_num < config.rounds:
            state, row = run_round(experiment, process, state)
            last = state.round_num == config.rounds
            if last or state.round_num % config.evaluation.every == 0:
                weights = trained_weights(state.process)
                score, accuracies = evaluate_anchors(experiment, evaluator, weights)
                row["validation"] = accuracies
                if score > state.best_score:
                    checkpoints.save_best(state.round_num, weights)
                    state = state._replace(best_round=state.round_num, best_score=score)
                logging.info("round %d: validation %s", state.round_num, "  ".join(
                    f"{name.partition('_')[2]} {value:.3f}" for name, value in accuracies.items()))
            for manager in release_managers:
                await manager.release(row, key=state.round_num)
            # Saved after the metrics: a round that is repeated overwrites its row.
            if last or state.round_num % config.checkpoint_every == 0:
                await checkpoints.save(state)
            bar.update()
            report_round(bar, terminal, state.round_num, config.rounds, row)
    return state


def run_round(experiment: Experiment, process: tff.learning.templates.LearningProcess,
              state: ProgramState) -> tuple[ProgramState, collections.OrderedDict]:
    """Trains one round and returns the new state and the round's metrics."""
    start = time.perf_counter()
    cohort = experiment.cohort(state.round_num)
    check_cohort(cohort, experiment.routing.num_levels)
    output = process.next(state.process, cohort)
    seconds = time.perf_counter() - start
    counts = output.metrics["aggregator"]
    refused = int(counts["clients_refused"])
    if refused:
        logging.warning("round %d: the updates of %d of %d clients were not finite and are left "
                        "out", state.round_num + 1, refused, len(cohort))
        if not int(counts["clients_with_data"]):
            raise FloatingPointError(
                f"round {state.round_num + 1}: no client's update was finite; lower "
                "training.learning_rate or training.clip_norm")
    state = state._replace(
        process=output.state, round_num=state.round_num + 1, seconds=state.seconds + seconds,
        bytes_down=state.bytes_down + int(output.metrics["distributor"]["bytes_down"]),
        bytes_up=state.bytes_up + int(counts["bytes_up"]))
    return state, round_metrics(output.metrics, seconds)


def report_round(bar: tqdm.tqdm, terminal: bool, round_num: int, rounds: int, row: dict) -> None:
    """Shows a round's losses on the bar, or in a log line about every twentieth of the run."""
    losses = {name.partition("_")[2]: float(value)  # 0: no mini-batch trained the role
              for name, value in row["client_work"]["train"].items()
              if name.startswith("loss_") and value}
    if terminal:
        bar.set_postfix({name: f"{value:.3f}" for name, value in losses.items()})
    elif round_num == 1 or round_num % max(1, rounds // 20) == 0:
        logging.info("round %d of %d: loss %s, %.1f s", round_num, rounds, ", ".join(
            f"{name} {value:.3f}" for name, value in losses.items()), row["seconds"])
