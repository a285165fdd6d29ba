import shutil

import numpy as np
import pytest

from feast_tf.datasets.tinyimagenet import read_tinyimagenet


def read(root, tmp_path, image_size=32):
    return read_tinyimagenet(root, image_size=image_size, cache=tmp_path / "decoded")


def annotate(root, *lines):
    (root / "val" / "val_annotations.txt").write_text("".join(f"{line}\n" for line in lines))


def move_into_class_folders(root, subfolder):
    for name, wnid in (("val_0", "n02"), ("val_2", "n03"), ("val_1", "n01")):
        folder = root / "val" / wnid / subfolder
        folder.mkdir(parents=True)
        (root / "val" / "images" / f"{name}.JPEG").rename(folder / f"{name}.JPEG")


def labels_by_number(split):
    """Which label each val picture has; the blue value tells its number."""
    numbers = np.rint(split.images[:, 0, 0, 2] / 60).astype(int)
    return dict(zip(numbers.tolist(), split.labels.tolist()))


def test_labels_are_positions_among_the_sorted_ids(tiny_root, tmp_path):
    classes, train, val = read(tiny_root, tmp_path)
    assert classes == ("n01", "n02", "n03")
    assert train.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert np.abs(train.images[:, 0, 0, 0].astype(int) - 50 * train.labels).max() <= 3
    assert labels_by_number(val) == {0: 1, 1: 0, 2: 2}


@pytest.mark.parametrize("subfolder", ["", "images"])
@pytest.mark.parametrize("leftover", ["nothing", "list", "empty images"])
def test_val_sorted_into_class_folders_has_the_same_labels(
    tiny_root, tmp_path, subfolder, leftover
):
    move_into_class_folders(tiny_root, subfolder)
    if leftover != "empty images":
        (tiny_root / "val" / "images").rmdir()
    if leftover != "list":
        (tiny_root / "val" / "val_annotations.txt").unlink()
    _, _, val = read(tiny_root, tmp_path)
    assert labels_by_number(val) == {0: 1, 1: 0, 2: 2}


def test_val_that_is_sorted_in_part_is_an_error(tiny_root, tmp_path):
    move_into_class_folders(tiny_root, "")
    (tiny_root / "val" / "n02" / "val_0.JPEG").rename(tiny_root / "val" / "images" / "val_0.JPEG")
    with pytest.raises(ValueError, match=r"line 2: val_2\.JPEG is not in .*val/images"):
        read(tiny_root, tmp_path)


def test_a_missing_list_is_an_error_and_not_label_0(tiny_root, tmp_path):
    (tiny_root / "val" / "val_annotations.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"val/val_annotations\.txt is missing"):
        read(tiny_root, tmp_path)


def test_a_missing_val_folder_is_an_error(tiny_root, tmp_path):
    shutil.rmtree(tiny_root / "val")
    with pytest.raises(FileNotFoundError, match=r"val/val_annotations\.txt is missing"):
        read(tiny_root, tmp_path)


@pytest.mark.parametrize(
    "lines, message",
    [
        (["val_0.JPEG\tn01", "val_9.JPEG\tn02"], r"annotations\.txt line 2: val_9\.JPEG is not"),
        (["val_0.JPEG\tn01", "", "val_1.JPEG\tn09\t1"], r"line 3: val_1\.JPEG has the class 'n09'"),
        (["val_0.JPEG n01"], r"line 1: val_0\.JPEG n01 has the class ''"),
        (["val_0.JPEG\tn01", "val_0.JPEG\tn02"], r"line 2: val_0\.JPEG is listed for the second"),
        (["val_0.JPEG\tn01", "val_1.JPEG\tn02"], r"val_2\.JPEG has no line in .*val_annotations"),
    ],
)
def test_a_list_that_does_not_fit_the_pictures_is_refused(tiny_root, tmp_path, lines, message):
    annotate(tiny_root, *lines)
    with pytest.raises(ValueError, match=message):
        read(tiny_root, tmp_path)


def test_a_class_without_train_pictures_is_named(tiny_root, tmp_path):
    shutil.rmtree(tiny_root / "train" / "n02" / "images")
    with pytest.raises(ValueError, match="class n02 has no pictures"):
        read(tiny_root, tmp_path)


def test_a_train_folder_of_no_class_is_named(tiny_root, tmp_path):
    (tiny_root / "train" / "n77").mkdir()
    with pytest.raises(ValueError, match="train/n77 is none of the 3 classes"):
        read(tiny_root, tmp_path)


def test_a_missing_or_doubtful_class_list_is_named(tiny_root, tmp_path):
    (tiny_root / "wnids.txt").write_text("n01\nn02\nn01\n")
    with pytest.raises(ValueError, match=r"wnids\.txt must list each WordNet id once"):
        read(tiny_root, tmp_path)
    (tiny_root / "wnids.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"wnids\.txt is missing"):
        read(tiny_root, tmp_path)


def test_a_damaged_picture_is_named(tiny_root, tmp_path):
    path = tiny_root / "train" / "n02" / "images" / "n02_1.JPEG"
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(ValueError, match=r"train/n02/images/n02_1\.JPEG"):
        read(tiny_root, tmp_path)
