"""The set-up: what installs, what is refused, and with which words."""

from __future__ import annotations

from importlib import metadata
import os
from pathlib import Path
import re
import shutil
import subprocess
import sys
import time

import psutil
import pytest

from feast_tf import versions

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("python3.11", "python3.10", "python3.9", "python3")


def _run(command, *, cwd, **variables):
    # A `make` that runs this test would pass its own flags on to the one that the test runs.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        command, cwd=cwd, env={**environment, **variables}, capture_output=True, text=True
    )


@pytest.fixture
def checkout(tmp_path):
    """The files that a set-up reads, in a folder with a blank in its name."""
    folder = tmp_path / "my checkout"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "requirements.lock", "requirements-modern.lock"):
        shutil.copy(ROOT / name, folder)
    return folder


def _fake_pythons(folder, reply):
    folder.mkdir()
    for name in PYTHONS:
        (folder / name).write_text(f"#!/bin/sh\n{reply}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def _is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _installed_versions(monkeypatch, **installed):
    def version(distribution):
        if distribution not in installed:
            raise metadata.PackageNotFoundError(distribution)
        return installed[distribution]

    monkeypatch.setattr(metadata, "version", version)


def test_import_needs_neither_tensorflow_nor_federated(tmp_path):
    script = """
import sys
sys.modules.update({"tensorflow": None, "tensorflow_federated": None, "numpy": None})
import feast_tf, feast_tf.versions
print(feast_tf.__version__)
"""
    result = _run([sys.executable, "-c", script], cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", result.stdout)


def test_the_installed_set_is_accepted():
    assert versions.check_tensorflow() == metadata.version("tensorflow")
    assert versions.check_federated() == "0.87.0"
    versions.require_federated()


@pytest.mark.parametrize(
    "installed, check, error, words",
    [
        pytest.param(
            {},
            versions.check_tensorflow,
            ImportError,
            r"needs TensorFlow 2\.14 or newer, and Python 3\S+ has none; .*pip install 'tensorflow",
            id="no_tensorflow",
        ),
        pytest.param(
            {"tensorflow": "2.9.3"},
            versions.check_tensorflow,
            RuntimeError,
            r"needs TensorFlow 2\.14 or newer, and found 2\.9\.3; .*pip install 'tensorflow",
            id="old_tensorflow",
        ),
        pytest.param(
            {"tensorflow": "2.14.1"},
            versions.check_federated,
            ImportError,
            r"needs TensorFlow Federated 0\.87\.0, and Python 3\S+ has none; .*requirements\.lock",
            id="no_federated",
        ),
        pytest.param(
            {"tensorflow": "2.14.1", "tensorflow-federated": "0.33.0"},
            versions.check_federated,
            RuntimeError,
            r"needs TensorFlow Federated 0\.87\.0, and found 0\.33\.0; .*requirements\.lock",
            id="old_federated",
        ),
        pytest.param(
            {"tensorflow": "2.15.0rc1", "tensorflow-federated": "0.87.0"},
            versions.require_federated,
            RuntimeError,
            r"Federated 0\.87\.0 needs TensorFlow 2\.14, and found 2\.15\.0rc1; .*requirements\.lock",
            id="pair_that_does_not_fit",
        ),
    ],
)
def test_version_checks_say_what_is_needed(monkeypatch, installed, check, error, words):
    _installed_versions(monkeypatch, **installed)
    with pytest.raises(error, match=words) as raised:
        check()
    assert "\n" not in str(raised.value)


def test_tensorflow_under_another_name_is_found(monkeypatch):
    _installed_versions(monkeypatch, **{"tensorflow-cpu": "2.18.0"})
    assert versions.check_tensorflow() == "2.18.0"


@pytest.mark.parametrize("lock, chosen", [
    pytest.param("requirements.lock", {"jax==0.4.13", "jaxlib==0.4.13"}, id="main"),
    pytest.param("requirements-modern.lock", {"openfl==1.9", "flwr==1.42.0"}, id="modern"),
])
def test_locks_are_hashed_and_name_no_host(lock, chosen):
    text = (ROOT / lock).read_text()
    assert "://" not in text and "--index-url" not in text
    requirements = text.replace("\\\n", " ").splitlines()
    assert [line for line in requirements if "--hash=sha256:" not in line] == []
    pinned = [line.split()[0] for line in requirements]
    assert [pin for pin in pinned if "==" not in pin] == []
    assert chosen <= set(pinned)


def test_one_version_of_federated_everywhere():
    pin = f"tensorflow-federated=={versions.FEDERATED_VERSION}"
    assert f"\n{pin} " in (ROOT / "requirements.lock").read_text()
    assert f'tff = ["{pin}"]' in (ROOT / "pyproject.toml").read_text()
    assert f"(TensorFlow Federated {versions.FEDERATED_VERSION})" in (ROOT / "Makefile").read_text()


def test_the_two_environments_share_nothing_that_cannot_be_shared():
    pins = lambda lock: {line.split("==")[0]: line.split("==")[1].split()[0]
                         for line in (ROOT / lock).read_text().splitlines() if "==" in line}
    main, modern = pins("requirements.lock"), pins("requirements-modern.lock")
    assert "flwr" not in main and "openfl" not in main and "tensorflow-federated" not in modern
    newest = tuple(map(int, modern["tensorflow-cpu"].split(".")[:2]))
    assert newest > versions.TENSORFLOW_WITH_FEDERATED and int(modern["keras"].split(".")[0]) >= 3


def test_installed_set_breaks_the_jax_pins_only():
    lines = _run([sys.executable, "-m", "pip", "check"], cwd=ROOT).stdout.splitlines()
    assert [line for line in lines if "has requirement jax" not in line] == []
    assert len(lines) == 2


def test_wrong_python_is_one_line(checkout, tmp_path):
    path = _fake_pythons(tmp_path / "fakes", "echo 3.12.1")
    result = _run(["make", "run"], cwd=checkout, PATH=path)
    assert result.returncode != 0
    assert result.stdout == ""
    assert re.fullmatch(
        r"Makefile:\d+: \*\*\* feast-tf needs Python 3\.9-3\.11 \(TensorFlow Federated 0\.87\.0\); "
        r"python3 is 3\.12\.1\. Set PYTHON=/path/to/python3\.11\.  Stop\.\n",
        result.stderr,
    )
    assert not (checkout / ".venv").exists()


def test_the_modern_environment_is_made_apart(checkout, tmp_path):
    path = _fake_pythons(tmp_path / "fakes", "echo 3.11.4")
    result = _run(["make", "--dry-run", "test-modern", "ARGS=-x"], cwd=checkout, PATH=path)
    made, installed, ours, _, tested = [line for line in result.stdout.splitlines()
                                        if not line.startswith("touch .venv-modern/.locked")]
    assert made == '"python3.11" -m venv --clear .venv-modern'
    assert installed.endswith(" --require-hashes -r requirements-modern.lock")
    assert ours == (".venv-modern/bin/python -m pip install --no-deps --no-build-isolation "
                    "--editable .")
    assert tested == ".venv-modern/bin/python -m pytest -x"


def test_the_modern_environment_refuses_other_pythons(checkout, tmp_path):
    path = _fake_pythons(tmp_path / "fakes", "echo 3.10.2")
    result = _run(["make", "setup-modern"], cwd=checkout, PATH=path)
    assert "*** feast-tf needs Python 3.11 (Flower 1.42 and this project); python3 is 3.10.2." in (
        result.stderr)


def test_a_launcher_that_starts_nothing_is_passed_over(checkout, tmp_path):
    path = _fake_pythons(tmp_path / "fakes", "exit 127")
    (tmp_path / "fakes" / "python3.9").write_text("#!/bin/sh\necho 3.9.18\n")
    result = _run(["make", "--dry-run", "setup"], cwd=checkout, PATH=path)
    assert '"python3.9" -m venv --clear .venv\n' in result.stdout


def test_chosen_python_overrides_the_search(checkout, tmp_path):
    path = _fake_pythons(tmp_path / "some fakes", "echo 3.10.13")
    chosen = tmp_path / "some fakes" / "python3"
    result = _run(["make", "--dry-run", "setup", f"PYTHON={chosen}"], cwd=checkout, PATH=path)
    assert f'"{chosen}" -m venv --clear .venv\n' in result.stdout
    result = _run(["make", "setup", "PYTHON=/nowhere/python"], cwd=checkout, PATH=path)
    assert "; /nowhere/python is missing. " in result.stderr


def _write_stamps(checkout):
    stamps = checkout / ".venv"
    stamps.mkdir()
    (stamps / ".locked").touch()
    (stamps / ".installed").touch()


def test_second_set_up_does_nothing(checkout):
    _write_stamps(checkout)
    assert _run(["make", "--question", "setup"], cwd=checkout).returncode == 0
    result = _run(["make", "--dry-run", "run", "ARGS=--rounds=3 --seed=7"], cwd=checkout)
    assert result.stdout == ".venv/bin/python -m tff_programs.run --rounds=3 --seed=7\n"
    result = _run(["make", "--dry-run", "test", "ARGS=-x"], cwd=checkout)
    assert result.stdout == ".venv/bin/python -m pytest -x\n"


@pytest.mark.parametrize(
    "changed, starts_again", [("requirements.lock", True), ("pyproject.toml", False)]
)
def test_a_changed_file_is_installed(checkout, changed, starts_again):
    _write_stamps(checkout)
    past = time.time() - 60
    for stamp in (checkout / ".venv").iterdir():
        os.utime(stamp, (past, past))
    for name in {"requirements.lock", "pyproject.toml"} - {changed}:
        os.utime(checkout / name, (past - 60, past - 60))
    result = _run(["make", "--dry-run", "setup"], cwd=checkout)
    assert ("-m venv --clear .venv" in result.stdout) == starts_again
    assert "--editable ." in result.stdout


def test_an_interrupted_set_up_starts_again(checkout):
    (checkout / ".venv" / "lib").mkdir(parents=True)
    result = _run(["make", "--dry-run", "run"], cwd=checkout)
    assert "-m venv --clear .venv\n" in result.stdout


def test_a_surviving_worker_fails_the_session_and_is_ended(tmp_path):
    worker = tmp_path / "worker_binary"
    shutil.copy(shutil.which("sleep"), worker)
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    # The shell ends at once and leaves the worker behind as an orphan.
    (tmp_path / "leak_test.py").write_text(
        "import subprocess\n"
        "def test_leaks():\n"
        f"    subprocess.run('\"{worker}\" 60 >/dev/null 2>&1 & echo $! >pid', shell=True)\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\npython_files = *_test.py\n")
    result = _run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider"], cwd=tmp_path)
    assert "1 passed, 1 error" in result.stdout, result.stdout
    assert "the tests left worker_binary processes running" in result.stdout
    assert not _is_running(int((tmp_path / "pid").read_text()))
