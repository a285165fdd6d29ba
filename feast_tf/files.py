"""Files that are either whole or not there."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import BinaryIO, Union


def write_whole(path: Union[str, os.PathLike], write: Callable[[BinaryIO], object]) -> None:
    """Calls `write(file)` on a new binary file that gets the name `path` only when complete.

    Whatever stops the writing, `path` keeps what it held. Missing folders are made.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(partial, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
