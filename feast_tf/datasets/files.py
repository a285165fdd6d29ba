"""Where data sets are kept, and files that several processes prepare without half-made results."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from absl import logging

CACHE_VARIABLE = "FEAST_TF_DATA"
_READ_SIZE = 1 << 20


def cache_dir() -> Path:
    """Returns the folder for what is downloaded: $FEAST_TF_DATA or ~/.cache/feast_tf."""
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/feast_tf").expanduser()


def workspace(folder: Path) -> Path:
    """Returns `folder` when it may be written into, otherwise the cache folder."""
    # The permission bits count too: root passes os.access() on folders nobody is to write into.
    writable = os.access(folder, os.W_OK) and folder.stat().st_mode & 0o222
    return folder if writable else cache_dir()


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Lets one process at a time prepare `path`; the others wait for it.

    The lock is on `.<name>.lock` beside it and ends with the process, however that ends. Missing
    parent folders are made.

    Raises:
        OSError: If the folder cannot be made or written into, or has no file locks.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = _locked(path.with_name(f".{path.name}.lock"))
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write into {path.parent} ({error.strerror}); set {CACHE_VARIABLE} to a folder "
            "on a disk that can be written and locked",
        ) from error
    with stream:
        yield


def _locked(path: Path) -> TextIO:
    stream = open(path, "w", encoding="utf-8")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logging.info("Waiting for another process that holds %s", path)
        fcntl.flock(stream, fcntl.LOCK_EX)
    return stream


def digest(path: Path, algorithm: str) -> str:
    """Returns the hexadecimal digest of a file, by a name that `hashlib.new` knows."""
    result = hashlib.new(algorithm)
    with open(path, "rb") as stream:
        while block := stream.read(_READ_SIZE):
            result.update(block)
    return result.hexdigest()
