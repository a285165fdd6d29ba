"""Tests of feast_tf.seeding."""

import itertools

import numpy as np
import pytest

from feast_tf.seeding import stateless_seed
from feast_tf.seeding import stream


def test_stream_gives_these_numbers_in_every_process():
    assert stream(7, "cohort", 3).integers(0, 1000, 5).tolist() == [102, 102, 409, 602, 752]


def test_stateless_seed_gives_these_numbers_in_every_process():
    seed = stateless_seed(7, "cohort", 3)
    assert seed.dtype == np.int32
    assert seed.tolist() == [1128359326, 292810179]
    assert stateless_seed(-(2**70), "a", 0).tolist() == [-1727190457, 1493042334]


def test_each_part_of_the_key_counts():
    keys = [
        (1, "a"),
        (1, "a", 0),
        (1, "a", 0, 0),
        (1, "a", 23),
        (1, "a", 2, 3),
        (1, "a", 3, 2),
        (12, "a", 3),
        (-1, "a"),
        (1, "b"),
        (1, "a, 0"),
        (1, 'a", 0'),
        (2**32 + 1, "a"),
    ]
    draws = [
        (tuple(stream(*key).integers(0, 2**62, 2)), tuple(stateless_seed(*key))) for key in keys
    ]
    for (one_stream, one_seed), (other_stream, other_seed) in itertools.combinations(draws, 2):
        assert one_stream != other_stream
        assert one_seed != other_seed


def test_draws_elsewhere_do_not_matter():
    stream(5, "first").random(100)
    np.random.random(3)
    assert stream(5, "second", 1).random() == stream(5, "second", np.int32(1)).random()


def test_a_key_that_is_not_whole_is_refused():
    with pytest.raises(TypeError, match="float"):
        stream(1.5, "a")
    with pytest.raises(TypeError, match="float"):
        stateless_seed(1, "a", 2.0)
    with pytest.raises(TypeError, match="purpose must be a string, not 3"):
        stream(1, 3)
