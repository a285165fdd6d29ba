"""FEAST as a learning process, on two runtimes, against a plain re-implementation."""

from __future__ import annotations

import collections
import types

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from feast_tf import runtime
from feast_tf.aggregation import sparse_mean
from feast_tf.algorithms import build_feast, check_cohort, client_type
from feast_tf.routing import Routing
from feast_tf.seeding import stateless_seed
from feast_tf.space import SupernetSpec, VariantCache
from feast_tf.supernet import initial_weights
from feast_tf.training import ROLES, Augmentation, LocalTraining, local, local_update

SPEC = SupernetSpec(stem=4, bases=(4, 8), depths=(0, 1), widths=(0.5, 1.0), expansions=(0.5, 1.0),
                    strides=(1, 2), classes=3, image_size=8, divisor=2)
ROUTING = Routing(VariantCache(SPEC, [
    SPEC.variant(d=0, e=0.5, w=0.5),
    SPEC.variant(d=(0, 1), e=0.5, w=(0.5, 0.5, 1.0)),
    SPEC.variant(d=(1, 0), e=0.5, w=(0.5, 1.0, 0.5)),
    SPEC.variant(d=1, e=(0.5, 1.0), w=1.0),
]))
LAYOUT, TOP = ROUTING.layout, ROUTING.num_levels - 1
TRAINING = LocalTraining()
SEED, TOTAL_ROUNDS = -17, 4

S = (
    "<global_model_weights=<trainable=<float32[3,3,3,4],float32[4],float32[4],"
    "float32[3,3,4,4],float32[4],float32[4],float32[3,3,4,4],float32[4],float32[4],"
    "float32[1,1,4,4],float32[4],float32[4],"
    "float32[3,3,4,4],float32[4],float32[4],float32[3,3,4,4],float32[4],float32[4],"
    "float32[3,3,4,8],float32[8],float32[8],float32[3,3,8,8],float32[8],float32[8],"
    "float32[1,1,4,8],float32[8],float32[8],"
    "float32[3,3,8,8],float32[8],float32[8],float32[3,3,8,8],float32[8],float32[8],"
    "float32[8,3],float32[3]>,non_trainable=<>>,"
    "distributor=<>,client_work=int32,aggregator=<>,finalizer=<>>"
)
D = "<client=int32,level=int32,data=<x=uint8[?,8,8,3],y=int32[?]>*>"
M = (
    "<distributor=<bytes_down=int64>,client_work=<train=<loss_largest=float32,"
    "accuracy_largest=float32,loss_minimum=float32,accuracy_minimum=float32,"
    "distillation_minimum=float32,loss_random=float32,accuracy_random=float32,"
    "distillation_random=float32,examples=int64>>,"
    "aggregator=<bytes_up=int64,clients_with_data=int32,clients_without_data=int32,"
    "clients_refused=int32>,finalizer=<>>"
)


@pytest.fixture(scope="module", params=["in_process", "tff_worker"])
def feast(request):
    """The process, and the list of the traces of its co-training."""
    traces = []

    def traced_gradient(*args, **kwargs):
        traces.append(args)
        return original(*args, **kwargs)

    original = local.cotrain_gradient
    context_or_worker = runtime.use(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "cotrain_gradient", traced_gradient)
        process = build_feast(ROUTING, TRAINING, total_rounds=TOTAL_ROUNDS, seed=SEED)
        yield types.SimpleNamespace(process=process, traces=traces)
    if request.param == "tff_worker":
        context_or_worker.stop()


@pytest.fixture(scope="module")
def process(feast):
    return feast.process


@pytest.fixture(scope="module")
def state(process):
    """The state before the first round, with weights whose gammas and betas are not 1 and 0."""
    rng = np.random.default_rng(3)
    weights = tuple(np.asarray(weight) + rng.normal(0, 0.1, np.shape(weight)).astype(np.float32)
                    for weight in weights_of(process.initialize()))
    return with_weights(process, process.initialize(), weights)


def weights_of(state) -> list[np.ndarray]:
    return [np.array(weight) for weight in state.global_model_weights.trainable]


def with_weights(process, state, weights):
    return process.set_model_weights(state, tff.learning.models.ModelWeights(tuple(weights), ()))


def client(number: int, level: int, pictures: int, batch_size: int = 4) -> collections.OrderedDict:
    rng = np.random.default_rng(number)
    data = collections.OrderedDict(
        x=rng.integers(0, 256, [pictures, 8, 8, 3], np.uint8),
        y=rng.integers(0, SPEC.classes, pictures, np.int32))
    return collections.OrderedDict(
        client=np.int32(number), level=np.int32(level),
        data=tf.data.Dataset.from_tensor_slices(data).batch(batch_size))


@pytest.fixture(scope="module")
def local_work():
    """A client's local work as one graph of its own, without TFF."""
    @tf.function(reduce_retracing=True, input_signature=[
        tuple(tf.TensorSpec(p.elastic_shape) for p in LAYOUT.parameters),
        tf.TensorSpec([], tf.int32),
        tf.data.DatasetSpec(collections.OrderedDict(x=tf.TensorSpec([None, 8, 8, 3], tf.uint8),
                                                    y=tf.TensorSpec([None], tf.int32))),
        tf.TensorSpec([2], tf.int32), tf.TensorSpec([])])
    def run(slices, level, dataset, seed, rate):
        return local_update(LAYOUT, TRAINING, tf.constant(ROUTING.variant_dims), slices, level,
                            dataset, seed, rate)

    return run


def plain_round(local_work, weights, cohort, round_num):
    """One round by the paper: cut, train, mean. Returns new weights and the summed statistics."""
    contributions, statistics = [], 0
    for member in cohort:
        slices = LAYOUT.cut(weights, ROUTING.envelope_dims[member["level"]])
        stream = tf.constant(stateless_seed(SEED, "local training"))
        for part in (round_num, int(member["client"])):
            stream = tf.random.experimental.stateless_fold_in(stream, part)
        rate = 0.1 * (1 + np.cos(np.pi * round_num / TOTAL_ROUNDS)) / 2
        result = local_work(tuple(map(tf.constant, slices)), tf.constant(member["level"]),
                            member["data"], stream, tf.constant(rate, tf.float32))
        contributions.append((int(result.num_examples), [part.numpy() for part in result.update]))
        statistics = statistics + result.metrics.numpy()
    return sparse_mean(weights, contributions), statistics


def assert_same_bits(ours, theirs):
    assert [part.tobytes() for part in ours] == [part.tobytes() for part in theirs]


MIXED = [(3, 0, 5), (11, 2, 9), (4, TOP, 6), (8, 1, 4), (9, 0, 3)]


def cohort_of(members) -> list[collections.OrderedDict]:
    return [client(*member) for member in members]


def test_type_signatures(process):
    assert str(client_type(ROUTING)) == D
    assert str(process.initialize.type_signature) == f"( -> {S}@SERVER)"
    assert str(process.next.type_signature) == (
        f"(<state={S}@SERVER,clients={{{D}}}@CLIENTS> -> <state={S}@SERVER,metrics={M}@SERVER>)")


def test_metrics_are_those_of_the_trained_roles():
    training = LocalTraining(rule="min_max", augmentation=Augmentation.none())
    process = build_feast(ROUTING, training, total_rounds=1)
    metrics = process.next.type_signature.result.metrics.member
    assert str(metrics.client_work.train) == (
        "<loss_largest=float32,accuracy_largest=float32,loss_minimum=float32,"
        "accuracy_minimum=float32,examples=int64>")


def test_initial_state(process):
    state = process.initialize()
    assert state.client_work == 0
    assert_same_bits(weights_of(state), [w.numpy() for w in initial_weights(LAYOUT, SEED)])


def test_rounds_are_those_of_the_paper(process, state, local_work):
    cohort, weights = cohort_of(MIXED), weights_of(state)
    for round_num in range(2):
        output = process.next(state, cohort)
        expected, statistics = plain_round(local_work, weights, cohort, round_num)
        state, weights = output.state, weights_of(output.state)
        assert state.client_work == round_num + 1
        for parameter, ours, theirs in zip(LAYOUT.parameters, weights, expected):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5, err_msg=parameter.name)
        train = output.metrics["client_work"]["train"]
        assert train["examples"] == 27
        for role, row in zip(ROLES, statistics):
            supervised, distillation, correct, examples = row
            assert train[f"loss_{role}"] == pytest.approx(supervised / examples, rel=1e-4)
            assert train[f"accuracy_{role}"] == pytest.approx(correct / examples, rel=1e-4)
            if role != "largest":
                assert train[f"distillation_{role}"] == pytest.approx(distillation / examples,
                                                                      rel=1e-4)


def test_bytes_are_those_of_the_envelopes(process, state):
    metrics = process.next(state, cohort_of(MIXED)).metrics
    payload = sum(ROUTING.envelope(level).payload_bytes for _, level, _ in MIXED)
    assert payload == 4 * (2 * 409 + 2765 + 2903 + 953)
    assert metrics["distributor"]["bytes_down"] == metrics["aggregator"]["bytes_up"] == payload


@pytest.mark.parametrize("level", range(TOP + 1))
def test_client_changes_its_own_envelope_only(process, state, level):
    before, after = weights_of(state), weights_of(process.next(state, [client(2, level, 6)]).state)
    for place, (old, new) in enumerate(zip(before, after)):
        inside = LAYOUT.prefix(place, ROUTING.envelope_dims[level])
        assert old[inside].size == 0 or np.any(old[inside] != new[inside])
        new[inside] = old[inside]
        assert old.tobytes() == new.tobytes(), LAYOUT.parameters[place].name


def test_learning_rate_0_keeps_all_bits(process, state):
    weights = weights_of(state)
    weights[0].flat[:2] = -0.0, 1e-42
    state = with_weights(process, state, weights)._replace(client_work=TOTAL_ROUNDS)
    output = process.next(state, cohort_of(MIXED))
    assert_same_bits(weights_of(output.state), weights)
    assert output.metrics["aggregator"]["clients_with_data"] == 5


def test_client_without_pictures_changes_nothing_for_the_others(process, state):
    alone = process.next(state, cohort_of(MIXED))
    among = process.next(state, cohort_of([MIXED[0], (5, TOP, 0), *MIXED[1:]]))
    assert_same_bits(weights_of(among.state), weights_of(alone.state))
    assert among.metrics["client_work"] == alone.metrics["client_work"]
    counts = among.metrics["aggregator"]
    assert (counts["clients_with_data"], counts["clients_without_data"]) == (5, 1)


def test_cohort_without_pictures_changes_nothing(process, state):
    output = process.next(state, cohort_of([(1, 0, 0), (2, TOP, 0)]))
    assert_same_bits(weights_of(output.state), weights_of(state))
    counts = output.metrics["aggregator"]
    assert (counts["clients_with_data"], counts["clients_without_data"]) == (0, 2)
    assert all(value == 0 for value in output.metrics["client_work"]["train"].values())


def test_empty_cohort_only_counts_the_round(process, state):
    output = process.next(state, [])
    assert_same_bits(weights_of(output.state), weights_of(state))
    assert output.state.client_work == 1 and output.metrics["distributor"]["bytes_down"] == 0


def test_roles_that_nobody_trained_are_0(process, state):
    train = process.next(state, [client(6, 0, 5)]).metrics["client_work"]["train"]
    assert train["loss_largest"] > 0 and train["examples"] == 5
    assert all(value == 0 for name, value in train.items() if name.endswith(("minimum", "random")))


def test_client_that_diverges_is_left_out_of_weights_and_losses(process, state):
    weights = weights_of(state)
    place = next(place for place, parameter in enumerate(LAYOUT.parameters)
                 if parameter.name == "stem/gamma")
    weights[place][-1] = np.nan  # beyond the envelope of level 0
    state = with_weights(process, state, weights)
    healthy = [client(3, 0, 5), client(9, 0, 3)]
    alone, among = process.next(state, healthy), process.next(state, [*healthy, client(4, TOP, 6)])
    assert_same_bits(weights_of(among.state), weights_of(alone.state))
    assert np.isnan(weights_of(among.state)[place]).tolist() == [False, False, False, True]
    counts = among.metrics["aggregator"]
    assert (counts["clients_with_data"], counts["clients_refused"]) == (2, 1)
    for name, value in among.metrics["client_work"]["train"].items():
        assert value == (14 if name == "examples" else alone.metrics["client_work"]["train"][name])


@pytest.mark.parametrize("level", [-1, TOP + 1])
def test_level_outside_the_cache_stops_the_round(process, state, level):
    message = rf"client\D*77\D*has the level\D*{level}\D*but levels lie in 0..{TOP}"
    with pytest.raises(RuntimeError, match=message):
        process.next(state, [client(1, 0, 5), client(77, level, 5)])
    process.next(state, [client(1, 0, 5)])  # the runtime goes on


def test_randomness_is_of_seed_round_and_client(process, state):
    run = lambda state, number: weights_of(process.next(state, [
        collections.OrderedDict(client(1, TOP, 8), client=np.int32(number))]).state)
    first, again = run(state, 1), run(state, 1)
    assert_same_bits(first, again)
    later = run(state._replace(client_work=1), 1)
    for other in (run(state, 2), later):
        assert any(np.any(one != two) for one, two in zip(first, other))


def test_model_weights_round_trip(process, state):
    output = process.next(state, cohort_of(MIXED[:2]))
    weights = process.get_model_weights(output.state)
    assert isinstance(weights, tff.learning.models.ModelWeights)
    assert_same_bits(map(np.asarray, weights.trainable), weights_of(output.state))
    again = process.set_model_weights(state, weights)
    assert_same_bits(weights_of(again), weights_of(output.state))
    assert again.client_work == 0


def test_no_traces_after_the_build(feast, state):
    traces = len(feast.traces)
    assert traces > 0
    for members in (MIXED[:2], MIXED, MIXED[1:2]):
        state = feast.process.next(state, cohort_of(members)).state
    assert len(feast.traces) == traces


def test_runs_in_tff_s_training_loop(process):
    rounds = []
    state = tff.simulation.run_training_process(
        process, lambda round_num: cohort_of(MIXED[:round_num]), total_rounds=2,
        metrics_managers=[types.SimpleNamespace(release=record(rounds))])
    assert state.client_work == 2
    assert [row["client_work"]["train"]["examples"] for row in rounds if "client_work" in row] == [
        5, 14]


def record(rows: list):
    async def release(value, key):
        rows.append(value)

    return release


@pytest.mark.parametrize("rounds", [0, -1])
def test_schedule_needs_rounds(rounds):
    with pytest.raises(ValueError, match=f"^total_rounds must be at least 1, but is {rounds}$"):
        build_feast(ROUTING, TRAINING, total_rounds=rounds)


def test_check_cohort():
    check_cohort([{"client": 5, "level": 0}, {"client": 6, "level": 3}], 4)
    with pytest.raises(ValueError, match="^the cohort is empty: a round needs at least one client"):
        check_cohort([], 4)
    for level in (-1, 4):
        cohort = [{"client": 5, "level": 0}, {"client": np.int32(77), "level": np.int32(level)}]
        message = rf"^client 77 has the level {level}, but levels lie in 0\.\.3$"
        with pytest.raises(ValueError, match=message):
            check_cohort(cohort, 4)
