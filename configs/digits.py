"""Digits (embedded in scikit-learn): the whole method in minutes on two cores.

    python -m tff_programs.run

30 clients on 5 budgets, most of them small, train one network of 0.6M to 4.5M MACs. docs/results.md
has the accuracies and times that were measured, and what the five training rules do here.
"""

from configs.base import base_config, finish


def get_config(arg=None):
    config = base_config()
    config.dataset = "digits"
    config.image_size = 16
    config.held_out = 0.2
    config.server_samples = 160
    config.augmentation.update(crop_padding=0, flip=False)
    config = finish(config, arg or "small")
    config.training.learning_rate = 0.1
    return config
