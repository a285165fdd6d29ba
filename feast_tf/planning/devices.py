"""The devices of a federation, by groups that share a budget: from a configuration or from a file.

Everything a plan needs is a sum over clients, so ten million of them are kept as a few counts.
"""

from __future__ import annotations

import collections
import csv
import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Optional, Union

import ml_collections
import numpy as np

from feast_tf import population
from feast_tf.seeding import stream

# Up to here every client is drawn, as a run would draw it; beyond, the counts of the budgets are.
MOST_DRAWN_CLIENTS = 100_000
_COLUMNS = ("budget", "device", "count", "bandwidth_mbps")


@dataclasses.dataclass(frozen=True, eq=False)
class Devices:
    """Groups of clients.

    Attributes:
      budget: float64[G], MACs.
      count: int64[G], clients.
      bandwidth: float64[G], bits per second in either direction; nan where it is not known.
      members: int64[N], the group of each client in the order of their ids; None where the clients
        are only counted.
    """

    budget: np.ndarray
    count: np.ndarray
    bandwidth: np.ndarray
    members: Optional[np.ndarray]

    @property
    def num_clients(self) -> int:
        return int(self.count.sum())


def configured_devices(config: ml_collections.ConfigDict) -> Devices:
    """The devices that a configuration describes, the same ones that a run of it would have.

    Raises:
      ValueError: a setting of `config.population` is out of its range.
    """
    settings = config.population
    if settings.num_clients <= MOST_DRAWN_CLIENTS:
        budgets = population.draw_budgets(
            settings.num_clients, seed=config.seed, low=settings.low, high=settings.high,
            num_ranks=settings.num_ranks, zipf_s=settings.zipf_s, ranks_seed=settings.ranks_seed,
            mix=settings.budgets)
        budget, members, count = np.unique(budgets, return_inverse=True, return_counts=True)
        return Devices(budget, count, np.full(len(budget), np.nan), members)
    if settings.budgets:
        budget, count = population.budget_counts(settings.budgets, settings.num_clients)
    else:
        seed = config.seed if settings.ranks_seed < 0 else settings.ranks_seed
        count = population.bounded_zipf_counts(
            settings.num_clients, num_ranks=settings.num_ranks, s=settings.zipf_s,
            rng=stream(seed, "population counts"))
        budget = population.budgets_from_ranks(
            np.arange(1, settings.num_ranks + 1), num_ranks=settings.num_ranks, low=settings.low,
            high=settings.high)
    order = np.flatnonzero(count)[np.argsort(budget[count > 0])]
    return Devices(budget[order], count[order], np.full(len(order), np.nan), None)


def parse_classes(text: str) -> dict[str, float]:
    """Reads budgets of device classes, `watch:25e6,phone:300e6`.

    Raises:
      ValueError: it is something else.
    """
    classes = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, budget = part.partition(":")
        classes[name.strip()] = _positive(budget, f"devices: {part!r} must be name:budget such as "
                                          "phone:300e6")
    return classes


def read_devices(path: Union[str, os.PathLike], classes: Mapping[str, float]) -> Devices:
    """Reads a list of devices, line by line, in memory for the different kinds only.

    Columns, by the names in the first line: `budget` (MACs) or `device` (a class), and optionally
    `count` (devices of this line, 1 if it is missing) and `bandwidth_mbps`.

    Args:
      path: a CSV file.
      classes: budgets in MACs of the device classes.

    Raises:
      ValueError: the file is malformed; the message names file, line and field.
    """
    kinds: dict[tuple[float, float], int] = collections.Counter()
    members: Optional[list[int]] = []
    places: dict[tuple[float, float], int] = {}
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        found = reader.fieldnames or ()
        unknown = [name for name in found if name not in _COLUMNS]
        if unknown or ("budget" in found) == ("device" in found):
            raise ValueError(f"{path}: the first line must name the columns budget or device, and "
                             f"may name count and bandwidth_mbps, but is {','.join(found)!r}")
        for line in reader:
            where = f"{path}: line {reader.line_num}"
            if "device" in found and line["device"] not in classes:
                raise ValueError(f"{where}: device {line['device']!r} has no budget; --devices "
                                 f"gives budgets to {', '.join(classes) or 'none'}")
            budget = (classes[line["device"]] if "device" in found
                      else _positive(line["budget"], f"{where}: budget must be positive MACs"))
            bandwidth = (_positive(line["bandwidth_mbps"],
                                   f"{where}: bandwidth_mbps must be positive") * 1e6
                         if line.get("bandwidth_mbps") else math.nan)
            count = _positive(line["count"], f"{where}: count must be a positive whole number"
                              ) if line.get("count") else 1
            if count != int(count):
                raise ValueError(f"{where}: count must be a positive whole number, not {count}")
            # A nan does not equal another one, so it cannot be part of a key.
            kind = (budget, -1.0 if math.isnan(bandwidth) else bandwidth)
            kinds[kind] += int(count)
            place = places.setdefault(kind, len(places))
            if members is not None and len(members) + count <= MOST_DRAWN_CLIENTS:
                members += [place] * int(count)
            else:
                members = None
    if not kinds:
        raise ValueError(f"{path}: there are no devices")
    budget, bandwidth = np.array(list(kinds), np.float64).T
    order = np.lexsort((bandwidth, budget))
    return Devices(budget[order], np.array(list(kinds.values()), np.int64)[order],
                   np.where(bandwidth < 0, np.nan, bandwidth)[order],
                   None if members is None else np.argsort(order)[members])


def _positive(text: str, message: str) -> float:
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{message}, not {text!r}")
    return value
