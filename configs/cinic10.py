"""CINIC-10; its official validation split takes the place of held-out training pictures.

    python -m tff_programs.run --dataset=cinic10
    python -m tff_programs.run --config=configs/cinic10.py:small

The paper's space (55.68M parameters, 56 cached variants) and federation: 100 clients, 10 a round,
4000 rounds; days on a CPU. ":small" is a network of 0.3M parameters and 30 clients, for a try.
"""

from configs.base import base_config, finish


def get_config(arg=None):
    config = base_config()
    config.dataset = "cinic10"
    config.held_out = 0.0
    return finish(config, arg)
