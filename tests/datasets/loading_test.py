import shutil

import numpy as np
import pytest

from feast_tf.datasets import NAMES
from feast_tf.datasets import load
from feast_tf.datasets.digits import read_digits


def parts(dataset):
    return dataset.train, dataset.validation, dataset.server, dataset.test


def keys(split):
    return [image.tobytes() for image in split.images]


def test_names():
    assert NAMES == ("digits", "cifar10", "cifar100", "cinic10", "tinyimagenet")


def test_digits_are_divided_without_loss():
    everything = read_digits(16)
    dataset = load("digits")
    assert [len(part) for part in parts(dataset)] == [1260, 112, 28, 397]
    found = sorted(key for part in parts(dataset) for key in keys(part))
    assert found == sorted(keys(everything))
    assert dataset.classes == tuple("0123456789")
    for part in parts(dataset):
        shares = np.bincount(part.labels) / len(part)
        exact = np.bincount(everything.labels) / len(everything)
        assert np.abs(shares - exact).max() <= 2 / len(part)


def test_digits_are_grey_from_black_to_white():
    images = read_digits(8).images
    assert images.shape == (1797, 8, 8, 3)
    # The first digit begins with the grey values 0, 0, 5, 13, 9, 1, 0, 0 out of 16.
    assert images[0, 0, :, 1].tolist() == [0, 0, 80, 207, 143, 16, 0, 0]
    assert images.min() == 0 and images.max() == 255
    assert np.array_equal(images[..., 0], images[..., 2])
    assert read_digits(16).images.shape == (1797, 16, 16, 3)


def test_moments_are_those_of_train():
    dataset = load("digits", image_size=8)
    pixels = dataset.train.images / 255
    np.testing.assert_allclose(dataset.mean, pixels.mean(axis=(0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(dataset.std, pixels.std(axis=(0, 1, 2)), rtol=1e-6)


def test_the_seed_decides_what_is_held_out_but_not_the_test_set():
    first, again, other = (load("digits", seed=seed, image_size=8) for seed in (1, 1, 2))
    for one, two in zip(parts(first), parts(again)):
        np.testing.assert_array_equal(one.images, two.images)
    np.testing.assert_array_equal(first.test.images, other.test.images)
    assert set(keys(first.server)) != set(keys(other.server))
    assert set(keys(first.validation)) != set(keys(other.validation))


def test_held_out_and_server_samples():
    dataset = load("digits", image_size=8, held_out=0.25, server_samples=37)
    assert [len(part) for part in parts(dataset)] == [1050, 313, 37, 397]


def test_cifar10(cifar10_root):
    dataset = load("cifar10", data_dir=cifar10_root)
    assert [len(part) for part in parts(dataset)] == [45, 4, 1, 10]
    assert dataset.name == "cifar10" and dataset.classes[3] == "class_3"
    larger = load("cifar10", data_dir=cifar10_root, image_size=48)
    assert larger.test.images.shape == (10, 48, 48, 3)


def test_held_out_pictures_are_of_all_classes(cifar10_root):
    dataset = load("cifar10", data_dir=cifar10_root, held_out=0.4, server_samples=10)
    assert np.bincount(dataset.train.labels).tolist() == [3] * 10
    assert np.bincount(dataset.server.labels).tolist() == [1] * 10
    assert np.bincount(dataset.validation.labels).tolist() == [1] * 10


def test_cinic10_holds_out_its_valid_split(cinic_root):
    dataset = load("cinic10", data_dir=cinic_root)
    assert [len(part) for part in parts(dataset)] == [20, 16, 4, 20]
    with pytest.raises(ValueError, match="held_out does not go with cinic10"):
        load("cinic10", data_dir=cinic_root, held_out=0.1)


def test_tinyimagenet_tests_on_val(tiny_root):
    dataset = load("tinyimagenet", data_dir=tiny_root)
    # Two are held out even of twelve: one for the server, one for validation.
    assert [len(part) for part in parts(dataset)] == [10, 1, 1, 3]
    assert dataset.classes == ("n01", "n02", "n03")
    assert load("tinyimagenet", data_dir=tiny_root, image_size=64).train.images.shape[1] == 64


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"name": "mnist"}, "data set 'mnist' is unknown; it must be one of digits, cifar10"),
        ({"image_size": 0}, "image_size must be at least 1 pixel, not 0"),
        ({"held_out": 0}, "held_out must be a share between 0 and 1, not 0"),
        ({"held_out": 1.0}, "held_out must be a share between 0 and 1, not 1.0"),
        ({"held_out": 0.9999}, "held_out 0.9999 takes all 1400 train pictures"),
        ({"server_samples": 0}, r"server_samples must be in 1\.\.139, .* not 0"),
        ({"server_samples": 140}, r"server_samples must be in 1\.\.139, .* not 140"),
    ],
)
def test_arguments_out_of_range_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        load(**{"name": "digits", "image_size": 8, **arguments})


def test_a_missing_part_of_the_data_is_an_error_before_anything_is_decoded(cinic_root):
    shutil.rmtree(cinic_root / "test" / "ship")
    with pytest.raises(ValueError, match="test/ship"):
        load("cinic10", data_dir=cinic_root)
    assert not (cinic_root / "decoded").exists()
