"""Reads the python version of CIFAR-10 and CIFAR-100 without trusting its pickles."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from feast_tf.datasets.splits import Split

_SIDE = 32
# All that a CIFAR pickle needs beyond plain Python values. NumPy's function goes by two names,
# the newer one since NumPy 2; taking it from an array works under both.
_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR file needs")
        return _ALLOWED[module, name]


def read_cifar10(root: Path) -> tuple[tuple[str, ...], Split, Split]:
    """Reads `cifar-10-batches-py`.

    Args:
        root: The folder with data_batch_1 to data_batch_5, test_batch and batches.meta.

    Returns:
        `(classes, train, test)`, pictures of 32x32, train in the order of the batches.

    Raises:
        ValueError: If a file is not a CIFAR batch, or its pictures and labels are not of the right
            shape, type and range; the message names the file.
        FileNotFoundError: If a file is missing.
    """
    classes = _read_names(root / "batches.meta", "label_names")
    batches = [root / f"data_batch_{number}" for number in range(1, 6)]
    train = _read_batches(batches, "labels", len(classes))
    return classes, train, _read_batches([root / "test_batch"], "labels", len(classes))


def read_cifar100(root: Path) -> tuple[tuple[str, ...], Split, Split]:
    """Reads `cifar-100-python` (files train, test and meta) with its fine labels.

    Args, returns and raises as `read_cifar10`.
    """
    classes = _read_names(root / "meta", "fine_label_names")
    train = _read_batches([root / "train"], "fine_labels", len(classes))
    return classes, train, _read_batches([root / "test"], "fine_labels", len(classes))


def _read_names(path: Path, key: str) -> tuple[str, ...]:
    names = _unpickle(path, (key,))[key]
    if not isinstance(names, list) or not names:
        raise ValueError(f"{path}: {key} must be a list of class names")
    return tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names)


def _read_batches(paths: Sequence[Path], key: str, class_count: int) -> Split:
    batches = [_read_batch(path, key, class_count) for path in paths]
    return Split(
        np.concatenate([images for images, _ in batches]),
        np.concatenate([labels for _, labels in batches]),
    )


def _read_batch(path: Path, key: str, class_count: int) -> tuple[np.ndarray, np.ndarray]:
    content = _unpickle(path, ("data", key))
    data, labels = content["data"], np.asarray(content[key])
    if labels.ndim != 1 or not len(labels) or labels.dtype.kind not in "iu":
        raise ValueError(f"{path}: {key} must be a list of integers, one per picture")
    if labels.min() < 0 or labels.max() >= class_count:
        raise ValueError(
            f"{path}: {key} must be in 0..{class_count - 1}, but they are in "
            f"{labels.min()}..{labels.max()}"
        )
    expected = (len(labels), 3 * _SIDE * _SIDE)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape != expected:
        found = f"{data.dtype} {data.shape}" if isinstance(data, np.ndarray) else type(data)
        raise ValueError(f"{path}: data must be of uint8 {expected}, not of {found}")
    images = data.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), labels.astype(np.int32)


def _unpickle(path: Path, keys: Sequence[str]) -> dict[str, Any]:
    try:
        stream = open(path, "rb")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} is missing; get a whole copy of the data set") from error
    with stream:
        try:
            content = _RestrictedUnpickler(stream, encoding="bytes").load()
        # A garbled pickle can raise nearly anything, as the documentation of pickle says.
        except Exception as error:
            raise ValueError(f"{path} is not a CIFAR file: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a CIFAR file: it holds a {type(content).__name__}")
    # Pickles of Python 2 have byte strings as keys, those of Python 3 have text.
    content = {k.decode() if isinstance(k, bytes) else k: value for k, value in content.items()}
    for key in keys:
        if key not in content:
            raise ValueError(f"{path} is not a CIFAR file of the right kind: it has no {key!r}")
    return content
