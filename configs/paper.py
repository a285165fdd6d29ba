"""The paper's CIFAR-100 setting with the analytic figures that it publishes.

    python -m tff_programs.plan --config=configs/paper.py

prints them next to those that FEAST-TF computes. Training is that of configs/cifar100.py.
"""

import ml_collections

from configs.base import base_config, finish


def get_config(arg=None):
    config = base_config()
    config.published = ml_collections.ConfigDict(dict(
        supernet_params=55.68e6, largest_envelope_params=35.60e6, largest_variant_params=11.78e6,
        mean_payload_params=8.17e6, aggregate_reduction=6.8, reduction_mean=43.8,
        reduction_median=22.9, reduction_max=111.0, training_pmacs=31.01, over_single=1.56,
        over_heterofl=2.07, over_scalefl=2.04, over_fiarse=1.03))
    return finish(config, arg)
