"""Small made-up data sets in the official layouts, and a cache folder for each test."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

WNIDS = ("n03", "n01", "n02")  # Not sorted, as in the official wnids.txt.


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """The cache folder, which does not exist yet, instead of the user's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FEAST_TF_DATA", str(folder))
    return folder


@pytest.fixture
def cifar10_root(tmp_path) -> Path:
    """`source/cifar-10-batches-py` with 10 pictures a batch, one a class."""
    root = tmp_path / "source" / "cifar-10-batches-py"
    root.mkdir(parents=True)
    rng = np.random.default_rng(3)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        data = rng.integers(0, 256, (10, 3072), dtype=np.uint8)
        write_pickle(root / name, {b"data": data, b"labels": list(range(10))})
    names = [f"class_{number}".encode() for number in range(10)]
    write_pickle(root / "batches.meta", {b"label_names": names})
    return root


@pytest.fixture
def tiny_root(tmp_path) -> Path:
    """`source/tiny-imagenet-200`: 3 classes, 4 train pictures each, 3 val pictures in one folder.

    Train picture k of class c is plain (50 * c, 20 * k, 7), val picture k is plain (0, 0, 60 * k).
    """
    root = tmp_path / "source" / "tiny-imagenet-200"
    for label, wnid in enumerate(sorted(WNIDS)):
        for number in range(4):
            path = root / "train" / wnid / "images" / f"{wnid}_{number}.JPEG"
            write_picture(path, (50 * label, 20 * number, 7))
        (root / "train" / wnid / f"{wnid}_boxes.txt").write_text("")
    for number in range(3):
        write_picture(root / "val" / "images" / f"val_{number}.JPEG", (0, 0, 60 * number))
    (root / "wnids.txt").write_text("".join(f"{wnid}\n" for wnid in WNIDS))
    (root / "val" / "val_annotations.txt").write_text(
        "val_0.JPEG\tn02\t0\t1\t2\t3\nval_2.JPEG\tn03\t0\t1\t2\t3\nval_1.JPEG\tn01\t0\t1\t2\t3\n"
    )
    return root


@pytest.fixture
def cinic_root(tmp_path) -> Path:
    """`source/CINIC-10`: 2 pictures a class and split, plain (20 * class, 100 * number, 9)."""
    root = tmp_path / "source" / "CINIC-10"
    names = "airplane automobile bird cat deer dog frog horse ship truck".split()
    for part in ("train", "valid", "test"):
        for label, name in enumerate(names):
            for number in range(2):
                path = root / part / name / f"cifar10-{part}-{number}.png"
                write_picture(path, (20 * label, 100 * number, 9))
    return root


def write_picture(path: Path, colour, *, size: int = 32, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = "PNG" if path.suffix == ".png" else "JPEG"
    options = {} if kind == "PNG" else {"quality": 100, "subsampling": 0}
    Image.new(mode, (size, size), colour).save(path, kind, **options)


def write_pickle(path: Path, content: object) -> None:
    # Protocol 3 needs no globals but NumPy's, like the official files of Python 2.
    path.write_bytes(pickle.dumps(content, protocol=3))
