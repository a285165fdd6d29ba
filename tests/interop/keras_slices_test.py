"""Maps of Keras models: a narrower model is a prefix of the whole one, or an error says why."""

from __future__ import annotations

from hypothesis import given, settings, strategies
import numpy as np
import pytest
import tensorflow as tf

from feast_tf.interop.keras_slices import recalibrate, slice_map, submodel
from feast_tf.interop.rounds import merge

layers = tf.keras.layers


def randomize(model, seed=0):
    rng = np.random.default_rng(seed)
    for weight in model.weights:
        values = rng.normal(size=weight.shape).astype(np.float32)
        weight.assign(np.abs(values) + 0.5 if "variance" in weight.name else values)
    return model


def values(weights):
    return [np.asarray(weight) for weight in weights]


def functional(inputs, *chain):
    outputs = inputs
    for layer in chain:
        outputs = layer(outputs)
    return tf.keras.Model(inputs, outputs)


@pytest.fixture(scope="module")
def perceptron():
    return randomize(tf.keras.Sequential([
        tf.keras.Input([5]), layers.Dense(8, "relu", name="one"), layers.Dropout(0.5),
        layers.Dense(6, "relu", name="two"), layers.Dense(3, name="out")]))


LEVELS = [{"one": 2, "two": 0.5}, {"one": 0.7}, {"two": np.int64(1)}, {}]


def test_a_map_by_hand(perceptron):
    slices = slice_map(perceptron, LEVELS)
    names = [name.replace(f"{perceptron.name}/", "") for name in slices.names]  # Keras 3 has it
    assert names == ["one/kernel", "one/bias", "two/kernel", "two/bias", "out/kernel", "out/bias"]
    assert slices.shapes == ((5, 8), (8,), (8, 6), (6,), (6, 3), (3,))
    assert slices.slice_shapes(0) == [(5, 2), (2,), (2, 3), (3,), (3, 3), (3,)]
    assert slices.slice_shapes(1) == [(5, 6), (6,), (6, 6), (6,), (6, 3), (3,)]  # 5.6 units
    assert slices.slice_shapes(2) == [(5, 8), (8,), (8, 1), (1,), (1, 3), (3,)]
    assert slices.slice_shapes(3) == list(slices.shapes)
    assert slices.extents[0].dtype == np.int32
    assert slices.elastic_shapes[1:4] == ((None,), (None, None), (None,))


def test_a_submodel_by_hand(perceptron):
    part = submodel(perceptron, LEVELS[0])
    kernel_1, bias_1, kernel_2, bias_2, kernel_3, bias_3 = values(perceptron.trainable_weights)
    x = np.float32([[1, -2, 3, 0.5, -1]])
    hidden = np.maximum(x @ kernel_1[:, :2] + bias_1[:2], 0)
    hidden = np.maximum(hidden @ kernel_2[:2, :3] + bias_2[:3], 0)
    np.testing.assert_allclose(part(x), hidden @ kernel_3[:3] + bias_3, rtol=1e-5)
    assert not {id(weight) for weight in part.weights} & {id(w) for w in perceptron.weights}


def branches():
    """Branches of equal shapes at one depth, a residual sum, a concatenation, a shared layer."""
    inputs = tf.keras.Input([6, 6, 3])
    shared = layers.ReLU(name="shared")
    stem = shared(layers.Conv2D(8, 3, padding="same", name="stem")(inputs))
    left = layers.Conv2D(8, 3, padding="same", name="left")(stem)
    right = layers.SeparableConv2D(8, 3, padding="same", depth_multiplier=2, name="right")(stem)
    right = layers.DepthwiseConv2D(3, padding="same", name="depth")(right)
    total = shared(layers.Add(name="sum")([stem, left, right]))
    total = layers.MaxPooling2D()(total)
    static = layers.Conv2D(2, 1, strides=2, name="static")(inputs)
    both = layers.Concatenate(name="both")([static, total])
    pooled = layers.GlobalAveragePooling2D()(both)
    return tf.keras.Model(inputs, [layers.Dense(4, name="head")(pooled),
                                   layers.Dense(2, name="second")(layers.Flatten()(static))])


def words():
    inputs = tf.keras.Input([7], dtype="int32")
    embedded = layers.Embedding(20, 8, name="embedding")(inputs)
    attended = layers.MultiHeadAttention(4, 3, name="attention")(embedded, embedded)
    x = layers.Add()([embedded, attended])
    x = layers.Conv1D(6, 3, activation="relu", name="conv")(x)
    x = layers.SimpleRNN(5, return_sequences=True, name="rnn")(x)
    x = layers.GRU(3, name="gru")(x)
    return tf.keras.Model(inputs, layers.Dense(2, name="head")(x))


MODELS = {
    "branches": (branches, [{"stem": 3, "left": 3, "right": 3},
                            {"stem": 0.5, "left": 4, "right": 4}, {}]),
    "words": (words, [{"embedding": 2, "attention": 1, "conv": 3, "rnn": 2}, {"conv": 0.5},
                      {"attention": 3, "embedding": 5}, {}]),
}
INPUTS = {"branches": np.random.default_rng(1).normal(size=[2, 6, 6, 3]).astype(np.float32),
          "words": np.random.default_rng(2).integers(20, size=[2, 7])}


@pytest.mark.parametrize("name", MODELS)
def test_a_submodel_computes_what_the_whole_model_does_where_the_rest_is_0(name):
    build, levels = MODELS[name]
    model = randomize(build())
    whole = values(model.trainable_weights)
    slices = slice_map(model, levels)
    for level, widths in enumerate(levels):
        part = submodel(model, widths)
        cut = slices.cut(whole, level)
        for ours, theirs in zip(values(part.trainable_weights), cut):
            np.testing.assert_array_equal(ours, theirs)
        for weight, old, kept in zip(model.trainable_weights, whole, cut):
            weight.assign(np.pad(kept, [(0, wide - size)
                                        for wide, size in zip(old.shape, kept.shape)]))
        for ours, theirs in zip(tf.nest.flatten(part(INPUTS[name])),
                                tf.nest.flatten(model(INPUTS[name]))):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
        for weight, old in zip(model.trainable_weights, whole):
            weight.assign(old)
    assert slices.payload[-1] == sum(weight.size for weight in whole)


@settings(max_examples=8, deadline=None)
@given(strategies.lists(strategies.tuples(
    strategies.sampled_from(["conv", "separable", "residual", "depthwise", "norm", "pool"]),
    strategies.integers(1, 6), strategies.floats(0.01, 1)), min_size=1, max_size=5),
    strategies.booleans())
def test_weights_of_random_submodels_are_what_is_cut(chain, flatten):
    inputs = x = tf.keras.Input([8, 8, 2])
    widths, channels, share = {}, 2, 1.0
    for place, (kind, units, fraction) in enumerate(chain):
        name = f"layer{place}"
        if kind == "conv":
            x = layers.Conv2D(units, 3, padding="same", name=name)(x)
            channels, share = units, fraction
            widths[name] = share
        elif kind == "separable":
            x = layers.SeparableConv2D(units, 3, padding="same", name=name)(x)
            channels, share = units, fraction
            widths[name] = share
        elif kind == "residual":
            x = layers.Add()([x, layers.Conv2D(channels, 1, name=name)(x)])
            widths[name] = share
        elif kind == "depthwise":
            x = layers.DepthwiseConv2D(3, padding="same")(x)
        elif kind == "norm":
            x = layers.BatchNormalization()(x)
        else:
            x = layers.AveragePooling2D(2, padding="same")(x)
    x = layers.GlobalMaxPooling2D(keepdims=True)(x)
    x = layers.Flatten()(x) if flatten else layers.Activation("relu")(x)
    model = randomize(tf.keras.Model(inputs, layers.Dense(3)(x)))
    slices = slice_map(model, [widths, {}])
    part = submodel(model, widths)
    for ours, theirs in zip(values(part.trainable_weights),
                            slices.cut(values(model.trainable_weights), 0)):
        np.testing.assert_array_equal(ours, theirs)
    whole = submodel(model, {})
    np.testing.assert_array_equal(whole(np.ones([1, 8, 8, 2])), model(np.ones([1, 8, 8, 2])))


def test_only_trainable_weights_are_sent():
    frozen = layers.Dense(4, name="frozen", trainable=False)
    model = randomize(functional(tf.keras.Input([3]), frozen,
                                 layers.BatchNormalization(name="norm"),
                                 layers.Dense(6, name="hidden"), layers.LayerNormalization(),
                                 layers.Dense(2, name="out")))
    slices = slice_map(model, [{"hidden": 3}, {}])
    assert slices.names[:3] == ("norm/gamma", "norm/beta", "hidden/kernel")
    part = submodel(model, {"hidden": 3})
    np.testing.assert_array_equal(part.get_layer("frozen").kernel, frozen.kernel)
    np.testing.assert_array_equal(part.get_layer("norm").moving_mean,
                                  model.get_layer("norm").moving_mean)


def test_moments_of_its_own():
    model = randomize(functional(tf.keras.Input([2]), layers.Dense(4, name="hidden"),
                                 layers.BatchNormalization(name="norm", momentum=0.9),
                                 layers.Dense(1)))
    part = submodel(model, {"hidden": 3})
    batches = [np.random.default_rng(seed).normal(seed, 1, [50, 2]).astype(np.float32)
               for seed in range(3)]
    features = [np.asarray(part.get_layer("hidden")(batch)) for batch in batches]
    recalibrate(part, iter(batches))
    norm = part.get_layer("norm")
    # Keras 2 divides variances by one picture less.
    means, variances = ([getattr(f, name)(0) for f in features] for name in ("mean", "var"))
    np.testing.assert_allclose(norm.moving_mean, np.mean(means, axis=0), rtol=1e-4)
    np.testing.assert_allclose(norm.moving_variance, np.mean(variances, axis=0), rtol=0.03)
    assert norm.momentum == 0.9


def test_a_round_of_a_user_model(perceptron):
    slices = slice_map(perceptron, LEVELS)
    weights = values(perceptron.trainable_weights)
    part = submodel(perceptron, LEVELS[0])
    trained = [value + 1 for value in values(part.trainable_weights)]
    new, _ = merge(slices, weights, {"phone": 0}, [("phone", trained, 9)])
    for ours, theirs, extents in zip(new, weights, slices.extents):
        change = np.pad(np.ones(extents[0]), [(0, wide - size) for wide, size in
                                              zip(theirs.shape, extents[0])])
        np.testing.assert_allclose(ours - theirs, change, atol=1e-6)


def picture():
    return tf.keras.Input([4, 4, 2])


def conv(name="conv", **options):
    return layers.Conv2D(4, 3, padding="same", name=name, **options)


class Doubled(layers.Layer):
    """An operation that nobody knows."""

    def call(self, inputs):
        return tf.concat([inputs, inputs], axis=-1)


def concatenated():
    inputs = picture()
    first, second = conv("conv")(inputs), conv("second")(inputs)
    both = layers.Concatenate(name="both")([first, second])
    return tf.keras.Model(inputs, layers.Dense(2)(layers.GlobalMaxPooling2D()(both)))


def residual():
    inputs = picture()
    first = conv("conv")(inputs)
    total = layers.Add()([first, conv("second")(first)])
    return tf.keras.Model(inputs, layers.Dense(2)(layers.GlobalMaxPooling2D()(total)))


def flattened_once():
    """A shared Flatten, whose first call is not elastic."""
    inputs, flatten = picture(), layers.Flatten(name="flatten")
    rigid, elastic = flatten(conv("rigid")(inputs)), flatten(conv("conv")(inputs))
    return tf.keras.Model(inputs, [layers.Dense(2)(rigid), layers.Dense(2)(elastic)])


REFUSED = {
    "flatten": (lambda: functional(picture(), conv(), layers.Flatten(name="flat"), layers.Dense(2)),
                {"conv": 2}, r"flat \(Flatten\): .*pool globally"),
    "shared": (flattened_once, {"conv": 2}, r"flatten \(Flatten\): .*pool globally"),
    "reshape": (lambda: functional(picture(), conv(), layers.Reshape([16, -1], name="again"),
                                   layers.GRU(3), layers.Dense(2)),
                {"conv": 2}, r"again \(Reshape\) is not known to keep"),
    "fixed": (lambda: functional(picture(), conv(), layers.Reshape([16, 4]), layers.GRU(3)),
              {"conv": 2}, "Keras cannot build the model of widths {'conv': 2}: "),
    "concatenate": (concatenated, {"conv": 2, "second": 2}, r"both \(Concatenate\): only its last"),
    "residual": (residual, {"conv": 2}, "Keras cannot build the model of widths {'conv': 2}: "),
    "unknown": (lambda: functional(picture(), conv(), Doubled(name="twice"),
                                   layers.GlobalMaxPooling2D(), layers.Dense(2)),
                {"conv": 2}, r"twice \(Doubled\) is not known to keep .*`trusted`"),
    "groups": (lambda: functional(picture(), conv(), conv("grouped", groups=2),
                                  layers.GlobalMaxPooling2D(), layers.Dense(2)),
               {"conv": 2}, r"grouped \(Conv2D\): a convolution in groups"),
    "axis": (lambda: functional(tf.keras.Input([4]), layers.Dense(6, name="conv"),
                                layers.RepeatVector(3), layers.Permute([2, 1], name="turned"),
                                layers.GlobalMaxPooling1D(), layers.Dense(2)),
             {"conv": 2}, r"turned \(Permute\) is not known"),
    "pooled": (lambda: functional(
        tf.keras.Input([2, 4, 4]), layers.BatchNormalization(axis=1), layers.Dense(3, name="conv"),
        layers.GlobalMaxPooling2D(data_format="channels_first", name="first"), layers.Dense(2)),
        {"conv": 2}, r"first \(GlobalMaxPooling2D\): only channels can be elastic"),
    "output": (lambda: functional(picture(), layers.GlobalMaxPooling2D(),
                                  layers.Dense(4, name="conv")),
               {"conv": 2}, "the outputs of the model must keep their shape"),
    "lstm": (lambda: functional(tf.keras.Input([5, 2]), layers.LSTM(4, name="conv"),
                                layers.Dense(2)),
             {"conv": 2}, r"conv \(LSTM\) has no width to cut: its gates lie side by side"),
    "no width": (lambda: functional(picture(), layers.ReLU(name="conv"), layers.Dense(2)),
                 {"conv": 2},
                 r"conv \(ReLU\) has no width to cut: only .*Dense"),
    "no layer": (residual, {"cnv": 2}, "the model has no layer 'cnv'; its layers are .*conv"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_prefix_is_refused(case):
    build, widths, message = REFUSED[case]
    model = build()
    assert slice_map(model, [{}]).num_levels == 1
    with pytest.raises(ValueError, match=f"^level 1: .*{message}") as caught:
        slice_map(model, [{}, widths])
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=f"^(?!level).*{message}"):
        submodel(model, widths)


def test_channels_that_stay_in_front_when_flattened():
    for shape, data_format in (([1, 1, 2], "channels_last"), ([2, 3, 3], "channels_first")):
        model = functional(tf.keras.Input(shape), conv(data_format=data_format),
                           layers.Flatten(), layers.Dense(2))
        positions = 1 if data_format == "channels_last" else 9
        assert slice_map(model, [{"conv": 3}]).slice_shapes(0)[2] == (3 * positions, 2)


@pytest.mark.parametrize("width", [0, -1, 9, 0.0, 1.5, True, "4", None, float("nan")])
def test_widths_that_are_none(perceptron, width):
    with pytest.raises(ValueError, match=r"one \(Dense\): the width must be an int in 1..8 or "):
        slice_map(perceptron, [{"one": width}])


def test_a_model_without_weights():
    with pytest.raises(ValueError, match="rigid has no trainable weights"):
        slice_map(tf.keras.Sequential([tf.keras.Input([3]), layers.ReLU()], name="rigid"), [{}])


def test_no_levels(perceptron):
    with pytest.raises(ValueError, match="at least one level"):
        slice_map(perceptron, [])


def test_a_trusted_layer():
    model = functional(tf.keras.Input([3, 4]), layers.Dense(6, name="hidden"),
                       layers.Permute([2, 1], name="turned"), layers.GlobalMaxPooling1D(
                           data_format="channels_first", name="pool"), layers.Dense(2))
    slices = slice_map(model, [{"hidden": 2}], trusted=["turned"])
    assert slices.slice_shapes(0) == [(4, 2), (2,), (2, 2), (2,)]
    assert submodel(model, {"hidden": 2}, trusted=["turned"]).count_params() == 16


def test_models_without_a_known_graph():
    class Own(tf.keras.Model):
        def __init__(self):
            super().__init__(name="own")
            self.dense = layers.Dense(2)

        def call(self, inputs):
            return self.dense(inputs)

    own = Own()
    own(np.ones([1, 3]))
    unbuilt = tf.keras.Sequential([layers.Dense(2)], name="unbuilt")
    for model in (own, unbuilt):
        with pytest.raises(ValueError, match=f"{model.name} must be a Sequential or functional"):
            slice_map(model, [{}])


def test_a_sequential_model_that_was_built_late():
    model = tf.keras.Sequential([layers.Dense(4, name="hidden"), layers.Dense(2)])
    model.build([None, 3])
    assert slice_map(model, [{"hidden": 1}]).slice_shapes(0) == [(3, 1), (1,), (1, 2), (2,)]
