"""Reads TinyImageNet-200, whose validation labels are in a list and not in folder names."""

from __future__ import annotations

from pathlib import Path

from feast_tf.datasets.pictures import PictureFiles
from feast_tf.datasets.pictures import list_class_folders
from feast_tf.datasets.pictures import list_pictures
from feast_tf.datasets.pictures import load_pictures
from feast_tf.datasets.splits import Split

_ANNOTATIONS = "val_annotations.txt"


def read_tinyimagenet(
    root: Path, *, image_size: int, cache: Path
) -> tuple[tuple[str, ...], Split, Split]:
    """Reads the official train and val splits; the official test split has no labels.

    Val is accepted as published (`val/images/*.JPEG` with `val/val_annotations.txt`) and sorted
    into class folders (`val/<wnid>/*.JPEG` or `val/<wnid>/images/*.JPEG`).

    Args:
        root: The folder with wnids.txt, train and val.
        image_size: Height and width in pixels; the official 64x64 are resampled to other sizes.
        cache: The folder for decoded pictures.

    Returns:
        `(classes, train, val)`: the sorted WordNet ids of wnids.txt, whose positions are the class
        numbers, and the pictures.

    Raises:
        ValueError: If a class has no train pictures, val_annotations.txt and the val pictures do
            not fit each other, a WordNet id is not in wnids.txt, or a picture is damaged; the
            message names the class, line or file.
        FileNotFoundError: If wnids.txt or val_annotations.txt is missing.
    """
    classes = _read_classes(root / "wnids.txt")
    # Both are listed first: a bad list is then found before the long decoding.
    train_files = list_class_folders(root / "train", classes)
    val_files = _list_val(root / "val", classes)
    train = load_pictures(
        train_files, image_size=image_size, cache=cache, name="tinyimagenet-train"
    )
    val = load_pictures(val_files, image_size=image_size, cache=cache, name="tinyimagenet-val")
    return classes, train, val


def _read_classes(path: Path) -> tuple[str, ...]:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; it lists the WordNet ids of the classes")
    wnids = path.read_text(encoding="utf-8").split()
    if not wnids or len(set(wnids)) < len(wnids):
        raise ValueError(f"{path} must list each WordNet id once, and at least one")
    return tuple(sorted(wnids))


def _list_val(folder: Path, classes: tuple[str, ...]) -> PictureFiles:
    pictures = list_pictures(folder / "images") if (folder / "images").is_dir() else []
    annotations = folder / _ANNOTATIONS
    if not pictures and any((folder / name).is_dir() for name in classes):
        return list_class_folders(folder, classes, ignore=("images",))
    if not annotations.exists():
        raise FileNotFoundError(
            f"{annotations} is missing; without it the pictures of {folder} have no classes"
        )
    return _annotated(annotations, pictures, classes)


def _annotated(
    annotations: Path, pictures: list[Path], classes: tuple[str, ...]
) -> PictureFiles:
    numbers = {name: number for number, name in enumerate(classes)}
    by_name = {path.name: path for path in pictures}
    labels: dict[str, int] = {}
    for number, line in enumerate(annotations.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        place = f"{annotations} line {number}"
        name, _, rest = line.partition("\t")
        wnid = rest.split("\t")[0].strip()
        if wnid not in numbers:
            raise ValueError(f"{place}: {name} has the class {wnid!r}, which is not in wnids.txt")
        if name not in by_name:
            raise ValueError(f"{place}: {name} is not in {annotations.parent / 'images'}")
        if name in labels:
            raise ValueError(f"{place}: {name} is listed for the second time")
        labels[name] = numbers[wnid]
    for name, path in by_name.items():
        if name not in labels:
            raise ValueError(f"{path} has no line in {annotations}")
    if not labels:
        raise ValueError(f"{annotations} lists no pictures")
    return PictureFiles(tuple(by_name[name] for name in labels), tuple(labels.values()))
