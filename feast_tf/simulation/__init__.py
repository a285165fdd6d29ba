"""An experiment from its configuration to its results."""

from feast_tf import versions

versions.require_federated()

from feast_tf.simulation.checkpoints import Checkpoints
from feast_tf.simulation.checkpoints import ProgramState
from feast_tf.simulation.evaluate import evaluate_run
from feast_tf.simulation.experiment import Experiment
from feast_tf.simulation.experiment import build_experiment
from feast_tf.simulation.export import export_run
from feast_tf.simulation.measured import Evaluation
from feast_tf.simulation.measured import MeasuredPoint
from feast_tf.simulation.measured import measure_points
from feast_tf.simulation.runner import run
from feast_tf.simulation.stored_run import StoredRun
from feast_tf.simulation.stored_run import load_run
from feast_tf.simulation.training_program import make_evaluator
from feast_tf.simulation.training_program import train
