"""Downloads a file: continued after a cut, and checked before it gets its name."""

from __future__ import annotations

import http.client
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from absl import logging

from feast_tf.datasets.files import digest
from feast_tf.datasets.files import exclusive
from feast_tf.datasets.progress import progress

_CHUNK = 1 << 18
_WORTH_A_RETRY = (408, 425, 429)
_RANGE_NOT_SATISFIABLE = 416
# Troubles on the way, as opposed to an OSError of the disk.
_NETWORK_ERRORS = (
    urllib.error.URLError, http.client.HTTPException, ssl.SSLError, ConnectionError, TimeoutError,
)


class _GaveUp(Exception):
    """One URL does not give the file; the message says why."""


def download(
    urls: Sequence[str], target: Path, *, checksum: str, attempts: int = 4,
    wait_seconds: float = 1.0, timeout_seconds: float = 30.0,
) -> Path:
    """Returns `target` after downloading it from the first URL that gives it, unless it is there.

    What has arrived is kept in `<target>.part` and continued, by this call or by a later one. A
    second process with the same target waits for the first.

    Args:
        urls: Where the file is to be had, in the order to try.
        target: The file to make; missing parent folders are made.
        checksum: `<algorithm>:<hexadecimal digest>`, such as "md5:9052...".
        attempts: How often to try each URL.
        wait_seconds: The pause before the second attempt; doubled for each further one.
        timeout_seconds: How long a silent server is waited for.

    Raises:
        ConnectionError: If no URL gives a file with this checksum. A wrong file is deleted.
        OSError: If the disk is full or the folder cannot be written.
    """
    with exclusive(target):
        if target.exists():
            return target
        part = target.with_name(target.name + ".part")
        failures = []
        for url in urls:
            logging.info("Downloading %s to %s", url, target)
            try:
                _fetch_checked(url, part, checksum, attempts, wait_seconds, timeout_seconds)
                part.replace(target)
                return target
            except _GaveUp as failure:
                failures.append(f"{url} ({failure})")
            except OSError as error:
                raise OSError(
                    error.errno, f"cannot write {part}: {error.strerror or error}"
                ) from error
    raise ConnectionError(f"cannot download {' or '.join(failures)}")


def _fetch_checked(
    url: str, part: Path, checksum: str, attempts: int, wait_seconds: float, timeout_seconds: float
) -> None:
    continued = part.exists()
    for attempt in range(1, attempts + 1):
        try:
            _fetch_once(url, part, timeout_seconds)
            break
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == _RANGE_NOT_SATISFIABLE:
                break  # Nothing is missing from the part; the checksum tells whether it is right.
            if (error.code < 500 and error.code not in _WORTH_A_RETRY) or attempt == attempts:
                raise _GaveUp(f"HTTP status {error.code} {error.reason}") from error
        except _NETWORK_ERRORS as error:
            if attempt == attempts:
                reason = getattr(error, "reason", None) or str(error) or type(error).__name__
                raise _GaveUp(f"{reason}, after {attempts} attempts") from error
        time.sleep(wait_seconds * 2 ** (attempt - 1))
    algorithm, expected = checksum.split(":")
    actual = digest(part, algorithm)
    if actual == expected:
        return
    part.unlink()
    if not continued:
        raise _GaveUp(f"the {algorithm} checksum is {actual} instead of {expected}")
    logging.info("Starting %s anew: what an earlier download left does not fit", url)
    _fetch_checked(url, part, checksum, attempts, wait_seconds, timeout_seconds)


def _fetch_once(url: str, part: Path, timeout_seconds: float) -> None:
    """Adds to `part` what is missing from it; raises one of `_NETWORK_ERRORS` if some still is."""
    offset = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "feast-tf"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=timeout_seconds) as response:
        # A server that ignores the range sends the whole file again, with status 200.
        if response.status != http.client.PARTIAL_CONTENT:
            offset = 0
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
            part.unlink()
            raise ConnectionError("the server sent another range than it was asked for")
        length = response.headers.get("Content-Length")
        size = None if length is None else offset + int(length)
        with open(part, "ab" if offset else "wb") as stream, progress(
            f"Downloading {part.stem}", total=size, unit="B", initial=offset
        ) as advance:
            while chunk := response.read(_CHUNK):
                stream.write(chunk)
                advance(len(chunk))
            received = stream.tell()
    if size is not None and received < size:
        raise ConnectionError(f"the connection was cut after {received} of {size} bytes")
