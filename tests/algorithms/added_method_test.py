"""The method that docs/how_to_add_a_method.md writes, and a round of it worked out by hand."""

from __future__ import annotations

import collections
from pathlib import Path
import re

import numpy as np
import pytest
import tensorflow as tf

from feast_tf import runtime

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "how_to_add_a_method.md"


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    runtime.use("in_process")
    [source] = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    path = tmp_path_factory.mktemp("guide") / "first_features.py"
    path.write_text(source)  # autograph reads the sources of what it converts
    names = {"__name__": "first_features", "__file__": str(path)}
    exec(compile(source, str(path), "exec"), names)
    return names["build_first_features"]((1, 3), classes=2, rate=0.5)


def client(number, level, x, y):
    return collections.OrderedDict(
        client=np.int32(number), level=np.int32(level),
        data=tf.data.Dataset.from_tensors(collections.OrderedDict(x=np.float32(x), y=np.int32(y))))


def test_round_by_hand(process):
    """With weights of 0 both classes have the probability 1/2, so the gradient of an example is
    x * [-1/2, 1/2] where the class is 0, and its negative where it is 1."""
    output = process.next(process.initialize(), [
        client(0, 0, [[2, 9, 9]], [0]), client(1, 1, [[4, 8, 1], [0, 0, 3]], [1, 1])])
    first = np.array([1, -1]) * 0.5 / 2 * 2
    second = np.array([-1, 1]) * 0.5 / 2 * np.array([[4], [8], [4]]) / 2
    [kernel] = output.state.global_model_weights.trainable
    np.testing.assert_allclose(kernel, [(first + 2 * second[0]) / 3, second[1], second[2]],
                               rtol=1e-6)
    train = output.metrics["client_work"]["train"]
    assert train["loss"] == pytest.approx(np.log(2)) and train["examples"] == 3
    assert output.metrics["distributor"]["bytes_down"] == 4 * (1 + 3) * 2
