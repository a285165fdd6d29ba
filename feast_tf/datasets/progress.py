"""Shows how far a long step is: a bar on a terminal, otherwise a log line now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from collections.abc import Iterator

from absl import logging
from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 10.0


@contextlib.contextmanager
def progress(
    description: str, *, total: int | None, unit: str, initial: int = 0
) -> Iterator[Callable[[int], None]]:
    """Gives a function that is called with each bit of work done, in units.

    Args:
        description: What is being done.
        total: The size of the whole job in units; None if unknown.
        unit: The name of a unit, such as "B" for bytes.
        initial: How much of `total` was already there.

    Yields:
        `advance(amount)`.
    """
    done = initial
    next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    with tqdm(
        desc=description, total=total, initial=initial, unit=unit, unit_scale=True,
        disable=not on_terminal,
    ) as bar:

        def advance(amount: int) -> None:
            nonlocal done, next_line
            done += amount
            bar.update(amount)
            if not on_terminal and time.monotonic() >= next_line:
                next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
                logging.info("%s: %d of %s %s", description, done, total or "?", unit.strip())

        yield advance
