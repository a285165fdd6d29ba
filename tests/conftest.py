"""What all tests share: the environment TensorFlow starts in, the pictures, and a check for leaks."""

from __future__ import annotations

import os
from pathlib import Path
import uuid

import psutil
import pytest

# Read once, when TensorFlow is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

# Every process that a test starts inherits this mark and keeps it when its parent is gone.
_SESSION_VARIABLE = "FEAST_TF_TEST_SESSION"
_SESSION = uuid.uuid4().hex
os.environ[_SESSION_VARIABLE] = _SESSION

_WORKER_NAME = "worker_binary"
_SECONDS_TO_END = 5


def _workers_of_this_session() -> list[psutil.Process]:
    workers = []
    for process in psutil.process_iter(["name"]):
        try:
            if process.info["name"] == _WORKER_NAME:
                if process.environ().get(_SESSION_VARIABLE) == _SESSION:
                    workers.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # Ended meanwhile, or another user's: not one of ours.
    return workers


@pytest.fixture(scope="session", autouse=True)
def no_worker_survives():
    """Fails the session, after its last test, if a TensorFlow Federated worker is still running."""
    yield
    _, alive = psutil.wait_procs(_workers_of_this_session(), timeout=_SECONDS_TO_END)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=_SECONDS_TO_END)
    assert not alive, f"the tests left {_WORKER_NAME} processes running: {alive}"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with archives of real pictures; tests that need it are skipped without it."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("FEAST_TF_SHARED_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"no pictures in {folder}; set FEAST_TF_SHARED_DATA to their folder")
    return folder
