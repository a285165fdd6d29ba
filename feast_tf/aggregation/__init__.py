"""The sparse sample-weighted mean: NumPy reference, TensorFlow fold, TFF aggregator, optimisers."""

from feast_tf import versions

versions.require_federated()

from feast_tf.aggregation.federated import build_sparse_sum
from feast_tf.aggregation.federated import slices_type
from feast_tf.aggregation.federated import weights_type
from feast_tf.aggregation.fold import Accumulator
from feast_tf.aggregation.reference import sparse_mean
from feast_tf.aggregation.server_optimizer import hold_unreported
from feast_tf.aggregation.sliced_mean import SlicedMeanFactory
