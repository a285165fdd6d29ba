"""Exports plain networks of any size from a finished run, and checks each file.

    python -m tff_programs.export --run=runs/digits                  # five sizes, three formats
    python -m tff_programs.export --run=runs/x --budget=50e6 --formats=keras,tflite,tflite_int8
    python -m tff_programs.export --run=runs/x --latency_ms=12 --threads=1 --formats=tflite

Writes the files, export.json and export.html to --output_dir (default <run>/export). Exit code 1
means that nothing was written, or that a file exceeds its bound; the line says which. More is in
docs/deploy.md.
"""

from __future__ import annotations

from tff_programs import environment  # isort: skip  (first: it prepares TensorFlow's import)
from absl import flags

from tff_programs import flags as program_flags

_RUN = flags.DEFINE_string("run", None, "Folder of a finished run.")
_FORMATS = flags.DEFINE_list(
    "formats", ["keras", "tflite", "tflite_int8"],
    "Of keras, savedmodel, tflite, tflite_fp16, tflite_dynamic, tflite_int8.")
_BUDGET = flags.DEFINE_multi_float("budget", [], "MACs; the largest cached variant within them.")
_BUDGETS = flags.DEFINE_list("budgets", [], "Several budgets: a,b,c.")
_LEVELS = flags.DEFINE_list("levels", [], "Places in the run's cache: 0,2,4.")
_VARIANT = flags.DEFINE_multi_string("variant", [], "A variant of the space, cached or not, such "
                                     "as 'd=1,0;e=0.5;w=1'; may be repeated.")
_PARAMS = flags.DEFINE_float("params", None, "The largest cached variant of at most so many "
                             "parameters.")
_BYTES = flags.DEFINE_float("bytes", None, "The largest cached variant whose file in the first "
                            "format has at most so many bytes.")
_LATENCY = flags.DEFINE_float("latency_ms", None, "The largest cached variant whose file in the "
                              "first format takes at most so many milliseconds on this machine.")
_POST_HOC = flags.DEFINE_bool("post_hoc", False, "With --budget or --params: search the space "
                              "for the fittest variant, instead of taking the largest cached one.")
_THREADS = flags.DEFINE_integer("threads", 1, "Threads of the interpreter.", lower_bound=1)
_BATCH = flags.DEFINE_enum("batch", "1", ["1", "dynamic"], "Pictures in a call of a TFLite file.")
_INT8_INPUT = flags.DEFINE_enum("int8_input", "uint8", ["uint8", "float32"],
                                "Type of pictures and logits of tflite_int8.")
_TEST_PICTURES = flags.DEFINE_integer("test_pictures", None, "Check with so many test pictures "
                                      "instead of all.", lower_bound=1)
_TRAINABLE = flags.DEFINE_bool("trainable", False, "Also write a file with which a client of each "
                               "network's budget trains on its device.")
_LICENSE = flags.DEFINE_string("license", "", "Terms of use, for the metadata of the files.")
_DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Folder or archive with the run's data set; downloaded where this is not "
    "given.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Folder for the files (<run>/export).")


def numbers(name: str, texts: list[str], kind: type) -> tuple:
    """The numbers of a list flag."""
    try:
        return tuple(kind(text) for text in texts)
    except ValueError as error:
        raise ValueError(f"--{name} must be a list of numbers: {error}") from error


def main(argv) -> None:
    del argv
    program_flags.log_own_lines()
    program_flags.refuse_configuration("the run has its own")
    if not _RUN.value:
        raise ValueError("name the folder of a finished run with --run")
    import tensorflow as tf

    from feast_tf import serving, simulation

    tf.get_logger().setLevel("ERROR")  # it tells where each SavedModel on the way was written

    request = serving.ExportRequest(
        budgets=(*_BUDGET.value, *numbers("budgets", _BUDGETS.value, float)),
        levels=numbers("levels", _LEVELS.value, int), variants=tuple(_VARIANT.value),
        params=_PARAMS.value, bytes=_BYTES.value, latency_ms=_LATENCY.value,
        post_hoc=_POST_HOC.value)
    settings = serving.ExportSettings(
        formats=tuple(_FORMATS.value), batch=None if _BATCH.value == "dynamic" else 1,
        int8_input=_INT8_INPUT.value, threads=_THREADS.value, license=_LICENSE.value,
        test_pictures=_TEST_PICTURES.value)
    simulation.export_run(_RUN.value, request, settings, trainable=_TRAINABLE.value,
                          output_dir=_OUTPUT_DIR.value, data_dir=_DATA_DIR.value)


if __name__ == "__main__":
    # Before absl runs: TensorFlow 2.14, when imported later, starts in graph mode, and Keras then
    # makes placeholders of TensorFlow 1.
    import tensorflow  # noqa: F401

    program_flags.run_main(main, interrupted="interrupted; nothing was written")
