"""The NumPy reference, worked out by hand: everything else is compared with it."""

from __future__ import annotations

import numpy as np

from feast_tf.aggregation import sparse_mean

# One matrix and one vector of distinct values.
WEIGHTS = [np.array([[10, 20, 30], [40, 50, 60]], np.float32), np.array([7, 8], np.float32)]


def test_mean_by_hand():
    # 3 pictures: a 1x2 corner and nothing of the vector; 5 pictures: a 2x1 corner and all of it.
    small = 3, [np.array([[1.0, 2.0]], np.float32), np.zeros([0], np.float32)]
    tall = 5, [np.array([[-4.0], [0.5]], np.float32), np.array([0.25, -1.0], np.float32)]
    matrix, vector = sparse_mean(WEIGHTS, [small, tall])
    both = 10 + (3 * 1 + 5 * -4) / 8
    np.testing.assert_allclose(matrix, [[both, 20 + 2, 30], [40 + 0.5, 50, 60]], rtol=1e-6)
    np.testing.assert_allclose(vector, [7.25, 7.0], rtol=1e-6)
    assert matrix.dtype == vector.dtype == np.float32


def test_it_is_the_mean_of_the_trained_weights_over_those_who_trained_them():
    rng = np.random.default_rng(0)
    counts, rows = [2, 7, 11], [1, 2, 2]
    trained = [rng.normal(size=[row, 3]).astype(np.float32) for row in rows]
    contributions = [(count, [new - WEIGHTS[0][:len(new)], np.zeros([0])])
                     for count, new in zip(counts, trained)]
    matrix = sparse_mean(WEIGHTS, contributions)[0]
    np.testing.assert_allclose(matrix[0], sum(n * t[0] for n, t in zip(counts, trained)) / 20,
                               rtol=1e-5)
    np.testing.assert_allclose(matrix[1], (7 * trained[1][1] + 11 * trained[2][1]) / 18, rtol=1e-5)


def test_positions_that_nobody_covers_keep_their_bits():
    weights = [np.array([1.5, -0.0, 1e-42, -3e38], np.float32)]
    result = sparse_mean(weights, [(4, [np.array([2.0], np.float32)])])[0]
    assert result[0] == 3.5
    assert result[1:].tobytes() == weights[0][1:].tobytes()


def test_nobody_changes_nothing():
    for contributions in ([], [(0, [np.ones([2, 3]), np.ones([2])])]):
        for ours, weight in zip(sparse_mean(WEIGHTS, contributions), WEIGHTS):
            assert ours.tobytes() == weight.tobytes()


def test_clients_without_pictures_or_sense_are_left_out():
    good = 5, [np.array([[1.0, 2.0]]), np.array([3.0])]
    empty = 0, [np.full([2, 3], 9.0), np.full([2], 9.0)]
    broken = 4, [np.ones([2, 3]), np.array([1.0, np.nan])]
    alone, among = sparse_mean(WEIGHTS, [good]), sparse_mean(WEIGHTS, [empty, good, broken])
    for one, other in zip(alone, among):
        np.testing.assert_array_equal(one, other)
