"""Federated methods, one file each, and the parts that they share."""

from feast_tf import versions

versions.require_federated()

from feast_tf.algorithms.feast import build_feast
from feast_tf.algorithms.feast import client_type
from feast_tf.algorithms.parts import build_client_work
from feast_tf.algorithms.parts import build_distributor
from feast_tf.algorithms.parts import build_mean_finalizer
from feast_tf.algorithms.parts import build_sliced_process
from feast_tf.algorithms.parts import check_cohort
from feast_tf.algorithms.parts import compose_member_computation
from feast_tf.algorithms.parts import compose_sliced_process
from feast_tf.algorithms.parts import member_type
from feast_tf.algorithms.sliced_fed_avg import build_sliced_fed_avg
