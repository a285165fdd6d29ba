import shutil

import numpy as np
import pytest

from feast_tf.datasets.cinic10 import read_cinic10


def read(root, tmp_path):
    return read_cinic10(root, image_size=32, cache=tmp_path / "decoded")


def test_class_numbers_are_those_of_the_official_list(cinic_root, tmp_path):
    for split in read(cinic_root, tmp_path):
        assert len(split) == 20
        np.testing.assert_array_equal(split.images[:, 4, 6, 0], 20 * split.labels)


@pytest.mark.parametrize("whole_folder", [True, False])
def test_a_class_without_pictures_is_named(cinic_root, tmp_path, whole_folder):
    shutil.rmtree(cinic_root / "train" / "frog")
    if not whole_folder:
        (cinic_root / "train" / "frog").mkdir()
    with pytest.raises(ValueError, match="class frog has no pictures: .*train/frog is missing or"):
        read(cinic_root, tmp_path)


def test_a_folder_of_no_class_is_named(cinic_root, tmp_path):
    (cinic_root / "valid" / "unicorn").mkdir()
    with pytest.raises(ValueError, match="valid/unicorn is none of the 10 classes"):
        read(cinic_root, tmp_path)
