"""A whole run in one folder: build, train or resume, measure, write the results."""

from __future__ import annotations

import asyncio
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Union

import ml_collections
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
import tqdm
from absl import logging

from feast_tf import runtime
from feast_tf.algorithms import build_feast
from feast_tf.serving import (Evaluator, OperatingPoint, SavedSupernet, anchor_levels,
                              save_supernet)
from feast_tf.simulation import outputs, report
from feast_tf.simulation.checkpoints import Checkpoints
from feast_tf.simulation.experiment import Experiment, build_experiment
from feast_tf.simulation.training_program import make_evaluator, train


def describe(experiment: Experiment) -> str:
    """What will be run, a line each for the data, the network and the clients."""
    routing, cache = experiment.routing, experiment.routing.cache
    sizes = [client.num_samples for client in experiment.clients]
    payload = routing.payload[experiment.levels]
    data = experiment.dataset
    return "\n".join([
        f"data: {data.name}, {len(data.train):,} train, {len(data.validation):,} validation, "
        f"{len(data.server):,} server, {len(data.test):,} test pictures of "
        f"{cache.spec.image_size}x{cache.spec.image_size}, {len(data.classes)} classes",
        f"network: {len(cache)} cached variants of {cache.macs[0] / 1e6:.4g}M to "
        f"{cache.macs[-1] / 1e6:.4g}M MACs",
        f"clients: {len(sizes)} on {len(np.unique(experiment.levels))} levels, "
        f"{min(sizes)} to {max(sizes)} pictures each; {experiment.config.population.cohort_size} "
        f"a round, mean payload {np.mean(payload) / 1e6:.4g}M of "
        f"{sum(np.prod(p.shape) for p in routing.layout.parameters) / 1e6:.4g}M parameters"])


def measure(experiment: Experiment, evaluator: Evaluator,
            weights) -> tuple[list[OperatingPoint], list[OperatingPoint]]:
    """(test points of the whole cache in its order, validation points of the anchors)."""
    dataset, cache = experiment.dataset, experiment.routing.cache
    with tqdm.tqdm(total=len(cache), desc="test accuracy", unit="variant",
                   disable=not sys.stderr.isatty()) as bar:
        test = evaluator.operating_points(
            weights, range(len(cache)), dataset.test.images, dataset.test.labels, "test",
            on_point=lambda point: bar.update())
    anchors = anchor_levels(cache.macs, experiment.config.evaluation.anchors)
    validation = evaluator.operating_points(
        weights, anchors, dataset.validation.images, dataset.validation.labels, "validation")
    return test, validation


def run(config: ml_collections.ConfigDict, output_dir: Union[str, os.PathLike], *,
        data_dir: Optional[Union[str, os.PathLike]] = None, runtime_name: str = "in_process",
        workers: Sequence[str] = (), lanes: Optional[int] = None,
        dry_run: bool = False) -> Optional[dict]:
    """Runs an experiment to its end, going on where an earlier call on the same folder stopped.

    Makes a TFF runtime the default of this process. Prints the final table.

    Args:
      config: as `configs.base.base_config` describes it.
      output_dir: the run's folder; the README lists its files.
      data_dir: see `datasets.load`.
      runtime_name: see `runtime.use`.
      workers: addresses for the runtime "tff_workers".
      lanes: clients that run at the same time on the CPU, for the runtime "in_process".
      dry_run: only say what would be run.

    Returns:
      What summary.json holds, or None for a dry run.

    Raises:
      ValueError: a setting, the folder or the data does not fit; one line that names it.
    """
    if bool(workers) != (runtime_name == "tff_workers"):
        raise ValueError("addresses of workers (--workers) go with the runtime tff_workers, and "
                         f"only with it, but the runtime is {runtime_name}")
    if lanes and runtime_name != "in_process":
        raise ValueError(f"lanes (--lanes) go with the runtime in_process, not {runtime_name}")
    folder = pathlib.Path(output_dir)
    if not dry_run:
        outputs.check_folder(folder, config)
        summary = outputs.read_summary(folder)
        if summary:
            print(f"{folder}: complete after {summary['rounds']} rounds, population-averaged test "
                  f"accuracy {summary['population_accuracy']:.4f}; nothing to do")
            return summary
    experiment = build_experiment(config, data_dir=data_dir)
    print(describe(experiment), flush=True)
    if dry_run:
        return None
    with outputs.claimed(folder, config):
        options = {"tff_workers": {"addresses": workers}, "in_process": {"lanes": lanes}}
        return _run_in(folder, experiment, runtime_name, options.get(runtime_name, {}))


def _run_in(folder: pathlib.Path, experiment: Experiment, runtime_name: str,
            runtime_options: Mapping[str, Any]) -> dict:
    """Trains, measures and writes the results to a claimed folder."""
    config = experiment.config
    runtime.use(runtime_name, **runtime_options)  # first: lanes are made before TensorFlow starts
    checkpoints = Checkpoints(folder / "checkpoints")
    managers = [outputs.metrics_manager(folder / "metrics.csv"),
                tff.program.TensorBoardReleaseManager(folder / "logdir")]
    logging.info("metrics go to %s and %s, checkpoints to %s", folder / "metrics.csv",
                 folder / "logdir", folder / "checkpoints")
    evaluator = make_evaluator(experiment)
    logging.info("evaluation runs in this process, on %s",
                 ", ".join(d.name for d in tf.config.list_physical_devices("GPU")) or "the CPU")
    process = build_feast(experiment.routing, experiment.training, total_rounds=config.rounds,
                          seed=config.seed)
    state = asyncio.run(train(experiment, process, evaluator, checkpoints, managers))

    weights = checkpoints.load_best(state.best_round)
    test, validation = measure(experiment, evaluator, weights)
    cache = experiment.routing.cache
    save_supernet(folder / "model", SavedSupernet(
        cache, weights, experiment.dataset.classes, experiment.training.mean,
        experiment.training.std))
    outputs.write_operating_points(folder, [*test, *validation])
    outputs.write_clients(folder, experiment, test)
    summary = outputs.summarize(
        experiment, test, rounds=state.round_num, best_round=state.best_round,
        bytes_down=state.bytes_down, bytes_up=state.bytes_up, seconds=state.seconds)
    groups = outputs.budget_groups(experiment, test)
    report.write_report(folder, experiment, test, groups, summary)
    outputs.write_summary(folder, summary)
    print(outputs.format_table(groups, summary["population_accuracy"]))
    print(f"report: {folder / 'report.html'}")
    return summary
