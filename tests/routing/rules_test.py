"""Tests of feast_tf.routing.rules."""

import numpy as np
import pytest

from feast_tf.routing import RULES
from feast_tf.routing import TrainingRule


def test_expected_passes_of_the_full_rule():
    np.testing.assert_allclose(RULES["full"].expected_passes(4), [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1 / 3, 1, 0],  # a third of the draws hits the one in between
        [1, 1 / 4, 1 / 4, 1]])


@pytest.mark.parametrize("name, row", [
    ("min", [1, 0, 0]), ("max", [0, 0, 1]), ("min_max", [1, 0, 1]), ("min_max_kd", [1, 0, 1])])
def test_expected_passes_of_endpoints(name, row):
    assert RULES[name].expected_passes(3)[2].tolist() == row


def test_a_draw_counts_where_its_variant_is_not_trained_anyway():
    without_minimum = TrainingRule(largest=True, random=True).expected_passes(3)
    np.testing.assert_allclose(without_minimum, [[1, 0, 0], [1 / 2, 1, 0], [1 / 3, 1 / 3, 1]])
    without_largest = TrainingRule(minimum=True, random=True).expected_passes(3)
    np.testing.assert_allclose(without_largest, [[1, 0, 0], [1, 1 / 2, 0], [1, 1 / 3, 1 / 3]])


@pytest.mark.parametrize("rule", [
    *RULES.values(), TrainingRule(largest=True, random=True),
    TrainingRule(minimum=True, random=True)])
def test_expected_passes_are_those_that_training_draws(rule):
    import tensorflow as tf

    from feast_tf.training.rules import draw_variants

    level, draws = 3, 400
    draw = tf.function(lambda seed: draw_variants(rule, tf.constant(level), seed)[0])
    counts = np.zeros(5)
    for number in range(draws):
        counts += np.bincount(draw(tf.constant([number, 7])).numpy(), minlength=5)
    # Four standard deviations of a mean of 400 draws.
    np.testing.assert_allclose(counts / draws, rule.expected_passes(5)[level], atol=4 * 0.5 / 20)


def test_roles_in_order():
    assert RULES["full"].roles == ("largest", "minimum", "random")
    assert RULES["min"].roles == ("minimum",)


@pytest.mark.parametrize("arguments, message", [
    (dict(random=True), "a training rule needs the largest or the minimum variant"),
    (dict(largest=True, distill=True), "distillation needs the largest variant as teacher"),
])
def test_impossible_rule_raises(arguments, message):
    with pytest.raises(ValueError, match=message):
        TrainingRule(**arguments)
