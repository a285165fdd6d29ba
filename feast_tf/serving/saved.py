"""The trained supernet on disk: weights, space, cache and input normalisation in one folder."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pathlib
import zipfile
import zlib
from collections.abc import Sequence
from typing import Union

import numpy as np

from feast_tf.files import write_whole
from feast_tf.space import SupernetSpec, VariantCache, layout_of
from feast_tf.supernet import ElasticResNet


@dataclasses.dataclass(frozen=True)
class SavedSupernet:
    """What `save_supernet` keeps.

    Attributes:
      cache: the variant cache, and in it the space.
      weights: tuple of float32 arrays in the order of the layout's parameters.
      classes: names of the classes.
      mean, std: per-channel normalisation of pictures scaled to 0..1.
    """

    cache: VariantCache
    weights: tuple[np.ndarray, ...]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def spec(self) -> SupernetSpec:
        return self.cache.spec

    def model(self) -> ElasticResNet:
        """The supernet as a Keras model with the trained weights."""
        model = ElasticResNet(self.spec)
        model.set_weights(list(self.weights))
        return model


def save_weights(path: Union[str, os.PathLike], weights: Sequence[np.ndarray]) -> None:
    """Writes arrays to an .npz file, whole or not at all; `load_weights` keeps their order."""
    content = io.BytesIO()  # on a full disk NumPy's archive, closed at random, complains once more
    np.savez(content, **{f"{place:04d}": weight for place, weight in enumerate(weights)})
    write_whole(path, lambda file: file.write(content.getbuffer()))


def load_weights(path: Union[str, os.PathLike]) -> tuple[np.ndarray, ...]:
    """The arrays that `save_weights` wrote.

    Raises:
      ValueError: the file is damaged; the message names it.
      FileNotFoundError: there is none.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return tuple(arrays[name] for name in sorted(arrays.files))
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error})") from error


def save_supernet(folder: Union[str, os.PathLike], saved: SavedSupernet) -> None:
    """Writes weights.npz, spec.json and cache.csv to `folder`."""
    folder = pathlib.Path(folder)
    save_weights(folder / "weights.npz", saved.weights)
    saved.cache.save(folder / "cache.csv")
    fields = {"space": dataclasses.asdict(saved.spec), "classes": list(saved.classes),
              "mean": list(map(float, saved.mean)), "std": list(map(float, saved.std))}
    write_whole(folder / "spec.json",
                lambda file: file.write(json.dumps(fields, indent=2).encode() + b"\n"))


def load_supernet(folder: Union[str, os.PathLike]) -> SavedSupernet:
    """Reads what `save_supernet` wrote.

    Raises:
      ValueError: a file is missing or damaged, or the files do not fit each other; the message
        names the file.
    """
    folder = pathlib.Path(folder)
    for name in ("spec.json", "cache.csv", "weights.npz"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing: not the model folder of a finished run")
    try:
        fields = json.loads((folder / "spec.json").read_text())
        spec = SupernetSpec(**fields["space"])
        classes, mean, std = (tuple(fields[key]) for key in ("classes", "mean", "std"))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{folder / 'spec.json'} is damaged ({error})") from error
    if len(classes) != spec.classes or len(mean) != 3 or len(std) != 3:
        raise ValueError(f"{folder / 'spec.json'} must name {spec.classes} classes and three "
                         f"channels' mean and std, but has {len(classes)}, {len(mean)} and "
                         f"{len(std)}")
    weights = load_weights(folder / "weights.npz")
    shapes = [parameter.shape for parameter in layout_of(spec).parameters]
    if [weight.shape for weight in weights] != shapes:
        raise ValueError(f"{folder / 'weights.npz'} does not fit the space in spec.json: "
                         f"{len(weights)} arrays instead of {len(shapes)}, or other shapes")
    return SavedSupernet(VariantCache.load(folder / "cache.csv", spec), weights, classes, mean, std)
