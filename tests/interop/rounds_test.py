"""Plain NumPy rounds, worked out by hand, and fed with everything that clients get wrong."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tracemalloc

from hypothesis import given, settings, strategies
import numpy as np
import pytest

from feast_tf.interop.rounds import Merger, merge, plan_round
from feast_tf.routing import SliceMap

# Level 0 holds a 1x2 corner of the matrix, level 1 a 2x1 corner (not nested) and all of the vector,
# level 2 everything. Nobody cuts the scalar.
SLICES = SliceMap(("matrix", "vector", "scalar"), ((2, 3), (2,), ()),
                  (np.int32([[1, 2], [2, 1], [2, 3]]), np.int32([[0], [2], [2]]),
                   np.zeros([3, 0], np.int32)))
WEIGHTS = [np.float32([[10, 20, 30], [40, 50, 60]]), np.float32([7, -0.0]), np.array(5, np.float32)]
COHORT = {"phone": 0, "tablet": 1}
PHONE = [np.float32([[11, 22]]), np.zeros([0], np.float32), np.array(9, np.float32)]
TABLET = [np.float32([[6], [40.5]]), np.float32([7.25, -1]), np.array(1, np.float32)]


def bits(arrays) -> list[bytes]:
    return [np.asarray(array).tobytes() for array in arrays]


def test_what_clients_are_sent():
    plan = plan_round(SLICES, WEIGHTS, COHORT)
    assert list(plan) == ["phone", "tablet"]
    assert [part.tolist() for part in plan["phone"]] == [[[10, 20]], [], 5]
    assert [part.tolist() for part in plan["tablet"]] == [[[10], [40]], [7, 0], 5]
    assert all(np.shares_memory(part, weight)
               for part, weight in zip(plan["tablet"], WEIGHTS)), "no copies"
    with pytest.raises(ValueError, match="read-only"):
        plan["tablet"][0][0, 0] = 1
    assert WEIGHTS[0].flags.writeable


def test_the_mean_by_hand():
    new, summary = merge(SLICES, WEIGHTS, COHORT, [("phone", PHONE, 3), ("tablet", TABLET, 5)])
    both = (3 * 11 + 5 * 6) / 8
    np.testing.assert_array_equal(new[0], np.float32([[both, 22, 30], [40.5, 50, 60]]))
    np.testing.assert_array_equal(new[1], np.float32([7.25, -1]))
    assert new[2] == np.float32((3 * 9 + 5 * 1) / 8) and isinstance(new[2], np.ndarray)
    assert [array.dtype for array in new] == [np.float32] * 3
    assert summary == {
        "with_data": ["phone", "tablet"], "without_data": [], "missing": [], "refused": {},
        "ignored": [], "examples": 8, "bytes_down": 4 * (3 + 5), "bytes_up": 4 * (3 + 5)}


def test_updates_give_the_same():
    plan = plan_round(SLICES, WEIGHTS, COHORT)
    updates = [(client, [new - old for new, old in zip(result, plan[client])], count)
               for client, result, count in [("phone", PHONE, 3), ("tablet", TABLET, 5)]]
    trained, _ = merge(SLICES, WEIGHTS, COHORT, [("phone", PHONE, 3), ("tablet", TABLET, 5)])
    assert bits(merge(SLICES, WEIGHTS, COHORT, updates, returns="updates")[0]) == bits(trained)


def test_where_nobody_reports_the_bits_stay():
    weights = [np.float32([[1.5, -0.0, 1e-42], [3e38, -1e-45, -0.0]]), np.float32([-0.0, 1]),
               np.float32(-0.0)]
    cohort = {1: 0, 2: 2}
    same = plan_round(SLICES, weights, cohort)
    for results in ([], [(1, same[1], 4), (2, same[2], 3)], [(2, [a + 1 for a in same[2]], 0)]):
        new, _ = merge(SLICES, weights, cohort, results)
        assert bits(new) == bits(weights)
        assert not any(np.shares_memory(one, other) for one, other in zip(new, weights))
    new, _ = merge(SLICES, weights, cohort, [(1, [same[1][0] + 1, same[1][1], np.float32(2)], 7)])
    assert new[0].tolist()[0][:2] == [2.5, 1] and new[2] == 2
    assert bits([new[0][0, 2:], new[0][1], new[1]]) == bits([weights[0][0, 2:], *weights[0][1:],
                                                             weights[1]])


def test_a_client_that_dies_is_missing():
    alone, summary = merge(SLICES, WEIGHTS, COHORT, [("phone", PHONE, 3)])
    assert summary["missing"] == ["tablet"] and summary["with_data"] == ["phone"]
    assert alone[0].tolist() == [[11, 22, 30], [40, 50, 60]] and alone[2] == 9
    assert summary["bytes_down"] == 4 * (3 + 5) and summary["bytes_up"] == 4 * 3


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e39, 1e308])
@pytest.mark.parametrize("strict", [True, False])
def test_values_that_are_not_finite_are_refused_and_counted(bad, strict):
    broken = [np.array([[11, 22]], np.float64), PHONE[1], np.float64(bad)]
    merger = Merger(SLICES, WEIGHTS, COHORT, strict=strict)
    assert merger.add("phone", broken, 4) is False
    assert merger.add("tablet", TABLET, 5) is True
    new, summary = merger.result()
    assert bits(new) == bits(merge(SLICES, WEIGHTS, COHORT, [("tablet", TABLET, 5)])[0])
    assert list(summary["refused"]) == ["phone"] and summary["missing"] == []
    assert "client 'phone': scalar holds values that are not finite" in summary["refused"]["phone"]


def test_an_update_that_overflows_the_weights_is_refused():
    weights = [np.array(weight * np.float32(1e36)) for weight in WEIGHTS]
    down = [np.full(np.shape(part), -1e38, np.float32) for part in PHONE]
    up = [np.full(np.shape(part), 3.4028e38, np.float32) for part in PHONE]
    merger = Merger(SLICES, weights, {1: 0, 2: 0}, returns="updates")
    assert merger.add(1, down, 2) and not merger.add(2, up, 2)
    assert all(np.all(np.isfinite(array)) for array in merger.result()[0])


@pytest.mark.parametrize("dtype, fits, too_large", [
    (np.float16, 6e4, 7e4), (np.float32, 3e38, 4e38), (np.float64, 3e38, 4e38)])
def test_the_range_of_trained_weights(dtype, fits, too_large):
    weights = [np.asarray(weight, dtype) for weight in WEIGHTS]
    for value, used in ((fits, True), (too_large, False)):
        merger = Merger(SLICES, weights, COHORT)
        assert merger.add("phone", [*PHONE[:2], np.array(value, np.float64)], 4) is used
        assert np.isfinite(merger.result()[0][2])


MALFORMED = [
    ([PHONE[0].T, *PHONE[1:]], 3, r"matrix must be of shape \(1, 2\), but is of shape \(2, 1\)"),
    ([*PHONE[:2], np.float32([9])], 3, r"scalar must be of shape \(\), but is of shape \(1,\)"),
    (TABLET, 3, r"matrix must be of shape \(1, 2\)"),
    (PHONE[:2], 3, "returned 2 arrays instead of 3"),
    ([*PHONE, PHONE[0]], 3, "returned 4 arrays instead of 3"),
    (None, 3, "must be a list of arrays, but is a NoneType"),
    ([PHONE[0].astype(object), *PHONE[1:]], 3, "matrix must be an array of real numbers"),
    ([PHONE[0].astype(complex), *PHONE[1:]], 3, "matrix must be an array of real numbers"),
    ([[["a", "b"]], *PHONE[1:]], 3, "matrix must be an array of real numbers"),
    ([[[1], [2, 3]], *PHONE[1:]], 3, "matrix must be an array of real numbers"),
    ([np.zeros([1, 2], [("a", "i4"), ("b", "f4")]), *PHONE[1:]], 3, "array of real numbers"),
    (PHONE, -1, r"num_examples must be an integer in 0..2\^53, but is -1"),
    (PHONE, 2.0, "num_examples must be an integer"),
    (PHONE, None, "num_examples must be an integer"),
    (PHONE, np.nan, "num_examples must be an integer"),
    (PHONE, 2**53 + 1, "num_examples must be an integer"),
]


@pytest.mark.parametrize("arrays, count, message", MALFORMED)
def test_malformed_results(arrays, count, message):
    expected = bits(merge(SLICES, WEIGHTS, COHORT, [("phone", PHONE, 3), ("tablet", TABLET, 5)])[0])
    strict = Merger(SLICES, WEIGHTS, COHORT)
    with pytest.raises(ValueError, match=f"^client 'phone'.*{message}"):
        strict.add("phone", arrays, count)
    strict.add("phone", PHONE, 3)  # corrected, and nothing of the first was kept
    strict.add("tablet", TABLET, 5)
    assert bits(strict.result()[0]) == expected

    new, summary = merge(SLICES, WEIGHTS, COHORT, [("phone", arrays, count), ("tablet", TABLET, 5)],
                         strict=False)
    assert bits(new) == bits(merge(SLICES, WEIGHTS, COHORT, [("tablet", TABLET, 5)])[0])
    assert list(summary["refused"]) == ["phone"] and summary["bytes_up"] == 4 * 5


def test_strangers_and_second_results():
    results = [("phone", PHONE, 3), ("phone", PHONE, 3), ("watch", PHONE, 9), ("tablet", TABLET, 0),
               ("tablet", TABLET, 5)]
    for place, message in ((1, "client 'phone' reported a second time"),
                           (2, "client 'watch' is not in the cohort")):
        with pytest.raises(ValueError, match=message):
            merge(SLICES, WEIGHTS, COHORT, [results[0], results[place]])
    new, summary = merge(SLICES, WEIGHTS, COHORT, results, strict=False)
    assert bits(new) == bits(merge(SLICES, WEIGHTS, COHORT, [("phone", PHONE, 3)])[0])
    assert summary["ignored"] == ["client 'phone' reported a second time",
                                  "client 'watch' is not in the cohort",
                                  "client 'tablet' reported a second time"]
    assert summary["with_data"] == ["phone"] and summary["without_data"] == ["tablet"]
    assert summary["refused"] == {} and summary["missing"] == []


@pytest.mark.parametrize("convert", [
    lambda a: a.astype(np.float16), lambda a: a.astype(np.float64), lambda a: a.astype(">f4"),
    lambda a: np.array(a, order="F"), lambda a: np.repeat(a[..., np.newaxis], 2, axis=-1)[..., 0],
    lambda a: a.tolist() if a.ndim == 2 else a])
def test_other_dtypes_and_orders_of_bytes(convert):
    # Integers and halves of them: the same in every dtype.
    expected, _ = merge(SLICES, WEIGHTS, COHORT, [("phone", PHONE, 3), ("tablet", TABLET, 5)])
    new, _ = merge(SLICES, WEIGHTS, COHORT,
                   [("phone", [convert(np.asarray(part)) for part in PHONE], np.int64(3)),
                    ("tablet", [convert(np.asarray(part)) for part in TABLET], 5)])
    assert bits(new) == bits(expected)


def test_bfloat16():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    result = [part.astype(bfloat16) for part in PHONE]
    new, _ = merge(SLICES, WEIGHTS, COHORT, [("phone", result, 3)])
    assert new[0].tolist() == [[11, 22, 30], [40, 50, 60]]


@pytest.mark.parametrize("dtype", ["<f2", ">f4", "<f8"])
def test_the_dtype_of_the_weights_stays(dtype):
    weights = [np.asarray(weight, dtype) for weight in WEIGHTS]
    for weight in weights:
        weight.flags.writeable = False
    new, _ = merge(SLICES, weights, COHORT, [("phone", PHONE, 3), ("tablet", TABLET, 5)])
    assert [array.dtype for array in new] == [np.dtype(dtype)] * 3
    np.testing.assert_allclose(new[0], [[63 / 8, 22, 30], [40.5, 50, 60]], rtol=1e-3)
    assert new[0].flags.writeable


@pytest.mark.parametrize("cohort, message", [
    ({}, "the cohort is empty"),
    ({"phone": 3}, r"client 'phone': level must be an integer in 0..2, but is 3"),
    ({"phone": -1}, "client 'phone': level must be an integer in 0..2, but is -1"),
    ({"phone": 1.0}, "client 'phone': level must be an integer in 0..2, but is 1.0"),
])
def test_bad_cohorts(cohort, message):
    with pytest.raises(ValueError, match=message):
        plan_round(SLICES, WEIGHTS, cohort)
    with pytest.raises(ValueError, match=message):
        merge(SLICES, WEIGHTS, cohort, [])


@pytest.mark.parametrize("weights, message", [
    (WEIGHTS[:2], "the slice map has 3 arrays, but there are 2 weights"),
    ([WEIGHTS[0].T, *WEIGHTS[1:]], r"matrix: the weight must be of shape \(2, 3\)"),
    ([WEIGHTS[0].astype(int), *WEIGHTS[1:]], "matrix: the weight must be floating-point"),
    ([*WEIGHTS[:2], np.float32(np.nan)], "scalar: the weight must be finite"),
])
def test_bad_weights(weights, message):
    with pytest.raises(ValueError, match=message):
        plan_round(SLICES, weights, COHORT)
    with pytest.raises(ValueError, match=message):
        Merger(SLICES, weights, COHORT)


def test_an_unknown_kind_of_result():
    with pytest.raises(ValueError, match="returns must be one of weights, updates, but is 'grads'"):
        Merger(SLICES, WEIGHTS, COHORT, returns="grads")


@settings(max_examples=20, deadline=None)
@given(strategies.integers(0, 2**32 - 1))
def test_any_order_gives_the_same(seed):
    rng = np.random.default_rng(seed)
    weights = [rng.normal(size=shape).astype(np.float32) for shape in SLICES.shapes]
    cohort = {client: int(rng.integers(3)) for client in range(4)}
    results = [(client,
                [part + rng.normal(0, 0.1, part.shape).astype(np.float32) for part in parts],
                int(rng.integers(1, 1000)))
               for client, parts in plan_round(SLICES, weights, cohort).items()]
    outcomes = [merge(SLICES, weights, cohort, order)[0]
                for order in itertools.permutations(results)]
    for other in outcomes[1:]:
        for one, two in zip(outcomes[0], other):
            np.testing.assert_allclose(one, two, rtol=1.2e-7, atol=0)  # a float32's last bit


def test_memory_is_that_of_one_accumulator():
    size, clients = 250_000, 30
    slices = SliceMap(tuple(f"array{place}" for place in range(8)), ((size,),) * 8,
                      (np.int32([[size // 2], [size]]),) * 8)
    weights = [np.ones(size, np.float32) for _ in range(8)]
    cohort = {client: client % 2 for client in range(clients)}

    def results():
        for client, parts in plan_round(slices, weights, cohort).items():
            yield client, [part + np.float32(client) for part in parts], 1 + client

    tracemalloc.start()
    new, _ = merge(slices, weights, cohort, results())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The model is 8 MB: the accumulator 16, two clients' results, the new model, one array's sums.
    assert peak < 48e6, f"{peak / 1e6:.1f} MB"
    counts = 1 + np.arange(clients)
    assert new[0][-1] == pytest.approx(1 + np.average(np.arange(1, clients, 2),
                                                      weights=counts[1::2]), rel=1e-6)


def test_numpy_is_all_it_needs():
    script = ("import sys; import feast_tf.interop.rounds; "
              "heavy = {'tensorflow', 'keras', 'tensorflow_federated'} & set(sys.modules); "
              "assert not heavy, heavy")
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                            cwd=__file__.rsplit("/tests/", 1)[0])
    assert result.returncode == 0, result.stderr
