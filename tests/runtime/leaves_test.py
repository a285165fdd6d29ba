"""Graphs of the kinds that differ between a session of their own and this process."""

from __future__ import annotations

import threading

import numpy as np
import psutil
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from feast_tf.runtime import leaves

CPU, OTHER_CPU = "/device:CPU:0", "/device:CPU:1"
STRINGS = tff.TensorType(np.str_, [None])


def leaf_of(computation) -> leaves.TensorFlowLeaf:
    block = computation.to_building_block()
    return leaves.load_leaf(block.proto, block.type_signature)


def operations_of(computation) -> set[str]:
    proto = computation.to_building_block().proto
    graph = tf.compat.v1.GraphDef.FromString(proto.tensorflow.graph_def.value)
    return {node.op for node in leaves._all_nodes(graph)}


@pytest.fixture
def loops_with_frames():
    """Loops become Enter, Merge, Switch, NextIteration and Exit, as in old graphs."""
    tf.compat.v1.disable_control_flow_v2()
    yield
    tf.compat.v1.enable_control_flow_v2()


# --- variables


def test_every_call_has_variables_of_its_own(same_results):
    @tff.tensorflow.computation(np.int32)
    def counted(x):
        variable = tf.Variable(10)
        with tf.control_dependencies([variable.assign_add(x)]):
            return variable.read_value()

    assert same_results(lambda: [counted(1), counted(2)]) == [11, 12]


def test_calls_in_threads_do_not_share_variables():
    @tff.tensorflow.computation(np.int32)
    def summed(x):
        variable = tf.Variable(0)

        @tf.function
        def add():
            for _ in tf.range(200):
                variable.assign_add(x)
            return variable.read_value()

        return add()

    leaf, wrong = leaf_of(summed), []

    def work(number, device):
        for _ in range(20):
            if int(leaf(tf.constant(number), device)) != 200 * number:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=[number, (CPU, OTHER_CPU)[number % 2]])
               for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("fails", [False, True])
def test_variables_are_freed(fails):
    """4 MiB a call, also where the call ends with an error."""
    @tff.tensorflow.computation(np.bool_)
    def uses_memory(ok):
        variable = tf.Variable(tf.random.normal([1024, 1024]))
        with tf.control_dependencies([variable.assign_add(tf.random.normal([1024, 1024]))]):
            total = tf.reduce_sum(variable.read_value())
        with tf.control_dependencies([total]):
            check = tf.debugging.Assert(ok, ["as asked"])
        with tf.control_dependencies([check]):
            return tf.identity(total)

    leaf, process = leaf_of(uses_memory), psutil.Process()

    def call():
        try:
            leaf(tf.constant(not fails), CPU)
            assert not fails
        except tf.errors.InvalidArgumentError:
            assert fails

    for _ in range(5):
        call()
    before = process.memory_info().rss
    for _ in range(40):
        call()
    assert process.memory_info().rss - before < 40 * 2**20  # a quarter of what the calls used


def test_initialisers_run_first(same_results):
    @tff.tensorflow.computation(np.float32)
    def product(x):
        variable = tf.Variable(tf.linalg.matmul(tf.random.stateless_normal([300, 300], [1, 2]),
                                                tf.eye(300)))
        return x * tf.reduce_sum(variable)

    same_results(lambda: [product(2.0) for _ in range(5)])


# --- loops


@pytest.mark.parametrize("nested", [False, True])
def test_loops_with_frames(nested, loops_with_frames, same_results):
    @tff.tensorflow.computation(np.int32)
    def looped(count):
        variable = tf.Variable(tf.fill([200, 200], 7.0))
        loop = lambda body: tf.compat.v1.while_loop(
            lambda i, total: i < count, lambda i, total: (i + 1, body(total)), (0, 0.0))[1]
        inner = lambda total: total + variable.read_value()[0, 0]
        return loop((lambda total: total + loop(inner)) if nested else inner) * tf.reduce_mean(
            variable)

    assert {"Enter", "Exit"} <= operations_of(looped)
    result = same_results(lambda: [looped(3) for _ in range(5)])
    assert result == [7 * 7 * (9 if nested else 3)] * 5


@pytest.mark.parametrize("count", [0, 3])
def test_loops_and_conditions_as_functions(count, same_results):
    @tff.tensorflow.computation(np.int32)
    @tf.function
    def looped(count):
        total = 0.0
        for i in tf.range(count):
            if i % 2 == 0:
                total += 1.5
            else:
                total *= 3.0
        return total

    assert {"While", "StatelessWhile"} & operations_of(looped)
    same_results(lambda: looped(count))


# --- functions


def test_functions_of_one_name_are_kept_apart(same_results):
    def make(factor):
        @tf.function
        def scale(x):
            return x * factor

        return tff.tensorflow.computation(lambda x: scale(scale(x)), np.int32)

    double, triple = make(2), make(3)
    assert same_results(lambda: [double(1), triple(1), double(1)]) == [4, 9, 4]


def test_gradients_and_custom_gradients(same_results):
    @tf.custom_gradient
    def clipped(x):
        return tf.identity(x), lambda upstream: tf.clip_by_value(upstream, -1.0, 1.0)

    @tff.tensorflow.computation(tff.TensorType(np.float32, [2]))
    @tf.function
    def gradient(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = clipped(x)**2
            z = tf.reduce_sum(tf.map_fn(lambda v: v**3, y))
        return tape.gradient(z, x), tape.gradient(y, x)

    same_results(lambda: gradient(np.array([0.5, -3.0], np.float32)))


# --- tables and other resources


def test_tables_start_empty_in_every_call(same_results):
    @tff.tensorflow.computation(STRINGS)
    @tf.function
    def numbered(words):
        table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
        before = table.size()
        with tf.control_dependencies([before]):
            table.insert(words, tf.range(tf.size(words, tf.int64)))
        return before, table.size(), table.lookup(words)

    results = same_results(lambda: [numbered(["a", "b"]), numbered(["c"])])
    assert [before for before, *_ in results] == [0, 0]


def test_dense_tables(same_results):
    @tff.tensorflow.computation(tff.TensorType(np.int64, [None]))
    @tf.function
    def squares(keys):
        table = tf.lookup.experimental.DenseHashTable(tf.int64, tf.int64, -1, -2, -3)
        table.insert(keys, keys * keys)
        return table.lookup(keys + 1), table.size()

    same_results(lambda: [squares(np.array([1, 2, 3])), squares(np.array([5]))])


def test_tables_of_what_a_call_is_given(same_results):
    @tff.tensorflow.computation(STRINGS)
    def places(words):
        table = tf.lookup.StaticVocabularyTable(tf.lookup.KeyValueTensorInitializer(
            words, tf.range(tf.size(words, tf.int64), dtype=tf.int64)), num_oov_buckets=1)
        return table.lookup(tf.reverse(words, [0])), table.lookup(tf.constant(["?"]))

    same_results(lambda: [places(["a", "b"]), places(["c"])])


def test_constant_tables(same_results):
    @tff.tensorflow.computation(STRINGS)
    def priced(words):
        table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(["a", "b"], [3, 4]), default_value=-1)
        return table.lookup(words)

    same_results(lambda: [priced(["a", "c"]), priced(["b"])])


def test_tensor_arrays_and_sparse_and_ragged_tensors(same_results):
    @tff.tensorflow.computation(tff.TensorType(np.float32, [None]))
    @tf.function
    def mixed(x):
        squares = tf.TensorArray(tf.float32, 0, dynamic_size=True)
        for i in tf.range(tf.size(x)):
            squares = squares.write(i, x[i]**2)
        ragged = tf.RaggedTensor.from_row_lengths(x, [1, 0, tf.size(x) - 1])
        return (squares.stack(), tf.sparse.to_dense(tf.sparse.from_dense(x)),
                tf.reduce_sum(ragged, axis=1))

    same_results(lambda: mixed(np.array([1.5, 0.0, 2.0], np.float32)))


# --- data sets inside of a graph


@pytest.mark.parametrize("pipeline", [
    lambda data: data.shuffle(10, seed=3).batch(2),
    lambda data: data.cache().repeat(2).batch(3),
    lambda data: data.map(lambda x: x + 1, num_parallel_calls=2).prefetch(1).batch(4),
    lambda data: data.interleave(lambda x: tf.data.Dataset.range(tf.cast(x, tf.int64)).map(
        lambda y: tf.cast(y, tf.int32))).batch(3),
    lambda data: data.window(2, drop_remainder=True).flat_map(lambda w: w.batch(2)),
])
def test_pipelines(pipeline, same_results):
    @tff.tensorflow.computation(tff.SequenceType(np.int32))
    @tf.function
    def reduced(data):
        total = tf.constant(0)
        for batch in iter(pipeline(data)):
            total = 3 * total + tf.reduce_sum(batch)
        return total

    same_results(lambda: [reduced([1, 2, 3, 4, 5]), reduced([5])])


def test_data_sets_are_made_on_the_cpu_whatever_the_device():
    computation = tff.tensorflow.computation(lambda n: tf.data.Dataset.range(n), np.int64)
    leaf = leaf_of(computation)
    assert "CPU:0" in leaf(tf.constant(3, tf.int64), OTHER_CPU).variant.device


# --- loading


def test_results_that_are_arguments_or_constants_or_nothing(same_results):
    computation = tff.tensorflow.computation(lambda x: (x, 5, (), x), np.int32)
    same_results(lambda: computation(3))
    same_results(tff.tensorflow.computation(lambda: ((), [()])))


def test_other_kinds_of_computations_are_refused():
    block = tff.federated_computation(lambda x: x, np.int32).to_building_block()
    with pytest.raises(NotImplementedError, match="runs TensorFlow and JAX, not 'lambda'"):
        leaves.load_leaf(block.proto, block.type_signature)
