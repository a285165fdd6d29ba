"""TinyImageNet-200 at 32x32, which keeps the paper's MACs.

    python -m tff_programs.run --dataset=tinyimagenet
    python -m tff_programs.run --config=configs/tinyimagenet.py:small

The paper's space (55.68M parameters, 56 cached variants) and federation: 100 clients, 10 a round,
4000 rounds; days on a CPU. ":small" is a network of 0.3M parameters and 30 clients, for a try.

The pictures' native size is one key away: --config.image_size=64 (four times the MACs).
"""

from configs.base import base_config, finish


def get_config(arg=None):
    config = base_config()
    config.dataset = "tinyimagenet"
    return finish(config, arg)
