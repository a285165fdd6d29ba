"""The parts of a sliced process, joined and apart, worked out by hand on three numbers."""

from __future__ import annotations

import asyncio
import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from feast_tf import runtime
from feast_tf.aggregation import SlicedMeanFactory, hold_unreported, slices_type, weights_type
from feast_tf.algorithms import (build_client_work, build_distributor, build_mean_finalizer,
                                 build_sliced_process, compose_member_computation,
                                 compose_sliced_process, member_type)
from feast_tf.routing import SliceMap
from feast_tf.training import LocalResult

SLICES = SliceMap(("vector",), ((3,),), (np.array([[1], [2], [3]], np.int32),))
START = [1.0, 2.0, 4.0]
BATCHES = tff.SequenceType(tff.TensorType(np.float32, [None]))
F32 = tff.TensorType(np.float32)


@pytest.fixture(scope="module", autouse=True)
def in_process():
    runtime.use("in_process")


def train(received, client, level, data, round_num):
    """The client's new weights are the mean of its numbers, plus 100 a round."""
    del level
    total, count = tf.constant(0.0), tf.constant(0)
    for batch in iter(data):
        total += tf.reduce_sum(batch)
        count += tf.size(batch)
    mean = tf.math.divide_no_nan(total, tf.cast(count, tf.float32))
    mean += 100.0 * tf.cast(round_num, tf.float32)
    return LocalResult(tuple(mean - part for part in received), count,
                       tf.stack([total, tf.cast(client, tf.float32)]))


def report(sums):
    return collections.OrderedDict(total=sums[0], clients=sums[1])


@tff.tensorflow.computation
def initial():
    return tff.learning.models.ModelWeights((tf.constant(START),), ())


CLIENT_WORK = build_client_work(SLICES, train, report, batches=BATCHES)
MODEL_TYPE = initial.type_signature.result


@pytest.fixture(scope="module")
def process():
    return build_sliced_process(initial, SLICES, CLIENT_WORK)


def client(number, level, numbers):
    return collections.OrderedDict(
        client=np.int32(number), level=np.int32(level),
        data=tf.data.Dataset.from_tensor_slices(np.float32(numbers)).batch(2))


def cohort():
    """Mean 10 of 1 number, and 2 of 3: the first position gets (10 + 3 * 2) / 4."""
    return [client(5, 0, [10.0]), client(7, 1, [1.0, 4.0, 1.0])]


def vector(state):
    return np.asarray(state.global_model_weights.trainable[0])


# --- each part


def test_types_of_the_parts():
    w, w_slice, key = "<float32[3]>", "<float32[?]>", "<client=int32,level=int32>"
    assert str(member_type(BATCHES)) == "<client=int32,level=int32,data=float32[?]*>"
    distributor = build_distributor(SLICES)
    assert str(distributor.initialize.type_signature) == "( -> <>@SERVER)"
    assert str(distributor.next.type_signature) == (
        f"(<state=<>@SERVER,weights={w}@SERVER,keys={{{key}}}@CLIENTS> -> <state=<>@SERVER,"
        f"result={{{w_slice}}}@CLIENTS,measurements=<bytes_down=int64>@SERVER>)")
    assert str(CLIENT_WORK.initialize.type_signature) == "( -> int32@SERVER)"
    assert str(CLIENT_WORK.next.type_signature) == (
        f"(<state=int32@SERVER,weights={{<slices={w_slice},key={key}>}}@CLIENTS,"
        f"data={{float32[?]*}}@CLIENTS> -> <state=int32@SERVER,"
        f"result={{<update={w_slice},update_weight=float32>}}@CLIENTS,"
        "measurements=<train=<total=float32,clients=float32,examples=int64>>@SERVER>)")
    model = f"<trainable={w},non_trainable=<>>"
    assert str(build_mean_finalizer(MODEL_TYPE).next.type_signature) == (
        f"(<state=<>@SERVER,weights={model}@SERVER,update={w}@SERVER> -> "
        f"<state=<>@SERVER,result={model}@SERVER,measurements=<>@SERVER>)")


def test_types_of_the_process(process):
    assert isinstance(process, tff.learning.templates.LearningProcess)
    state = ("<global_model_weights=<trainable=<float32[3]>,non_trainable=<>>,distributor=<>,"
             "client_work=int32,aggregator=<>,finalizer=<>>")
    assert str(process.next.type_signature) == (
        f"(<state={state}@SERVER,clients={{<client=int32,level=int32,data=float32[?]*>}}@CLIENTS>"
        f" -> <state={state}@SERVER,metrics=<distributor=<bytes_down=int64>,client_work=<train="
        "<total=float32,clients=float32,examples=int64>>,aggregator=<bytes_up=int64,"
        "clients_with_data=int32,clients_without_data=int32,clients_refused=int32>,finalizer=<>>"
        "@SERVER>)")


def test_distributor_cuts_each_client_s_slice():
    distributor = build_distributor(SLICES)
    keys = [dict(client=np.int32(number), level=np.int32(level))
            for number, level in ((3, 2), (8, 0), (9, 1))]
    output = distributor.next(distributor.initialize(), (np.float32(START),), keys)
    assert [parts[0].tolist() for parts in output.result] == [[1, 2, 4], [1], [1, 2]]
    assert output.measurements["bytes_down"] == 4 * (3 + 1 + 2)


def test_distributor_names_the_client_of_a_level_that_is_not_there():
    distributor = build_distributor(SLICES)
    with pytest.raises(RuntimeError, match=r"client\D*6\D*has the level\D*3\D*levels lie in 0..2"):
        distributor.next(distributor.initialize(), (np.float32(START),),
                         [dict(client=np.int32(6), level=np.int32(3))])


def test_client_work_returns_what_is_to_be_subtracted():
    received = [dict(slices=(np.float32(START[:level + 1]),),
                     key=dict(client=np.int32(number), level=np.int32(level)))
                for number, level in ((5, 0), (7, 1))]
    output = CLIENT_WORK.next(1, received, [member["data"] for member in cohort()])
    assert [result.update[0].tolist() for result in output.result] == [
        [1 - 110], [1 - 102, 2 - 102]]
    assert [result.update_weight for result in output.result] == [1, 3]
    assert output.state == 2
    assert output.measurements["train"] == dict(total=16, clients=12, examples=4)


def test_mean_finalizer_keeps_bits_where_the_mean_is_0():
    weights = np.array([-0.0, 1e-42, 5.0], np.float32)
    finalizer = build_mean_finalizer(MODEL_TYPE)
    result = finalizer.next(finalizer.initialize(),
                            tff.learning.models.ModelWeights((weights,), ()),
                            (np.array([0.0, -0.0, 3.0], np.float32),)).result
    assert result.trainable[0].tobytes() == np.array([-0.0, 1e-42, 2.0], np.float32).tobytes()


# --- the whole


def test_round_by_hand(process):
    output = process.next(process.initialize(), cohort())
    np.testing.assert_allclose(vector(output.state), [(10 + 3 * 2) / 4, 2, 4])
    assert output.metrics["distributor"] == dict(bytes_down=4 * (1 + 2))
    assert output.metrics["aggregator"] == dict(bytes_up=4 * (1 + 2), clients_with_data=2,
                                                clients_without_data=0, clients_refused=0)
    output = process.next(output.state, cohort()[:1])
    np.testing.assert_allclose(vector(output.state), [110, 2, 4])
    assert output.state.client_work == 2


def test_metrics_of_a_client_that_diverges_are_left_out(process):
    output = process.next(process.initialize(), [*cohort(), client(9, 2, [np.inf, 1.0])])
    np.testing.assert_allclose(vector(output.state), [4, 2, 4])
    assert output.metrics["client_work"]["train"] == dict(total=16, clients=12, examples=6)
    assert output.metrics["aggregator"]["clients_refused"] == 1


def test_server_optimizer_holds_what_nobody_reports():
    process = build_sliced_process(
        initial, SLICES, CLIENT_WORK,
        server_optimizer=tff.learning.optimizers.build_sgdm(0.5, momentum=0.5))
    state = process.next(process.initialize(), cohort()).state
    # Mean updates 1 - 4 and 2 - 2, which is 0 and so is held as well.
    np.testing.assert_allclose(vector(state), [1 + 0.5 * 3, 2, 4])
    output = process.next(state, [client(5, 1, [-98.0])])  # its new weights: -98 + 100
    # Momentum 0.5 * -3 + (2.5 - 2) = -1 at the first position; the second is reported as 0 again.
    np.testing.assert_allclose(vector(output.state), [2.5 + 0.5 * 1, 2, 4])
    assert str(output.state.finalizer["accumulator"][0].tolist()) == "[-1.0, 0.0, 0.0]"
    assert output.metrics["finalizer"] == dict(update_non_finite=0)


def test_aggregator_in_a_wrapper():
    process = build_sliced_process(
        initial, SLICES, CLIENT_WORK,
        aggregator=tff.aggregators.clipping_factory(1.5, SlicedMeanFactory(SLICES)))
    output = process.next(process.initialize(), cohort())
    # Updates [-9] and [-1, 0], of which the first is clipped to [-1.5].
    np.testing.assert_allclose(vector(output.state), [1 + (1.5 + 3 * 1) / 4, 2, 4])
    assert output.metrics["aggregator"]["clipped_count"] == 1
    assert output.metrics["aggregator"]["clipping"]["bytes_up"] == 12


def test_secure_sums_in_the_process():
    process = build_sliced_process(
        initial, SLICES, CLIENT_WORK, aggregator=SlicedMeanFactory(
            SLICES, tff.aggregators.SecureSumFactory(100.0),
            tff.aggregators.SecureSumFactory(float(2**20 - 1), 0.0)))
    state = process.next(process.initialize(), cohort()).state
    np.testing.assert_allclose(vector(state), [4, 2, 4], rtol=1e-6)
    assert vector(state)[2] == 4


def test_hyperparameters():
    process = build_sliced_process(initial, SLICES, CLIENT_WORK,
                                   server_optimizer=tff.learning.optimizers.build_sgdm(0.5))
    state = process.initialize()
    assert process.get_hparams(state) == dict(client_work={}, finalizer=dict(learning_rate=0.5))
    state = process.set_hparams(state, collections.OrderedDict(
        client_work=collections.OrderedDict(),
        finalizer=collections.OrderedDict(learning_rate=np.float32(0.25))))
    np.testing.assert_allclose(vector(process.next(state, cohort()).state), [1 + 0.25 * 3, 2, 4])


def test_weights_are_replaced_and_nothing_else(process):
    state = process.next(process.initialize(), cohort()).state
    again = process.set_model_weights(
        state, tff.learning.models.ModelWeights((np.float32([7, 8, 9]),), ()))
    assert vector(again).tolist() == [7, 8, 9] and again.client_work == 1
    assert process.get_model_weights(again).trainable[0].tolist() == [7, 8, 9]


# --- TFF's own loops and managers


@pytest.fixture(scope="module")
def process_of_ids(process):
    """Whose clients bring "5" or "7", and make the same of it as `cohort` does."""
    @tff.tensorflow.computation(np.str_)
    def member(client_id):
        number = tf.strings.to_number(client_id, tf.int32)
        first = tf.equal(number, 5)
        numbers = tf.where(first, [[10.0, 0.0, 0.0]], [[1.0, 4.0, 1.0]])[0]
        numbers = tf.boolean_mask(numbers, numbers > 0)
        return collections.OrderedDict(
            client=number, level=tf.where(first, 0, 1),
            data=tf.data.Dataset.from_tensor_slices(numbers).batch(2))

    return compose_member_computation(member, process)


def test_process_of_ids_is_the_same_but_for_its_clients(process, process_of_ids):
    assert process_of_ids.initialize is process.initialize
    assert process_of_ids.get_model_weights is process.get_model_weights
    assert process_of_ids.get_hparams is process.get_hparams
    assert process_of_ids.set_hparams is process.set_hparams
    assert str(process_of_ids.next.type_signature.parameter[1]) == "{str}@CLIENTS"
    output = process_of_ids.next(process_of_ids.initialize(), ["5", "7"])
    np.testing.assert_allclose(vector(output.state), [4, 2, 4])


def run_program(process, folder, rounds):
    """TFF's training program with managers of every kind; returns (checkpoints, metrics)."""
    models, metrics = tff.program.MemoryReleaseManager(), tff.program.MemoryReleaseManager()
    managers = [metrics, tff.program.LoggingReleaseManager(),
                tff.program.CSVFileReleaseManager(folder / "metrics.csv"),
                tff.program.TensorBoardReleaseManager(folder / "logdir")]
    context = tff.program.NativeFederatedContext(
        runtime.InProcessAsyncContext(runtime.InProcessContext()))
    with tff.framework.get_context_stack().install(context):
        asyncio.run(tff.learning.programs.train_model(
            train_process=process, train_data_source=tff.program.ClientIdDataSource(["5", "7"]),
            train_per_round_clients=2, train_total_rounds=rounds, model_output_manager=models,
            program_state_manager=tff.program.FileProgramStateManager(folder / "state"),
            train_metrics_manager=tff.program.GroupingReleaseManager(managers),
            evaluation_manager=None, evaluation_periodicity=1))
    return models.values(), metrics.values()


def test_train_model_and_resuming(process, process_of_ids, tmp_path):
    models, _ = run_program(process_of_ids, tmp_path / "whole", 3)
    run_program(process_of_ids, tmp_path / "parts", 1)
    resumed, metrics = run_program(process_of_ids, tmp_path / "parts", 3)
    assert sorted(metrics) == [2, 3]
    expected = process.initialize()
    for _ in range(3):
        expected = process.next(expected, cohort()).state
    for found in (models, resumed):
        state = found["training_checkpoint_round_3"]
        np.testing.assert_allclose(vector(state), vector(expected), rtol=1e-6)
    rows = (tmp_path / "parts" / "metrics.csv").read_text().splitlines()
    assert "model_metrics/total" in rows[0].split(",") and "distributor/bytes_down" in rows[0]
    assert [row[0] for row in rows[1:]] == list("123")


def test_run_training_process(process):
    asyncio.set_event_loop(asyncio.new_event_loop())  # TFF uses the thread's
    released = tff.program.MemoryReleaseManager()
    state = tff.simulation.run_training_process(
        process, lambda round_num: cohort()[round_num - 1:], total_rounds=2,
        metrics_managers=[released])
    np.testing.assert_allclose(vector(state), [102, 102, 4])
    assert [values["client_work"]["train"]["examples"]
            for _, values in sorted(released.values().items()) if "client_work" in values] == [4, 3]


# --- parts that do not fit


OTHER = SliceMap(("vector",), ((4,),), (np.array([[1], [2], [4]], np.int32),))


def parts(**replaced):
    return {**dict(
        initial_weights=initial, distributor=build_distributor(SLICES), client_work=CLIENT_WORK,
        aggregator=SlicedMeanFactory(SLICES).create(slices_type(SLICES), F32),
        finalizer=build_mean_finalizer(MODEL_TYPE)), **replaced}


@pytest.mark.parametrize("name, part, match", [
    ("initial_weights", START, "must be a Computation, but is a list$"),
    ("distributor", SLICES, "must be a MeasuredProcess, but is a SliceMap$"),
    ("distributor", tff.learning.templates.build_broadcast_process(MODEL_TYPE),
     "must take a state, weights and the clients' keys$"),
    ("client_work", train, "must be a ClientWorkProcess, but is a function$"),
    ("aggregator", SlicedMeanFactory(SLICES), "must be a AggregationProcess, but is a SlicedMean"),
    ("aggregator", tff.aggregators.SumFactory().create(weights_type(SLICES)), "must be weighted$"),
    ("finalizer", None, "must be a FinalizerProcess, but is a NoneType$"),
    ("distributor", build_distributor(OTHER), "does not take what initial_weights gives: it takes "
     r"<float32\[4\]>, but is given <float32\[3\]>"),
    ("aggregator", tff.aggregators.MeanFactory().create(weights_type(SLICES), F32),
     r"does not take what client_work gives: it takes <float32\[3\]>, but is given <float32\[\?\]"),
    ("aggregator", SlicedMeanFactory(OTHER).create(slices_type(OTHER), F32),
     "finalizer does not take what aggregator gives: "),
], ids=lambda value: value if isinstance(value, str) and " " not in value else "")
def test_parts_that_do_not_fit(name, part, match):
    with pytest.raises(TypeError, match=match if match.startswith("finalizer") else
                       f"^{name} {match}") as error:
        compose_sliced_process(**parts(**{name: part}))
    assert len(str(error.value)) < 600


def test_members_of_another_kind(process):
    other = tff.tensorflow.computation(lambda number: (number, number), np.int32)
    with pytest.raises(TypeError, match="^member must give <client=int32,.* gives <int32,int32>$"):
        compose_member_computation(other, process)


@pytest.mark.parametrize("aggregator", [tff.aggregators.SumFactory(), 3], ids=["sum", "number"])
def test_aggregator_of_another_kind(aggregator):
    with pytest.raises(TypeError, match="^aggregator must be a tff.*WeightedAggregationFactory, "):
        build_sliced_process(initial, SLICES, CLIENT_WORK, aggregator=aggregator)


def test_server_optimizer_of_another_kind():
    with pytest.raises(TypeError, match="^optimizer must be a tff.learning.optimizers.Optimizer, "):
        build_sliced_process(initial, SLICES, CLIENT_WORK, server_optimizer=0.1)


def test_a_held_optimizer_may_be_given_as_well():
    optimizer = hold_unreported(tff.learning.optimizers.build_adam(0.1))
    process = build_sliced_process(initial, SLICES, CLIENT_WORK, server_optimizer=optimizer)
    state = process.next(process.initialize(), cohort()).state
    np.testing.assert_allclose(vector(state), [1.1, 2, 4], rtol=1e-5)
