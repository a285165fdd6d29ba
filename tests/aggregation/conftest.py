"""A small slice map and a cohort whose mean is worked out by hand; the runtime in process."""

from __future__ import annotations

import numpy as np
import pytest

from feast_tf import runtime
from feast_tf.routing import SliceMap

# Two arrays and a scalar; level 0 holds 4 positions, level 1 holds 6 and level 2 all 10.
SLICES = SliceMap(
    ("kernel", "bias", "scale"), ((2, 3), (3,), ()),
    (np.array([[1, 2], [2, 2], [2, 3]], np.int32), np.array([[1], [1], [3]], np.int32),
     np.zeros([3, 0], np.int32)))
COUNTS = (2.0, 3.0, 5.0)  # n_i of a client of each level
UPDATES = (([[1, 2]], [3], 4), ([[10, 20], [30, 40]], [50], 60),
           ([[100, 200, 300], [400, 500, 600]], [700, 800, 900], 1000))
NOTHING = ([[]], [], 0)
MEAN = ([[532 / 10, 1064 / 10, 300], [2090 / 8, 2620 / 8, 600]], [3656 / 10, 800, 900], 5188 / 10)


def arrays(values) -> tuple[np.ndarray, ...]:
    return tuple(np.array(value, np.float32) for value in values)


def padded(update) -> tuple[np.ndarray, ...]:
    """The update in arrays of the full shapes."""
    result = arrays(map(np.zeros, SLICES.shapes))
    for whole, part in zip(result, update):
        whole[tuple(slice(size) for size in np.shape(part))] = part
    return result


def assert_arrays(found, expected, tolerance: float = 1e-6) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def in_process():
    runtime.use("in_process")
