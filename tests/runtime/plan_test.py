"""Plans: how a computation is cut into passes over the clients."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow_federated as tff

from feast_tf.runtime import InProcessContext, execution, leaves
from feast_tf.runtime.plan import CLIENTS, EVERYWHERE, SERVER, Aggregate, intrinsics

INT_AT_CLIENTS = tff.FederatedType(np.int32, tff.CLIENTS)
add = tff.tensorflow.computation(lambda a, b: a + b, np.int32, np.int32)
double = tff.tensorflow.computation(lambda x: 2 * x, np.int32)


def plan_of(computation):
    return InProcessContext()._compile(computation).plan


def test_aggregates_of_one_level_share_a_pass():
    plan = plan_of(tff.federated_computation(
        lambda x: (tff.federated_sum(x), tff.federated_sum(tff.federated_map(double, x)),
                   tff.federated_max(x)), INT_AT_CLIENTS))
    assert [len(wave.aggregates) for wave in plan.waves] == [3]
    assert plan.name == "<lambda>"


def test_an_aggregate_that_needs_another_takes_a_second_pass():
    @tff.federated_computation(INT_AT_CLIENTS)
    def computation(x):
        doubled = tff.federated_map(double, x)
        total = tff.federated_broadcast(tff.federated_sum(doubled))
        shifted = tff.federated_map(add, (doubled, total))
        return tff.federated_sum(shifted), tff.federated_sum(x)

    plan = plan_of(computation)
    assert plan.name == "computation"
    # The sum of x itself does not wait for the second pass.
    assert [len(wave.aggregates) for wave in plan.waves] == [2, 1]
    first, second = plan.waves
    assert [node.placement for node in first.kept] == [CLIENTS]  # doubled, for the second pass
    assert second.kept == () and len(second.sources) == 1


def test_results_at_clients_are_collected_in_their_pass():
    @tff.federated_computation(INT_AT_CLIENTS)
    def computation(x):
        total = tff.federated_broadcast(tff.federated_sum(x))
        return tff.federated_map(double, x), tff.federated_map(add, (x, total))

    plan = plan_of(computation)
    assert [len(wave.collected) for wave in plan.waves] == [1, 1]


def test_nothing_is_planned_for_what_is_not_needed():
    @tff.federated_computation(INT_AT_CLIENTS)
    def computation(x):
        tff.federated_sum(tff.federated_map(double, x))
        return tff.federated_sum(x)

    plan = plan_of(computation)
    assert [len(wave.aggregates) for wave in plan.waves] == [1]
    assert not any(wave.collected or wave.kept for wave in plan.waves)


def test_placements_and_uses():
    @tff.federated_computation(tff.FederatedType(np.int32, tff.SERVER), INT_AT_CLIENTS,
                               tff.FederatedType(np.int32, tff.CLIENTS, all_equal=True))
    def computation(server, own, same):
        sent = tff.federated_broadcast(server)
        return server, sent, tff.federated_sum(tff.federated_map(add, (own, same))), own

    plan = plan_of(computation)
    assert [node.placement for node in plan.arguments] == [SERVER, CLIENTS, EVERYWHERE]
    assert [node.path for node in plan.arguments] == [(0,), (1,), (2,)]
    assert [node.placement for node in plan.result] == [SERVER, EVERYWHERE, SERVER, CLIENTS]
    assert isinstance(plan.result[2], Aggregate)
    assert plan.uses[plan.arguments[0]] == 2  # as a result, and as what is sent


def test_server_values_are_dropped_after_their_last_use(monkeypatch):
    """The state is not held while the next one is made: both may be as large as memory."""
    alive = []

    @tff.tensorflow.computation(tff.TensorType(np.float32, [3]))
    def step(x):
        return x + 1

    @tff.federated_computation(tff.FederatedType(tff.TensorType(np.float32, [3]), tff.SERVER))
    def three_steps(x):
        for _ in range(3):
            x = tff.federated_map(step, x)
        return x

    original = execution.Run.server_value

    def noted(run, node):
        value = original(run, node)
        alive.append(len(run._server))
        return value

    monkeypatch.setattr(execution.Run, "server_value", noted)
    with tff.framework.get_context_stack().install(InProcessContext()):
        np.testing.assert_array_equal(three_steps(np.zeros(3, np.float32)), [3, 3, 3])
    assert alive and max(alive) == 0


def test_intrinsics():
    block = tff.federated_computation(
        lambda x: tff.federated_broadcast(tff.federated_sum(x)), INT_AT_CLIENTS).to_building_block()
    assert intrinsics(block) == {"federated_sum", "federated_broadcast"}
    assert intrinsics(double.to_building_block()) == set()


@pytest.mark.parametrize("keys", [1, 3])
def test_clients_with_equal_keys_get_one_slice(keys, in_process, monkeypatch):
    """A slice is cut again only when the key changes."""
    calls = []
    original = leaves.TensorFlowLeaf.__call__
    monkeypatch.setattr(leaves.TensorFlowLeaf, "__call__", lambda leaf, *arguments: calls.append(
        str(leaf.type_signature)) or original(leaf, *arguments))
    cut = tff.tensorflow.computation(lambda table, key: table[key],
                                     tff.TensorType(np.float32, [3]), np.int32)

    @tff.federated_computation(tff.FederatedType(tff.TensorType(np.int32, [1]), tff.CLIENTS),
                               tff.FederatedType(tff.TensorType(np.float32, [3]), tff.SERVER))
    def selected(keys, table):
        slices = tff.federated_select(keys, tff.federated_value(3, tff.SERVER), table, cut)
        total = tff.tensorflow.computation(
            lambda data: data.reduce(0.0, lambda a, b: a + b), slices.type_signature.member)
        return tff.federated_sum(tff.federated_map(total, slices))

    drawn = [np.array([number * keys // 12], np.int32) for number in range(12)]
    table = np.array([1, 10, 100], np.float32)
    with tff.framework.get_context_stack().install(in_process):
        assert selected(drawn, table) == sum(table[key[0]] for key in drawn)
    cuts = [call for call in calls if "key=int32" in call]
    assert 0 < len(cuts) <= keys * len(in_process.lanes), set(calls)
