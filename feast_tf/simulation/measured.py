"""The operating points of a run, measured again and in depth: accuracy, calibration, confusions.

Cached variants give the accuracy-MACs curve and the population average (paper 4.2, Table 1);
uncached ones drawn from the space give the post-hoc gap (4.2, "Post-hoc extraction").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Optional

import numpy as np
import tensorflow as tf

from feast_tf.seeding import stream
from feast_tf.serving import (OperatingPoint, PostHocGap, Reliability, confusion_matrix,
                              fittest_variants, population_accuracy, post_hoc_gap, reliability,
                              share_correct, uncached_variants)
from feast_tf.simulation.stored_run import StoredRun
from feast_tf.simulation.training_program import make_evaluator
from feast_tf.space import Variant, costs, layout_of

SPLITS = ("test", "validation")
DRAWS = ("random", "fittest")


@dataclasses.dataclass(frozen=True, eq=False)
class MeasuredPoint:
    """One variant, measured in depth.

    Attributes:
      point: what is served, and its accuracy.
      reliability: its predictions by their confidence.
      confusion: int64[classes, classes], pictures by their class and by what they were taken for.
      clients: how many clients are served it; None for a variant that is not in the cache.
    """

    point: OperatingPoint
    reliability: Reliability
    confusion: np.ndarray
    clients: Optional[int]


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
    """What `measure_points` found.

    Attributes:
      split: what was measured on, one of `SPLITS`.
      cached: all cached variants, ascending in MACs.
      uncached: the others, ascending in MACs.
      gap: how these compare with the cached curve; None where there are none.
      draw, seed: how they were chosen.
      population_accuracy: mean over clients of the accuracy of each one's largest affordable
        cached variant.
    """

    split: str
    cached: tuple[MeasuredPoint, ...]
    uncached: tuple[MeasuredPoint, ...]
    gap: Optional[PostHocGap]
    draw: str
    seed: int
    population_accuracy: float


def measure_points(run: StoredRun, *, split: str = "test", uncached: int = 0, draw: str = "random",
                   seed: int = 0, on_variants: Callable[[int], None] = lambda count: None,
                   on_point: Callable[[], object] = lambda: None) -> Evaluation:
    """Measures all cached variants of a run, and some that are not in its cache.

    Recalibration and batches are those of the run, so the accuracies are too. Deterministic.

    Args:
      run: from `load_run`.
      split: one of `SPLITS`.
      uncached: how many variants that are not in the cache.
      draw: one of `DRAWS`: "random" (`uncached_variants`) or "fittest" (`fittest_variants`, which
        may find fewer).
      seed: of random ones.
      on_variants, on_point: called with the number of variants at first, and after each of them.

    Raises:
      ValueError: an argument does not fit, the space has too few variants, or a network's logits
        are not finite; the message names it.
    """
    for name, value, allowed in (("split", split, SPLITS), ("draw", draw, DRAWS)):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, but is {value!r}")
    if uncached < 0:
        raise ValueError(f"uncached must not be negative, but is {uncached}")
    experiment = run.experiment
    cache, spec = experiment.routing.cache, experiment.routing.cache.spec
    drawn = []
    if uncached:
        drawn = fittest_variants(cache, uncached) if draw == "fittest" else uncached_variants(
            cache, uncached, stream(seed, "uncached variants"))
    served = np.bincount(experiment.levels, minlength=len(cache)).tolist()
    on_variants(len(cache) + len(drawn))
    evaluator, layout = make_evaluator(experiment), layout_of(spec)
    weights = [tf.convert_to_tensor(weight, tf.float32) for weight in run.weights]
    data = getattr(experiment.dataset, split)

    def measure(variant: Variant, clients: Optional[int]) -> MeasuredPoint:
        logits = evaluator.logits(weights, layout.dims(variant), data.images)
        if not np.all(np.isfinite(logits)):
            raise ValueError(f"{variant}: the logits are not finite; the run has diverged")
        point = OperatingPoint(variant, costs.macs(spec, variant), costs.params(spec, variant),
                               share_correct(logits, data.labels), split)
        on_point()
        return MeasuredPoint(point, reliability(logits, data.labels),
                             confusion_matrix(logits, data.labels), clients)

    cached = tuple(map(measure, cache.variants, served))
    others = tuple(measure(variant, None) for variant in drawn)
    accuracies = [measured.point.accuracy for measured in cached]
    gap = post_hoc_gap([measured.point.macs for measured in others],
                       [measured.point.accuracy for measured in others],
                       cache.macs, accuracies) if others else None
    return Evaluation(split, cached, others, gap, draw, seed,
                      population_accuracy(experiment.levels, accuracies))
