"""The in-process runtime: errors, threads, caches, devices, memory."""

from __future__ import annotations

import gc
import os
from pathlib import Path
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from feast_tf import runtime
from feast_tf.runtime.in_process import cpu_lanes
from feast_tf.runtime import ComputationError, InProcessContext, in_process, leaves, values

ROOT = Path(__file__).resolve().parents[2]
INTS = tff.SequenceType(np.int32)
at_clients = lambda type_spec: tff.FederatedType(type_spec, tff.CLIENTS)


@pytest.fixture(params=[1, 2], ids=["one lane", "two lanes"])
def context(request):
    """The default context of a test, with nothing in its caches."""
    context = InProcessContext(devices=["/device:CPU:0", "/device:CPU:1"][:request.param])
    with tff.framework.get_context_stack().install(context):
        yield context


def two_lanes() -> InProcessContext:
    return InProcessContext(devices=["/device:CPU:0", "/device:CPU:1"])


@tff.tensorflow.computation(np.int32)
def small_only(x):
    with tf.control_dependencies([tf.debugging.assert_less(x, 10, "ten is the limit")]):
        return tf.identity(x)


@tff.federated_computation(at_clients(np.int32))
def sum_of_small(x):
    return tff.federated_sum(tff.federated_map(small_only, x))


@tff.tensorflow.computation(INTS)
@tf.function
def total(data):
    result = 0
    for x in iter(data):
        result += x
    return result


@tff.federated_computation(at_clients(INTS))
def sum_of_data(data):
    return tff.federated_sum(tff.federated_map(total, data))


def generated(make, dtype=tf.int32) -> tf.data.Dataset:
    return tf.data.Dataset.from_generator(make, output_signature=tf.TensorSpec([], dtype))


# --- errors: one line with the computation, the client and the cause


def check_one_line(error, *parts):
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("failing", [0, 3, 5])
def test_a_client_that_fails_is_named(failing, context):
    values_of_clients = [1] * 6
    values_of_clients[failing] = 11
    with pytest.raises(ComputationError) as error:
        sum_of_small(values_of_clients)
    check_one_line(error, f"sum_of_small: client {failing} of 6: InvalidArgumentError",
                   "ten is the limit")
    assert isinstance(error.value.__cause__, tf.errors.InvalidArgumentError)
    assert sum_of_small([1, 2, 9]) == 12  # the context is as good as new


def test_a_failure_inside_a_data_set(context):
    def records():
        yield 1
        raise ValueError("record 2 is broken")

    with pytest.raises(ComputationError) as error:
        sum_of_data([[1, 2], generated(records)])
    check_one_line(error, "sum_of_data: client 1 of 2", "ValueError: record 2 is broken")


@pytest.mark.parametrize("message", [
    "Graph execution error:\n\nDetected at node A defined at (most recent call last):\n"
    "  File \"x.py\", line 1, in <module>\n\nthe cause\n\t [[{{node A}}]] [Op:__inference_f_1]",
    "Graph execution error:\n\n2 root error(s) found.\n  (0) INVALID_ARGUMENT:  the cause\n"
    "\t [[{{node A}}]]\n  (1) INVALID_ARGUMENT:  another\n\t [[{{node B}}]]",
    "the cause", "the cause [Op:Gather]"])
def test_the_cause_of_tensorflows_errors(message):
    from feast_tf.runtime.execution import cause

    assert cause(ValueError(message)) == "ValueError: the cause"


def test_an_error_without_a_message():
    from feast_tf.runtime.execution import cause

    assert cause(KeyError()) == "KeyError: no message"


def test_a_failure_at_the_server(context):
    @tff.federated_computation(tff.FederatedType(np.int32, tff.SERVER))
    def checked(x):
        return tff.federated_map(small_only, x)

    with pytest.raises(ComputationError) as error:
        checked(12)
    check_one_line(error, "checked: at the server: InvalidArgumentError", "ten is the limit")


def test_a_failure_without_placements(context):
    with pytest.raises(ComputationError) as error:
        small_only(12)
    check_one_line(error, "computation: InvalidArgumentError", "ten is the limit")


@pytest.mark.parametrize("call, message", [
    (lambda: sum_of_small([1, "x"]), "sum_of_small: client 1 of 2: TypeError: Cannot convert 'x'"),
    (lambda: sum_of_small([1, 1.5]), "client 1 of 2: TypeError: Cannot convert 1.5"),
    (lambda: sum_of_small([np.int64(2**40)]), "a value of int64 does not fit int32"),
    (lambda: sum_of_small([np.float32(2)]), "a value of float32 does not fit int32"),
    (lambda: sum_of_small([tf.constant(2, tf.int64)]), "a value of int64 does not fit int32"),
    (lambda: sum_of_small([[1, 2]]), r"a tensor of shape \(2,\) does not fit int32"),
    (lambda: small_only([1, 2]), r"computation: TypeError: a tensor of shape \(2,\) does not fit"),
    (lambda: sum_of_data([1]), "a sequence must be a tf.data.Dataset or a list, not .*int"),
    (lambda: sum_of_data([tf.data.Dataset.range(2)]), "a data set of .*int64.* is not a sequence of"),
    (lambda: sum_of_data([tf.data.Dataset.from_tensors((1, 2))]), "is not a sequence of int32"),
])
def test_values_of_wrong_types(call, message, context):
    with pytest.raises(ComputationError, match=message):
        call()


@pytest.mark.parametrize("value", [3, None, np.array([1, 2], np.int32)])
def test_client_values_that_are_no_list(value, context):
    with pytest.raises(TypeError, match="sum_of_small: the values of {int32}@CLIENTS must be a list"):
        sum_of_small(value)


def test_cohorts_of_different_sizes(context):
    @tff.federated_computation(at_clients(np.int32), at_clients(np.int32))
    def product(x, y):
        return tff.federated_sum(x), tff.federated_sum(y)

    with pytest.raises(ValueError, match="product: 2 clients in one argument, 3 in another"):
        product([1, 2], [1, 2, 3])


def test_keys_that_select_nothing(context):
    @tff.federated_computation(at_clients(tff.TensorType(np.int32, [1])),
                               tff.FederatedType(tff.TensorType(np.int32, [3]), tff.SERVER))
    def selected(keys, table):
        pick = tff.tensorflow.computation(lambda table, key: table[key],
                                          tff.TensorType(np.int32, [3]), np.int32)
        return tff.federated_select(keys, tff.federated_value(3, tff.SERVER), table, pick)

    keys = [np.array([key], np.int32) for key in (0, 7)]
    with pytest.raises(ComputationError, match="selected: client 1 of 2: .*slice index 7"):
        selected(keys, np.array([1, 2, 3], np.int32))


def test_an_intrinsic_that_it_does_not_have(context, monkeypatch):
    monkeypatch.setattr(in_process, "intrinsics", lambda block: set())
    secure = tff.federated_computation(lambda x: tff.federated_secure_sum(x, 7),
                                       at_clients(np.int32))
    with pytest.raises(NotImplementedError, match="no 'federated_secure_sum'"):
        secure([1, 2])


def test_an_aggregate_whose_functions_capture(context):
    add = tff.tensorflow.computation(lambda a, b: a + b, np.int32, np.int32)

    @tff.federated_computation(np.int32, at_clients(np.int32))
    def shifted(by, x):
        accumulate = tff.federated_computation(lambda a, b: add(add(a, b), by), np.int32, np.int32)
        report = tff.federated_computation(lambda a: a, np.int32)
        return tff.federated_aggregate(x, 0, accumulate, add, report)

    with pytest.raises(NotImplementedError, match="federated_aggregate whose functions use values"):
        shifted(5, [1, 2])


# --- interruption, threads, re-entrancy


def lane_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "feast-lane" in thread.name]


def test_ctrl_c_ends_the_wave_after_the_current_clients(context):
    started = []

    def records(client):
        started.append(client)
        if client == 2:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)  # the main thread must get its turn
        yield 1

    clients = [generated(lambda client=client: records(client)) for client in range(40)]
    sum_of_data([[1]])  # compiled
    with pytest.raises(KeyboardInterrupt):
        sum_of_data(clients)
    assert len(started) < 40
    assert lane_threads() == []
    assert sum_of_data([[1], [2, 3]]) == 6


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failing_lane_stops_the_others(failing):
    context = two_lanes()
    seen, failed = [], threading.Event()

    def fails():
        failed.set()
        raise ValueError("broken")
        yield

    def waits(client):
        seen.append(client)
        failed.wait(10)
        yield 1

    clients = [generated(fails if client == failing else lambda client=client: waits(client))
               for client in range(60)]
    with tff.framework.get_context_stack().install(context):
        with pytest.raises(ComputationError, match=f"client {failing} of 60: .*broken"):
            sum_of_data(clients)
    assert len(seen) < 6  # no further ahead than lanes may run
    assert lane_threads() == []


def test_generators_are_closed(context):
    closed = []

    def endless(client):
        try:
            while True:
                yield client
        finally:
            closed.append(client)

    clients = [generated(lambda client=client: endless(client)).take(3) for client in range(3)]
    assert sum_of_data(clients) == 9
    gc.collect()
    assert sorted(closed) == [0, 1, 2]


def test_threads_that_invoke_at_once(context):
    wrong = []

    def work(number):
        with tff.framework.get_context_stack().install(context):
            for repetition in range(10):
                clients = [number, repetition, 1]
                if sum_of_small(clients) != sum(clients):
                    wrong.append(clients)
                if sum_of_data([clients, [number]]) != sum(clients) + number:
                    wrong.append((clients, number))

    threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_data_set_that_runs_computations(context):
    def records():
        yield int(sum_of_small([1, 2, 3]))

    def in_context():  # generators run in threads of TensorFlow's, which have no default context
        with tff.framework.get_context_stack().install(context):
            yield from records()

    assert sum_of_data([generated(in_context) for _ in range(4)]) == 24


BATCH_NORMALISATION = """
import sys, threading
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from feast_tf import runtime

@tff.tensorflow.computation(tff.TensorType(np.float32, [None] * 4))
def normalised(x):
    channels = tf.shape(x)[-1]
    with tf.GradientTape() as tape:
        tape.watch(x)
        y, *_ = tf.raw_ops.FusedBatchNormV3(
            x=x, scale=tf.ones([channels]), offset=tf.zeros([channels]), mean=tf.zeros([0]),
            variance=tf.zeros([0]), epsilon=1e-3, exponential_avg_factor=1.0, is_training=True)
        loss = tf.reduce_sum(tf.nn.relu(y)**2)
    return loss, tape.gradient(loss, x)

loss_of = tff.federated_computation(
    lambda x: tff.federated_sum(tff.federated_map(
        tff.tensorflow.computation(lambda loss, gradient: loss), tff.federated_map(normalised, x))),
    tff.FederatedType(normalised.type_signature.parameter, tff.CLIENTS))
context = runtime.use_in_process()
cohorts = [[np.random.default_rng(0).normal(size=(16, 12, 12, channels)).astype(np.float32)] * 4
           for channels in (8, 64, 16, 128)]
expected = [loss_of(cohort) for cohort in cohorts]
wrong = []

def work(cohort, result):
    with tff.framework.get_context_stack().install(context):
        for _ in range(40):
            if not np.isclose(loss_of(cohort), result, rtol=1e-4):
                wrong.append(result)

threads = [threading.Thread(target=work, args=pair) for pair in zip(cohorts, expected)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit(len(wrong))
"""


@pytest.mark.slow
def test_batch_normalisation_of_different_widths_in_threads(subprocess_environment):
    """Without its locks the process dies of a corrupted heap."""
    program = subprocess.run([sys.executable, "-c", BATCH_NORMALISATION], cwd=ROOT,
                             env=subprocess_environment, capture_output=True, timeout=300)
    assert program.returncode == 0, program.stderr.decode()[-2000:]


# --- caches


def test_a_round_compiles_nothing(context, monkeypatch):
    loaded, traced = [], []
    original = leaves.load_leaf
    monkeypatch.setattr(leaves, "load_leaf",
                        lambda *arguments: loaded.append(1) or original(*arguments))
    compute = tf.function(lambda x: traced.append(1) or x + 1)
    increment = tff.tensorflow.computation(compute, np.int32)
    computation = tff.federated_computation(
        lambda x: tff.federated_max(tff.federated_map(increment, x)), at_clients(np.int32))
    computation([1, 2])
    counts = len(loaded), len(traced)
    for cohort in ([1, 2], [5], [1, 2, 3, 4]):
        computation(cohort)
    assert (len(loaded), len(traced)) == counts


def test_equal_leaves_are_loaded_once(context, monkeypatch):
    loaded = []
    original = leaves.load_leaf
    monkeypatch.setattr(leaves, "load_leaf",
                        lambda *arguments: loaded.append(1) or original(*arguments))
    for _ in range(3):
        tff.federated_computation(lambda x: (tff.federated_sum(x), tff.federated_sum(x)),
                                  at_clients(np.int32))([1, 2])
    assert len(loaded) == 2  # the zero and the addition


def test_caches_are_bounded(context, monkeypatch):
    monkeypatch.setattr(in_process, "_MAX_COMPILED", 3)
    for number in range(8):
        add = tff.tensorflow.computation(lambda x: x + number, np.int32)
        assert add(1) == 1 + number
    gc.collect()
    assert len(context._compiled) == 3
    assert len(context._leaves) == 3


def test_a_computation_that_is_dropped_while_it_runs(context, monkeypatch):
    monkeypatch.setattr(in_process, "_MAX_COMPILED", 1)
    running, may_end, results = threading.Event(), threading.Event(), []

    def records():
        running.set()
        may_end.wait(30)
        yield 4

    def work():
        with tff.framework.get_context_stack().install(context):
            results.append(sum_of_data([generated(records), [1]]))

    thread = threading.Thread(target=work)
    thread.start()
    running.wait(30)
    assert sum_of_small([1, 2]) == 3
    assert [compiled.name for compiled in context._compiled.values()] == ["sum_of_small"]
    may_end.set()
    thread.join()
    assert results == [5]


def test_a_forgotten_computation_is_not_taken_for_a_new_one(context):
    for number in range(100):  # identities are used again as soon as an object is gone
        assert tff.tensorflow.computation(lambda: tf.constant(number))() == number


# --- devices and results


@pytest.mark.parametrize("options", [
    dict(devices=["/device:TPU:0"]), dict(devices=[]), dict(devices=["/device:CPU:0"] * 2),
    dict(server_device="/device:GPU:7")])
def test_devices_that_are_refused(options):
    with pytest.raises(ValueError, match="there are /device:CPU:0, /device:CPU:1"):
        InProcessContext(**options)


def test_a_free_lane_takes_the_next_client():
    """One long client keeps its lane; the other lane does all that it may run ahead, and no more."""
    done, may_end = [], threading.Event()

    def client(number):
        if number == 1:
            may_end.wait(10)
        done.append(number)
        if len(done) == 4:  # 0, 2, 3 and 4; client 5 would be four ahead of client 1
            threading.Timer(0.3, may_end.set).start()
        yield number

    clients = [generated(lambda number=number: client(number)) for number in range(9)]
    with tff.framework.get_context_stack().install(two_lanes()):
        assert sum_of_data(clients) == 36
    assert sorted(done[:4]) == [0, 2, 3, 4] and sorted(done) == list(range(9))
    assert 1 in done[4:6]


# Rounding makes every order of these give another float32: 1e8 swallows what is below 4.
DELICATE = [1e8, 3.0, -1e8, 1.5, 7.0, -2.5]


@pytest.mark.parametrize("slow", range(len(DELICATE)))
def test_sums_are_the_same_to_the_bit_on_any_number_of_lanes(slow):
    first = tff.tensorflow.computation(lambda data: data.reduce(0.0, lambda _, x: x),
                                       tff.SequenceType(np.float32))
    total_of = tff.federated_computation(
        lambda data: tff.federated_sum(tff.federated_map(first, data)),
        at_clients(first.type_signature.parameter))

    def client(number):
        time.sleep(0.2 * (number == slow))
        yield np.float32(DELICATE[number])

    data = lambda: [generated(lambda number=number: client(number), tf.float32)
                    for number in range(len(DELICATE))]
    expected = np.float32(0)
    for value in DELICATE:
        expected += np.float32(value)
    for context in (InProcessContext(devices=["/device:CPU:0"]), two_lanes()):
        with tff.framework.get_context_stack().install(context):
            assert total_of(data()) == expected


def test_an_error_in_a_sum_names_the_client_that_was_added():
    @tff.tensorflow.computation(np.int32, np.int32)
    def add(total, value):
        with tf.control_dependencies([tf.debugging.assert_less(total + value, 10, "too much")]):
            return total + value

    summed = tff.federated_computation(
        lambda x: tff.federated_aggregate(
            x, np.int32(0), add, add, tff.tensorflow.computation(lambda x: x, np.int32)),
        at_clients(np.int32))
    for context in (InProcessContext(devices=["/device:CPU:0"]), two_lanes()):
        with tff.framework.get_context_stack().install(context):
            with pytest.raises(ComputationError, match="client 3 of 5: .*too much"):
                summed([1, 2, 3, 4, 5])
            assert summed([1, 2, 3]) == 6


def test_results_can_stay_tensors_on_the_servers_device():
    context = InProcessContext(devices=["/device:CPU:0"], server_device="/device:CPU:1",
                               materialize=False)
    with tff.framework.get_context_stack().install(context):
        result = sum_of_small([1, 2])
        assert isinstance(result, tf.Tensor) and result.device.endswith("CPU:1")
        again = tff.federated_computation(
            lambda x: tff.federated_map(small_only, x), tff.FederatedType(np.int32, tff.SERVER))
        assert int(again(result)) == 3


@pytest.mark.parametrize("reset", [True, False])
def test_shuffled_data_sets_go_on_unless_they_are_reset(reset):
    shuffled = tf.data.Dataset.range(100).shuffle(100, seed=1)
    elements = tff.tensorflow.computation(
        lambda data: data.batch(100).reduce(tf.zeros([100], tf.int64), lambda _, batch: batch),
        tff.SequenceType(np.int64))
    context = InProcessContext(reset_datasets=reset)
    with tff.framework.get_context_stack().install(context):
        first, second = elements(shuffled), elements(shuffled)
    assert sorted(first) == sorted(second) == list(range(100))
    assert (first == second).all() == reset


def test_use_refuses_unknown_names():
    with pytest.raises(ValueError, match="must be one of in_process, tff_worker, tff_workers, but is"):
        runtime.use("tff-worker")


def test_use_makes_it_the_default():
    context = runtime.use("in_process", devices=["/device:CPU:1"])
    assert context.lanes == ("/device:CPU:1",)
    assert sum_of_small([1, 2]) == 3
    assert [compiled.name for compiled in context._compiled.values()] == ["sum_of_small"]


# --- memory


def test_one_clients_values_at_a_time(context, monkeypatch):
    alive, most = [], []
    original = values.ingest

    def noted(value, type_spec, device, *options):
        tensor = original(value, type_spec, device, *options)
        alive.append(value)
        weakref.finalize(tensor, lambda: alive.pop())
        most.append(len(alive))
        return tensor

    computation = tff.federated_computation(
        lambda x: tff.federated_max(tff.federated_map(small_only, x)), at_clients(np.int32))
    computation([1])
    monkeypatch.setattr(values, "ingest", noted)
    computation([1] * 12)
    assert max(most) <= len(context.lanes) + 1


@pytest.fixture(scope="module")
def subprocess_environment():
    return {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}


def test_lanes_on_the_cpu_are_logical_devices():
    # TensorFlow has started by now, with the two devices of conftest.
    tf.config.list_logical_devices()
    assert cpu_lanes(2) == ["/device:CPU:0", "/device:CPU:1"]
    with pytest.raises(RuntimeError, match="3 lanes need as many logical CPU devices, but .* 2"):
        cpu_lanes(3)


@pytest.mark.parametrize("cores, lanes", [({0}, 1), ({1, 3}, 2), (set(range(8)), 2)])
def test_two_lanes_where_there_are_two_cores(cores, lanes, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    assert len(runtime.use("in_process").lanes) == lanes


def test_one_lane_where_tensorflow_has_started_with_one_device(monkeypatch):
    def started(count):
        raise RuntimeError(f"{count} lanes need as many logical CPU devices")

    monkeypatch.setattr(in_process, "cpu_lanes", started)
    assert runtime.use("in_process").lanes == ("/device:CPU:0",)
    with pytest.raises(RuntimeError, match="3 lanes"):  # but who asks for some gets them, or knows
        runtime.use("in_process", lanes=3)
