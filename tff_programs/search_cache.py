"""Searches the variants that a federation trains and serves: the fittest network for each limit.

    python -m tff_programs.search_cache                     # the paper's space, 25M to 600M MACs
    python -m tff_programs.search_cache --spec=configs/cifar100.py:small --targets=0.6e6:4.5e6:8
    python -m tff_programs.search_cache --constraint=params --targets=1e6,3e6,10e6

Writes --output, which a configuration's `cache` may name, and beside it <name>.fitness.csv. The
same command resumes an interrupted search.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import sys

import tqdm
from absl import flags, logging

from feast_tf import datasets, space
from feast_tf.space import path
from tff_programs import flags as program_flags

_SPEC = flags.DEFINE_string("spec", "paper", "The space: 'paper', a configuration such as "
                            "configs/cifar100.py:small, or a JSON file with SupernetSpec's fields.")
_TARGETS = flags.DEFINE_string("targets", "25e6:600e6:56",
                               "Limits: low:high:count in equal steps, or a list a,b,c.")
_CONSTRAINT = flags.DEFINE_enum("constraint", "macs", ["macs", "params", "latency"],
                                "What the targets limit.")
_EXPANSION = flags.DEFINE_enum("expansion", "stage", ["stage", "block"],
                               "One expansion ratio a stage, which the supernet can train, or one "
                               "a block, as DeepFedNAS has it (then only the table is written).")
_MAX_RHO = flags.DEFINE_float("max_rho", space.FitnessSettings().max_rho,
                              "rho0, the largest depth-to-width ratio rho.", lower_bound=0)
_PIN = flags.DEFINE_multi_string("pin", [], "A variant to keep, such as "
                                 "'d=3,7,6,7 e=0.1 w=0.3,0.1,0.1,0.1,0.1'; may be repeated.")
_MEASURE = flags.DEFINE_string("measure", None, "For --constraint=latency: module:function that "
                               "returns the latency of (spec, variant), in the targets' unit.")
_CANDIDATES = flags.DEFINE_integer("candidates", 64, "Networks that --measure is called for.",
                                   lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", "variants.csv", "The cache file to write.")


def read_spec(value: str) -> space.SupernetSpec:
    """The space that --spec names."""
    if value == "paper":
        return space.paper_spec()
    if value.endswith(".json"):
        with open(value) as file:
            try:
                return space.SupernetSpec(**json.load(file))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{value}: {error}") from error
    if not pathlib.Path(value.partition(":")[0]).is_file():
        raise ValueError(f"--spec: there is no file {value!r}; give 'paper', a configuration such "
                         "as configs/cifar100.py:small, or a JSON file")
    config = program_flags.load_config(value)
    return space.SupernetSpec(classes=len(datasets.class_counts(config.dataset)),
                              image_size=config.image_size, **config.space.to_dict())


def read_measure(value: str | None):
    """The function that --measure names."""
    module, colon, name = (value or "").partition(":")
    if not colon:
        raise ValueError("--constraint=latency needs --measure=module:function")
    sys.path.insert(0, os.getcwd())
    function = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise ValueError(f"--measure: module {module} has no function {name}")
    return function


def main(argv) -> None:
    del argv
    program_flags.log_own_lines()
    program_flags.refuse_configuration("name the space with --spec, such as "
                                       "--spec=configs/cifar100.py:small")
    latency = _CONSTRAINT.value == "latency"
    measure = read_measure(_MEASURE.value) if latency else None
    spec, targets = read_spec(_SPEC.value), path.parse_targets(_TARGETS.value)
    pins = [path.parse_pin(text, spec) for text in _PIN.value]
    search = space.Search(
        spec, cost="macs" if latency else _CONSTRAINT.value, expansion=_EXPANSION.value,
        settings=space.FitnessSettings(max_rho=_MAX_RHO.value))
    with tqdm.tqdm(total=_CANDIDATES.value if latency else len(targets), desc="search",
                   unit="variant", disable=not sys.stderr.isatty()) as bar:
        rows = path.build_cache(
            search, targets, _OUTPUT.value, pins=pins, candidates=_CANDIDATES.value,
            measure=measure, on_row=lambda row: bar.update())
    for row in rows:
        logging.info("%s: %.4gM MACs, %.4gM parameters, fitness %.1f, rho %.4f: %s", row.how,
                     row.score.macs / 1e6, row.score.params / 1e6, row.score.fitness,
                     row.score.rho, row.architecture)
    found = f"variants: {len(rows)}, targets: {len(targets)}"
    print(f"{found}, file: {_OUTPUT.value}" if _EXPANSION.value == "stage" else found)


if __name__ == "__main__":
    program_flags.run_main(main)
