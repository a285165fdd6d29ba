"""Tests of feast_tf.supernet.model."""

from hypothesis import Phase
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf

from feast_tf.space import SupernetSpec
from feast_tf.space import layer_table
from feast_tf.space import layout_of
from feast_tf.space import macs
from feast_tf.space import params
from feast_tf.space import paper_spec
from feast_tf.supernet import ElasticResNet
from feast_tf.supernet import ElasticRunner
from feast_tf.supernet import extract
from feast_tf.supernet import forward
from feast_tf.supernet import initial_weights

keras = tf.keras
SPEC = SupernetSpec(stem=6, bases=(8, 10), depths=(0, 1, 2), widths=(1 / 3, 0.5, 1.0),
                    expansions=(0.25, 0.5, 1.0), strides=(1, 2), classes=5, image_size=6, divisor=2)
LAYOUT = layout_of(SPEC)
# A failure is reported as found: shrinking it would build networks for minutes.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


def random_weights(layout, seed):
    """float32 weights on which nothing is trivial: gammas around 1, and no zeros."""
    rng = np.random.default_rng(seed)
    spread = {"kernel": 0.5, "gamma": 0.3, "beta": 0.4, "head_kernel": 0.7, "head_bias": 0.5}
    return [np.float32((p.kind == "gamma") + spread[p.kind] * rng.normal(size=p.shape))
            for p in layout.parameters]


def pictures(spec, seed, count=5):
    size = spec.image_size
    return np.random.default_rng(seed).normal(0.3, 1, (count, size, size, 3)).astype(np.float32)


def variants_of(spec):
    stages = spec.num_stages
    several = lambda values, count: st.tuples(*[st.sampled_from(values)] * count)
    return st.builds(lambda d, e, w: spec.variant(d=d, e=e, w=w), several(spec.depths, stages),
                     several(spec.expansions, stages), several(spec.widths, stages + 1))


@st.composite
def spaces_with_a_variant(draw):
    stages = draw(st.integers(1, 3))
    per_stage = lambda values: draw(st.lists(st.sampled_from(values), min_size=stages,
                                             max_size=stages))
    some = lambda values: draw(st.lists(st.sampled_from(values), min_size=1, max_size=3))
    strides = per_stage([1, 2, 3])
    spec = SupernetSpec(
        stem=draw(st.integers(1, 12)), bases=per_stage(range(1, 20)), depths=some([0, 1, 2]),
        widths=some([0.1, 1 / 3, 0.5, 1.0]), expansions=some([0.1, 0.22, 0.6, 1.0]),
        strides=strides, classes=draw(st.integers(1, 5)),
        image_size=int(np.prod(strides)) * draw(st.integers(1, 2)),
        divisor=draw(st.sampled_from([1, 2, 4, 8])))
    return spec, draw(variants_of(spec))


def keras_table(model):
    """[(kernel shape, pixels per side, parameters with the norm's, MACs)] from the layers alone."""
    rows = []
    for layer in model.layers:
        if isinstance(layer, (keras.layers.Conv2D, keras.layers.Dense)):
            kernel = tuple(layer.kernel.shape)
            pixels = int(np.prod(layer.output.shape[1:-1], dtype=int))
            size = int(np.prod(kernel))
            rows.append([kernel, int(np.sqrt(pixels)), layer.count_params(), size * pixels])
        elif isinstance(layer, keras.layers.BatchNormalization):
            rows[-1][2] += sum(int(np.prod(w.shape)) for w in layer.trainable_weights)
    return sorted(map(tuple, rows))


@given(spaces_with_a_variant())
@settings(max_examples=14, deadline=None, phases=PHASES)
def test_costs_are_those_of_the_extracted_network(spec_and_variant):
    spec, variant = spec_and_variant
    weights = [np.zeros(p.shape, np.float32) for p in layout_of(spec).parameters]
    model = extract(spec, weights, variant)
    table = keras_table(model)
    assert sum(row[2] for row in table) == params(spec, variant)
    assert sum(row[3] for row in table) == macs(spec, variant)
    assert table == sorted((row.kernel, row.output_size, row.params, row.macs)
                           for row in layer_table(spec, variant))
    trainable = sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)
    assert trainable == params(spec, variant)


@pytest.fixture(scope="module")
def runner():
    return ElasticRunner(LAYOUT)


@given(variants_of(SPEC), st.integers(0, 2**32))
@settings(max_examples=8, deadline=None, phases=PHASES)
def test_an_extracted_network_equals_the_elastic_one(runner, variant, seed):
    weights, images = random_weights(LAYOUT, seed), pictures(SPEC, seed)
    dims = LAYOUT.dims(variant)
    # Moments of other pictures, far from Keras' initial ones.
    batches = [3 * pictures(SPEC, seed + 1, 4) + 1, pictures(SPEC, seed + 2, 7)]
    moments = runner.recalibrate(weights, dims, batches)
    assert all(np.all(np.abs(mean) > 1e-6) and np.all(np.abs(variance - 1) > 1e-6)
               for mean, variance in moments if len(mean))
    plain = extract(SPEC, weights, variant, moments)
    np.testing.assert_allclose(plain(images), runner.logits(weights, dims, moments, images),
                               rtol=1e-5, atol=1e-5)
    # In training it uses the moments of the batch, as the elastic network does without moments.
    trained = forward(LAYOUT, weights, dims, images)
    np.testing.assert_allclose(plain(images, training=True), trained, rtol=1e-5, atol=1e-5)


def test_without_moments_an_extracted_network_has_keras_initial_ones():
    weights, images, dims = random_weights(LAYOUT, 4), pictures(SPEC, 5), LAYOUT.full_dims
    plain = extract(SPEC, weights, SPEC.largest())
    shapes = [LAYOUT.parameters[unit.gamma].shape for unit, _ in LAYOUT.units()]
    initial = [(tf.zeros(shape), tf.ones(shape)) for shape in shapes]
    expected = forward(LAYOUT, weights, dims, images, moments=initial)
    np.testing.assert_allclose(plain(images), expected, rtol=1e-4, atol=1e-4)
    trained = forward(LAYOUT, weights, dims, images)
    assert np.max(np.abs(trained - expected)) > 1e-2
    np.testing.assert_allclose(plain(images, training=True), trained, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", [
    SupernetSpec(stem=3, bases=(5,), depths=(0,), widths=(0.4, 1.0), expansions=(0.5, 1.0),
                 strides=(3,), classes=2, image_size=9, divisor=1),
    SupernetSpec(stem=4, bases=(8, 16), depths=(1, 3), widths=(0.3, 0.6), expansions=(0.25, 1.0),
                 strides=(2, 2), classes=4, image_size=8, divisor=4),
], ids=["one stage, stride 3", "divisor 4"])
def test_extraction_in_other_spaces(spec):
    layout, weights, images = layout_of(spec), random_weights(layout_of(spec), 1), pictures(spec, 2)
    for variant in (spec.smallest(), spec.largest(), spec.random(np.random.default_rng(3))):
        dims = layout.dims(variant)
        logits, moments = forward(layout, weights, dims, images, record_moments=True)
        # Its own moments as fixed ones give the same logits.
        np.testing.assert_allclose(extract(spec, weights, variant, moments)(images), logits,
                                   rtol=1e-4, atol=1e-5)


def test_an_extracted_network_has_no_trace_of_the_elastic_one():
    variant = SPEC.variant(d=(1, 0), e=(0.5, 1), w=(0.5, 1, 1 / 3))
    weights, images = random_weights(LAYOUT, 4), pictures(SPEC, 5)
    model = extract(SPEC, weights, variant, name="served")
    assert model.name == "served" and type(model).__name__ == "Functional"
    assert {type(layer) for layer in model.layers} == {
        keras.layers.InputLayer, keras.layers.Conv2D, keras.layers.BatchNormalization,
        keras.layers.ReLU, keras.layers.Add, keras.layers.ZeroPadding2D,
        keras.layers.AveragePooling2D, keras.layers.GlobalAveragePooling2D, keras.layers.Dense}
    assert {layer.epsilon for layer in model.layers
            if isinstance(layer, keras.layers.BatchNormalization)} == {1e-5}
    # Every tensor is as large as the variant's, and the file names nothing of this package.
    assert [tuple(w.shape) for w in model.trainable_weights if len(w.shape) == 4] == [
        (3, 3, 3, 4), (3, 3, 4, 4), (3, 3, 4, 8), (1, 1, 4, 8), (3, 3, 8, 4), (3, 3, 4, 8),
        (3, 3, 8, 4), (3, 3, 4, 4), (1, 1, 8, 4)]
    assert "feast" not in model.to_json()
    copy = keras.models.model_from_json(model.to_json())
    copy.set_weights(model.get_weights())
    np.testing.assert_array_equal(copy(images), model(images))
    graph = tf.function(lambda x: model(x, training=False)).get_concrete_function(
        tf.TensorSpec([1, 6, 6, 3])).graph
    kinds = {operation.type for operation in graph.get_operations()}
    assert not [kind for kind in kinds if "Slice" in kind or "Gather" in kind
                or kind in ("If", "StatelessIf", "While", "PartitionedCall", "Select", "SelectV2")]


def test_an_extracted_network_owns_its_weights():
    weights, images = random_weights(LAYOUT, 4), pictures(SPEC, 5)
    model = extract(SPEC, weights, SPEC.largest())
    before = model(images).numpy()
    for weight in weights:
        weight[...] = 0
    np.testing.assert_array_equal(model(images), before)


def test_an_extracted_network_goes_on_training():
    model = extract(SPEC, random_weights(LAYOUT, 4), SPEC.smallest())
    model.compile(keras.optimizers.SGD(0.05), keras.losses.SparseCategoricalCrossentropy(True))
    images, labels = pictures(SPEC, 5, 20), np.arange(20) % 5
    losses = model.fit(images, labels, epochs=8, verbose=0, batch_size=20).history["loss"]
    assert losses[-1] < losses[0]


def test_extraction_refuses_foreign_variants():
    with pytest.raises(ValueError, match="d must have 2 values, but has 4"):
        extract(SPEC, random_weights(LAYOUT, 0), paper_spec().smallest())


def test_extraction_at_paper_scale():
    spec = paper_spec(classes=100)
    layout, weights = layout_of(spec), initial_weights(layout_of(spec), 0)
    assert sum(weight.shape.num_elements() for weight in weights) == 55_682_916
    variant = spec.variant(d=(2, 4, 3, 5), e=(0.1, 0.25, 0.14, 0.18), w=(0.6, 0.3, 0.5, 0.4, 0.5))
    model, images = extract(spec, weights, variant), pictures(spec, 1, 2)
    assert sum(int(np.prod(w.shape)) for w in model.trainable_weights) == params(spec, variant)
    np.testing.assert_allclose(model(images, training=True),
                               forward(layout, weights, layout.dims(variant), images),
                               rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def model():
    model = ElasticResNet(SPEC, seed=3)
    model.set_weights(random_weights(LAYOUT, 6))
    return model


def test_weights_are_in_the_order_of_the_layout(model):
    assert [tuple(w.shape) for w in model.weights] == [p.shape for p in LAYOUT.parameters]
    assert [w.name.removesuffix(":0") for w in model.weights] == [
        p.name.replace("/", "_") for p in LAYOUT.parameters]
    assert model.trainable_weights == model.weights and not model.non_trainable_weights
    assert model.count_params() == params(SPEC, SPEC.largest())
    for weight, expected in zip(model.get_weights(), random_weights(LAYOUT, 6)):
        np.testing.assert_array_equal(weight, expected)


def test_a_new_model_has_the_initial_weights_of_its_seed():
    for weight, expected in zip(ElasticResNet(SPEC, seed=5).weights, initial_weights(LAYOUT, 5)):
        np.testing.assert_array_equal(weight, expected)


def test_a_call_runs_the_variant_that_it_is_given(model):
    images, variant = pictures(SPEC, 7), SPEC.variant(d=(0, 2), e=0.5, w=(0.5, 1, 1 / 3))
    dims = LAYOUT.dims(variant)
    expected = forward(LAYOUT, model.get_weights(), dims, images)
    for given_as in (variant, dims, dims.tolist(), tf.constant(dims), dims.astype(np.int64)):
        np.testing.assert_array_equal(model(images, variant=given_as), expected)
    np.testing.assert_array_equal(model(images), model(images, variant=SPEC.largest()))
    assert np.max(np.abs(model(images) - expected)) > 1e-3
    with pytest.raises(ValueError, match=r"d must have 2 values, but has 4"):
        model(images, variant=paper_spec().smallest())


def test_a_call_with_moments_normalises_by_them(model, runner):
    images, variant = pictures(SPEC, 7), SPEC.variant(d=(1, 0), e=0.5, w=0.5)
    dims = LAYOUT.dims(variant)
    moments = runner.recalibrate(model.get_weights(), dims, [pictures(SPEC, 8, 9)])
    np.testing.assert_allclose(model(images, variant=variant, moments=moments),
                               runner.logits(model.get_weights(), dims, moments, images),
                               rtol=1e-6, atol=1e-6)


def test_mask_execution_gives_the_same_logits(model):
    images, variant = pictures(SPEC, 7), SPEC.variant(d=(1, 0), e=0.5, w=0.5)
    masked = ElasticResNet(SPEC, execution="mask")
    masked.set_weights(model.get_weights())
    np.testing.assert_allclose(masked(images, variant=variant), model(images, variant=variant),
                               rtol=1e-5, atol=1e-5)


def test_one_graph_of_the_model_serves_all_variants(model):
    run = tf.function(lambda images, dims: model(images, variant=dims), input_signature=[
        tf.TensorSpec([None, 6, 6, 3]), tf.TensorSpec([LAYOUT.num_dims], tf.int32)])
    rng, images = np.random.default_rng(1), pictures(SPEC, 7)
    for _ in range(3):
        variant = SPEC.random(rng)
        np.testing.assert_allclose(run(images, LAYOUT.dims(variant)),
                                   model(images, variant=variant), rtol=1e-5, atol=1e-5)
    assert run.experimental_get_tracing_count() == 1


def test_a_gradient_step_changes_the_variants_slice_alone():
    model = ElasticResNet(SPEC, seed=2)
    before = model.get_weights()
    images, labels = pictures(SPEC, 9, 10), np.arange(10) % 5
    variant = SPEC.variant(d=(1, 0), e=0.5, w=0.5)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.05)

    @tf.function
    def step(dims):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, variant=dims))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_weights),
                                      model.trainable_weights))
        return loss

    losses = [float(step(tf.constant(LAYOUT.dims(variant)))) for _ in range(6)]
    assert losses[-1] < losses[0]
    changed, extents = False, LAYOUT.extents(LAYOUT.dims(variant))
    for after, old, extent in zip(model.get_weights(), before, extents):
        inside = tuple(slice(0, int(size)) for size in extent)
        changed |= not np.array_equal(after[inside], old[inside])
        after[inside] = old[inside]
        np.testing.assert_array_equal(after, old)
    assert changed


def test_fit_trains_the_whole_supernet():
    model = ElasticResNet(SPEC, seed=2)
    model.compile(keras.optimizers.SGD(0.05), keras.losses.SparseCategoricalCrossentropy(True))
    images, labels = pictures(SPEC, 9, 20), np.arange(20) % 5
    losses = model.fit(images, labels, epochs=6, verbose=0, batch_size=20).history["loss"]
    assert losses[-1] < losses[0]
    assert model.predict(images, verbose=0).shape == (20, 5)


def test_a_config_makes_the_same_model():
    model = ElasticResNet(SPEC, execution="mask", seed=11, name="net")
    copy = ElasticResNet.from_config(model.get_config())
    assert (copy.spec, copy.execution, copy.seed, copy.name) == (SPEC, "mask", 11, "net")
    for weight, expected in zip(copy.weights, model.weights):
        np.testing.assert_array_equal(weight, expected)


@pytest.mark.parametrize("name, used", [
    ("net.keras", False),
    ("net.keras", True),
    pytest.param("net", True, marks=pytest.mark.skipif(
        hasattr(keras, "ops"), reason="Keras 3 has no SavedModel format of its own")),
])
def test_a_saved_model_comes_back(tmp_path, name, used):
    model = ElasticResNet(SPEC, seed=3)
    model.set_weights(random_weights(LAYOUT, 6))
    images, variant = pictures(SPEC, 7), SPEC.variant(d=(1, 0), e=0.5, w=0.5)
    if used:  # which the SavedModel format needs
        model(images)
    model.save(tmp_path / name)
    loaded = keras.models.load_model(tmp_path / name)
    assert isinstance(loaded, ElasticResNet) and loaded.spec == SPEC
    for weight, expected in zip(loaded.weights, model.weights):
        np.testing.assert_array_equal(weight, expected)
    np.testing.assert_array_equal(loaded(images, variant=variant), model(images, variant=variant))


def test_saved_weights_come_back(tmp_path, model):
    model.save_weights(tmp_path / "net.weights.h5")
    copy = ElasticResNet(SPEC, seed=9)
    copy.load_weights(tmp_path / "net.weights.h5")
    for weight, expected in zip(copy.weights, model.weights):
        np.testing.assert_array_equal(weight, expected)
