"""The static training steps of `workload` in PyTorch, for those who have it installed."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from feast_tf.routing import Routing
from feast_tf.space import Block, ConvUnit, Layout


class _ConvNorm(torch.nn.Sequential):
    """conv, batch normalisation; `pool` averages first (a shortcut), else the convolution strides."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], unit: ConvUnit, pool: bool = False):
        size, _, inputs, outputs = shapes[unit.kernel]
        pooling = [torch.nn.AvgPool2d(unit.stride)] if pool and unit.stride > 1 else []
        super().__init__(*pooling, torch.nn.Conv2d(
            inputs, outputs, size, 1 if pool else unit.stride, size // 2, bias=False),
            torch.nn.BatchNorm2d(outputs))


class _Block(torch.nn.Module):

    def __init__(self, shapes: Sequence[tuple[int, ...]], block: Block):
        super().__init__()
        self.path = torch.nn.Sequential(_ConvNorm(shapes, block.conv1), torch.nn.ReLU(),
                                        _ConvNorm(shapes, block.conv2), torch.nn.ReLU())
        self.shortcut = (torch.nn.Identity() if block.shortcut is None
                         else _ConvNorm(shapes, block.shortcut, pool=True))

    def forward(self, x):
        return torch.relu(self.path(x) + self.shortcut(x))


def network(layout: Layout, dims: np.ndarray) -> torch.nn.Module:
    """The plain network of one variant, float32[batch, 3, size, size] to logits."""
    shapes = [tuple(extent.tolist()) for extent in layout.extents(dims)]
    blocks = [_Block(shapes, block) for stage in layout.stages for block in stage
              if block.gate is None or dims[block.gate[0]] >= block.gate[1]]
    return torch.nn.Sequential(
        _ConvNorm(shapes, layout.stem), torch.nn.ReLU(), *blocks, torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(), torch.nn.Linear(*shapes[layout.head_kernel]))


class TorchSteps:
    """What `workload.StaticSteps` measures, in PyTorch."""

    def __init__(self, routing: Routing):
        self._networks = [network(routing.layout, dims) for dims in routing.variant_dims]
        self._optimizers = [torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
                            for net in self._networks]

    def seconds(self, clients: Sequence, drawn: Sequence[Sequence[int]]) -> float:
        """Time of one step for every variant of every client, on the client's own pictures."""
        total = 0.0
        for client, places in zip(clients, drawn):
            batch = next(client["data"].as_numpy_iterator())
            images = torch.tensor(batch["x"]).permute(0, 3, 1, 2).float() / 255
            labels = torch.tensor(batch["y"], dtype=torch.long)
            for place in places:
                start = time.perf_counter()
                self._optimizers[place].zero_grad()
                loss = torch.nn.functional.cross_entropy(self._networks[place](images), labels)
                loss.backward()
                self._optimizers[place].step()
                total += time.perf_counter() - start
        return total
