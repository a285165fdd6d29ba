"""What is done with a trained supernet: measure its operating points, save and load it."""

from feast_tf.serving.evaluation import Evaluator
from feast_tf.serving.evaluation import OperatingPoint
from feast_tf.serving.evaluation import anchor_levels
from feast_tf.serving.evaluation import population_accuracy
from feast_tf.serving.saved import SavedSupernet
from feast_tf.serving.saved import load_supernet
from feast_tf.serving.saved import load_weights
from feast_tf.serving.saved import save_supernet
from feast_tf.serving.saved import save_weights
