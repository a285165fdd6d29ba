import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from feast_tf.datasets.splits import Split
from feast_tf.datasets.splits import channel_moments
from feast_tf.datasets.splits import stratified_split


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    labels=st.lists(st.integers(0, 7), min_size=1, max_size=120),
    share=st.floats(0, 1),
    seed=st.integers(0, 5),
)
def test_stratified_split_is_a_proportional_partition(labels, share, seed):
    labels = np.array(labels)
    count = round(share * len(labels))
    chosen, rest = stratified_split(labels, count, np.random.default_rng(seed))
    again, _ = stratified_split(labels, count, np.random.default_rng(seed))
    assert chosen.tolist() == again.tolist()
    assert len(chosen) == count
    assert sorted([*chosen, *rest]) == list(range(len(labels)))
    for label in np.unique(labels):
        exact = count * np.mean(labels == label)
        assert abs(np.sum(labels[chosen] == label) - exact) < 1 + 1e-9


def test_stratified_split_gives_what_is_missing_to_the_largest_remainders():
    # Shares of 5 out of 20: 11/4 = 2.75, 6/4 = 1.5, 3/4 = 0.75.
    labels = np.array([0] * 11 + [1] * 6 + [2] * 3)
    chosen, _ = stratified_split(labels, 5, np.random.default_rng(0))
    assert np.bincount(labels[chosen]).tolist() == [3, 1, 1]


def test_stratified_split_depends_on_the_generator():
    labels = np.arange(200) % 4
    first, _ = stratified_split(labels, 20, np.random.default_rng(0))
    second, _ = stratified_split(labels, 20, np.random.default_rng(1))
    assert first.tolist() != second.tolist()


@pytest.mark.parametrize("count", [-1, 4])
def test_stratified_split_refuses_a_count_that_is_not_there(count):
    with pytest.raises(ValueError, match=rf"count must be in 0\.\.3.*not {count}"):
        stratified_split(np.zeros(3, dtype=int), count, np.random.default_rng(0))


def test_channel_moments_of_two_pixels():
    images = np.array([[[[0, 51, 255]]], [[[255, 153, 255]]]], dtype=np.uint8)
    mean, std = channel_moments(images)
    np.testing.assert_allclose(mean, [0.5, 0.4, 1.0], atol=1e-7)
    np.testing.assert_allclose(std, [0.5, 0.2, 0.0], atol=1e-7)
    assert mean.dtype == std.dtype == np.float32


def test_channel_moments_of_more_pictures_than_are_added_at_once():
    images = np.random.default_rng(0).integers(0, 256, (1500, 3, 5, 3), dtype=np.uint8)
    mean, std = channel_moments(images)
    np.testing.assert_allclose(mean, images.mean(axis=(0, 1, 2)) / 255, rtol=1e-6)
    np.testing.assert_allclose(std, images.std(axis=(0, 1, 2)) / 255, rtol=1e-6)


def test_channel_moments_of_the_brightest_pictures_do_not_overflow():
    mean, std = channel_moments(np.full((1100, 8, 8, 3), 255, dtype=np.uint8))
    assert mean.tolist() == [1, 1, 1]
    assert std.tolist() == [0, 0, 0]


def test_split_refuses_arrays_that_do_not_fit():
    images = np.zeros((2, 4, 4, 3), dtype=np.uint8)
    with pytest.raises(ValueError, match=r"images must be uint8 .* not float64 \[2, 4, 4, 3\]"):
        Split(images.astype(float), np.zeros(2, dtype=np.int32))
    with pytest.raises(ValueError, match=r"labels must be int32 \[2\].* not int32 \[3\]"):
        Split(images, np.zeros(3, dtype=np.int32))


def test_take_keeps_pictures_and_labels_together():
    images = np.arange(3, dtype=np.uint8).reshape(3, 1, 1, 1) * np.ones(3, dtype=np.uint8)
    split = Split(images, np.array([10, 11, 12], dtype=np.int32)).take(np.array([2, 0]))
    assert len(split) == 2
    assert split.images[:, 0, 0, 0].tolist() == [2, 0]
    assert split.labels.tolist() == [12, 10]
