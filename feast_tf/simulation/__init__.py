"""An experiment from its configuration to its results."""

from feast_tf import versions

versions.require_federated()

from feast_tf.simulation.checkpoints import Checkpoints
from feast_tf.simulation.checkpoints import ProgramState
from feast_tf.simulation.experiment import Experiment
from feast_tf.simulation.experiment import build_experiment
from feast_tf.simulation.runner import run
from feast_tf.simulation.training_program import make_evaluator
from feast_tf.simulation.training_program import train
