"""Says in one line what is missing when TensorFlow or TensorFlow Federated does not fit.

Only package metadata is read: asking costs milliseconds and imports nothing.
"""

from __future__ import annotations

from importlib import metadata
import platform
from typing import Optional

FEDERATED_VERSION = "0.87.0"
TENSORFLOW_MINIMUM = (2, 14)
# The one TensorFlow release that FEDERATED_VERSION was built for.
TENSORFLOW_WITH_FEDERATED = (2, 14)

_TENSORFLOW_DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "tensorflow-macos", "tf-nightly")
_INSTALL_TENSORFLOW = "pip install 'tensorflow>=2.14'"
_INSTALL_FEDERATED = (
    "in a clean Python 3.9-3.11 environment: "
    "pip install --no-deps --require-hashes -r requirements.lock (or: make setup)"
)


def check_tensorflow() -> str:
    """Returns the version of the installed TensorFlow, without importing it.

    Raises:
      ImportError: TensorFlow is not installed.
      RuntimeError: it is older than `TENSORFLOW_MINIMUM`.
    """
    found = _installed(*_TENSORFLOW_DISTRIBUTIONS)
    if found is None:
        raise ImportError(
            f"feast_tf needs TensorFlow 2.14 or newer, and Python {platform.python_version()} has "
            f"none; install it with: {_INSTALL_TENSORFLOW}"
        )
    if _release(found) < TENSORFLOW_MINIMUM:
        raise RuntimeError(
            f"feast_tf needs TensorFlow 2.14 or newer, and found {found}; "
            f"upgrade with: {_INSTALL_TENSORFLOW}"
        )
    return found


def check_federated() -> str:
    """Returns the version of the installed TensorFlow Federated, without importing it.

    Raises:
      ImportError: TensorFlow Federated is not installed.
      RuntimeError: it is not `FEDERATED_VERSION`.
    """
    found = _installed("tensorflow-federated")
    needed = f"this part of feast_tf needs TensorFlow Federated {FEDERATED_VERSION}"
    if found is None:
        raise ImportError(
            f"{needed}, and Python {platform.python_version()} has none; "
            f"install it {_INSTALL_FEDERATED}"
        )
    if found != FEDERATED_VERSION:
        raise RuntimeError(f"{needed}, and found {found}; install it {_INSTALL_FEDERATED}")
    return found


def require_federated() -> None:
    """Checks both and that they fit each other; packages that import TFF call it first.

    Raises:
      ImportError: TensorFlow Federated or TensorFlow is not installed.
      RuntimeError: one of them has another version than the pair that works.
    """
    federated = check_federated()
    tensorflow = check_tensorflow()
    if _release(tensorflow) != TENSORFLOW_WITH_FEDERATED:
        raise RuntimeError(
            f"TensorFlow Federated {federated} needs TensorFlow 2.14, and found {tensorflow}; "
            f"install both {_INSTALL_FEDERATED}"
        )


def _installed(*distributions: str) -> Optional[str]:
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
