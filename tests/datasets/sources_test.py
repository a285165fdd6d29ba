import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from feast_tf.datasets.sources import SOURCES
from feast_tf.datasets.sources import locate

ROOT = Path(__file__).resolve().parents[2]


def pack(root, archive):
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz") as stream:
        stream.add(root, arcname=root.name)
    return archive


def find(data_dir, name="cifar10"):
    return locate(SOURCES[name], data_dir, download=False)


def entries(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_root_itself_or_a_folder_that_holds_it(cifar10_root):
    assert find(cifar10_root) == (cifar10_root, cifar10_root / "decoded")
    parent = cifar10_root.parent
    assert find(str(parent)) == (cifar10_root, parent / "decoded")
    moved = cifar10_root.rename(parent / "renamed")
    assert find(moved)[0] == moved


@pytest.mark.parametrize("name", ["cifar-10-python.tar.gz", "cifar-10-batches-py-subset.tgz"])
def test_an_archive_in_the_folder_is_unpacked_beside_it(cifar10_root, tmp_path, name):
    archive = pack(cifar10_root, tmp_path / "disk" / name)
    root, decoded = find(archive.parent)
    assert entries(root) == entries(cifar10_root)
    assert root.parents[2] == tmp_path / "disk" and decoded == tmp_path / "disk" / "decoded"
    assert find(archive) == (root, decoded)


def test_the_root_folder_goes_before_archives_and_the_official_one_before_others(
    cifar10_root, tmp_path
):
    disk = tmp_path / "disk"
    pack(cifar10_root, disk / "cifar-10-python-subset.tar.gz")
    (cifar10_root / "extra").touch()
    pack(cifar10_root, disk / "cifar-10-python.tar.gz")
    assert "extra" in entries(find(disk)[0])
    shutil.copytree(cifar10_root, disk / "cifar-10-batches-py")
    assert find(disk)[0] == disk / "cifar-10-batches-py"


def test_several_archives_are_not_guessed_between(cifar10_root, tmp_path):
    for name in ("cifar-10-python-b.tar.gz", "cifar-10-batches-py-a.tar.gz"):
        pack(cifar10_root, tmp_path / "disk" / name)
    message = r"several archives of cifar10 \(cifar-10-batches-py-a\.tar\.gz, cifar-10-python-b"
    with pytest.raises(ValueError, match=message):
        find(tmp_path / "disk")


def test_a_changed_archive_is_unpacked_anew(cifar10_root, tmp_path):
    archive = pack(cifar10_root, tmp_path / "disk" / "mine.tar.gz")
    first, _ = find(archive)
    (cifar10_root / "extra").touch()
    pack(cifar10_root, archive)
    second, _ = find(archive)
    assert first != second and "extra" in entries(second)


def test_nothing_is_written_into_a_read_only_folder(cifar10_root, tmp_path, cache):
    archive = pack(cifar10_root, tmp_path / "disk" / "cifar-10-python.tar.gz")
    archive.parent.chmod(0o555)
    for data_dir in (archive.parent, archive):
        root, decoded = find(data_dir)
        assert root.is_relative_to(cache) and decoded == cache / "decoded"
    assert entries(archive.parent) == ["cifar-10-python.tar.gz"]
    archive.parent.chmod(0o755)


def test_an_archive_of_another_data_set_is_refused(cifar10_root, tmp_path):
    archive = pack(cifar10_root, tmp_path / "disk" / "mine.tar.gz")
    with pytest.raises(ValueError, match=r"mine\.tar\.gz is not an archive of tinyimagenet"):
        find(archive, "tinyimagenet")
    assert list((tmp_path / "disk" / "extracted").glob("mine*")) == []


def test_a_wrong_data_dir_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=rf"data_dir {tmp_path}/typo does not exist"):
        find(tmp_path / "typo")


def test_what_was_looked_for_is_said_when_download_is_off(tmp_path, cache):
    message = "cinic10 is not in .*CINIC-10, .*train, valid, test.*download is off.*--data_dir"
    with pytest.raises(FileNotFoundError, match=message):
        find(None, "cinic10")
    assert not cache.exists()


def test_a_failed_download_names_the_url_and_data_dir(tmp_path, monkeypatch):
    def offline(urls, target, *, checksum):
        raise ConnectionError(f"cannot download {urls[0]} (Name or service not known)")

    monkeypatch.setattr("feast_tf.datasets.sources.download_file", offline)
    message = r"tinyimagenet is not in .*http://cs231n\.stanford.*not known.*with --data_dir"
    with pytest.raises(ConnectionError, match=message) as raised:
        locate(SOURCES["tinyimagenet"], tmp_path, download=True)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("given", [True, False])
def test_a_download_is_unpacked_in_the_same_place(
    cifar10_root, tmp_path, cache, monkeypatch, given
):
    def fetched(urls, target, *, checksum):
        assert urls == ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",)
        assert checksum.startswith("sha256:6d958be0")
        return pack(cifar10_root, target)

    monkeypatch.setattr("feast_tf.datasets.sources.download_file", fetched)
    place = tmp_path / "disk" if given else cache
    if given:
        place.mkdir()
    root, decoded = locate(SOURCES["cifar10"], place if given else None, download=True)
    assert root.is_relative_to(place / "extracted") and decoded == place / "decoded"
    assert (place / "cifar-10-python.tar.gz").exists()
    assert find(place if given else None) == (root, decoded)


def test_two_processes_load_the_same_archive(tiny_root, tmp_path):
    archive = pack(tiny_root, tmp_path / "disk" / "tiny-imagenet-200.tar.gz")
    script = (
        "import sys; from feast_tf import datasets; "
        "d = datasets.load('tinyimagenet', data_dir=sys.argv[1]); "
        "print(len(d.train), len(d.test), int(d.train.images.astype(int).sum()))"
    )
    command = [sys.executable, "-c", script, str(archive)]
    running = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    outputs = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(set(outputs)) == 1 and outputs[0].startswith("10 3 ")
