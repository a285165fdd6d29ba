"""Finds a data set on disk: as a folder, as an archive, or else by downloading the archive."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from feast_tf.datasets.archives import SUFFIXES
from feast_tf.datasets.archives import unpack
from feast_tf.datasets.download import download as download_file
from feast_tf.datasets.files import cache_dir
from feast_tf.datasets.files import digest
from feast_tf.datasets.files import workspace


@dataclasses.dataclass(frozen=True)
class Source:
    """How a data set is published.

    Attributes:
        name: Our name of the data set.
        folder: The root folder in the archive (CINIC-10 has none: the name it is usually given).
        markers: Files or folders by which a root is known, whatever its own name.
        archive: The file name of the official archive.
        urls: Where the official archive is, in the order to try.
        checksum: Of the official archive, `<algorithm>:<hexadecimal digest>`.
    """

    name: str
    folder: str
    markers: tuple[str, ...]
    archive: str
    urls: tuple[str, ...]
    checksum: str


SOURCES = {
    source.name: source
    for source in (
        Source(
            name="cifar10",
            folder="cifar-10-batches-py",
            markers=("data_batch_1",),
            archive="cifar-10-python.tar.gz",
            urls=("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
            checksum="sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        ),
        Source(
            name="cifar100",
            folder="cifar-100-python",
            markers=("train", "test", "meta"),
            archive="cifar-100-python.tar.gz",
            urls=("https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",),
            checksum="sha256:85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        ),
        Source(
            name="cinic10",
            folder="CINIC-10",
            markers=("train", "valid", "test"),
            archive="CINIC-10.tar.gz",
            # The second one is where the first one leads since the repository's software changed.
            urls=(
                "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
                "https://datashare.ed.ac.uk/server/api/core/bitstreams/"
                "e8e186cc-2688-48f1-aa5a-3fda1a43f8b6/content",
            ),
            checksum="md5:6ee4d0c996905fe93221de577967a372",
        ),
        Source(
            name="tinyimagenet",
            folder="tiny-imagenet-200",
            markers=("wnids.txt",),
            archive="tiny-imagenet-200.zip",
            urls=("http://cs231n.stanford.edu/tiny-imagenet-200.zip",),
            checksum="md5:90528d7ca1a48142e341f4ef8d21d0de",
        ),
    )
}


def locate(
    source: Source, data_dir: str | os.PathLike[str] | None, *, download: bool
) -> tuple[Path, Path]:
    """Returns the data set's root folder and the folder for its decoded pictures.

    Looked for, in this order: `data_dir` as the root itself; the root folder in it; the official
    archive in it; one other archive in it whose name begins like the official archive or like the
    root folder (a subset, say); the download. `data_dir` may also be the path of an archive.

    An archive is unpacked to `extracted/<name>-<start of its sha256>` beside itself, or in the
    cache folder when its own folder is read-only; `decoded` is placed likewise. So two archives
    never share an unpacked folder, and a changed archive is unpacked anew. Only downloads are held
    against the official checksum: a subset given by the user is welcome.

    Args:
        source: The data set.
        data_dir: A folder or an archive; None for the cache folder (`files.cache_dir`).
        download: Whether to download what is not there.

    Raises:
        FileNotFoundError: If the data set is not there and is not to be downloaded.
        ConnectionError: If the download failed.
        ValueError: If the archive is damaged, unsafe, of another data set, or one of several.
        OSError: If nothing can be written.
    """
    path = cache_dir() if data_dir is None else Path(data_dir).expanduser().absolute()
    if data_dir is not None and not path.exists():
        raise FileNotFoundError(f"data_dir {path} does not exist; name a folder or an archive")
    if path.is_file():
        place = workspace(path.parent)
        return _unpacked(source, path, place), place / "decoded"
    # The cache folder is made when something is written into it, not before.
    place = workspace(path) if path.exists() else path
    root = _find_root(source, path)
    if root is None:
        archive = _find_archive(source, path)
        if archive is None:
            archive = _downloaded(source, path, place, download)
        root = _unpacked(source, archive, place)
    return root, place / "decoded"


def _find_root(source: Source, folder: Path) -> Path | None:
    if all((folder / marker).exists() for marker in source.markers):
        return folder
    # Without the markers too: the reader then says which file is missing.
    return folder / source.folder if (folder / source.folder).is_dir() else None


def _find_archive(source: Source, folder: Path) -> Path | None:
    if (folder / source.archive).is_file():
        return folder / source.archive
    starts = (source.archive.split(".")[0].lower(), source.folder.lower())
    names = sorted(
        entry.name
        for entry in (folder.iterdir() if folder.exists() else ())
        if entry.name.lower().startswith(starts) and entry.name.lower().endswith(SUFFIXES)
    )
    if len(names) > 1:
        raise ValueError(
            f"{folder} holds several archives of {source.name} ({', '.join(names)}); "
            "give the path of one of them as data_dir"
        )
    return folder / names[0] if names else None


def _downloaded(source: Source, folder: Path, place: Path, allowed: bool) -> Path:
    missing = (
        f"{source.name} is not in {folder} (looked for the folder {source.folder}, for its content "
        f"{', '.join(source.markers)}, and for an archive such as {source.archive})"
    )
    if not allowed:
        raise FileNotFoundError(f"{missing} and download is off; give its place with --data_dir")
    try:
        return download_file(source.urls, place / source.archive, checksum=source.checksum)
    except ConnectionError as error:
        raise ConnectionError(
            f"{missing}, and {error}; get it by other means and give its place with --data_dir"
        ) from error


def _unpacked(source: Source, archive: Path, place: Path) -> Path:
    def check(folder: Path) -> None:
        if _find_root(source, folder) is None:
            raise ValueError(
                f"{archive} is not an archive of {source.name}: it holds neither the folder "
                f"{source.folder} nor {', '.join(source.markers)}"
            )

    stem = archive.name.split(".")[0]
    target = place / "extracted" / f"{stem}-{digest(archive, 'sha256')[:16]}"
    unpack(archive, target, check=check)
    return _find_root(source, target)
