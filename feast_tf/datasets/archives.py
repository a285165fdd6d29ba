"""Unpacks .zip and .tar.gz archives, whole or not at all, and never outside the target folder."""

from __future__ import annotations

import gzip
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from collections.abc import Iterator
from pathlib import Path
from pathlib import PurePosixPath
from typing import BinaryIO

from feast_tf.datasets.files import exclusive
from feast_tf.datasets.progress import progress

SUFFIXES = (".zip", ".tar.gz", ".tgz")

# What the standard library raises on archives that are cut, garbled, or compressed or encrypted
# in a way it does not know. gzip.BadGzipFile is an OSError and so has to be named.
_DAMAGE = (
    EOFError, gzip.BadGzipFile, zlib.error, tarfile.TarError, zipfile.BadZipFile, RuntimeError,
)
_READ_SIZE = 1 << 20


def unpack(archive: Path, target: Path, *, check: Callable[[Path], object]) -> None:
    """Makes the folder `target` with everything in the archive, unless it is there already.

    Unpacks into `<target>.partial` and renames that at the end: `target` exists only when it is
    complete, even if the process is killed. Processes that want the same target wait for each
    other.

    Args:
        archive: A file whose name ends in one of `SUFFIXES`.
        target: The folder to make; missing parents are made too.
        check: Called with the unpacked folder before it gets its final name; what it raises is
            passed on, and nothing is kept.

    Raises:
        ValueError: If the archive is of another kind, is damaged or incomplete, or has a member
            that is a link or device or whose name leads out of the target folder.
        OSError: If the folder cannot be written, such as on a full disk.
    """
    members = _zip_members if archive.name.lower().endswith(".zip") else _tar_members
    if not archive.name.lower().endswith(SUFFIXES):
        raise ValueError(f"{archive} must be a {', '.join(SUFFIXES)} archive, going by its name")
    with exclusive(target):
        if target.exists():
            return
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            with progress(f"Unpacking {archive.name}", total=None, unit=" files") as advance:
                for name, content in members(archive):
                    _write(partial, name, content)
                    advance(1)
            check(partial)
            partial.rename(target)
        except _DAMAGE as error:
            raise ValueError(
                f"{archive} is damaged or incomplete ({error}); get a whole copy"
            ) from error
        except OSError as error:
            raise OSError(
                error.errno,
                f"cannot unpack {archive} into {target.parent}: {error.strerror or error}",
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _write(folder: Path, name: str, content: BinaryIO | None) -> None:
    destination = folder / name
    if content is None:
        destination.mkdir(parents=True, exist_ok=True)
        return
    destination.parent.mkdir(parents=True, exist_ok=True)
    with open(destination, "wb") as stream:
        shutil.copyfileobj(content, stream)


def _zip_members(path: Path) -> Iterator[tuple[str, BinaryIO | None]]:
    """Yields the checked name of each member with its content, or with None for a folder."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            _check_name(path, member.filename)
            if stat.S_ISLNK(member.external_attr >> 16):
                raise ValueError(_not_a_file(path, member.filename))
            if member.is_dir():
                yield member.filename, None
            else:
                with archive.open(member) as content:
                    yield member.filename, content


def _tar_members(path: Path) -> Iterator[tuple[str, BinaryIO | None]]:
    """As `_zip_members`."""
    with gzip.open(path) as unzipped:
        with tarfile.open(fileobj=unzipped, mode="r|") as archive:
            for member in archive:
                _check_name(path, member.name)
                if not (member.isfile() or member.isdir()):
                    raise ValueError(_not_a_file(path, member.name))
                yield member.name, archive.extractfile(member)
        # gzip checks its checksum at the end of the stream, which tarfile need not reach.
        while unzipped.read(_READ_SIZE):
            pass


def _check_name(archive: Path, name: str) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(
            f"{archive} is refused: its member {name!r} would be written outside the target folder"
        )


def _not_a_file(archive: Path, name: str) -> str:
    return (
        f"{archive} is refused: its member {name!r} is a link or device; only files and folders "
        "are unpacked"
    )
