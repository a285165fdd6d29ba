"""FEAST in Flower: nodes of different budgets train one network on handwritten digits.

`python examples/flower_digits.py` tries it on one machine. For a federation of your own, give each
SuperNode its budget in MACs and its share of the data,

    flower-supernode --superlink=HOST:PORT \\
        --node-config 'budget=1.3e6 partition-id=3 num-partitions=8'

and start the app from this folder with `flwr run`.
"""

from __future__ import annotations

import functools

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
import numpy as np

from feast_tf import datasets, routing, serving, space, supernet, training
from feast_tf.interop.flower import FeastStrategy, feast_client

SPEC = space.SupernetSpec(
    stem=16, bases=(16, 32, 64, 128), depths=(0, 1, 2), widths=(0.25, 0.5, 0.75, 1.0),
    expansions=(0.25, 0.5), strides=(1, 2, 2, 2), classes=10, image_size=16)
ROUTES = routing.Routing(space.shipped_cache("small_5", SPEC))
TRAINING = training.LocalTraining(optimizer=training.SGD(learning_rate=0.1),
                                  augmentation=training.Augmentation.none())


@functools.lru_cache(maxsize=None)
def digits() -> datasets.Dataset:
    """The same split everywhere; nodes read their own data here in a real federation."""
    return datasets.load("digits", image_size=SPEC.image_size, held_out=0.2, server_samples=160,
                         seed=0)


def share_of_digits(context: Context) -> datasets.Split:
    """Every `num-partitions`-th training picture, from the `partition-id`-th on."""
    train, node = digits().train, context.node_config
    return train.take(np.arange(node["partition-id"], len(train), node["num-partitions"]))


client_app = feast_client(ROUTES, TRAINING, budget=lambda context: context.node_config["budget"],
                          data=share_of_digits)
server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Trains, and measures the operating points after the last round."""
    rounds = context.run_config["num-rounds"]

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round < rounds:
            return None
        data = digits()
        points = serving.Evaluator(ROUTES, data.server.images, mean=TRAINING.mean, std=TRAINING.std
                                   ).operating_points(
            arrays.to_numpy_ndarrays(), range(ROUTES.num_levels), data.test.images,
            data.test.labels, "test")
        return MetricRecord({f"accuracy-at-{point.macs}-macs": point.accuracy for point in points})

    strategy = FeastStrategy(ROUTES.slices, total_rounds=rounds,
                             min_available_nodes=context.run_config["num-nodes"])
    initial = [weight.numpy() for weight in supernet.initial_weights(ROUTES.layout, seed=0)]
    strategy.start(grid, ArrayRecord(initial), num_rounds=rounds, evaluate_fn=evaluate,
                   timeout=context.run_config["round-timeout"])
