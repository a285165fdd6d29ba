"""200 rounds: memory does not grow, and nothing is compiled or traced again."""

from __future__ import annotations

import json
import os
from pathlib import Path
import subprocess
import sys

import pytest

ROOT = Path(__file__).resolve().parents[2]

# In a process of its own: what other tests leave behind and free would blur the numbers.
PROGRAM = """
import collections, gc, json, sys

import numpy as np
import psutil
import tensorflow as tf
import tensorflow_federated as tff

from feast_tf import runtime
from feast_tf.algorithms import build_feast
from feast_tf.routing import Routing
from feast_tf.runtime import leaves
from feast_tf.space import SupernetSpec, VariantCache
from feast_tf.training import LocalTraining

what, lanes, rounds, cohorts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * lanes)
loaded, load = [], leaves.load_leaf
leaves.load_leaf = lambda *arguments: loaded.append(1) or load(*arguments)
rng = np.random.default_rng(0)

def batches(shape, pictures):
    return tf.data.Dataset.from_tensor_slices(collections.OrderedDict(
        x=rng.integers(0, 256, [pictures, *shape], np.uint8),
        y=rng.integers(0, 3, pictures, np.int32))).shuffle(20, seed=1).batch(4)

def feast():
    spec = SupernetSpec(stem=4, bases=(4, 8), depths=(0, 1), widths=(0.5, 1.0),
                        expansions=(0.5, 1.0), strides=(1, 2), classes=3, image_size=8, divisor=2)
    routing = Routing(VariantCache(spec, [spec.variant(d=0, e=0.5, w=0.5),
                                          spec.variant(d=1, e=1.0, w=1.0)]))
    process = build_feast(routing, LocalTraining(), total_rounds=1000)
    return process, lambda client: collections.OrderedDict(
        client=np.int32(client), level=np.int32(client % 2), data=batches([8, 8, 3], 5 + client))

def fed_avg():
    def model():
        net = tf.keras.Sequential([
            tf.keras.layers.InputLayer([8, 8, 3]), tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, "relu"), tf.keras.layers.Dense(3)])
        return tff.learning.models.from_keras_model(
            net, loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            input_spec=collections.OrderedDict(x=tf.TensorSpec([None, 8, 8, 3]),
                                               y=tf.TensorSpec([None], tf.int32)))
    process = tff.learning.algorithms.build_weighted_fed_avg(
        model, tff.learning.optimizers.build_sgdm(0.01))
    return process, lambda client: batches([8, 8, 3], 5 + client).map(
        lambda e: collections.OrderedDict(x=tf.cast(e["x"], tf.float32) / 255, y=e["y"]))

runtime.use("in_process", devices=[f"/device:CPU:{lane}" for lane in range(lanes)])
process, make = {"feast": feast, "fed_avg": fed_avg}[what]()
clients = [make(client) for client in range(8)]
state, sizes, counts = process.initialize(), [], []
for number in range(rounds):
    size = 3 if cohorts == "constant" else 2 + number % 7
    state = process.next(state, clients[:size]).state
    if (number + 1) % 10 == 0:
        gc.collect()
    sizes.append(psutil.Process().memory_info().rss / 2**20)
    counts.append(len(loaded))
print(json.dumps({"mib": sizes, "loaded": counts}))
"""


def grown(what: str, lanes: int, rounds: int, cohorts: str, since: int) -> float:
    program = subprocess.run(
        [sys.executable, "-c", PROGRAM, what, str(lanes), str(rounds), cohorts], cwd=ROOT, text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}, capture_output=True, timeout=900)
    assert program.returncode == 0, program.stderr[-2000:]
    result = json.loads(program.stdout.splitlines()[-1])
    sizes, loaded = result["mib"], result["loaded"]
    assert loaded[0] > 0 and loaded[-1] == loaded[0]
    print(f"{what}, {lanes} lanes, {cohorts} cohorts: "
          + ", ".join(f"round {n}: {sizes[n - 1]:.1f} MiB" for n in (1, since, rounds)))
    return sizes[-1] / sizes[since - 1] - 1


@pytest.mark.slow
@pytest.mark.parametrize("what, lanes", [("fed_avg", 1), ("feast", 2)])
def test_memory_is_flat(what, lanes):
    assert grown(what, lanes, rounds=200, cohorts="constant", since=50) < 0.05


@pytest.mark.slow
def test_memory_is_flat_where_the_cohort_changes_in_every_round():
    assert grown("fed_avg", 1, rounds=60, cohorts="changing", since=20) < 0.05
