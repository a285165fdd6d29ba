"""The rows of the paper's Table 2: what they train on a mini-batch, and how the draw falls."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from feast_tf.routing import ROLES, RULES, TrainingRule
from feast_tf.training.rules import draw_variants

LARGEST, MINIMUM, RANDOM = 0, 1, 2


def draws(rule: TrainingRule, level: int, seeds: int) -> list[tuple[list[int], list[int]]]:
    """(places, roles) for each of the seeds [0, 7], [1, 7], ..."""
    draw = tf.function(lambda level, seed: draw_variants(rule, level, seed),
                       input_signature=[tf.TensorSpec([], tf.int32), tf.TensorSpec([2], tf.int32)])
    found = [draw(tf.constant(level), tf.constant([seed, 7])) for seed in range(seeds)]
    return [(places.numpy().tolist(), roles.numpy().tolist()) for places, roles in found]


def test_roles_are_the_rows_of_the_metrics():
    assert ROLES == ("largest", "minimum", "random")
    assert {name: rule.roles for name, rule in RULES.items()} == {
        "min": ("minimum",),
        "max": ("largest",),
        "min_max": ("largest", "minimum"),
        "min_max_kd": ("largest", "minimum"),
        "full": ("largest", "minimum", "random"),
    }
    assert [name for name, rule in RULES.items() if rule.distill] == ["min_max_kd", "full"]


@pytest.mark.parametrize(
    "name, places, roles",
    [
        ("min", [0], [MINIMUM]),
        ("max", [4], [LARGEST]),
        ("min_max", [4, 0], [LARGEST, MINIMUM]),
        ("min_max_kd", [4, 0], [LARGEST, MINIMUM]),
    ],
)
def test_rules_without_a_random_variant(name, places, roles):
    assert draws(RULES[name], 4, seeds=10) == [(places, roles)] * 10


def test_full_rule_adds_the_draw_where_it_is_neither_of_the_others():
    found = draws(RULES["full"], 4, seeds=60)
    without = ([4, 0], [LARGEST, MINIMUM])
    expected = [without] + [([4, 0, place], [LARGEST, MINIMUM, RANDOM]) for place in (1, 2, 3)]
    assert all(one in expected for one in found)
    assert all(one in found for one in expected)


@pytest.mark.parametrize("name", ["max", "min_max", "min_max_kd", "full"])
def test_at_level_0_the_largest_variant_is_trained_once(name):
    assert draws(RULES[name], 0, seeds=10) == [([0], [LARGEST])] * 10


def test_at_level_0_the_minimum_alone_keeps_its_role():
    assert draws(RULES["min"], 0, seeds=3) == [([0], [MINIMUM])] * 3


def test_at_level_1_there_is_nothing_between():
    assert draws(RULES["full"], 1, seeds=10) == [([1, 0], [LARGEST, MINIMUM])] * 10


@pytest.mark.parametrize("level", [2, 5])
def test_draw_is_uniform_over_all_affordable_variants(level):
    # Its hits on the ends have no pass of their own: 2 of level + 1 draws in the mean.
    count = 1200
    found = draws(RULES["full"], level, seeds=count)
    extra = np.bincount([places[2] for places, _ in found if len(places) == 3],
                        minlength=level + 1)
    expected, deviation = count / (level + 1), np.sqrt(count * level) / (level + 1)
    assert extra[0] == extra[level] == 0
    np.testing.assert_allclose(extra[1:level], expected, atol=4 * deviation)
    skipped = count - extra.sum()
    assert abs(skipped - 2 * expected) < 4 * np.sqrt(2 * (level - 1) * count) / (level + 1)


@pytest.mark.parametrize("rule", [TrainingRule(largest=a, minimum=b, random=True)
                                  for a, b in ((True, True), (True, False), (False, True))])
@pytest.mark.parametrize("level", [0, 1, 3])
def test_every_rule_with_a_draw_trains_each_place_once_and_the_largest_first(rule, level):
    found = draws(rule, level, seeds=40)
    for places, roles in found:
        assert len(set(places)) == len(places) and len(set(roles)) == len(roles)
        assert all(0 <= place <= level for place in places)
        assert (places[0], roles[0]) == ((level, LARGEST) if rule.largest else (0, MINIMUM))
    # A draw that hits a variant which the rule does not train anyway is a pass like any other.
    assert {place for places, _ in found for place in places} == set(range(level + 1))


def test_seed_decides():
    assert draws(RULES["full"], 9, seeds=20) == draws(RULES["full"], 9, seeds=20)
    assert len({tuple(places) for places, _ in draws(RULES["full"], 9, seeds=20)}) > 5


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("level", [0, 1, 4])
def test_a_graph_of_the_first_kind_draws_the_same(name, level):
    # TFF traces in such graphs, where `==` on tensors compares identities.
    with tf.Graph().as_default():
        found = draw_variants(RULES[name], tf.constant(level), tf.constant([3, 7]))
        with tf.compat.v1.Session() as session:
            places, roles = session.run(found)
    assert (places.tolist(), roles.tolist()) == draws(RULES[name], level, seeds=4)[3]
