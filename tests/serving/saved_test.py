"""Tests of feast_tf.serving.saved."""

from __future__ import annotations

import dataclasses
import errno
import json
import os

import numpy as np
import pytest

from feast_tf.serving import (SavedSupernet, load_supernet, load_weights, save_supernet,
                              save_weights)
from feast_tf.space import SupernetSpec, VariantCache, layout_of

SPEC = SupernetSpec(stem=4, bases=(4, 6), depths=(0, 1), widths=(0.5, 1.0), expansions=(0.3, 1.0),
                    strides=(1, 2), classes=3, image_size=4, divisor=2)
CACHE = VariantCache(SPEC, [SPEC.variant(d=0, e=0.3, w=0.5), SPEC.variant(d=(1, 0), e=1.0, w=1.0)])
FILES = ("cache.csv", "spec.json", "weights.npz")


@pytest.fixture
def saved():
    rng = np.random.default_rng(5)
    weights = tuple(np.float32(rng.normal(size=p.shape)) for p in layout_of(SPEC).parameters)
    return SavedSupernet(CACHE, weights, ("owl", "zèbre", "emu"), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


def assert_same(one, other):
    assert one.spec == other.spec and one.cache.variants == other.cache.variants
    assert [w.tobytes() for w in one.weights] == [w.tobytes() for w in other.weights]
    assert [w.shape for w in one.weights] == [w.shape for w in other.weights]
    assert (one.classes, one.mean, one.std) == (other.classes, other.mean, other.std)


def test_what_is_saved_is_loaded(saved, tmp_path):
    save_supernet(tmp_path / "new" / "model", saved)
    assert sorted(os.listdir(tmp_path / "new" / "model")) == sorted(FILES)
    found = load_supernet(str(tmp_path / "new" / "model"))
    assert_same(found, saved)
    assert found.weights[0].dtype == np.float32


def test_float32_moments_become_numbers(saved, tmp_path):
    save_supernet(tmp_path, dataclasses.replace(saved, mean=tuple(np.float32([0.1, 0.2, 0.3]))))
    assert load_supernet(tmp_path).mean == tuple(map(float, np.float32([0.1, 0.2, 0.3])))


def test_the_model_has_the_weights(saved, tmp_path):
    save_supernet(tmp_path, saved)
    model = load_supernet(tmp_path).model()
    assert model.spec == SPEC
    assert [w.tobytes() for w in model.get_weights()] == [w.tobytes() for w in saved.weights]
    images = np.float32(np.random.default_rng(1).normal(size=(4, 4, 4, 3)))
    small, large = (model(images, variant=variant) for variant in CACHE.variants)
    assert small.shape == (4, 3) and not np.allclose(small, large)


def test_weights_keep_their_order(tmp_path):
    # More than ten, so that sorting names as text would mix them up.
    weights = [np.full(k % 4, k, np.float32) for k in range(120)]
    save_weights(tmp_path / "weights.npz", weights)
    found = load_weights(tmp_path / "weights.npz")
    assert [w.tolist() for w in found] == [w.tolist() for w in weights]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(saved, tmp_path, name):
    save_supernet(tmp_path, saved)
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing: not the model folder"):
        load_supernet(tmp_path)


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.98])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_was_cut_is_named(saved, tmp_path, name, keep):
    save_supernet(tmp_path, saved)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:int(keep * len(content))])
    with pytest.raises(ValueError, match=name) as error:
        load_supernet(tmp_path)
    assert "\n" not in str(error.value)


def test_weights_with_a_flipped_bit_are_refused(saved, tmp_path):
    save_supernet(tmp_path, saved)
    content = bytearray((tmp_path / "weights.npz").read_bytes())
    content[content.index(saved.weights[0].tobytes()[:16]) + 5] ^= 1
    (tmp_path / "weights.npz").write_bytes(content)
    with pytest.raises(ValueError, match="weights.npz is damaged"):
        load_supernet(tmp_path)


@pytest.mark.parametrize("key, value, message", [
    ("space.stem", 6, "weights.npz does not fit the space"),
    ("space.classes", 4, "spec.json must name 4 classes and three channels' .* but has 3"),
    ("space.classes", "3", r"spec.json is damaged \(classes must be a positive integer"),
    ("space.bases", [4], r"spec.json is damaged \(strides must have one value a stage"),
    ("space", {}, "spec.json is damaged"),
    ("space", None, "spec.json is damaged"),
    ("classes", ["a", "b"], "spec.json must name 3 classes .* but has 2"),
    ("mean", [0.1], "spec.json must name 3 classes and three channels' mean and std"),
    ("std", 1, "spec.json is damaged"),
    # The same weights, but other variants.
    ("space.expansions", [0.7, 1.0], "cache.csv: made for the space"),
])
def test_files_that_do_not_fit_are_refused(saved, tmp_path, key, value, message):
    save_supernet(tmp_path, saved)
    fields = json.loads((tmp_path / "spec.json").read_text())
    section, _, name = key.rpartition(".")
    (fields[section] if section else fields)[name] = value
    (tmp_path / "spec.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=message) as error:
        load_supernet(tmp_path)
    assert "\n" not in str(error.value)


def test_weights_of_another_space_are_refused(saved, tmp_path):
    save_supernet(tmp_path, saved)
    save_weights(tmp_path / "weights.npz", saved.weights[:-1])
    with pytest.raises(ValueError, match=r"weights.npz does not fit the space in spec.json: \d+ "
                                         r"arrays instead of \d+"):
        load_supernet(tmp_path)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("file_number", range(3))
def test_a_full_disk_leaves_whole_files_or_none(saved, tmp_path, monkeypatch, file_number, again):
    other = dataclasses.replace(saved, weights=tuple(2 * w for w in saved.weights))
    if again:
        save_supernet(tmp_path, other)
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    calls = []

    def full_disk(descriptor):
        calls.append(descriptor)
        if len(calls) > file_number:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_supernet(tmp_path, saved)
    monkeypatch.undo()
    assert set(os.listdir(tmp_path)) <= set(FILES)
    if not again:
        with pytest.raises(ValueError, match="is missing"):
            load_supernet(tmp_path)
    changed = [name for name in before if (tmp_path / name).read_bytes() != before[name]]
    assert changed == (["weights.npz"] if again and file_number else [])
    save_supernet(tmp_path, saved)
    assert_same(load_supernet(tmp_path), saved)
