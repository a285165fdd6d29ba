import os
import pickle

import numpy as np
import pytest

from feast_tf.datasets.cifar import read_cifar10
from feast_tf.datasets.cifar import read_cifar100


def rewrite(path, **changes):
    content = pickle.loads(path.read_bytes())
    content.update({key.encode(): value for key, value in changes.items()})
    path.write_bytes(pickle.dumps(content, protocol=3))


def test_pictures_are_channel_last_in_batch_order(cifar10_root):
    # Red plane, green plane, blue plane; each row by row.
    data = np.arange(2 * 3072, dtype=np.uint32).reshape(2, 3072).astype(np.uint8)
    rewrite(cifar10_root / "data_batch_2", data=data, labels=[9, 4])
    classes, train, test = read_cifar10(cifar10_root)
    assert classes == tuple(f"class_{number}" for number in range(10))
    assert train.images.shape == (42, 32, 32, 3) and train.images.dtype == np.uint8
    assert train.labels.tolist() == [*range(10), 9, 4, *range(10), *range(10), *range(10)]
    row, column = 5, 7
    expected = [data[1, channel * 1024 + row * 32 + column] for channel in range(3)]
    assert train.images[11, row, column].tolist() == expected
    assert len(test) == 10


def test_cifar100_has_fine_labels(cifar10_root):
    batch = cifar10_root / "data_batch_1"
    rewrite(batch, fine_labels=[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], coarse_labels=[0] * 10)
    batch.rename(cifar10_root / "train")
    rewrite(cifar10_root / "test_batch", fine_labels=[2] * 10)
    (cifar10_root / "test_batch").rename(cifar10_root / "test")
    rewrite(cifar10_root / "batches.meta", fine_label_names=[b"x"] * 12)
    (cifar10_root / "batches.meta").rename(cifar10_root / "meta")
    classes, train, test = read_cifar100(cifar10_root)
    assert len(classes) == 12
    assert train.labels.tolist() == [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    assert test.labels.tolist() == [2] * 10


@pytest.mark.parametrize("old, new", [(b"numpy.core.", b"numpy._core."), (b"", b"")])
def test_both_names_of_the_numpy_module_are_read(cifar10_root, old, new):
    path = cifar10_root / "data_batch_4"
    path.write_bytes(path.read_bytes().replace(old, new))
    assert new in path.read_bytes()
    assert len(read_cifar10(cifar10_root)[1]) == 50


def test_text_keys_are_read(cifar10_root):
    path = cifar10_root / "data_batch_4"
    content = pickle.loads(path.read_bytes())
    content = {key.decode(): value for key, value in content.items()}
    path.write_bytes(pickle.dumps(content, protocol=3))
    assert len(read_cifar10(cifar10_root)[1]) == 50


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_code_in_a_pickle_is_not_run(cifar10_root, tmp_path):
    rewrite(cifar10_root / "data_batch_5", labels=Evil(str(tmp_path / "evil")))
    with pytest.raises(ValueError, match=r"data_batch_5 is not a CIFAR file: it asks for posix\."):
        read_cifar10(cifar10_root)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"data": np.zeros((10, 1024), np.uint8)},
            r"data must be of uint8 \(10, 3072\), not of uint8 \(10, 1024\)",
        ),
        ({"data": np.zeros((10, 3072))}, r"uint8 \(10, 3072\), not of float64 \(10, 3072\)"),
        ({"data": [1, 2]}, r"data must be of uint8 \(10, 3072\), not of <class 'list'>"),
        ({"labels": [0, 1]}, r"data must be of uint8 \(2, 3072\), not of uint8 \(10, 3072\)"),
        ({"labels": [*range(9), 10]}, r"labels must be in 0\.\.9, but they are in 0\.\.10"),
        ({"labels": [*range(9), -1]}, r"labels must be in 0\.\.9, but they are in -1\.\.8"),
        ({"labels": [0.5] * 10}, "labels must be a list of integers"),
        ({"labels": []}, "labels must be a list of integers"),
    ],
)
def test_bad_batches_are_named(cifar10_root, changes, message):
    rewrite(cifar10_root / "data_batch_3", **changes)
    with pytest.raises(ValueError, match=f"{cifar10_root}/data_batch_3: .*{message}"):
        read_cifar10(cifar10_root)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is not a CIFAR file: Ran out of input"),
        (b"hello", "is not a CIFAR file: "),
        (pickle.dumps([1]), "is not a CIFAR file: it holds a list"),
        (pickle.dumps({"data": 1}), "has no 'labels'"),
    ],
)
def test_files_that_are_no_batches_are_named(cifar10_root, content, message):
    (cifar10_root / "test_batch").write_bytes(content)
    with pytest.raises(ValueError, match=f"test_batch .*{message}") as raised:
        read_cifar10(cifar10_root)
    assert "\n" not in str(raised.value)


def test_a_cut_batch_is_named(cifar10_root):
    path = cifar10_root / "data_batch_1"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ValueError, match="data_batch_1 is not a CIFAR file: pickle data was trunc"):
        read_cifar10(cifar10_root)


@pytest.mark.parametrize("name", ["data_batch_4", "test_batch", "batches.meta"])
def test_a_missing_file_is_named(cifar10_root, name):
    (cifar10_root / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{name} is missing; get a whole copy"):
        read_cifar10(cifar10_root)
