import io
import os
import signal
import stat
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from feast_tf.datasets.archives import unpack

FILES = {"root/a.txt": b"alpha" * 400, "root/sub/b.bin": bytes(range(256)) * 40}
ROOT = Path(__file__).resolve().parents[2]


def make_zip(path, files=None):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("root/empty/", b"")
        for name, content in (files or FILES).items():
            archive.writestr(name, content)
    return path


def make_tar(path, files=None, links=()):
    with tarfile.open(path, "w:gz") as archive:
        folder = tarfile.TarInfo("root/empty")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, content in (files or FILES).items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for name, kind, target in links:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            archive.addfile(member)
    return path


def unpack_all(archive, target):
    unpack(archive, target, check=lambda folder: None)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


MAKERS = pytest.mark.parametrize("make, name", [(make_zip, "x.zip"), (make_tar, "x.tar.gz")])


@MAKERS
def test_unpacks_files_and_folders(tmp_path, make, name):
    target = tmp_path / "out" / "x"
    unpack_all(make(tmp_path / name), target)
    for path, content in FILES.items():
        assert (target / path).read_bytes() == content
    assert (target / "root" / "empty").is_dir()
    assert names_in(tmp_path / "out") == ["x"]


@MAKERS
def test_does_not_unpack_twice(tmp_path, make, name):
    target = tmp_path / "out" / "x"
    archive = make(tmp_path / name)
    unpack_all(archive, target)
    (target / "root" / "a.txt").write_text("changed")
    unpack_all(archive, target)
    assert (target / "root" / "a.txt").read_text() == "changed"


@MAKERS
@pytest.mark.parametrize("member", ["../evil.txt", "root/../../evil.txt", "{}/evil.txt"])
def test_refuses_names_that_lead_outside(tmp_path, make, name, member):
    target = tmp_path / "out" / "x"
    member = member.format(tmp_path)
    archive = make(tmp_path / name, {**FILES, member: b"evil"})
    with pytest.raises(ValueError, match=f"{name} is refused: its member '{member}' would"):
        unpack_all(archive, target)
    assert names_in(tmp_path / "out") == []
    assert not list(tmp_path.rglob("evil*"))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_refuses_links_and_devices_in_a_tar(tmp_path, kind):
    archive = make_tar(tmp_path / "x.tgz", links=[("root/way-out", kind, "../../..")])
    with pytest.raises(ValueError, match="member 'root/way-out' is a link or device"):
        unpack_all(archive, tmp_path / "out" / "x")
    assert names_in(tmp_path / "out") == []


def test_refuses_links_in_a_zip(tmp_path):
    link = zipfile.ZipInfo("root/way-out")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(link, "../../..")
    with pytest.raises(ValueError, match="member 'root/way-out' is a link or device"):
        unpack_all(tmp_path / "x.zip", tmp_path / "out" / "x")


@MAKERS
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.97, "all but one byte"])
def test_names_a_cut_archive_and_leaves_nothing(tmp_path, make, name, share):
    archive = make(tmp_path / name)
    whole = archive.read_bytes()
    keep = len(whole) - 1 if isinstance(share, str) else int(share * len(whole))
    archive.write_bytes(whole[:keep])
    with pytest.raises(ValueError, match=f"{name} is damaged or incomplete .*get a whole copy"):
        unpack_all(archive, tmp_path / "out" / "x")
    assert names_in(tmp_path / "out") == []
    archive.write_bytes(whole)
    unpack_all(archive, tmp_path / "out" / "x")
    assert (tmp_path / "out" / "x" / "root" / "a.txt").read_bytes() == FILES["root/a.txt"]


@MAKERS
def test_notices_a_changed_byte(tmp_path, make, name):
    archive = make(tmp_path / name, {"root/noise": os.urandom(5000)})
    content = bytearray(archive.read_bytes())
    content[2500] ^= 1
    archive.write_bytes(content)
    with pytest.raises(ValueError, match="damaged or incomplete"):
        unpack_all(archive, tmp_path / "out" / "x")


def test_refuses_another_kind_of_file(tmp_path):
    (tmp_path / "x.rar").write_bytes(b"Rar!")
    with pytest.raises(ValueError, match=r"x\.rar must be a \.zip, \.tar\.gz, \.tgz archive"):
        unpack_all(tmp_path / "x.rar", tmp_path / "out")


def test_keeps_nothing_that_fails_the_check(tmp_path):
    def check(folder):
        assert (folder / "root" / "a.txt").exists()
        raise ValueError("not what was wanted")

    with pytest.raises(ValueError, match="not what was wanted"):
        unpack(make_zip(tmp_path / "x.zip"), tmp_path / "out" / "x", check=check)
    assert names_in(tmp_path / "out") == []


def test_says_where_it_could_not_write(tmp_path):
    (tmp_path / "out").write_text("a file where a folder is needed")
    with pytest.raises(OSError, match=rf"cannot write into {tmp_path}/out .*FEAST_TF_DATA"):
        unpack_all(make_zip(tmp_path / "x.zip"), tmp_path / "out" / "x")


def test_says_which_archive_did_not_fit_on_the_disk(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("feast_tf.datasets.archives.shutil.copyfileobj", full)
    with pytest.raises(OSError, match=r"cannot unpack .*x\.zip into .*out: No space left"):
        unpack_all(make_zip(tmp_path / "x.zip"), tmp_path / "out" / "x")
    assert names_in(tmp_path / "out") == []


_SLOW = """
import pathlib, sys, time
from feast_tf.datasets.archives import unpack

def check(folder):
    print("unpacked", flush=True)
    time.sleep(float(sys.argv[3]))

unpack(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), check=check)
"""


def start_unpacking(archive, target, seconds):
    command = [sys.executable, "-c", _SLOW, str(archive), str(target), str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_killed_run_leaves_nothing_that_looks_complete(tmp_path):
    archive, target = make_zip(tmp_path / "x.zip"), tmp_path / "out" / "x"
    with start_unpacking(archive, target, 60) as process:
        assert process.stdout.readline() == "unpacked\n"
        process.send_signal(signal.SIGKILL)
    assert names_in(tmp_path / "out") == ["x.partial"]
    unpack_all(archive, target)
    assert names_in(tmp_path / "out") == ["x"]
    assert (target / "root" / "a.txt").read_bytes() == FILES["root/a.txt"]


def test_a_second_process_waits_for_the_first(tmp_path):
    archive, target = make_zip(tmp_path / "x.zip"), tmp_path / "out" / "x"
    with start_unpacking(archive, target, 1) as process:
        assert process.stdout.readline() == "unpacked\n"
        started = time.monotonic()
        unpack(archive, target, check=lambda folder: pytest.fail("unpacked twice"))
        assert time.monotonic() - started > 0.5
    assert process.returncode == 0
    assert names_in(tmp_path / "out") == ["x"]
