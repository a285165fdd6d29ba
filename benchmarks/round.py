"""Time of one FEAST round against the training steps of static Keras networks, and by phase.

    python -m benchmarks.round [--rounds=7] [--runtime=in_process]

The static networks are the same variants, on the same pictures, in the same process, one plain
training step each (forward, backward, SGD), so a ratio of 1 means that elasticity, distillation,
routing and aggregation cost nothing. Prints medians and, as the last line, JSON with
`round_over_static_steps`.
"""

from __future__ import annotations

from benchmarks import workload  # isort: skip  (first: it prepares TensorFlow's import)
import json

import numpy as np
import tensorflow_federated as tff
from absl import app, flags

from feast_tf import runtime
from feast_tf.aggregation import build_sparse_sum
from feast_tf.algorithms import build_distributor, build_feast
from feast_tf.serving import Evaluator

_ROUNDS = flags.DEFINE_integer("rounds", 7, "Timed rounds, after two that are not.", lower_bound=1)
_RUNTIME = flags.DEFINE_enum("runtime", "in_process", ("in_process", "tff_worker"), "TFF runtime.")


def phase_computations(routing):
    """(select, aggregate): routing alone, and aggregation alone, as TFF computations."""
    sparse_sum = build_sparse_sum(routing.slices)
    distributor = build_distributor(routing.slices)
    _, weights_type, keys_type = distributor.next.type_signature.parameter

    @tff.federated_computation(weights_type, keys_type)
    def select(weights, keys):
        return distributor.next(distributor.initialize(), weights, keys).measurements

    return select, sparse_sum


def main(argv) -> None:
    del argv
    print(workload.machine())
    routing = workload.small_routing()
    runtime.use(_RUNTIME.value)
    process = build_feast(routing, workload.TRAINING, total_rounds=1000)
    static = workload.StaticSteps(routing)
    clients = workload.cohort(routing)
    state, rounds, steps = workload.timed_rounds(process, clients, static, _ROUNDS.value + 2)
    rounds, steps = rounds[2:], steps[2:]
    ratio = workload.median([a / b for a, b in zip(rounds, steps)])

    select, aggregate = phase_computations(routing)
    weights = tuple(state.global_model_weights.trainable)
    keys = [{"client": client["client"], "level": client["level"]} for client in clients]
    updates = [{"update": tuple(routing.slices.cut(weights, int(client["level"]))),
                "weight": np.float32(64)} for client in clients]
    images = np.zeros((250, 32, 32, 3), np.uint8)
    labels = np.zeros(250, np.int64)
    evaluator = Evaluator(routing, images, mean=(0.5,) * 3, std=(0.25,) * 3)
    evaluate = lambda: evaluator.operating_points(weights, [2], images, labels, "validation")
    phases = {}
    for name, work in (("select", lambda: select(weights, keys)),
                       ("aggregate", lambda: aggregate(updates)), ("evaluate", evaluate)):
        work()
        phases[name] = workload.median([workload.timed(work) for _ in range(_ROUNDS.value)])
    round_seconds, static_seconds = workload.median(rounds), workload.median(steps)
    phases["train"] = round_seconds - phases["select"] - phases["aggregate"]
    print(f"round of {len(clients)} clients x {workload.BATCH} pictures: {round_seconds:.3f} s; "
          f"static Keras steps: {static_seconds:.3f} s; ratio {ratio:.3f}")
    print("phases: " + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in phases.items())
          + " (train: the rest of the round; evaluate: one point, 250 + 250 pictures)")
    print(json.dumps({"round_over_static_steps": round(ratio, 4), "runtime": _RUNTIME.value,
                      "round_s": round(round_seconds, 4),
                      "static_steps_s": round(static_seconds, 4),
                      **{f"{name}_s": round(value, 4) for name, value in phases.items()}}))


if __name__ == "__main__":
    app.run(main)
