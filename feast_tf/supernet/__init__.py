"""The elastic ResNet: one graph for all variants, extraction, batch-norm recalibration."""

from feast_tf.supernet.forward import BN_EPSILON
from feast_tf.supernet.forward import Moments
from feast_tf.supernet.forward import forward
from feast_tf.supernet.forward import initial_weights
from feast_tf.supernet.model import ElasticResNet
from feast_tf.supernet.model import extract
from feast_tf.supernet.recalibration import ElasticRunner
