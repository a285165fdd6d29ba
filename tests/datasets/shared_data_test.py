"""The archives of real pictures, and each of the broken ones beside them."""

import numpy as np
import pytest

from feast_tf.datasets import load
from feast_tf.datasets.sources import SOURCES
from feast_tf.datasets.sources import locate
from feast_tf.datasets.tinyimagenet import read_tinyimagenet


@pytest.fixture(scope="module")
def archives(shared_data, tmp_path_factory):
    """A folder of our own with links to the archives, so that nothing is written beside them."""
    folder = tmp_path_factory.mktemp("archives")
    for archive in (*shared_data.glob("*.*z*"), *shared_data.glob("bad/*.*z*")):
        (folder / archive.name).symlink_to(archive)
    return folder


@pytest.mark.parametrize(
    "name, sizes, class_count",
    [
        ("cifar10", [4500, 400, 100, 1000], 10),
        ("cifar100", [3600, 320, 80, 1000], 100),
        ("cinic10", [1500, 400, 100, 500], 10),
        ("tinyimagenet", [7200, 640, 160, 2000], 200),
    ],
)
def test_subset(archives, name, sizes, class_count):
    dataset = load(name, data_dir=archives, download=False)
    parts = dataset.train, dataset.validation, dataset.server, dataset.test
    assert [len(part) for part in parts] == sizes
    assert len(dataset.classes) == class_count
    for part in parts:
        assert part.images.shape[1:] == (32, 32, 3)
        counts = np.bincount(part.labels, minlength=class_count)
        assert counts.max() - counts.min() <= 1  # The subsets have equally many of each class.
    assert np.all((dataset.mean > 0.35) & (dataset.mean < 0.55))
    assert np.all((dataset.std > 0.2) & (dataset.std < 0.3))


def test_tinyimagenet_at_its_own_size(archives):
    dataset = load("tinyimagenet", data_dir=archives / "tiny-ok.zip", image_size=64)
    assert dataset.train.images.shape == (10, 64, 64, 3)


REFUSED = [
    ("tinyimagenet", "tiny-truncated-jpeg.zip", ["train/n01629819/images/n01629819_1.JPEG"]),
    ("tinyimagenet", "tiny-val-missing-file.zip", ["val_9999.JPEG", "val_annotations.txt"]),
    ("tinyimagenet", "tiny-val-unknown-wnid.zip", ["n99999999", "val_annotations.txt line 3"]),
    ("tinyimagenet", "tiny-empty-class.zip", ["n01641577", "has no pictures"]),
    ("tinyimagenet", "tiny-cut-half.zip", ["tiny-cut-half.zip", "damaged or incomplete"]),
    ("cifar10", "cifar10-wrong-shape.tar.gz", ["data_batch_3", "(10, 1024)", "(10, 3072)"]),
    ("cifar10", "cifar10-path-traversal.tar.gz", ["../evil.txt"]),
    ("cifar10", "cifar10-cut-half.tar.gz", ["cifar10-cut-half.tar.gz", "damaged or incomplete"]),
    ("cinic10", "cinic10-empty-class.tar.gz", ["train/frog"]),
]
LOADED = [
    ("tinyimagenet", "tiny-ok.zip", [12, 6, 3]),
    ("tinyimagenet", "tiny-grey-jpeg.zip", [12, 6, 3]),
    ("tinyimagenet", "tiny-cmyk-jpeg.zip", [12, 6, 3]),
    ("tinyimagenet", "tiny-png-named-jpeg.zip", [12, 6, 3]),
    ("cifar10", "cifar10-ok.tar.gz", [50, 10, 10]),
]


def test_every_broken_archive_is_tried(shared_data):
    found = {path.name for path in (shared_data / "bad").iterdir() if path.name != "README.md"}
    assert found == {archive for _, archive, _ in REFUSED + LOADED}


@pytest.mark.parametrize("name, archive, parts", REFUSED)
def test_broken_archive_is_refused(archives, name, archive, parts):
    for _ in range(2):  # A second run must not take leftovers of the first for data.
        with pytest.raises(ValueError) as raised:
            load(name, data_dir=archives / archive)
        message = str(raised.value)
        assert "\n" not in message
        assert [part for part in parts if part not in message] == []
    assert not list(archives.rglob("*.partial"))
    assert not list(archives.parent.rglob("evil.txt"))


@pytest.mark.parametrize("name, archive, counts", LOADED)
def test_whole_archive_is_loaded(archives, name, archive, counts):
    dataset = load(name, data_dir=archives / archive)
    kept = len(dataset.train) + len(dataset.validation) + len(dataset.server)
    assert [kept, len(dataset.test), len(dataset.classes)] == counts


@pytest.mark.parametrize(
    "archive, number, expected, tolerance",
    [
        # The number of the picture among the train pictures: class by class, names sorted.
        ("tiny-grey-jpeg.zip", 1, (80, 80, 80), 2),
        ("tiny-cmyk-jpeg.zip", 2, (160, 145, 141), 6),
        ("tiny-png-named-jpeg.zip", 8, (99, 111, 100), 1),
    ],
)
@pytest.mark.parametrize("image_size", [32, 64])
def test_unusual_picture_has_the_right_colours(
    archives, tmp_path, archive, number, expected, tolerance, image_size
):
    root, _ = locate(SOURCES["tinyimagenet"], archives / archive, download=False)
    _, train, _ = read_tinyimagenet(root, image_size=image_size, cache=tmp_path)
    mean = train.images[number].mean(axis=(0, 1))
    assert np.abs(mean - expected).max() <= tolerance
