"""Plans a federation before anybody trains: budgets, traffic, computation, data, exposure.

    python -m tff_programs.plan --config=configs/paper.py               # the paper's figures
    python -m tff_programs.plan --dataset=cifar10 --gamma=0 --cohort=20  # what if
    python -m tff_programs.plan --config=configs/paper.py --population=devices.csv

Needs no data set and no GPU. Prints tables and writes plan.json and plan.html to --output_dir.
"""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
from absl import flags

from feast_tf import planning
from tff_programs import flags as program_flags

flags.adopt_module_key_flags(program_flags)  # --help shows them too
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None,
                                  "Folder for the files (default plans/<data set>).")
_GAMMA = flags.DEFINE_float("gamma", None, "What if the data followed the budgets like this.")
_ZIPF_S = flags.DEFINE_float("zipf_s", None, "What if the budgets had this exponent.",
                             lower_bound=0)
_ALPHA = flags.DEFINE_float("alpha", None, "What if alpha_eff, the effective concentration of the "
                            "partition, were this.")
_COHORT = flags.DEFINE_integer("cohort", None, "What if a round had this many clients.",
                               lower_bound=1)
_CLIENTS = flags.DEFINE_integer("clients", None, "What if there were this many clients.",
                                lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", None, "What if there were this many rounds.",
                               lower_bound=1)
_POPULATION = flags.DEFINE_string("population", None, "CSV file of devices, not drawn clients: "
                                  "budget or device, optionally count and bandwidth_mbps.")
_DEVICES = flags.DEFINE_string("devices", "", "Budgets of the device classes in --population, such "
                               "as watch:25e6,phone:300e6.")
_BANDWIDTH = flags.DEFINE_float("bandwidth_mbps", None,
                                "Bandwidth of clients without one of their own.", lower_bound=0)


def apply_what_if(config) -> None:
    """Writes the what-if flags into the configuration."""
    settings = config.population
    if _ZIPF_S.value is not None and (settings.budgets or _POPULATION.value):
        raise ValueError("--zipf_s changes nothing: the budgets are given by "
                         + ("--population" if _POPULATION.value else "config.population.budgets"))
    if _CLIENTS.value is not None and _POPULATION.value:
        raise ValueError("--clients does not go with --population, which says how many there are")
    for name, flag in (("gamma", _GAMMA), ("zipf_s", _ZIPF_S), ("alpha_eff", _ALPHA),
                       ("cohort_size", _COHORT), ("num_clients", _CLIENTS)):
        if flag.value is not None:
            settings[name] = flag.value
    config.rounds = _ROUNDS.value or config.rounds
    config.dataset = program_flags.DATASET.value or config.dataset


def main(argv) -> None:
    del argv
    program_flags.log_own_lines()
    config = program_flags.CONFIG.value
    with config.unlocked():
        apply_what_if(config)
        if _POPULATION.value:
            devices = planning.read_devices(_POPULATION.value,
                                            planning.parse_classes(_DEVICES.value))
            config.population.num_clients = devices.num_clients
        else:
            devices = planning.configured_devices(config)
    if _BANDWIDTH.value:
        devices = dataclasses.replace(devices, bandwidth=np.where(
            np.isnan(devices.bandwidth), _BANDWIDTH.value * 1e6, devices.bandwidth))
    plan = planning.build_plan(config, devices)
    print(planning.format_plan(plan))
    folder = pathlib.Path(_OUTPUT_DIR.value or f"plans/{config.dataset}")
    planning.write_plan(folder, plan)
    print(f"\nfiles: {folder / 'plan.json'}, {folder / 'plan.html'}")


if __name__ == "__main__":
    program_flags.run_main(main)
