"""The in-process runtime against TFF's own worker, and against plain Keras steps.

    python -m benchmarks.runtime [--rounds=5] [--skip_55m]

Every case runs in a process of its own; memory is the highest sum of resident memory of that
process and its children. Cases: a tiny model; the small FEAST round of `workload` in process (two
lanes where there are two cores), on one lane, on TFF's worker and on two workers; one round at the
paper's scale (55.68M parameters, 10 clients with the largest envelope) with trivial local work, so
that what is left is select, aggregate and update; and whole rounds at that scale. The bare steps of
PyTorch are timed too where it is installed. The last line is JSON with `overhead_55m_s`,
`peak_rss_55m_gib`, `round_over_static_steps`, `round_over_stock` and `tiny_overhead_ms`.
"""

from __future__ import annotations

from benchmarks import workload  # isort: skip  (first: it prepares TensorFlow's import)
import contextlib
import importlib.util
import json
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import tensorflow as tf
import tensorflow_federated as tff
from absl import app, flags

from feast_tf import runtime
from feast_tf.aggregation import SlicedMeanFactory, slices_type, weights_type
from feast_tf.algorithms import build_distributor, build_feast, build_mean_finalizer
from feast_tf.routing import Routing
from feast_tf.space import paper_spec, shipped_cache
from feast_tf.supernet import initial_weights

_ROUNDS = flags.DEFINE_integer("rounds", 5, "Timed rounds of each case.", lower_bound=1)
_SKIP_55M = flags.DEFINE_bool("skip_55m", False, "Leave out the paper's scale on TFF's worker.")
_CASE = flags.DEFINE_string("case", None, "One case, in this process (the program's own use).")


@contextlib.contextmanager
def runtime_for(name: str):
    """Makes a runtime the default; "one_lane" is in process, one client after the other."""
    if name == "one_lane":
        runtime.use("in_process", lanes=1)
        yield
    elif name == "two_workers":
        workers = [runtime.Worker() for _ in range(2)]
        runtime.use("tff_workers", addresses=[f"127.0.0.1:{w.port}" for w in workers])
        yield
        for worker in workers:
            worker.stop()
    else:
        runtime.use(name)
        yield


class PeakMemory:
    """The highest sum of resident memory of this process and its children, in GiB."""

    def __enter__(self):
        self.gib, self._done = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self):
        while not self._done.wait(0.05):
            total = 0
            for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    total += process.memory_info().rss
            self.gib = max(self.gib, total / 2**30)

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()


def small_case(rounds: int) -> dict:
    """Small FEAST rounds, each next to the static Keras steps of the same variants."""
    routing = workload.small_routing()
    clients, static = workload.cohort(routing), workload.StaticSteps(routing)
    process = build_feast(routing, workload.TRAINING, total_rounds=1000)
    _, times, steps = workload.timed_rounds(process, clients, static, rounds + 2)
    return {"first_s": times[0], "round_s": workload.median(times[2:]),
            "static_s": workload.median(steps[2:]),
            "over_static": workload.median([t / s for t, s in zip(times[2:], steps[2:])])}


def torch_case(rounds: int) -> dict:
    """The same static steps in PyTorch."""
    from benchmarks.torch_steps import TorchSteps

    routing = workload.small_routing()
    clients, steps = workload.cohort(routing), TorchSteps(routing)
    times = [steps.seconds(clients, workload.drawn_variants(clients, number))
             for number in range(rounds + 2)]
    return {"first_s": times[0], "static_s": workload.median(times[2:])}


def tiny_case(rounds: int) -> dict:
    """Ten clients that train a softmax regression on 20 examples: what remains is overhead."""
    element = {"x": tff.TensorType(np.float32, [None, 16]), "y": tff.TensorType(np.int32, [None])}

    train = tff.tensorflow.computation(
        tf.function(_train), (tff.TensorType(np.float32, [16, 10]), tff.SequenceType(element)))

    @tff.federated_computation(
        tff.FederatedType(tff.TensorType(np.float32, [16, 10]), tff.SERVER),
        tff.FederatedType(tff.SequenceType(element), tff.CLIENTS))
    def one_round(weights, data):
        return tff.federated_mean(
            tff.federated_map(train, (tff.federated_broadcast(weights), data)))

    rng = np.random.default_rng(0)
    data = [tf.data.Dataset.from_tensor_slices({
        "x": rng.normal(size=(20, 16)).astype(np.float32),
        "y": rng.integers(0, 10, 20, dtype=np.int32)}).batch(10) for _ in range(10)]
    weights = np.zeros((16, 10), np.float32)
    bare = tf.function(_train)
    first = workload.timed(lambda: one_round(weights, data))
    bare(weights, data[0])
    rounds_s, bare_s = [], []
    for _ in range(20 * rounds):
        rounds_s.append(workload.timed(lambda: one_round(weights, data)))
        bare_s.append(workload.timed(lambda: [bare(weights, d).numpy() for d in data]))
    return {"first_s": first, "round_s": workload.median(rounds_s),
            "overhead_ms": (workload.median(rounds_s) - workload.median(bare_s)) / 10 * 1e3}


def _train(weights, data):
    initial = weights
    for batch in iter(data):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
                batch["y"], tf.matmul(batch["x"], weights)))
        weights -= 0.1 * tape.gradient(loss, weights)
    return weights - initial


def paper_case(rounds: int) -> dict:
    """The paper's supernet: every client gets the largest envelope and returns it scaled down."""
    routing = Routing(shipped_cache("paper_56", paper_spec()))
    slices, top = routing.slices, routing.num_levels - 1
    distributor = build_distributor(slices)
    aggregator = SlicedMeanFactory(slices).create(slices_type(slices), tff.TensorType(np.float32))
    model_type = tff.StructWithPythonType(
        [("trainable", weights_type(slices)), ("non_trainable", ())],
        tff.learning.models.ModelWeights)
    finalizer = build_mean_finalizer(model_type)
    keys_type = distributor.next.type_signature.parameter.keys

    @tff.tensorflow.computation(slices_type(slices))
    def trivial(received):
        return tuple(w * 1e-3 for w in received), tf.constant(64.0)

    @tff.federated_computation(tff.FederatedType(model_type, tff.SERVER), keys_type)
    def one_round(model, keys):
        sent = distributor.next(distributor.initialize(), model.trainable, keys)
        updates, counts = tff.federated_map(trivial, sent.result)
        mean = aggregator.next(aggregator.initialize(), updates, counts)
        return finalizer.next(finalizer.initialize(), model, mean.result).result

    weights = tff.learning.models.ModelWeights(
        tuple(np.asarray(w) for w in initial_weights(routing.layout, 0)), ())
    keys = [{"client": np.int32(client), "level": np.int32(top)} for client in range(10)]
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        weights = one_round(weights, keys)
        times.append(time.perf_counter() - start)
    return {"first_s": times[0], "round_s": workload.median(times[1:])}


def training_case(rounds: int) -> dict:
    """Whole FEAST rounds at the paper's scale: 56 variants, 10 clients with 8 pictures each."""
    routing = Routing(shipped_cache("paper_56", paper_spec()))
    clients = workload.cohort(routing, pictures=8)
    process = build_feast(routing, workload.TRAINING, total_rounds=1000)
    state, times = process.initialize(), []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        state = process.next(state, clients).state
        times.append(time.perf_counter() - start)
    return {"first_s": times[0], "round_s": workload.median(times[1:])}


CASES = {"tiny": tiny_case, "small": small_case, "torch": torch_case, "paper": paper_case,
         "training": training_case}


def measure(kind: str, name: str) -> dict:
    """Runs a case in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.runtime", f"--case={kind}:{name}",
         f"--rounds={_ROUNDS.value}"], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{kind} on {name} failed: {done.stderr.strip().splitlines()[-1]}")
    result = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"{kind:>6} on {name:<12} " + "  ".join(f"{k} {v:.3f}" for k, v in result.items()),
          flush=True)
    return result


def main(argv) -> None:
    del argv
    if _CASE.value:
        kind, _, name = _CASE.value.partition(":")
        # The runtime first: lanes are made before TensorFlow starts.
        with PeakMemory() as memory, runtime_for(name):
            result = CASES[kind](_ROUNDS.value)
        print(json.dumps({**result, "peak_gib": memory.gib}))
        return
    print(workload.machine())
    results = {}
    torch = ("in_process",) if importlib.util.find_spec("torch") else ()
    for kind, names in (("tiny", ("in_process", "tff_worker")),
                        ("small", ("in_process", "one_lane", "tff_worker", "two_workers")),
                        ("torch", torch),
                        ("paper", ("in_process",) if _SKIP_55M.value
                         else ("in_process", "tff_worker")),
                        ("training", ("in_process",))):
        for name in names:
            results[kind, name] = measure(kind, name)
    print(json.dumps({
        "overhead_55m_s": round(results["paper", "in_process"]["round_s"], 3),
        "peak_rss_55m_gib": round(results["paper", "in_process"]["peak_gib"], 3),
        "round_over_static_steps": round(results["small", "in_process"]["over_static"], 3),
        "round_over_stock": round(results["small", "in_process"]["round_s"]
                                  / results["small", "tff_worker"]["round_s"], 3),
        "tiny_overhead_ms": round(results["tiny", "in_process"]["overhead_ms"], 3)}))


if __name__ == "__main__":
    app.run(main)
