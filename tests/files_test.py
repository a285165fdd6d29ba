"""Tests of feast_tf.files."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from feast_tf.files import write_whole


def test_the_file_holds_all_that_was_written(tmp_path):
    path = tmp_path / "new" / "deep" / "one.bin"
    write_whole(path, lambda file: [file.write(part) for part in (b"ab\r\n", b"", b"\x00c")])
    assert path.read_bytes() == b"ab\r\n\x00c"
    assert [entry.name for entry in path.parent.iterdir()] == ["one.bin"]


def test_a_file_is_replaced(tmp_path):
    path = tmp_path / "one.bin"
    path.write_bytes(b"a long old text")
    write_whole(str(path), lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new"


def test_a_name_without_a_folder_is_in_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_whole("one.bin", lambda file: file.write(b"1"))
    assert (tmp_path / "one.bin").read_bytes() == b"1"


@pytest.mark.parametrize("error", [ValueError, OSError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("old", [None, b"old"])
def test_a_write_that_stops_leaves_everything_as_it_was(tmp_path, error, old):
    path = tmp_path / "one.bin"
    if old is not None:
        path.write_bytes(old)

    def half(file):
        file.write(b"half of it")
        file.flush()
        assert not path.exists() or path.read_bytes() == old
        raise error("no more")

    with pytest.raises(error, match="no more"):
        write_whole(path, half)
    assert [entry.read_bytes() for entry in tmp_path.iterdir()] == ([] if old is None else [old])


def test_a_name_that_cannot_be_taken_leaves_nothing(tmp_path):
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"):
        write_whole(tmp_path / "folder", lambda file: file.write(b"1"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]
    (tmp_path / "file").write_bytes(b"2")
    with pytest.raises(OSError, match="file"):
        write_whole(tmp_path / "file" / "one.bin", lambda file: file.write(b"1"))


def test_a_killed_write_leaves_the_old_file_and_does_not_hinder_the_next(tmp_path):
    path = tmp_path / "one.bin"
    path.write_bytes(b"old")
    program = ("import os, signal, sys\n"
               "from feast_tf.files import write_whole\n"
               "def half(file):\n"
               "    file.write(b'half')\n"
               "    file.flush()\n"
               "    os.kill(os.getpid(), signal.SIGKILL)\n"
               "write_whole(sys.argv[1], half)\n")
    root = pathlib.Path(__file__).resolve().parents[1]
    ended = subprocess.run([sys.executable, "-c", program, str(path)], timeout=60, check=False,
                           env={**os.environ, "PYTHONPATH": str(root)})
    assert ended.returncode == -signal.SIGKILL
    assert [entry.name for entry in tmp_path.glob("[!.]*")] == ["one.bin"]
    assert path.read_bytes() == b"old"
    write_whole(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new"
