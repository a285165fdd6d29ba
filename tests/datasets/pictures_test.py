import io
import os

import numpy as np
import pytest
from PIL import Image

from feast_tf.datasets import pictures
from feast_tf.datasets.pictures import PictureFiles
from feast_tf.datasets.pictures import decode
from feast_tf.datasets.pictures import list_class_folders
from feast_tf.datasets.pictures import load_pictures


def save(path, mode, colour, kind="JPEG"):
    Image.new(mode, (16, 16), colour).save(path, kind)
    return path


def test_greyscale_becomes_three_equal_channels(tmp_path):
    picture = decode(save(tmp_path / "a.JPEG", "L", 90), 16)
    assert picture.dtype == np.uint8 and picture.shape == (16, 16, 3)
    assert np.abs(picture.astype(int) - 90).max() <= 2


def test_cmyk_becomes_rgb_with_the_right_colours(tmp_path):
    path = save(tmp_path / "a.JPEG", "CMYK", (51, 102, 204, 51))
    assert b"Adobe" in path.read_bytes()
    # Ink c under black k leaves (255 - c) * (255 - k) / 255 of the light.
    expected = [204 * 204 / 255, 153 * 204 / 255, 51 * 204 / 255]
    assert np.abs(decode(path, 16).mean(axis=(0, 1)) - expected).max() <= 3


def test_content_counts_and_not_the_name(tmp_path):
    path = save(tmp_path / "a.JPEG", "RGBA", (10, 200, 30, 128), "PNG")
    assert decode(path, 16)[3, 5].tolist() == [10, 200, 30]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.95])
def test_a_truncated_jpeg_is_named(tmp_path, share):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).save(stream, "JPEG")
    path = tmp_path / "n01_7.JPEG"
    path.write_bytes(stream.getvalue()[: int(share * len(stream.getvalue()))])
    with pytest.raises(ValueError, match=rf"cannot decode picture {path}: "):
        decode(path, 64)


def test_sixteen_bits_a_channel_are_refused(tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(np.full((4, 4), 40_000, dtype=np.uint16)).save(path)
    with pytest.raises(ValueError, match=rf"{path}: pixel format I;16 has not 8 bits a channel"):
        decode(path, 4)


def test_a_picture_of_the_right_size_is_left_alone(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    np.testing.assert_array_equal(decode(tmp_path / "a.png", 8), noise)
    assert decode(tmp_path / "a.png", 4).shape == (4, 4, 3)


def test_class_numbers_come_from_the_class_list(tmp_path):
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        save(tmp_path / name / "2.png", "L", 1, "PNG")
        save(tmp_path / name / "10.JPG", "L", 1)
        (tmp_path / name / "notes.txt").touch()
        (tmp_path / name / "._2.png").touch()
    (tmp_path / ".hidden").mkdir()
    files = list_class_folders(tmp_path, ("a", "b"))
    assert [str(path.relative_to(tmp_path)) for path in files.paths] == [
        "a/10.JPG", "a/2.png", "b/10.JPG", "b/2.png",
    ]
    assert files.labels == (0, 0, 1, 1)
    with pytest.raises(ValueError, match=rf"class c has no pictures: {tmp_path}/c is missing"):
        list_class_folders(tmp_path, ("a", "b", "c"))
    with pytest.raises(ValueError, match=rf"folder {tmp_path}/b is none of the 1 classes"):
        list_class_folders(tmp_path, ("a",))
    with pytest.raises(ValueError, match=rf"folder {tmp_path}/none is missing"):
        list_class_folders(tmp_path / "none", ("a",))


@pytest.fixture
def files(tmp_path):
    paths = [save(tmp_path / f"{k}.png", "RGB", (k, 2 * k, 3 * k), "PNG") for k in (40, 70)]
    return PictureFiles(tuple(paths), (5, 2))


def load(files, tmp_path, image_size=16):
    return load_pictures(files, image_size=image_size, cache=tmp_path / "decoded", name="some")


def cache_files(tmp_path):
    return sorted((tmp_path / "decoded").glob("some-*.npz"))


def forbid_decoding(monkeypatch):
    monkeypatch.setattr(pictures, "decode", lambda path, size: pytest.fail("decoded again"))


def test_decoded_pictures_are_kept(files, tmp_path, monkeypatch):
    first = load(files, tmp_path)
    assert first.images[:, 0, 0].tolist() == [[40, 80, 120], [70, 140, 210]]
    assert first.labels.tolist() == [5, 2]
    forbid_decoding(monkeypatch)
    second = load(PictureFiles(files.paths, (1, 3)), tmp_path)
    np.testing.assert_array_equal(first.images, second.images)
    assert second.labels.tolist() == [1, 3]  # Labels are never taken from the cache.


def test_each_image_size_is_kept_apart(files, tmp_path):
    assert load(files, tmp_path, 16).images.shape == (2, 16, 16, 3)
    assert load(files, tmp_path, 4).images.shape == (2, 4, 4, 3)
    assert len(cache_files(tmp_path)) == 2


def test_a_changed_picture_is_decoded_again(files, tmp_path):
    load(files, tmp_path)
    save(files.paths[0], "RGB", (9, 9, 9), "PNG")
    os.utime(files.paths[0], ns=(1, 1))
    assert load(files, tmp_path).images[0, 0, 0].tolist() == [9, 9, 9]


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "other shape"])
def test_a_broken_cache_file_is_replaced(files, tmp_path, damage, monkeypatch):
    good = load(files, tmp_path).images
    (path,) = cache_files(tmp_path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "other shape":
        np.savez(path, images=good[:1])
    else:
        whole = path.read_bytes()
        path.write_bytes({"empty": b"", "cut": whole[:900], "flipped": content}[damage])
    np.testing.assert_array_equal(load(files, tmp_path).images, good)
    forbid_decoding(monkeypatch)
    np.testing.assert_array_equal(load(files, tmp_path).images, good)


def test_pictures_load_where_nothing_can_be_kept(files, tmp_path):
    (tmp_path / "decoded").write_text("a file where a folder is needed")
    assert load(files, tmp_path).images[1, 0, 0].tolist() == [70, 140, 210]


def test_pictures_load_when_the_disk_is_full(files, tmp_path, monkeypatch):
    def full(stream, **_):
        stream.write(b"half a file")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pictures.np, "savez", full)
    assert load(files, tmp_path).images[1, 0, 0].tolist() == [70, 140, 210]
    assert [p.name for p in (tmp_path / "decoded").iterdir() if p.suffix != ".lock"] == []
