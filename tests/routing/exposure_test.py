"""Tests of feast_tf.routing.exposure: against position-by-position counting, and by simulation."""

import numpy as np
import pytest

from feast_tf.routing import Exposure
from feast_tf.routing import RULES
from feast_tf.routing import Routing
from feast_tf.space import SupernetSpec
from feast_tf.space import VariantCache
from feast_tf.space import params

SPEC = SupernetSpec(stem=4, bases=(6, 10), depths=(0, 1, 2), widths=(0.5, 0.8, 1.0),
                    expansions=(0.3, 0.6), strides=(1, 2), classes=3, image_size=4, divisor=1)


@pytest.fixture(scope="module")
def routing():
    # Neither nested in each other nor covering the supernet.
    return Routing(VariantCache(SPEC, [
        SPEC.variant(d=[0, 0], e=0.3, w=[0.5, 0.5, 0.5]),
        SPEC.variant(d=[1, 0], e=[0.6, 0.3], w=[0.8, 0.5, 0.5]),
        SPEC.variant(d=[0, 1], e=[0.3, 0.6], w=[0.5, 0.8, 0.8]),
        SPEC.variant(d=[1, 1], e=[0.3, 0.3], w=[1.0, 0.8, 0.8])]))


def held(routing, dims):
    """bool of the shape of each parameter: the positions of one sub-network, by slicing."""
    result = []
    for place, parameter in enumerate(routing.layout.parameters):
        mask = np.zeros(parameter.shape, bool)
        mask[routing.layout.prefix(place, dims)] = True
        result.append(mask)
    return result


def test_cells_cover_every_position_once(routing):
    exposure = Exposure(routing, RULES["full"])
    assert exposure.size.sum() == params(SPEC, SPEC.largest())
    np.testing.assert_array_equal(exposure.size @ exposure.reached, routing.payload)


@pytest.mark.parametrize("rule", ["full", "max", "min_max"])
def test_exposure_is_that_of_counted_positions(routing, rule):
    share = np.array([0.4, 0.3, 0.2, 0.1])
    exposure = Exposure(routing, RULES[rule])
    chances = RULES[rule].expected_passes(4)
    variants = [held(routing, dims) for dims in routing.variant_dims]
    envelopes = [held(routing, dims) for dims in routing.envelope_dims]
    expected = {}
    for place, parameter in enumerate(routing.layout.parameters):
        inside = np.stack([variant[place] for variant in variants], -1)
        name = parameter.name.split("/")
        group = "/".join(name[:2]) if name[0].startswith("stage") else name[0]
        routed = np.stack([envelope[place] for envelope in envelopes], -1) @ share
        activation = inside @ (share @ chances)
        expected.setdefault(group, []).append(
            [*(values.ravel() for values in (routed, activation, inside.any(-1))),
             np.stack([envelope[place].ravel() for envelope in envelopes], -1),
             inside.reshape(-1, 4) @ chances.T])
    least = []
    for found in exposure.by_group(share):
        routed, activation, served, reach, passes = map(
            np.concatenate, zip(*expected.pop(found.name)))
        assert found.params == len(routed)
        assert found.routed == pytest.approx(routed.mean())
        assert found.activation == pytest.approx(activation.mean())
        assert found.served == pytest.approx(served.mean())
        assert found.reach == pytest.approx(reach.mean(axis=0))
        assert found.passes == pytest.approx(passes.mean(axis=0))
        assert found.least_activation == pytest.approx(
            activation[served].min() if served.any() else 0)
        least += activation[served].tolist()
    assert not expected
    assert exposure.psi_min(share) == pytest.approx(min(least))


def test_simulated_rounds_have_the_expected_mass(routing):
    """E[M_route] and E[M_exp] of every cell against 20,000 rounds (paper 3.4)."""
    rng, rounds, cohort = np.random.default_rng(5), 20_000, 2
    level, samples = np.array([0, 1, 1, 2, 3]), np.array([10, 40, 25, 60, 90])
    exposure = Exposure(routing, RULES["full"])
    # passes = inside @ chances.T, and chances can be inverted, so that inside is known exactly.
    inside = exposure.passes @ np.linalg.inv(RULES["full"].expected_passes(4).T)
    routed, activated = np.zeros(len(exposure.size)), np.zeros(len(exposure.size))
    for _ in range(rounds):
        for client in rng.choice(5, cohort, replace=False):
            top = level[client]
            routed += samples[client] * exposure.reached[:, top]
            trained = {0, top, int(rng.integers(top + 1))}
            activated += samples[client] * inside[:, sorted(trained)].sum(axis=1)
    share = np.bincount(level, weights=samples, minlength=4) / samples.sum()
    mass = cohort / 5 * samples.sum()  # m/N sum_i n_i
    np.testing.assert_allclose(routed / rounds, mass * exposure.routed_share(share), rtol=0.03)
    np.testing.assert_allclose(activated / rounds, mass * exposure.activation_share(share),
                               rtol=0.03, atol=1e-6)


def test_larger_budgets_reach_more(routing):
    reached = Exposure(routing, RULES["full"]).reached
    assert (reached[:, 1:] >= reached[:, :-1]).all()
