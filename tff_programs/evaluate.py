"""Measures a run in depth: every cached variant, uncached ones, calibration, confusions.

    python -m tff_programs.evaluate --run=runs/digits
    python -m tff_programs.evaluate --run=runs/digits --uncached=20
    python -m tff_programs.evaluate --run=runs/digits --split=validation

The run may be interrupted or still at work: then its best checkpoint is measured, and said to be
one. Results go to --output_dir (default <run>/evaluation). Nothing is trained and no TFF
computation runs, so there is no --runtime: the networks run in this process, on a GPU where there
is one.
"""

from __future__ import annotations

from tff_programs import environment  # isort: skip  (first: it prepares TensorFlow's import)
from absl import flags

from tff_programs import flags as program_flags

_RUN = flags.DEFINE_string("run", None, "Folder of the run.")
_SPLIT = flags.DEFINE_enum("split", "test", ("test", "validation"), "What to measure on.")
_UNCACHED = flags.DEFINE_integer(
    "uncached", 0, "How many variants that are not in the cache, but within its range of MACs, to "
    "hold against the cached ones.", lower_bound=0)
_DRAW = flags.DEFINE_enum(
    "draw", "random", ("random", "fittest"), "Which: drawn uniformly from the space, or the "
    "fittest under as many limits, which `tff_programs.export --post_hoc` would deploy.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of random ones.", lower_bound=0)
_DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Folder or archive with the data set, as for the run.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Folder of the results.")


def main(argv) -> None:
    del argv
    program_flags.log_own_lines()
    program_flags.refuse_configuration("the run's own config.json is")
    if not _RUN.value:
        raise ValueError("name the folder of a run, such as --run=runs/digits")
    from feast_tf import simulation  # after the flags: TensorFlow takes seconds to import

    simulation.evaluate_run(_RUN.value, split=_SPLIT.value, uncached=_UNCACHED.value,
                            draw=_DRAW.value, seed=_SEED.value,
                            data_dir=_DATA_DIR.value, output_dir=_OUTPUT_DIR.value)


if __name__ == "__main__":
    program_flags.run_main(main)
