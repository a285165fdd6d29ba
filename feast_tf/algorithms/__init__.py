"""Federated methods, one file each."""

from feast_tf import versions

versions.require_federated()

from feast_tf.algorithms.feast import build_feast
from feast_tf.algorithms.feast import check_cohort
from feast_tf.algorithms.feast import client_type
