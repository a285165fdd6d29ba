"""Reads CINIC-10: `train|valid|test/<class>/*.png`."""

from __future__ import annotations

from pathlib import Path

from feast_tf.datasets.pictures import list_class_folders
from feast_tf.datasets.pictures import load_pictures
from feast_tf.datasets.splits import Split

CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)
_PARTS = ("train", "valid", "test")


def read_cinic10(root: Path, *, image_size: int, cache: Path) -> tuple[Split, Split, Split]:
    """Reads the three official splits.

    Args:
        root: The folder with train, valid and test.
        image_size: Height and width in pixels; other sizes are resampled.
        cache: The folder for decoded pictures.

    Returns:
        `(train, valid, test)`, by class (numbers as in `CLASSES`) and then by file name.

    Raises:
        ValueError: If a class has no pictures in a split, a folder is of no class, or a picture is
            damaged; the message names it.
    """
    # All three are listed first: a missing class is then found before the long decoding.
    listed = {part: list_class_folders(root / part, CLASSES) for part in _PARTS}
    train, valid, test = (
        load_pictures(files, image_size=image_size, cache=cache, name=f"cinic10-{part}")
        for part, files in listed.items()
    )
    return train, valid, test
