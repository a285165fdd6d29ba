"""Trains one elastic network over clients of different budgets and measures what each is served.

    python -m tff_programs.run                                  # digits, minutes on two cores
    python -m tff_programs.run --dataset=tinyimagenet --data_dir=/data
    python -m tff_programs.run --config=configs/cifar100.py --config.training.rule=min_max

Results go to --output_dir (default runs/<data set>). The same command resumes an interrupted run.
Training and evaluation run in this process, on GPUs where there are any (--runtime).
"""

from __future__ import annotations

import os

from tff_programs import environment  # isort: skip  (first: it prepares TensorFlow's import)
from absl import flags, logging

from tff_programs import flags as program_flags

flags.adopt_module_key_flags(program_flags)  # --help shows them too
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None,
                                  "Folder of the run (default runs/<data set>).")
_DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Folder or archive with the data set; downloaded where this is not given.")
_ROUNDS = flags.DEFINE_integer("rounds", None, "Rounds to train, instead of the configuration's.",
                               lower_bound=1)
_SEED = flags.DEFINE_integer("seed", None, "Seed of everything, instead of the configuration's.",
                             lower_bound=0)
_RUNTIME = flags.DEFINE_enum(
    "runtime", "in_process", ("in_process", "tff_worker", "tff_workers"),
    "Where client work runs: in this process, on GPUs where there are any; in TFF's own worker, on "
    "the CPU; or in several of these (--workers).")
_WORKERS = flags.DEFINE_list("workers", [], "host:port of each worker, for --runtime=tff_workers.")
_LANES = flags.DEFINE_integer(
    "lanes", None, "Clients that run at the same time on the CPU, for --runtime=in_process (default "
    "2 where there are as many cores); results are the same with any number.", lower_bound=1)
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Only say what would be run.")


def main(argv) -> None:
    del argv
    program_flags.log_own_lines()
    config = program_flags.CONFIG.value
    with config.unlocked():
        config.dataset = program_flags.DATASET.value or config.dataset
        config.rounds = _ROUNDS.value or config.rounds
        config.seed = config.seed if _SEED.value is None else _SEED.value
    from feast_tf import simulation  # after the flags: TensorFlow takes seconds to import

    logging.info("oneDNN is %s (TF_ENABLE_ONEDNN_OPTS)",
                 "off" if os.environ["TF_ENABLE_ONEDNN_OPTS"] == "0" else "on")
    simulation.run(config, _OUTPUT_DIR.value or f"runs/{config.dataset}",
                   data_dir=_DATA_DIR.value, runtime_name=_RUNTIME.value,
                   workers=_WORKERS.value, lanes=_LANES.value, dry_run=_DRY_RUN.value)


if __name__ == "__main__":
    program_flags.run_main(
        main, interrupted="interrupted; the same command goes on from the last checkpoint")
