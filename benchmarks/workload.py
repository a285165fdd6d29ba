"""What the benchmarks share: a small FEAST round, and the static Keras steps it is held against."""

from __future__ import annotations

from tff_programs import environment  # isort: skip  (first: it prepares TensorFlow's import)
import collections
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from feast_tf.routing import Routing
from feast_tf.seeding import stateless_seed
from feast_tf.space import SupernetSpec, VariantCache
from feast_tf.supernet import extract, initial_weights
from feast_tf.training import RULES, Augmentation, LocalTraining
from feast_tf.training.rules import draw_variants

BATCH = 64
TRAINING = LocalTraining(rule="full", augmentation=Augmentation.none())


def machine() -> str:
    """One line: processor, cores, TensorFlow, oneDNN."""
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return (f"{model}, {os.cpu_count()} cores, TensorFlow {tf.__version__}, "
            f"TF_ENABLE_ONEDNN_OPTS={os.environ.get('TF_ENABLE_ONEDNN_OPTS')}")


def small_routing() -> Routing:
    """Three variants of 2.9M, 10.8M and 54M MACs in a supernet of 1.1M parameters."""
    spec = SupernetSpec(stem=16, bases=(40, 80, 160, 320), depths=(0, 1), widths=(0.2, 0.4, 1.0),
                        expansions=(0.25,), strides=(1, 2, 2, 2), classes=10, image_size=32)
    return Routing(VariantCache(spec, [spec.variant(d=0, e=0.25, w=0.2),
                                       spec.variant(d=1, e=0.25, w=0.4),
                                       spec.variant(d=1, e=0.25, w=1.0)]))


def cohort(routing: Routing, pictures: int = BATCH, seed: int = 0) -> list:
    """10 clients with `pictures` random pictures each; most of them of the lowest level."""
    rng = np.random.default_rng(seed)
    size, classes = routing.cache.spec.image_size, routing.cache.spec.classes
    levels = [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    top = routing.num_levels - 1
    clients = []
    for client, level in enumerate(levels):
        data = collections.OrderedDict(
            x=rng.integers(0, 256, (pictures, size, size, 3), dtype=np.uint8),
            y=rng.integers(0, classes, pictures, dtype=np.int32))
        clients.append(collections.OrderedDict(
            client=np.int32(client), level=np.int32(round(level / 2 * top)),
            data=tf.data.Dataset.from_tensor_slices(data).batch(BATCH)))
    return clients


def drawn_variants(clients: Sequence, round_num: int, seed: int = 0) -> list[int]:
    """The variants that FEAST's clients train in a round, for each client's single mini-batch."""
    fold = tf.random.experimental.stateless_fold_in
    places = []
    for client in clients:
        stream = fold(fold(stateless_seed(seed, "local training"), round_num), int(client["client"]))
        seeds = tf.random.experimental.stateless_split(fold(stream, 0), 2)
        drawn, _ = draw_variants(RULES["full"], tf.constant(client["level"]), seeds[0])
        places.append([int(place) for place in drawn])
    return places


class StaticSteps:
    """Training steps of plain Keras networks: what a round would cost if nothing were elastic."""

    def __init__(self, routing: Routing):
        weights = [np.asarray(weight) for weight in initial_weights(routing.layout, 0)]
        self._steps = []
        for variant in routing.cache.variants:
            self._steps.append(self._compile(extract(routing.cache.spec, weights, variant)))

    def _compile(self, model: tf.keras.Model) -> Callable:
        optimizer = tf.keras.optimizers.SGD(0.01, momentum=0.9)
        optimizer.build(model.trainable_variables)

        @tf.function
        def step(images, labels):
            with tf.GradientTape() as tape:
                logits = model(images, training=True)
                loss = tf.reduce_mean(
                    tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss

        return step

    def seconds(self, clients: Sequence, drawn: Sequence[Sequence[int]]) -> float:
        """Time of one step for every variant of every client, on the client's own pictures."""
        total = 0.0
        for client, places in zip(clients, drawn):
            batch = next(iter(client["data"]))
            images = tf.cast(batch["x"], tf.float32) / 255.0
            for place in places:
                start = time.perf_counter()
                self._steps[place](images, batch["y"]).numpy()
                total += time.perf_counter() - start
        return total


def timed_rounds(process, clients: Sequence, static: StaticSteps, rounds: int
                 ) -> tuple[object, list[float], list[float]]:
    """(last state, seconds of each round, of the static steps of its variants before it)."""
    state, times, steps = process.initialize(), [], []
    for number in range(rounds):
        steps.append(static.seconds(clients, drawn_variants(clients, number)))
        start = time.perf_counter()
        state = process.next(state, clients).state
        times.append(time.perf_counter() - start)
    return state, times, steps


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
