"""The one way in which FEAST-TF derives randomness: from (seed, purpose, round, client).

A purpose and its ids give the same numbers in every process, whatever was drawn before. So a
resumed run needs no stored generator state to equal an unbroken one.
"""

from __future__ import annotations

import hashlib
import json
import operator

import numpy as np


def stream(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """Returns a fresh generator that depends on its arguments only.

    Args:
        seed: The seed of the run, any integer.
        purpose: What the numbers are for, such as `"cohort"`. Two purposes never share a stream.
        *ids: Integers that tell the draws of one purpose apart, such as the round and the client.
            `stream(s, p)`, `stream(s, p, 0)` and `stream(s, p, 0, 0)` are all different.

    Returns:
        A `numpy.random.Generator` at the start of its stream.

    Raises:
        TypeError: If the seed or an id is not an integer, or the purpose is not a string.
    """
    # The bit generator is named because NumPy may change what `default_rng` stands for.
    return np.random.Generator(np.random.PCG64(int.from_bytes(_digest(seed, purpose, ids), "big")))


def stateless_seed(seed: int, purpose: str, *ids: int) -> np.ndarray:
    """Returns the int32[2] seed that TensorFlow's stateless random operations take.

    Args:
        seed: As in `stream`.
        purpose: As in `stream`.
        *ids: As in `stream`.

    Returns:
        An int32 array of shape [2].

    Raises:
        TypeError: As in `stream`.
    """
    return np.frombuffer(_digest(seed, purpose, ids)[:8], dtype="<i4").astype(np.int32)


def _digest(seed: int, purpose: str, ids: tuple[int, ...]) -> bytes:
    if not isinstance(purpose, str):
        raise TypeError(f"purpose must be a string, not {purpose!r}")
    # JSON keeps the boundaries between the ids; a plain SeedSequence([seed, *ids]) pads with
    # zeros, so that a missing id and an id of 0 would give the same numbers.
    key = json.dumps([operator.index(seed), purpose, *map(operator.index, ids)])
    return hashlib.sha256(key.encode("ascii")).digest()
