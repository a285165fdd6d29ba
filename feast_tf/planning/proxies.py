"""What the paper's baselines cost to train, as far as it can be told: proxies on ResNet-18 (4.3).

Convolutions only, as the paper's proxy counts them. Which levels it gave to ScaleFL is not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

_CHANNELS = (64, 128, 256, 512)
_STRIDES = (1, 2, 2, 2)
HETEROFL_RATES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
# (width, stages). A reconstruction: the widths in steps of 0.05 whose MACs are the nearest to those
# of HeteroFL's four levels that any client of the paper can hold as its largest.
SCALEFL_LEVELS = ((0.25, 1), (0.35, 2), (0.6, 3), (1, 4))


def resnet18_macs(width: float, image_size: int, *, stages: int = 4,
                  rounding: Callable[[float], int] = math.ceil) -> int:
    """Multiply-accumulates of the convolutions of a ResNet-18 for one picture.

    Args:
      width: factor of all channels.
      image_size: height and width of the picture in pixels; the stem keeps them.
      stages: how many of the four stages run.
      rounding: makes whole channels.
    """
    channels = [rounding(width * count) for count in _CHANNELS]
    size, before = image_size, channels[0]
    total = 27 * before * size**2
    for stage, (out, stride) in enumerate(zip(channels[:stages], _STRIDES)):
        size = -(-size // stride)
        shortcut = before * out if stage else 0
        total += (9 * before * out + 3 * 9 * out * out + shortcut) * size**2
        before = out
    return total


def largest_affordable(costs: Sequence[int], budgets: np.ndarray) -> np.ndarray:
    """For each budget the largest of the ascending `costs` within it, at least the first."""
    places = np.searchsorted(costs, budgets, side="right") - 1
    return np.asarray(costs, np.float64)[np.maximum(places, 0)]


def baseline_macs(budgets: np.ndarray, image_size: int) -> dict[str, np.ndarray]:
    """Forward MACs on a sample that clients of these budgets spend under each baseline.

    A client that cannot hold the smallest level trains it all the same, as in the baselines'
    own comparisons. FIARSE trains the masked but dense network, whatever the budget.

    Args:
      budgets: float64[G], MACs.
      image_size: of the pictures.

    Returns:
      "heterofl", "scalefl" and "fiarse", each float64[G].
    """
    heterofl = [resnet18_macs(rate, image_size) for rate in HETEROFL_RATES]
    scalefl = [resnet18_macs(width, image_size, stages=stages, rounding=int)
               for width, stages in SCALEFL_LEVELS]
    return dict(heterofl=largest_affordable(heterofl, budgets),
                scalefl=largest_affordable(scalefl, budgets),
                fiarse=np.full(len(budgets), float(resnet18_macs(1, image_size))))
