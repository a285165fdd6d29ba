"""`load`: a data set by name, divided the way the paper's runs need it (paper 4.1)."""

from __future__ import annotations

import operator
import os

from feast_tf.datasets import cifar
from feast_tf.datasets import cinic10
from feast_tf.datasets import digits
from feast_tf.datasets import tinyimagenet
from feast_tf.datasets.pictures import resize_all
from feast_tf.datasets.sources import SOURCES
from feast_tf.datasets.sources import locate
from feast_tf.datasets.splits import Dataset
from feast_tf.datasets.splits import Split
from feast_tf.datasets.splits import channel_moments
from feast_tf.datasets.splits import stratified_split
from feast_tf.seeding import stream

NAMES = ("digits", *SOURCES)

_DEFAULT_IMAGE_SIZE = 32
_DEFAULT_DIGITS_SIZE = 16
DEFAULT_HELD_OUT = 0.1
DIGITS_TEST_COUNT = 397
# The digits have no official test pictures. Ours must not depend on the seed of a run, or the
# figures of two seeds would not be comparable.
_DIGITS_TEST_SEED = 0


def load(
    name: str,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    image_size: int | None = None,
    held_out: float | None = None,
    server_samples: int | None = None,
    seed: int = 0,
    download: bool = True,
) -> Dataset:
    """Loads a data set and divides it into train, validation, server and test.

    Pictures held out from training are divided into `server`, for recalibrating batch
    normalisation, and `validation`, the rest. Both divisions keep the class proportions and depend
    on the seed and the labels only. Which pictures are held out:

    *   cifar10, cifar100: a tenth of the official train set. Of 50,000 pictures 45,000 are for
        training, 4,000 for validation and 1,000 for the server.
    *   tinyimagenet: a tenth of the official train set. The official val split is the test set, as
        the official test split has no labels.
    *   cinic10: the official valid split; the train split stays whole.
    *   digits: 397 pictures, the same ones for every seed, are the test set; a tenth of the other
        1,400 is held out.

    `mean` and `std` are those of `train` as loaded, for every data set.

    Args:
        name: One of `NAMES`.
        data_dir: A folder with the data set (its official root folder, that folder's content, or
            its archive), or the path of an archive; see `sources.locate`. By default $FEAST_TF_DATA
            or else ~/.cache/feast_tf. Digits need none.
        image_size: Height and width in pixels, 32 by default (16 for digits). TinyImageNet is 64x64
            by nature, CIFAR and CINIC-10 are 32x32, digits are 8x8; other sizes are resampled.
        held_out: The share of the train pictures to hold out, 0.1 by default, rounded to whole
            pictures and at least two of them. Not for cinic10.
        server_samples: How many of the held-out pictures the server gets, by default a fifth and at
            least one.
        seed: Of the run; decides which pictures are held out and which of them the server gets.
        download: Whether to download a data set that is not in `data_dir`.

    Raises:
        ValueError: If an argument is out of its range, or the data are damaged or not as published.
        FileNotFoundError: If the data set, or one of its files, is missing.
        ConnectionError: If the download failed.
        OSError: If nothing can be written, such as on a full disk.
    """
    if name not in NAMES:
        raise ValueError(f"data set {name!r} is unknown; it must be one of {', '.join(NAMES)}")
    if image_size is None:
        image_size = _DEFAULT_DIGITS_SIZE if name == "digits" else _DEFAULT_IMAGE_SIZE
    if operator.index(image_size) < 1:
        raise ValueError(f"image_size must be at least 1 pixel, not {image_size}")
    if held_out is not None and name == "cinic10":
        raise ValueError("held_out does not go with cinic10, whose valid split is the held-out set")
    if held_out is not None and not 0 < held_out < 1:
        raise ValueError(f"held_out must be a share between 0 and 1, not {held_out}")

    classes, train, held, test = _read(name, data_dir, image_size, download)
    if held is None:
        train, held = _hold_out(train, DEFAULT_HELD_OUT if held_out is None else held_out, seed)
    if server_samples is None:
        server_samples = max(1, len(held) // 5)
    if not 1 <= operator.index(server_samples) < len(held):
        raise ValueError(
            f"server_samples must be in 1..{len(held) - 1}, as {len(held)} pictures are held out "
            f"and validation needs some, not {server_samples}"
        )
    server, validation = stratified_split(
        held.labels, server_samples, stream(seed, "server pictures")
    )
    mean, std = channel_moments(train.images)
    return Dataset(
        name=name, classes=classes, train=train, validation=held.take(validation),
        server=held.take(server), test=test, mean=mean, std=std,
    )


def _read(
    name: str, data_dir: str | os.PathLike[str] | None, image_size: int, download: bool
) -> tuple[tuple[str, ...], Split, Split | None, Split]:
    """Returns the class names and what is published as train, held out (if so) and test."""
    if name == "digits":
        everything = digits.read_digits(image_size)
        test, train = stratified_split(
            everything.labels, DIGITS_TEST_COUNT, stream(_DIGITS_TEST_SEED, "digits test pictures")
        )
        return digits.CLASSES, everything.take(train), None, everything.take(test)
    root, cache = locate(SOURCES[name], data_dir, download=download)
    if name == "cinic10":
        train, valid, test = cinic10.read_cinic10(root, image_size=image_size, cache=cache)
        return cinic10.CLASSES, train, valid, test
    if name == "tinyimagenet":
        classes, train, val = tinyimagenet.read_tinyimagenet(
            root, image_size=image_size, cache=cache
        )
        return classes, train, None, val
    read_cifar = cifar.read_cifar10 if name == "cifar10" else cifar.read_cifar100
    classes, train, test = read_cifar(root)
    train, test = (Split(resize_all(s.images, image_size), s.labels) for s in (train, test))
    return classes, train, None, test


def _hold_out(train: Split, share: float, seed: int) -> tuple[Split, Split]:
    # Two at least: one for the server and one for validation.
    count = max(2, round(share * len(train)))
    if count >= len(train):
        raise ValueError(
            f"held_out {share} takes all {len(train)} train pictures; it must leave some of them"
        )
    held, kept = stratified_split(train.labels, count, stream(seed, "held-out pictures"))
    return train.take(kept), train.take(held)
