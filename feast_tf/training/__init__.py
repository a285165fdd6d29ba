"""One client's local work: which variants a batch trains, losses, augmentation, the local loop."""

from feast_tf.training.augment import Augmentation
from feast_tf.training.local import LocalResult
from feast_tf.training.local import LocalTraining
from feast_tf.training.local import local_seed
from feast_tf.training.local import local_update
from feast_tf.training.optimizer import SGD
from feast_tf.training.rules import ROLES
from feast_tf.training.rules import RULES
from feast_tf.training.rules import TrainingRule
