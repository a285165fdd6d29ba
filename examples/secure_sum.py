"""FEAST with secure sums: the server sees sums over clients alone, and gets the same model.

    python examples/secure_sum.py

Each client multiplies its update by its number of examples and pads it with zeros to the whole
model, so all clients send tensors of the same shapes. A secure sum adds these, and a second one the
weights of each level. The runtime here simulates the protocol, without any cryptography; and a
server that cuts slices for clients knows their levels. Takes about half a minute.
"""

from __future__ import annotations

from tff_programs import environment  # isort: skip  (first: it prepares TensorFlow's import)
import collections

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from feast_tf import aggregation, algorithms, datasets, routing, runtime, space, training

CLIENTS, PICTURES, ROUNDS = 6, 60, 3
# A client's number of pictures times the change of a weight is clipped to this, and quantised in
# 2^32 steps. For the counts, a power of 2 less 1 keeps whole numbers whole.
LARGEST_UPDATE, LARGEST_COUNT = 1000.0, float(2**20 - 1)


def main() -> None:
    runtime.use("in_process")
    tf.get_logger().setLevel("CRITICAL")  # TFF's secure sums hold asserts that TensorFlow misses
    spec = space.SupernetSpec(stem=8, bases=(8, 16), depths=(0,), widths=(0.5, 1.0),
                              expansions=(0.5, 1.0), strides=(1, 2), classes=10, image_size=8)
    routes = routing.Routing(space.VariantCache(spec, [spec.variant(d=0, e=0.5, w=0.5),
                                                       spec.variant(d=0, e=1.0, w=1.0)]))
    digits = datasets.load("digits", image_size=8).train
    cohort = []
    for client, rows in enumerate(np.split(np.arange(CLIENTS * PICTURES), CLIENTS)):
        batches = tf.data.Dataset.from_tensor_slices(collections.OrderedDict(
            x=digits.images[rows], y=digits.labels[rows])).batch(20)
        cohort.append(collections.OrderedDict(client=np.int32(client), level=np.int32(client % 2),
                                              data=batches))

    secure = aggregation.SlicedMeanFactory(
        routes.slices, value_sum_factory=tff.aggregators.SecureSumFactory(LARGEST_UPDATE),
        weight_sum_factory=tff.aggregators.SecureSumFactory(LARGEST_COUNT, 0.0))
    results = {}
    for name, aggregator in (("plain", None), ("secure", secure)):
        process = algorithms.build_feast(
            routes, training.LocalTraining(augmentation=training.Augmentation.none()),
            total_rounds=100, aggregator=aggregator)
        state = process.initialize()
        for round_num in range(ROUNDS):
            state, metrics = process.next(state, cohort)
            print(f"{name} sums, round {round_num + 1}: loss of the largest variants "
                  f"{metrics['client_work']['train']['loss_largest']:.4f}")
        results[name] = process.get_model_weights(state).trainable
    clipped = metrics["aggregator"]["mean_value"]
    print(f"clients with clipped values in the last round: "
          f"{clipped['secure_upper_clipped_count'] + clipped['secure_lower_clipped_count']}")
    difference = max(np.max(np.abs(one - other)) for one, other in zip(*results.values()))
    print(f"largest difference of a weight between plain and secure sums: {difference:.1e}")


if __name__ == "__main__":
    main()
