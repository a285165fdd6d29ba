"""Lists, decodes and resizes picture files, and keeps the decoded pixels for the next run."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path

import numpy as np
from absl import logging
from PIL import Image

from feast_tf.datasets.files import exclusive
from feast_tf.datasets.progress import progress
from feast_tf.datasets.splits import Split

_SUFFIXES = (".jpeg", ".jpg", ".png")
# Modes of 8 bits a channel. Pillow cuts off, rather than scales, wider ones on their way to RGB.
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
# Part of the key of a cache file; to be changed with anything that changes decoded pixels.
_CACHE_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class PictureFiles:
    """Labelled picture files: `paths` and their class numbers `labels`, both of length N."""

    paths: tuple[Path, ...]
    labels: tuple[int, ...]


def list_pictures(folder: Path) -> list[Path]:
    """Returns the JPEG and PNG files of a folder by name, by their suffix; hidden ones left out."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() in _SUFFIXES and not path.name.startswith(".")
    )


def list_class_folders(
    folder: Path, classes: tuple[str, ...], *, ignore: Collection[str] = ()
) -> PictureFiles:
    """Lists the pictures in `folder/<class>/` or `folder/<class>/images/`.

    The class number comes from `classes`, not from the folders found, so that a missing folder
    cannot shift the numbers after it.

    Args:
        folder: A split, such as `.../train`.
        classes: The class names; all have to be there.
        ignore: Names of folders that are no classes.

    Raises:
        ValueError: If a class has no folder or no pictures, or a folder is of no known class.
    """
    if not folder.is_dir():
        raise ValueError(f"folder {folder} is missing")
    known = {*classes, *ignore}
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and entry.name not in known and not entry.name.startswith("."):
            raise ValueError(f"folder {entry} is none of the {len(classes)} classes; remove it")
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        place = folder / name
        if (place / "images").is_dir():
            place = place / "images"
        found = list_pictures(place) if place.is_dir() else []
        if not found:
            raise ValueError(f"class {name} has no pictures: {place} is missing or empty")
        paths.extend(found)
        labels.extend([label] * len(found))
    return PictureFiles(tuple(paths), tuple(labels))


def decode(path: Path, image_size: int) -> np.ndarray:
    """Decodes one picture by its content, whatever its name says.

    Greyscale becomes three equal channels; CMYK becomes RGB with the black channel counted in and
    with Adobe's inverted values understood; transparency is dropped. A picture of another size is
    resampled (Lanczos) to the square.

    Args:
        path: The file.
        image_size: Height and width of the result in pixels.

    Returns:
        uint8 array of shape [image_size, image_size, 3].

    Raises:
        ValueError: If the file is cut short, damaged, no picture, or of more than 8 bits a
            channel; the message names it.
    """
    try:
        with Image.open(path) as image:
            if image.mode not in _MODES:
                raise ValueError(f"pixel format {image.mode} has not 8 bits a channel")
            return resize(image.convert("RGB"), image_size, Image.Resampling.LANCZOS)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"cannot decode picture {path}: {error}") from error


def resize(image: Image.Image, image_size: int, method: Image.Resampling) -> np.ndarray:
    """Returns an RGB picture as uint8 [image_size, image_size, 3], as it is if that is its size."""
    if image.size != (image_size, image_size):
        image = image.resize((image_size, image_size), method)
    return np.asarray(image)


def resize_all(
    images: np.ndarray, image_size: int, method: Image.Resampling = Image.Resampling.LANCZOS
) -> np.ndarray:
    """Resizes uint8 [N, height, width, 3] to uint8 [N, image_size, image_size, 3]."""
    if images.shape[1:3] == (image_size, image_size):
        return images
    return np.stack([resize(Image.fromarray(image), image_size, method) for image in images])


def load_pictures(files: PictureFiles, *, image_size: int, cache: Path, name: str) -> Split:
    """Decodes pictures, or takes them from an earlier run with the same files.

    The decoded pixels are kept in `<cache>/<name>-<image_size>-<key>.npz`. The key stands for the
    paths, sizes and times of all files, so that a changed, added or removed file is noticed. A
    cache file that cannot be used is written anew; one that cannot be written is done without.

    Args:
        files: At least one picture.
        image_size: Height and width of the result in pixels.
        cache: The folder for cache files.
        name: Begins the name of the cache file, and is shown while decoding.

    Raises:
        ValueError: As `decode`.
    """
    labels = np.array(files.labels, dtype=np.int32)
    path = cache / f"{name}-{image_size}-{_key(files)}.npz"
    try:
        with exclusive(path):
            images = _read_cache(path, (len(labels), image_size, image_size, 3))
            if images is None:
                images = _decode_all(files, image_size, name)
                _write_cache(path, images)
    except OSError as error:
        logging.warning("Decoded pictures are not kept for the next run: %s", error)
        images = _decode_all(files, image_size, name)
    return Split(images, labels)


def _decode_all(files: PictureFiles, image_size: int, name: str) -> np.ndarray:
    images = np.empty((len(files.paths), image_size, image_size, 3), dtype=np.uint8)
    with progress(f"Decoding {name}", total=len(images), unit=" pictures") as advance:
        for position, path in enumerate(files.paths):
            images[position] = decode(path, image_size)
            advance(1)
    return images


def _key(files: PictureFiles) -> str:
    result = hashlib.sha256(str(_CACHE_FORMAT).encode())
    for path in files.paths:
        status = path.stat()
        result.update(f"\n{path} {status.st_size} {status.st_mtime_ns}".encode())
    return result.hexdigest()[:16]


def _read_cache(path: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    if not path.exists():
        return None
    try:
        # An npz file is a zip file, whose checksum shows pixels that changed on disk.
        with np.load(path, allow_pickle=False) as content:
            images = content["images"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        logging.warning("Decoding again, as %s cannot be used: %s", path, error)
        return None
    return images if images.shape == shape and images.dtype == np.uint8 else None


def _write_cache(path: Path, images: np.ndarray) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as stream:
            np.savez(stream, images=images)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        logging.warning("Decoded pictures are not kept in %s: %s", path, error)
