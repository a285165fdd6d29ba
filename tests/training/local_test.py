"""Co-training of one client: gradients, metrics and the loop against independent computations."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import pytest
import tensorflow as tf

from feast_tf.routing import Routing
from feast_tf.space import SupernetSpec, VariantCache
from feast_tf.supernet import forward, initial_weights
from feast_tf.training import ROLES, RULES, SGD, Augmentation, LocalTraining, local_update
from feast_tf.training import rules
from feast_tf.training.local import (STATISTICS, cotrain_gradient, flatten, prepare_batch,
                                     unflatten)
from feast_tf.training.mixing import MixedBatch
from feast_tf.training.rules import draw_variants

SPEC = SupernetSpec(stem=4, bases=(4, 8), depths=(0, 1), widths=(0.5, 1.0), expansions=(0.5, 1.0),
                    strides=(1, 2), classes=3, image_size=8, divisor=2)
ROUTING = Routing(VariantCache(SPEC, [
    SPEC.variant(d=0, e=0.5, w=0.5),
    SPEC.variant(d=(0, 1), e=0.5, w=(0.5, 0.5, 1.0)),
    SPEC.variant(d=(1, 0), e=0.5, w=(0.5, 1.0, 0.5)),
    SPEC.variant(d=1, e=(0.5, 1.0), w=1.0),
]))
LAYOUT, DIMS = ROUTING.layout, ROUTING.variant_dims
TOP = ROUTING.num_levels - 1
PLAIN = LocalTraining(augmentation=Augmentation.none())


def envelope(level: int) -> list[tf.Tensor]:
    """The weights that a client of this level receives; gammas and betas are not 1 and 0."""
    noise = np.random.default_rng(5)
    weights = [weight.numpy() + noise.normal(0, 0.1, weight.shape).astype(np.float32)
               for weight in initial_weights(LAYOUT, 4)]
    return [tf.constant(part) for part in LAYOUT.cut(weights, ROUTING.envelope_dims[level])]


def pictures(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"x": rng.integers(0, 256, [count, 8, 8, 3], np.uint8),
            "y": rng.integers(0, SPEC.classes, count, np.int32)}


def batches(count: int, batch_size: int, seed: int = 0) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(pictures(count, seed)).batch(batch_size)


def mixed_batch(lam: float = 0.7) -> MixedBatch:
    rng = np.random.default_rng(8)
    labels = rng.integers(0, SPEC.classes, [2, 6], np.int32)
    return MixedBatch(tf.constant(rng.normal(size=[6, 8, 8, 3]), tf.float32),
                      tf.constant(labels[0]), tf.constant(labels[1]), tf.constant(lam))


@pytest.fixture(scope="module")
def compiled():
    """`compile_update`, once for each configuration."""
    return functools.lru_cache(maxsize=None)(compile_update)


def compile_update(config: LocalTraining):
    """`local_update` as one graph, and the list of its traces."""
    traces = []

    @tf.function(input_signature=[
        tuple(tf.TensorSpec(p.elastic_shape) for p in LAYOUT.parameters),
        tf.TensorSpec([], tf.int32),
        tf.data.DatasetSpec({"x": tf.TensorSpec([None, 8, 8, 3], tf.uint8),
                             "y": tf.TensorSpec([None], tf.int32)}),
        tf.TensorSpec([2], tf.int32), tf.TensorSpec([])])
    def run(weights, level, dataset, seed, rate):
        traces.append(level)
        return local_update(LAYOUT, config, tf.constant(DIMS), weights, level, dataset, seed, rate)

    def update(level, dataset, *, seed=(1, 2), rate=0.1):
        return run(tuple(envelope(level)), tf.constant(level), dataset, tf.constant(seed),
                   tf.constant(rate))

    return update, traces


def cotrain_gradients(config, weights, places, roles, batch):
    """`cotrain_gradient` from and to a tensor for each parameter."""
    vector, sizes = flatten(weights)
    shapes = [tf.shape(weight) for weight in weights]
    as_weights = lambda vector: unflatten(LAYOUT, vector, sizes, shapes)
    gradient, metrics = cotrain_gradient(LAYOUT, config, vector, as_weights,
                                         tf.gather(DIMS, places), tf.constant(roles), batch)
    return as_weights(gradient), metrics


def variant_gradients(weights, place, batch, config, teacher=None):
    """Gradients, logits, supervised and distillation loss of one variant, written out."""
    smooth = config.label_smoothing
    one_hot = lambda labels: (np.eye(SPEC.classes, dtype=np.float32)[labels.numpy()]
                              * (1 - smooth) + smooth / SPEC.classes)
    lam = float(batch.lam)
    rho = config.rho_kd if RULES[config.rule].distill and teacher is not None else 0.0
    t = config.temperature
    with tf.GradientTape() as tape:
        tape.watch(weights)
        logits = forward(LAYOUT, weights, tf.constant(DIMS[place]), batch.images)
        log = tf.nn.log_softmax(logits)
        supervised = -tf.reduce_sum(log * (lam * one_hot(batch.labels_a)
                                           + (1 - lam) * one_hot(batch.labels_b)))
        distillation = tf.constant(0.0)
        if teacher is not None:
            soft = np.exp(teacher / t) / np.sum(np.exp(teacher / t), axis=1, keepdims=True)
            distillation = -t**2 * tf.reduce_sum(soft * tf.nn.log_softmax(logits / t))
        size = batch.labels_a.shape[0]
        loss = ((1 - rho) * supervised + rho * distillation) / size
    gradients = tape.gradient(loss, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    guess = np.argmax(logits, axis=1)
    correct = (lam * np.sum(guess == batch.labels_a.numpy())
               + (1 - lam) * np.sum(guess == batch.labels_b.numpy()))
    return ([g.numpy() for g in gradients], logits.numpy(),
            [float(supervised), float(distillation), correct, size])


PASSES = {"min": [(0, 1)], "max": [(3, 0)], "min_max": [(3, 0), (0, 1)],
          "min_max_kd": [(3, 0), (0, 1)], "full": [(3, 0), (0, 1), (2, 2)]}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("normalisation", ["sum", "mean"])
def test_gradients_are_those_of_each_variant_alone(rule, normalisation):
    config = dataclasses.replace(PLAIN, rule=rule, gradients=normalisation, rho_kd=0.3,
                                 temperature=2.0, label_smoothing=0.1)
    weights, batch, passes = envelope(TOP), mixed_batch(), PASSES[rule]
    places, roles = (list(part) for part in zip(*passes))
    gradients, metrics = cotrain_gradients(config, weights, places, roles, batch)

    teacher, expected, rows = None, 0, np.zeros([len(ROLES), len(STATISTICS)])
    for place, role in passes:
        alone, logits, rows[role] = variant_gradients(weights, place, batch, config, teacher)
        teacher = logits if teacher is None else teacher
        expected = [g + a for g, a in zip(expected, alone)] if expected else alone
    divisor = len(passes) if normalisation == "mean" else 1
    for parameter, ours, theirs in zip(LAYOUT.parameters, gradients, expected):
        np.testing.assert_allclose(ours, theirs / divisor, rtol=1e-4, atol=1e-5,
                                   err_msg=parameter.name)
    np.testing.assert_allclose(metrics, rows, rtol=1e-5)


def test_distillation_trains_nothing_that_only_the_teacher_uses():
    config = dataclasses.replace(PLAIN, rule="min_max_kd", rho_kd=1.0)
    weights, batch = envelope(TOP), mixed_batch()
    run = lambda places, roles: cotrain_gradients(config, weights, places, roles, batch)[0]
    both, teacher = run([TOP, 0], [0, 1]), run([TOP], [0])
    changed = 0
    for place, (ours, alone) in enumerate(zip(both, teacher)):
        distilled = ours.numpy() - alone.numpy()
        shared = LAYOUT.prefix(place, DIMS[0])
        changed += np.count_nonzero(distilled[shared])
        distilled[shared] = 0
        assert not np.any(distilled), LAYOUT.parameters[place].name
    assert changed > 100


def test_first_variant_has_no_distillation_loss():
    for rule in RULES:
        config = dataclasses.replace(PLAIN, rule=rule)
        metrics = cotrain_gradients(config, envelope(TOP), [TOP], [0], mixed_batch())[1]
        assert metrics[0, STATISTICS.index("distillation_loss")] == 0


@pytest.mark.parametrize("config", [PLAIN, LocalTraining()], ids=["plain", "augmented"])
def test_local_update_is_the_loop_over_batches(compiled, config):
    weights, seed, rate, level = envelope(2), tf.constant([1, 2]), tf.constant(0.1), tf.constant(2)
    dataset = batches(11, 4)
    result = compiled(config)[0](2, dataset)

    received = weights
    velocity = [tf.zeros_like(weight) for weight in weights]
    sgd = config.optimizer
    metrics = 0
    for step, batch in enumerate(dataset):
        stream = tf.random.experimental.stateless_fold_in(seed, step)
        seeds = tf.random.experimental.stateless_split(stream, 2)
        places, roles = draw_variants(RULES[config.rule], level, seeds[0])
        prepared = prepare_batch(config, batch["x"], batch["y"], seeds[1], tf.constant(step))
        gradients, rows = cotrain_gradients(config, weights, places, roles, prepared)
        scale = min(1, sgd.clip_norm / (float(tf.linalg.global_norm(gradients)) + 1e-6))
        velocity = [sgd.momentum * v + scale * g + sgd.weight_decay * w
                    for v, g, w in zip(velocity, gradients, weights)]
        weights = [w - rate * v for w, v in zip(weights, velocity)]
        metrics = metrics + rows
    assert result.num_examples == 11
    np.testing.assert_allclose(result.metrics, metrics, rtol=1e-4)
    for update, new, old in zip(result.update, weights, received):
        np.testing.assert_allclose(update, new - old, rtol=1e-4, atol=1e-5)
    assert any(np.any(update) for update in result.update)


def test_local_update_by_hand(compiled):
    """Two batches of the largest variant, without any of the package's training code."""
    config = dataclasses.replace(
        PLAIN, rule="max", mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4),
        optimizer=SGD(momentum=0.9, weight_decay=0.01, clip_norm=0.5))
    weights = [weight.numpy() for weight in envelope(1)]
    result = compiled(config)[0](1, batches(7, 4), rate=0.2)

    data, received, velocity = pictures(7), weights, [0.0] * len(weights)
    for part in (slice(0, 4), slice(4, 7)):
        images = (data["x"][part] / np.float32(255) - (0.4, 0.5, 0.6)) / (0.2, 0.3, 0.4)
        variables = [tf.Variable(weight) for weight in weights]
        with tf.GradientTape() as tape:
            images = tf.constant(images, tf.float32)
            logits = forward(LAYOUT, variables, tf.constant(DIMS[1]), images)
            loss = tf.reduce_mean(tf.keras.losses.sparse_categorical_crossentropy(
                data["y"][part], logits, from_logits=True))
        gradients = tape.gradient(loss, variables,
                                  unconnected_gradients=tf.UnconnectedGradients.ZERO)
        gradients = [np.asarray(tf.convert_to_tensor(gradient)) for gradient in gradients]
        norm = math.sqrt(sum(float(np.sum(gradient**2)) for gradient in gradients))
        assert norm > 0.5  # the clipping is part of the test
        velocity = [0.9 * v + g * 0.5 / norm + 0.01 * w
                    for v, g, w in zip(velocity, gradients, weights)]
        weights = [w - 0.2 * v for w, v in zip(weights, velocity)]
    for update, new, old in zip(result.update, weights, received):
        np.testing.assert_allclose(update, new - old, rtol=1e-4, atol=1e-5)


def test_one_trace_serves_all_levels_and_batch_sizes(compiled):
    update, traces = compiled(LocalTraining())
    for level in range(ROUTING.num_levels):
        for count, batch_size in ((7, 3), (4, 4), (1, 2), (0, 4)):
            result = update(level, batches(count, batch_size))
            assert result.num_examples == count
            assert [tuple(part.shape) for part in result.update] == [
                tuple(extent[level]) for extent in ROUTING.extents]
            assert all(np.all(np.isfinite(part)) for part in result.update)
    assert len(traces) == 1


def test_client_without_pictures_changes_nothing(compiled):
    result = compiled(LocalTraining())[0](TOP, batches(0, 4))
    assert result.num_examples == 0 and not np.any(result.metrics)
    assert not any(np.any(part) for part in result.update)


def test_rate_0_gives_an_update_of_zeros(compiled):
    result = compiled(LocalTraining())[0](TOP, batches(6, 4), rate=0.0)
    assert not any(np.any(part) for part in result.update)
    assert result.metrics[0, STATISTICS.index("examples")] == 6


def test_metrics_are_sums_over_the_pictures_of_each_role(compiled):
    config = dataclasses.replace(PLAIN, rule="min_max_kd", temperature=3.0)
    result = compiled(config)[0](TOP, batches(7, 4), rate=0.0)
    weights, expected = envelope(TOP), np.zeros([len(ROLES), len(STATISTICS)])
    for batch in batches(7, 4):
        prepared = prepare_batch(config, batch["x"], batch["y"], tf.zeros(2, tf.int32), 0)
        _, teacher, row = variant_gradients(weights, TOP, prepared, config)
        expected[ROLES.index("largest")] += row
        expected[ROLES.index("minimum")] += variant_gradients(weights, 0, prepared, config,
                                                              teacher)[2]
    np.testing.assert_allclose(result.metrics, expected, rtol=1e-4)
    assert expected[:, STATISTICS.index("examples")].tolist() == [7, 7, 0]
    assert 0 < expected[0, STATISTICS.index("correct")] < 7


def test_same_seed_same_bits(compiled):
    update, _ = compiled(LocalTraining())
    first, again = update(TOP, batches(9, 4)), update(TOP, batches(9, 4))
    other = update(TOP, batches(9, 4), seed=(1, 3))
    for one, two in zip(first.update, again.update):
        assert one.numpy().tobytes() == two.numpy().tobytes()
    assert first.metrics.numpy().tobytes() == again.metrics.numpy().tobytes()
    assert any(np.any(one != two) for one, two in zip(first.update, other.update))


def test_batches_of_one_client_have_streams_of_their_own(compiled):
    update, _ = compiled(LocalTraining())
    once = update(TOP, batches(4, 4), rate=0.0).metrics
    twice = update(TOP, batches(4, 4).repeat(2), rate=0.0).metrics
    # Equal streams would augment the repeated batch in the same way: exactly twice the losses.
    assert abs(twice[0, 0] - 2 * once[0, 0]) > 1e-3


def test_exploding_learning_rate_gives_an_update_that_is_not_finite(compiled):
    result = compiled(LocalTraining())[0](TOP, batches(12, 4), rate=1e30)
    assert not all(np.all(np.isfinite(part)) for part in result.update)


def test_the_loop_is_one_even_where_autograph_cannot_read_the_caller(compiled, monkeypatch):
    calls = []

    def counted(*args):
        calls.append(args)
        assert len(calls) < 5, "the loop over the batches is unrolled"
        return draw_variants(*args)

    monkeypatch.setattr(rules, "draw_variants", counted)
    weights = tuple(envelope(TOP))
    run = tf.function(autograph=False, func=lambda dataset: local_update(
        LAYOUT, PLAIN, tf.constant(DIMS), weights, tf.constant(TOP), dataset, tf.constant([1, 2]),
        tf.constant(0.1)))
    result = run(batches(7, 2))
    expected = compiled(PLAIN)[0](TOP, batches(7, 2))
    np.testing.assert_allclose(result.metrics, expected.metrics, rtol=1e-5)


def test_a_graph_of_the_first_kind_gives_the_same(compiled):
    """TFF traces in such graphs, where `==` on tensors compares identities."""
    config = LocalTraining()
    expected = compiled(config)[0](TOP, batches(7, 4), seed=(3, 4))
    weights = [weight.numpy() for weight in envelope(TOP)]
    data = pictures(7)
    with tf.Graph().as_default():
        @tf.function
        def run(weights, dataset):
            return local_update(LAYOUT, config, tf.constant(DIMS), weights, tf.constant(TOP),
                                dataset, tf.constant([3, 4]), tf.constant(0.1))

        dataset = tf.data.Dataset.from_tensor_slices(data).batch(4)
        result = run(tuple(tf.constant(weight) for weight in weights), dataset)
        with tf.compat.v1.Session() as session:
            result = session.run(result)
    assert result.num_examples == 7
    np.testing.assert_allclose(result.metrics, expected.metrics, rtol=1e-4)
    for ours, theirs in zip(result.update, expected.update):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_prepared_pictures_are_normalised():
    config = dataclasses.replace(PLAIN, mean=(0.1, 0.2, 0.3), std=(0.5, 1.0, 2.0))
    data = pictures(2)
    batch = prepare_batch(config, tf.constant(data["x"]), tf.constant(data["y"]),
                          tf.constant([1, 2]), tf.constant(0))
    np.testing.assert_allclose(batch.images,
                               (data["x"] / 255 - (0.1, 0.2, 0.3)) / (0.5, 1.0, 2.0), atol=1e-6)
    assert batch.labels_a.numpy().tolist() == data["y"].tolist() and batch.lam == 1


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"rule": "x"}, "rule must be one of min, max, min_max, min_max_kd, full, but is 'x'"),
        ({"rho_kd": 1.1}, r"rho_kd must lie in \[0, 1\], but is 1.1"),
        ({"rho_kd": math.nan}, r"rho_kd must lie in \[0, 1\], but is nan"),
        ({"temperature": 0.0}, "temperature must be finite and positive, but is 0.0"),
        ({"temperature": math.nan}, "temperature must be finite and positive, but is nan"),
        ({"temperature": math.inf}, "temperature must be finite and positive, but is inf"),
        ({"label_smoothing": 1.0}, r"label_smoothing must lie in \[0, 1\), but is 1.0"),
        ({"gradients": "max"}, "gradients must be one of sum, mean, but is 'max'"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        LocalTraining(**settings)
