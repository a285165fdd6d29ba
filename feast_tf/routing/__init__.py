"""What each client gets and trains: envelopes, payloads, training rules, exposure."""

from feast_tf.routing.envelopes import BYTES_PER_PARAMETER
from feast_tf.routing.envelopes import Envelope
from feast_tf.routing.envelopes import Routing
from feast_tf.routing.exposure import Exposure
from feast_tf.routing.exposure import GroupExposure
from feast_tf.routing.rules import ROLES
from feast_tf.routing.rules import RULES
from feast_tf.routing.rules import TrainingRule
from feast_tf.routing.slices import SliceMap
from feast_tf.routing.traffic import Reduction
from feast_tf.routing.traffic import reduction
from feast_tf.routing.traffic import training_macs
from feast_tf.routing.traffic import weighted_median
