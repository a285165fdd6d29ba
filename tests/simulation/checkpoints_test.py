"""Tests of feast_tf.simulation.checkpoints."""

from __future__ import annotations

import asyncio
import collections
import os
import shutil

import numpy as np
import pytest
import tensorflow as tf
from absl import logging

from feast_tf.simulation import Checkpoints, ProgramState

STRUCTURE = ProgramState(collections.OrderedDict(w=(np.float32([0, 0]), np.float32([[0]])), r=0),
                         0, -1, -1.0, 0, 0, 0.0)


def state_of(round_num, best_round=-1, **numbers):
    process = collections.OrderedDict(
        w=(np.float32([round_num, 1 / 3]), np.float32([[round_num / 7]])), r=np.int32(round_num))
    return ProgramState(process, round_num, best_round, -1.0, 0, 0, 0.0)._replace(**numbers)


def best(round_num):
    return [np.float32([round_num, round_num + 0.5])]


def save(folder, *states):
    checkpoints = Checkpoints(folder)
    for state in states:
        if state.best_round == state.round_num:
            checkpoints.save_best(state.round_num, best(state.round_num))
        asyncio.run(checkpoints.save(state))
    return checkpoints


def load(folder):
    return asyncio.run(Checkpoints(folder).load_latest(STRUCTURE))


def states(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("round_"))


def bests(folder):
    return sorted(path.name for path in folder.glob("best_*"))


@pytest.fixture
def warnings(monkeypatch):
    found = []
    monkeypatch.setattr(logging, "warning", lambda text, *args: found.append(text % args))
    return found


def test_a_new_folder_has_no_state(tmp_path):
    assert load(tmp_path / "new" / "checkpoints") is None


def test_a_state_comes_back_to_the_last_digit(tmp_path):
    # None of these is a float32 or an int32.
    state = state_of(4, best_round=2, best_score=0.1 + 0.2, bytes_down=2**40 + 1,
                     bytes_up=2**31, seconds=100 / 3)
    save(tmp_path, state)
    found = load(tmp_path)
    assert found[1:] == state[1:]
    assert [type(number) for number in found[1:]] == [int, int, float, int, int, float]
    assert isinstance(found.process, collections.OrderedDict)
    for one, other in zip(tf.nest.flatten(found.process), tf.nest.flatten(state.process)):
        assert one.tobytes() == other.tobytes() and one.dtype == other.dtype


def test_the_two_newest_states_are_kept(tmp_path):
    save(tmp_path, *map(state_of, (2, 4, 9, 10)))
    assert states(tmp_path) == ["round_10", "round_9"]
    assert load(tmp_path).round_num == 10


def test_states_are_ordered_as_numbers(tmp_path):
    save(tmp_path, state_of(9), state_of(10), state_of(100))
    assert load(tmp_path).round_num == 100


DAMAGE = {
    "emptied": lambda path: [shutil.rmtree(path), path.mkdir()],
    "no saved_model.pb": lambda path: (path / "saved_model.pb").unlink(),
    "saved_model.pb cut": lambda path: os.truncate(path / "saved_model.pb", 100),
    "saved_model.pb empty": lambda path: os.truncate(path / "saved_model.pb", 0),
    "no variables": lambda path: shutil.rmtree(path / "variables"),
    "no index": lambda path: (path / "variables" / "variables.index").unlink(),
    "index cut": lambda path: os.truncate(path / "variables" / "variables.index", 30),
    "data cut": lambda path: os.truncate(next(path.glob("variables/*.data-*")), 5),
    "data empty": lambda path: os.truncate(next(path.glob("variables/*.data-*")), 0),
    "a file": lambda path: [shutil.rmtree(path), path.write_bytes(b"")],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_newest_state_falls_back_to_the_one_before(tmp_path, damage, warnings):
    save(tmp_path, state_of(3), state_of(6))
    DAMAGE[damage](tmp_path / "round_6")
    checkpoints = Checkpoints(tmp_path)
    state = asyncio.run(checkpoints.load_latest(STRUCTURE))
    assert state.round_num == 3 and state.process["w"][0][0] == 3
    (warning,) = warnings
    assert f"checkpoint {tmp_path / 'round_6'} can't be read" in warning and "\n" not in warning
    # The run goes on: the same round is saved again, and is the one that is found.
    asyncio.run(checkpoints.save(state_of(6, bytes_up=77)))
    assert load(tmp_path).bytes_up == 77


def test_damaged_data_of_the_right_size_is_noticed(tmp_path, warnings):
    save(tmp_path, state_of(3), state_of(6))
    path = next((tmp_path / "round_6" / "variables").glob("*.data-*"))
    content = bytearray(path.read_bytes())
    content[content.index(np.float32(6).tobytes())] ^= 1
    path.write_bytes(content)
    assert load(tmp_path).round_num == 3 and len(warnings) == 1


def test_with_all_states_damaged_the_run_starts_anew(tmp_path, warnings):
    save(tmp_path, state_of(3), state_of(6))
    for name in ("round_3", "round_6"):
        DAMAGE["emptied"](tmp_path / name)
    assert load(tmp_path) is None
    assert len(warnings) == 2 and states(tmp_path) == []
    save(tmp_path, state_of(3), state_of(6))
    assert load(tmp_path).round_num == 6


def test_a_state_that_cannot_be_read_is_kept_aside(tmp_path, warnings):
    save(tmp_path, state_of(6, bytes_up=5))
    other = STRUCTURE._replace(process=())  # another version's structure, say
    assert asyncio.run(Checkpoints(tmp_path).load_latest(other)) is None
    assert "unreadable_round_6" in warnings[0]
    (tmp_path / "unreadable_round_6").rename(tmp_path / "round_6")
    assert load(tmp_path).bytes_up == 5
    # A second one of the same round takes the place of the first.
    for _ in range(2):
        DAMAGE["emptied"](tmp_path / "round_6")
        assert load(tmp_path) is None
        save(tmp_path, state_of(6))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round_6", "unreadable_round_6"]


@pytest.mark.parametrize("name", ["round_7_temp1234", "round_", "round_x", "rounds_9"])
def test_other_names_are_no_states(tmp_path, name, warnings):
    save(tmp_path, state_of(6))
    (tmp_path / name).mkdir()
    assert load(tmp_path).round_num == 6 and not warnings
    assert (tmp_path / name).is_dir()


@pytest.mark.parametrize("error", [KeyboardInterrupt, tf.errors.ResourceExhaustedError])
def test_a_save_that_is_interrupted_leaves_the_state_before(tmp_path, monkeypatch, error):
    save(tmp_path, state_of(3, best_round=3))
    original = tf.saved_model.save

    def half(module, path, **options):
        original(module, path, **options)
        os.truncate(next(tmp_path.glob("round_6_temp*/variables/*.data-*")), 3)
        raise error(*([] if error is KeyboardInterrupt else [None, None, "disk full"]))

    monkeypatch.setattr(tf.saved_model, "save", half)
    with pytest.raises(error):
        save(tmp_path, state_of(6, best_round=6))
    monkeypatch.undo()
    assert load(tmp_path).round_num == 3 and load(tmp_path).best_round == 3
    assert bests(tmp_path) == ["best_3.npz", "best_6.npz"]
    save(tmp_path, state_of(6, best_round=6))
    assert load(tmp_path).round_num == 6


def test_best_weights_are_kept(tmp_path):
    checkpoints = save(tmp_path, state_of(2, best_round=2))
    assert checkpoints.load_best(2)[0].tolist() == [2.0, 2.5]
    with pytest.raises(FileNotFoundError, match="best_5.npz"):
        checkpoints.load_best(5)
    os.truncate(tmp_path / "best_2.npz", 50)
    with pytest.raises(ValueError, match="best_2.npz is damaged"):
        checkpoints.load_best(2)


def test_best_weights_of_both_kept_states_and_no_others(tmp_path):
    checkpoints = save(tmp_path, state_of(2, best_round=2), state_of(4, best_round=4),
                       state_of(6, best_round=4))
    assert bests(tmp_path) == ["best_4.npz"]
    # Several validations between two states: only the last improvement is referred to.
    for round_num in (7, 8, 9):
        checkpoints.save_best(round_num, best(round_num))
    assert len(bests(tmp_path)) == 4
    asyncio.run(checkpoints.save(state_of(10, best_round=9)))
    assert bests(tmp_path) == ["best_4.npz", "best_9.npz"]
    # The newest is damaged: the state before it still has its weights.
    DAMAGE["emptied"](tmp_path / "round_10")
    state = load(tmp_path)
    assert (state.round_num, state.best_round) == (6, 4)
    assert Checkpoints(tmp_path).load_best(state.best_round)[0].tolist() == [4.0, 4.5]


def test_best_weights_after_a_resume(tmp_path):
    save(tmp_path, state_of(2, best_round=2), state_of(4, best_round=2))
    checkpoints = Checkpoints(tmp_path)
    asyncio.run(checkpoints.load_latest(STRUCTURE))
    for round_num in (5, 6):
        checkpoints.save_best(round_num, best(round_num))
    asyncio.run(checkpoints.save(state_of(6, best_round=6)))
    # round_4 is kept as well, and refers to best_2.
    assert states(tmp_path) == ["round_4", "round_6"]
    assert bests(tmp_path) == ["best_2.npz", "best_6.npz"]
    asyncio.run(checkpoints.save(state_of(8, best_round=6)))
    assert bests(tmp_path) == ["best_6.npz"]
