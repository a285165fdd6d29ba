"""Federated averaging of a user's Keras model, against Keras' own training and plain rounds."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from feast_tf import runtime
from feast_tf.algorithms.sliced_fed_avg import build_sliced_fed_avg, local_steps, stateless_call
from feast_tf.interop.keras_slices import slice_map, submodel
from feast_tf.interop.rounds import merge

layers = tf.keras.layers
RATE, FEATURES, CLASSES = 0.05, 5, 3
LEVELS = [{"one": 2, "two": 3}, {"one": 4}, {}]
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
ELEMENT_SPEC = collections.OrderedDict(x=tf.TensorSpec([None, FEATURES]),
                                       y=tf.TensorSpec([None], tf.int32))
# (client, level, examples); the last one has none.
COHORT = [(3, 0, 5), (8, 2, 9), (5, 1, 4), (7, 2, 0)]


@pytest.fixture(scope="module", autouse=True)
def in_process():
    runtime.use("in_process")


@pytest.fixture(scope="module")
def model():
    inputs = tf.keras.Input([FEATURES])
    first = layers.Dense(6, "tanh", name="one")(inputs)
    second = layers.Dense(4, "relu", name="two")(first)
    side = layers.Dense(CLASSES, name="side", trainable=False)(inputs)
    outputs = layers.Add()([layers.Dense(CLASSES, name="head")(second), side])
    return randomize(tf.keras.Model(inputs, outputs))


def randomize(model):
    rng = np.random.default_rng(5)
    for weight in model.weights:
        weight.assign(rng.normal(size=weight.shape))
    return model


def values(weights):
    return [np.array(weight) for weight in weights]


def data(client, examples):
    rng = np.random.default_rng(client)
    arrays = collections.OrderedDict(x=rng.normal(size=[examples, FEATURES]).astype(np.float32),
                                     y=rng.integers(0, CLASSES, examples).astype(np.int32))
    return tf.data.Dataset.from_tensor_slices(arrays).batch(4)


def members():
    return [collections.OrderedDict(client=np.int32(client), level=np.int32(level),
                                    data=data(client, examples))
            for client, level, examples in COHORT]


@pytest.fixture(scope="module")
def process(model):
    return build_sliced_fed_avg(
        model, LEVELS, element_spec=ELEMENT_SPEC, loss=LOSS,
        optimizer=tff.learning.optimizers.build_sgdm(RATE, momentum=0.9),
        metrics={"accuracy": tf.keras.metrics.sparse_categorical_accuracy})


def test_the_model_is_left_as_it_was(process, model):
    assert model(np.ones([2, FEATURES])).shape == (2, CLASSES)


def test_type_signatures(process):
    weights = "float32[5,6],float32[6],float32[6,4],float32[4],float32[4,3],float32[3]"
    state = (f"<global_model_weights=<trainable=<{weights}>,non_trainable=<>>,distributor=<>,"
             "client_work=int32,aggregator=<>,finalizer=<>>")
    client = "<client=int32,level=int32,data=<x=float32[?,5],y=int32[?]>*>"
    metrics = ("<distributor=<bytes_down=int64>,client_work=<train=<loss=float32,accuracy=float32,"
               "examples=int64>>,aggregator=<bytes_up=int64,clients_with_data=int32,"
               "clients_without_data=int32,clients_refused=int32>,finalizer=<>>")
    assert str(process.next.type_signature) == (
        f"(<state={state}@SERVER,clients={{{client}}}@CLIENTS> -> "
        f"<state={state}@SERVER,metrics={metrics}@SERVER>)")


def keras_round(model, weights):
    """A round by Keras' own optimizer on the sub-models. Returns new weights and the metrics."""
    slices = slice_map(model, LEVELS)
    results, sums = [], np.zeros(3)
    for variable, value in zip(model.trainable_weights, weights):
        variable.assign(value)
    for client, level, examples in COHORT:
        part = submodel(model, LEVELS[level])
        optimizer = tf.keras.optimizers.legacy.SGD(RATE, momentum=0.9)
        for batch in data(client, examples):
            with tf.GradientTape() as tape:
                logits = part(batch["x"], training=True)
                loss = LOSS(batch["y"], logits)
            hits = np.mean(np.argmax(logits, -1) == batch["y"])
            sums += len(batch["y"]) * np.array([loss, hits, 1])
            optimizer.apply_gradients(zip(tape.gradient(loss, part.trainable_weights),
                                          part.trainable_weights))
        results.append((client, values(part.trainable_weights), examples))
    new, summary = merge(slices, weights, {client: level for client, level, _ in COHORT}, results)
    return new, summary, sums[:2] / sums[2]


def test_rounds_are_those_of_keras_and_plain_numpy(process, model):
    weights = start = values(model.trainable_weights)
    state = process.initialize()
    for ours, theirs in zip(state.global_model_weights.trainable, start):
        np.testing.assert_array_equal(ours, theirs)
    for _ in range(2):
        output = process.next(state, members())
        weights, summary, (loss, accuracy) = keras_round(model, weights)
        state = output.state
        for ours, theirs in zip(state.global_model_weights.trainable, weights):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        train = output.metrics["client_work"]["train"]
        assert train["examples"] == summary["examples"] == 18
        assert train["loss"] == pytest.approx(loss, rel=1e-5)
        assert train["accuracy"] == pytest.approx(accuracy, rel=1e-5)
        assert output.metrics["distributor"]["bytes_down"] == summary["bytes_down"]
        assert output.metrics["aggregator"]["bytes_up"] == summary["bytes_up"]
        assert output.metrics["aggregator"]["clients_without_data"] == 1
    assert summary["bytes_down"] == 4 * (33 + 59 + 2 * 79)
    for variable, value in zip(model.trainable_weights, start):
        variable.assign(value)


def test_what_small_clients_do_not_hold_keeps_its_bits(process):
    state = process.initialize()
    output = process.next(state, members()[:1])
    for ours, before, extents in zip(output.state.global_model_weights.trainable,
                                     state.global_model_weights.trainable,
                                     [(5, 2), (2,), (2, 3), (3,), (3, 3), (3,)]):
        held = np.pad(np.ones(extents, bool), [(0, wide - size) for wide, size in
                                               zip(np.shape(before), extents)])
        assert np.all(np.asarray(ours)[held] != np.asarray(before)[held])
        assert np.asarray(ours)[~held].tobytes() == np.asarray(before)[~held].tobytes()


def test_one_level_is_federated_averaging(model):
    whole = tf.keras.Sequential([tf.keras.Input([FEATURES]), layers.Dense(4, "relu"),
                                 layers.Dense(CLASSES)])
    randomize(whole)
    optimizer = tff.learning.optimizers.build_sgdm(RATE)
    ours = build_sliced_fed_avg(whole, [{}], element_spec=ELEMENT_SPEC, loss=LOSS,
                                optimizer=optimizer)
    theirs = tff.learning.algorithms.build_weighted_fed_avg(
        tff.learning.models.functional_model_from_keras(whole, LOSS, ELEMENT_SPEC), optimizer,
        tff.learning.optimizers.build_sgdm(1.0))
    cohort = [collections.OrderedDict(member, level=np.int32(0)) for member in members()[:3]]
    one = ours.next(ours.initialize(), cohort).state.global_model_weights.trainable
    other = theirs.next(theirs.initialize(), [member["data"] for member in cohort]
                        ).state.global_model_weights.trainable
    for left, right in zip(one, other):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


def test_a_stateless_call_in_any_order_of_weights():
    inputs = tf.keras.Input([4])
    first = layers.Dense(4, name="b")
    late = layers.Dense(4, name="a")(inputs)
    early = layers.Dense(4, name="z", trainable=False)(first(inputs))
    outputs = layers.Concatenate()([first(late), early, layers.LayerNormalization()(inputs)])
    model = randomize(tf.keras.Model(inputs, outputs))
    x = np.random.default_rng(0).normal(size=[2, 4]).astype(np.float32)
    shifted = [value + place for place, value in enumerate(values(model.trainable_weights))]
    before = model(x)
    call = stateless_call(model)
    np.testing.assert_array_equal(model(x), before)  # Keras is left as it was
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        ours = session.run(call([tf.constant(value) for value in shifted], tf.constant(x)))
    tf.keras.models.clone_model(model)  # as after each trace in `build_sliced_fed_avg`
    for weight, value in zip(model.trainable_weights, shifted):
        weight.assign(value)
    np.testing.assert_allclose(ours, model(x), rtol=1e-5, atol=1e-5)


def test_models_that_need_variables_or_more_than_a_loss():
    inputs = tf.keras.Input([4])
    norm = tf.keras.Model(inputs, layers.Dense(2)(layers.BatchNormalization(name="norm")(inputs)))
    with pytest.raises(ValueError, match=r"norm \(BatchNormalization\) .*GroupNormalization"):
        stateless_call(norm)
    norm.get_layer("norm").trainable = False  # then it only applies its moments
    assert callable(stateless_call(norm))
    decayed = tf.keras.Model(inputs, layers.Dense(2, kernel_regularizer="l2")(inputs))
    with pytest.raises(ValueError, match="regularisers .* weight decay"):
        stateless_call(decayed)


def test_gradients_of_embeddings():
    inputs = tf.keras.Input([2], dtype="int32")
    flat = layers.GlobalAveragePooling1D()(layers.Embedding(7, 4, name="words")(inputs))
    words = randomize(tf.keras.Model(inputs, layers.Dense(CLASSES)(flat)))
    call = stateless_call(words)
    weights = values(words.trainable_weights)
    batch = np.int32([[1, 3], [6, 1]]), np.int32([2, 0])
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        update = session.run(tf.function(lambda *tensors: local_steps(
            call, LOSS, {}, tff.learning.optimizers.build_sgdm(RATE), tensors,
            tf.data.Dataset.from_tensors(batch)).update)(*map(tf.constant, weights)))
    tf.keras.models.clone_model(words)  # as after each trace in `build_sliced_fed_avg`
    with tf.GradientTape() as tape:
        loss = LOSS(batch[1], words(batch[0]))
    for ours, theirs in zip(update, tape.gradient(loss, words.trainable_weights)):
        np.testing.assert_allclose(ours, -RATE * tf.convert_to_tensor(theirs), rtol=1e-5, atol=1e-7)
    assert np.all(update[0][[0, 2, 4, 5]] == 0) and np.all(update[0][[1, 3, 6]] != 0)


@pytest.mark.parametrize("spec", [ELEMENT_SPEC["x"], (ELEMENT_SPEC["x"],), {"x": ELEMENT_SPEC["x"]},
                                  {**ELEMENT_SPEC, "w": ELEMENT_SPEC["y"]}, None])
def test_batches_that_are_no_inputs_and_labels(model, spec):
    with pytest.raises(ValueError, match="element_spec must be a pair of inputs and labels, or a"):
        build_sliced_fed_avg(model, LEVELS, element_spec=spec, loss=LOSS,
                             optimizer=tff.learning.optimizers.build_sgdm(RATE))


@pytest.mark.parametrize("wrong, message", [
    ({"loss": "mse"}, "loss must be a function of .*, but is a str"),
    ({"metrics": {"hits": tf.keras.metrics.Accuracy()}}, "hits must be a function .*is a Accuracy")])
def test_losses_and_metrics_that_are_no_functions(model, wrong, message):
    with pytest.raises(TypeError, match=message):
        build_sliced_fed_avg(model, LEVELS, **{
            "element_spec": ELEMENT_SPEC, "loss": LOSS,
            "optimizer": tff.learning.optimizers.build_sgdm(RATE), **wrong})


def test_a_keras_optimizer_is_refused(model):
    with pytest.raises(TypeError, match="optimizer must be a tff.learning.optimizers.Optimizer"):
        build_sliced_fed_avg(model, LEVELS, element_spec=ELEMENT_SPEC, loss=LOSS,
                             optimizer=tf.keras.optimizers.SGD(0.1))
