"""The fixed cache of variants that a federation trains, routes and serves (paper 3.2).

A cache file is CSV with the space's fingerprint in its first line. Costs are recomputed when it is
loaded: the columns are for people, and one cache serves data sets with other numbers of classes.
"""

from __future__ import annotations

import importlib.resources
import os
import pathlib
from collections.abc import Iterable
from typing import Union

import numpy as np

from feast_tf.files import write_whole
from feast_tf.space import costs
from feast_tf.space.layout import layout_of
from feast_tf.space.spec import SupernetSpec, Variant, number_text

_COLUMNS = "macs,params,d,e,w"
_MARK = "# feast-tf variant cache, space "


class VariantCache:
    """Variants in ascending order of MACs.

    A client's *level* is the place of its largest affordable variant: A_i = variants[: level + 1],
    so affordable sets are nested by construction.

    Attributes:
      spec: the space.
      variants: tuple of `Variant`.
      macs, params: int64[A].
      dims: int32[A, 1 + 3S] (see `layout`).
    """

    def __init__(self, spec: SupernetSpec, variants: Iterable[Variant]):
        variants = tuple(variants)
        if not variants:
            raise ValueError("a variant cache needs at least one variant")
        layout = layout_of(spec)
        dims = np.stack([layout.dims(variant) for variant in variants])
        macs, params = costs.macs(spec, dims), costs.params(spec, dims)
        # Ties by size, then by the fields, so that the order never depends on the input's.
        order = sorted(range(len(variants)), key=lambda i: (
            macs[i], params[i], variants[i].d, variants[i].e, variants[i].w))
        first: dict[bytes, int] = {}
        for place, row in enumerate(dims):
            other = first.setdefault(row.tobytes(), place)
            if other != place:
                raise ValueError(f"the variants {variants[other]} and {variants[place]} "
                                 "are the same network")
        self.spec = spec
        self.variants = tuple(variants[i] for i in order)
        self.macs, self.params, self.dims = macs[order], params[order], dims[order]

    def __len__(self) -> int:
        return len(self.variants)

    @property
    def minimum(self) -> Variant:
        """a^min, the cheapest variant of the whole cache."""
        return self.variants[0]

    def level(self, budget: float) -> int:
        """The place of the largest variant with MACs <= budget.

        Raises:
          ValueError: nothing is affordable (or the budget is not a number).
        """
        budget = float(budget)
        count = int(np.searchsorted(self.macs, budget, side="right"))
        if count == 0 or np.isnan(budget):
            raise ValueError(f"a budget of {budget:,.0f} MACs affords no variant: the cheapest "
                             f"needs {self.macs[0]:,}")
        return count - 1

    def affordable(self, budget: float) -> tuple[Variant, ...]:
        """A_i = {a : MAC(a) <= budget}, ascending."""
        return self.variants[: self.level(budget) + 1]

    def largest(self, budget: float) -> Variant:
        """a^max_i, the variant that is served at `budget`."""
        return self.variants[self.level(budget)]

    def save(self, path: Union[str, os.PathLike]) -> None:
        """Writes the CSV file, whole or not at all."""
        lines = [_MARK + self.spec.fingerprint(), _COLUMNS]
        for macs, params, variant in zip(self.macs, self.params, self.variants):
            d, e, w = (" ".join(map(number_text, field))
                       for field in (variant.d, variant.e, variant.w))
            lines.append(f"{macs},{params},{d},{e},{w}")
        write_whole(path, lambda file: file.write("\n".join([*lines, ""]).encode()))

    @classmethod
    def load(cls, path: Union[str, os.PathLike], spec: SupernetSpec) -> "VariantCache":
        """Reads a file that `save` wrote, for any number of classes and any image size.

        Raises:
          ValueError: another space's cache, or a malformed line; the message names file and line.
        """
        path = pathlib.Path(path)
        # Undecodable bytes become a character that the checks below refuse by line.
        lines = path.read_text("utf-8-sig", errors="replace").splitlines()
        if not lines or not lines[0].startswith(_MARK):
            raise ValueError(f"{path}: line 1 must be {_MARK!r} and the space's fingerprint")
        found = lines[0][len(_MARK):].strip()
        if found != spec.fingerprint():
            raise ValueError(f"{path}: made for the space {found}, but the configuration's is "
                             f"{spec.fingerprint()}; search a cache for this space")
        if lines[1:2] != [_COLUMNS]:
            raise ValueError(f"{path}: line 2 must be {_COLUMNS}")
        layout, variants = layout_of(spec), []
        first: dict[bytes, int] = {}
        for number, line in enumerate(lines[2:], start=3):
            try:
                fields = line.split(",")
                if len(fields) != 5:
                    raise ValueError(f"must hold {_COLUMNS}, but has {len(fields)} fields")
                d, e, w = fields[2:]
                variant = Variant([int(v) for v in d.split()], [float(v) for v in e.split()],
                                  [float(v) for v in w.split()])
                other = first.setdefault(layout.dims(variant).tobytes(), number)
                if other != number:
                    raise ValueError(f"the same network as line {other}")
            except ValueError as error:
                raise ValueError(f"{path}: line {number}: {error}") from error
            variants.append(variant)
        try:
            return cls(spec, variants)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def shipped_cache(name: str, spec: SupernetSpec) -> VariantCache:
    """The cache `name` that comes with the package, e.g. "paper_56".

    Raises:
      ValueError: no such cache; the message lists those that there are.
    """
    folder = importlib.resources.files("feast_tf.space") / "caches"
    names = sorted(entry.name[:-4] for entry in folder.iterdir() if entry.name.endswith(".csv"))
    if name not in names:
        raise ValueError(f"no shipped cache {name!r}; there are {', '.join(names)}")
    with importlib.resources.as_file(folder / f"{name}.csv") as path:
        return VariantCache.load(path, spec)


def load_cache(name: str, spec: SupernetSpec) -> VariantCache:
    """The cache that a configuration names: one that comes with the package, or a file's path.

    Raises:
      ValueError: no such cache, or a file of another space.
    """
    if os.sep in name or name.endswith(".csv"):
        if not os.path.exists(name):
            raise ValueError(f"cache: there is no file {name}")
        return VariantCache.load(name, spec)
    return shipped_cache(name, spec)
