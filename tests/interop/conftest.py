"""The rounds in plain NumPy that Flower and OpenFL must come to as well."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def rounds_in_numpy():
    """(routing, training, pictures, weights, cohort, rounds) -> weights, with batches of 2.

    `cohort` has the level of each place in `pictures`; the seed is 6, the schedule four rounds long.
    """
    from feast_tf.interop.rounds import merge
    from feast_tf.interop.trainer import LocalTrainer

    def run(routing, training, pictures, weights, cohort, rounds):
        trainer = LocalTrainer(routing, training, batch_size=2)
        for round_num in range(rounds):
            results = []
            for client, level in cohort.items():
                trained = trainer.train(routing.slices.cut(weights, level), pictures[client],
                                        client=client, level=level, round_num=round_num,
                                        total_rounds=4, seed=6)
                results.append((client, trained.update, trained.num_examples))
            weights, _ = merge(routing.slices, weights, cohort, results, returns="updates")
        return weights

    return run
