"""From limits to a variant cache: an architecture for each, pins, and a table to resume from."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Optional, Union

import numpy as np

from feast_tf.files import write_whole
from feast_tf.space.cache import VariantCache
from feast_tf.space.fitness import Architecture, Score, channels, score
from feast_tf.space.search import Found, Search
from feast_tf.space.spec import SupernetSpec, Variant

_MARK = "# feast-tf fitness table, search "
_COLUMNS = ("target", "macs", "params", "fitness", "entropy", "rho", "latency", "d", "e", "w",
            "how")


@dataclasses.dataclass(frozen=True)
class Row:
    """One architecture of the path.

    Attributes:
      target: the limit on the cost that it was found for.
      architecture, score: what was found.
      how: "fittest" (proven), "fittest above the previous target" (where the fittest was taken), or
        "pinned".
      latency: as measured by the caller's function, or None.
    """

    target: float
    architecture: Architecture
    score: Score
    how: str
    latency: Optional[float] = None


def parse_targets(text: str) -> list[float]:
    """Reads limits: `low:high:count` for equal steps (whole from 1000 on), or a list `a,b,c`.

    Raises:
      ValueError: it is neither, or the limits do not ascend.
    """
    parts = text.split(":")
    try:
        if len(parts) == 3:
            low, high, count = float(parts[0]), float(parts[1]), int(parts[2])
            targets = np.linspace(low, high, count).tolist() if count > 0 else []
        else:
            targets = [float(part) for part in text.split(",")]
    except ValueError:
        targets = []
    targets = [float(int(target)) if 1000 <= target < np.inf else target for target in targets]
    if not targets or not all(a < b < np.inf for a, b in zip([0.0, *targets], targets)):
        raise ValueError(f"targets {text!r} must be low:high:count such as 25e6:600e6:56, or a "
                         "list such as 25e6,50e6, positive and ascending")
    return targets


def parse_pin(text: str, spec: SupernetSpec, *, name: str = "pin") -> Variant:
    """Reads a variant as it is printed: `d=3,7,6,7 e=0.1 w=0.3,0.1,0.1,0.1,0.1`.

    Semicolons may stand for the blanks. `name` is what messages call it.

    Raises:
      ValueError: it is not a variant of the space.
    """
    try:
        fields = dict(part.split("=") for part in text.replace(";", " ").split())
        values = {name: [kind(value) for value in fields.pop(name).split(",")]
                  for name, kind in (("d", int), ("e", float), ("w", float))}
        if fields:
            raise ValueError
    except (KeyError, ValueError):
        raise ValueError(f"{name} {text!r} must look like 'd=3,7,6,7 e=0.1 w=0.3,0.1,0.1,0.1,0.1'"
                         ) from None
    single = {name: value[0] if len(value) == 1 else value for name, value in values.items()}
    try:
        return spec.variant(**single)
    except ValueError as error:
        raise ValueError(f"{name} {text!r}: {error}") from error


def search_path(search: Search, targets: Sequence[float], *, pins: Sequence[Variant] = (),
                known: Sequence[Row] = ()) -> Iterator[Row]:
    """Yields the fittest architecture for each limit, in ascending order.

    A pin takes the place of the target whose range (previous target, target] its cost lies in; pins
    above the last target come at the end. Where the fittest architecture is already there,
    the fittest with a cost above the previous target is taken; where there is none, nothing is.

    Args:
      search: the space and what is limited.
      targets: ascending limits.
      pins: variants to keep.
      known: rows of an earlier, interrupted call with the same arguments.
    """
    targets = [float(target) for target in targets]
    spec, done = search.spec, {row.target: row for row in known if row.how != "pinned"}
    pinned: list[list[Row]] = [[] for _ in range(len(targets) + 1)]
    for pin in pins:
        architecture = Architecture.of(pin)
        found = score(spec, architecture, search.settings)
        place = int(np.searchsorted(targets, getattr(found, search.cost)))
        target = targets[min(place, len(targets) - 1)]
        pinned[place].append(Row(target, architecture, found, "pinned"))
    seen = {channels(spec, row.architecture) for rows in pinned for row in rows}
    floor = None
    for place, target in enumerate(targets):
        if pinned[place]:
            yield from sorted(pinned[place], key=lambda row: getattr(row.score, search.cost))
            continue
        row = done.get(target)
        if row is None:
            found, how = search.fittest(target, floor=floor), "fittest"
            if found is not None and channels(spec, found.architecture) in seen:
                found = search.fittest(target, above=targets[place - 1] if place else 0)
                how = "fittest above the previous target"
            if found is None or channels(spec, found.architecture) in seen:
                continue
            row = Row(target, found.architecture, found.score, how)
        seen.add(channels(spec, row.architecture))
        if floor is None or row.score.fitness > floor.score.fitness:
            floor = Found(row.architecture, row.score)
        yield row
    yield from pinned[-1]


def measured(rows: Iterator[Row], measure: Callable[[SupernetSpec, Variant], float],
             spec: SupernetSpec, known: Sequence[Row] = ()) -> Iterator[Row]:
    """Adds the latency of each row, by `measure(spec, variant)` where `known` does not have it."""
    latencies = {channels(spec, row.architecture): row.latency for row in known}
    for row in rows:
        latency = latencies.get(channels(spec, row.architecture))
        if latency is None:
            latency = float(measure(spec, row.architecture.variant()))
        yield dataclasses.replace(row, latency=latency)


def fittest_within(rows: Sequence[Row], limits: Sequence[float]) -> list[Row]:
    """For each latency limit the fittest measured row within it, each row once."""
    chosen = {}
    for limit in limits:
        fitting = [row for row in rows if row.latency <= limit]
        if fitting:
            best = max(fitting, key=lambda row: row.score.fitness)
            chosen.setdefault(best.target, best)
    return list(chosen.values())


def fingerprint(search: Search, targets: Sequence[float], pins: Sequence[Variant]) -> str:
    """Identifies a search, so that a table is resumed by the same one only."""
    fields = [dataclasses.asdict(search.spec), search.cost, search.expansion,
              dataclasses.asdict(search.settings), [float(target) for target in targets],
              [str(pin) for pin in pins]]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]


def write_table(path: Union[str, os.PathLike], rows: Sequence[Row], mark: str) -> None:
    """Writes the table of a search, whole or not at all; `mark` is its fingerprint."""
    text = io.StringIO()
    text.write(f"{_MARK}{mark}\n")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    join = lambda values: " ".join(f"{value:g}" for value in values)
    for row in rows:
        one, found = row.architecture, row.score
        writer.writerow([
            repr(row.target), found.macs, found.params, f"{found.fitness:.6f}",
            f"{found.entropy:.6f}", f"{found.rho:.8f}",
            "" if row.latency is None else repr(row.latency), join(one.d),
            "|".join(join(e if len(set(e)) > 1 else e[:1]) for e in one.e), join(one.w), row.how])
    write_whole(path, lambda file: file.write(text.getvalue().encode()))


def read_table(path: Union[str, os.PathLike], search: Search, mark: str) -> list[Row]:
    """Reads what `write_table` wrote; an empty list where there is no file. Scores are recomputed.

    Raises:
      ValueError: another search's table, or a malformed line; the message names the file.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    if not lines or lines[0] != f"{_MARK}{mark}":
        raise ValueError(f"{path}: holds another search; choose another --output or delete it")
    rows = []
    for number, line in enumerate(csv.DictReader(lines[1:]), start=3):
        try:
            d = tuple(int(value) for value in line["d"].split())
            e = [tuple(float(value) for value in stage.split()) for stage in line["e"].split("|")]
            # One value stands for the whole stage.
            e = tuple(own * (1 + blocks) if len(own) == 1 else own for own, blocks in zip(e, d))
            architecture = Architecture(d, e, tuple(float(value) for value in line["w"].split()))
            rows.append(Row(float(line["target"]), architecture,
                            score(search.spec, architecture, search.settings), line["how"],
                            float(line["latency"]) if line["latency"] else None))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: line {number}: {error}") from error
    return rows


def build_cache(search: Search, targets: Sequence[float], output: Union[str, os.PathLike], *,
                pins: Sequence[Variant] = (),
                measure: Optional[Callable[[SupernetSpec, Variant], float]] = None,
                candidates: int = 64, on_row: Callable[[Row], object] = lambda row: None
                ) -> list[Row]:
    """Searches a cache and writes it, going on where an earlier, interrupted call stopped.

    Two files: `output`, which `VariantCache.load` reads (expansion per stage only), and beside it
    `<name>.fitness.csv`, the table of all that was found, which grows row by row.

    Args:
      search: the space and what is limited.
      targets: ascending limits on the search's cost, or on the latency if there is a `measure`.
      output: the cache file.
      pins: variants that are in the cache in any case.
      measure: returns the latency of a variant of a space, in the unit of `targets`. It is called
        for the fittest networks of `candidates` costs, from the cheapest to the dearest, and each
        limit gets the fittest of them that keeps it; fitter ones may lie between the candidates.
      candidates: see `measure`.
      on_row: called with every row as it is found.

    Returns:
      The rows of the cache.

    Raises:
      ValueError: nothing keeps the limits, or the table beside `output` is another search's.
    """
    if measure is not None and search.expansion != "stage":
        raise ValueError("latency needs --expansion=stage: only such networks can be built")
    limits = targets if measure is None else np.geomspace(
        search.cheapest, search.dearest, candidates).tolist()
    output = pathlib.Path(output)
    table, mark = output.with_suffix(".fitness.csv"), fingerprint(search, limits, pins)
    known = read_table(table, search, mark)
    path = search_path(search, limits, pins=pins, known=known)
    if measure is not None:
        path = measured(path, measure, search.spec, known)
    rows = []
    for row in path:
        rows.append(row)
        if len(rows) > len(known):
            write_table(table, rows, mark)
        on_row(row)
    if measure is not None:
        pinned = [row for row in rows if row.how == "pinned"]
        rows = [*pinned, *(row for row in fittest_within(rows, targets) if row not in pinned)]
    if not rows:
        raise ValueError(f"no network keeps the targets: the cheapest of the space costs "
                         f"{search.cheapest:,} {search.cost}, and rho must not exceed "
                         f"{search.settings.max_rho:g}")
    if search.expansion == "stage":
        VariantCache(search.spec, [row.architecture.variant() for row in rows]).save(output)
    return rows
