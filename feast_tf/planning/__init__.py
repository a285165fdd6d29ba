"""A federation on paper: who trains what, what is sent, what it costs, which parameters starve."""

from feast_tf.planning.devices import Devices
from feast_tf.planning.devices import configured_devices
from feast_tf.planning.devices import parse_classes
from feast_tf.planning.devices import read_devices
from feast_tf.planning.plan import Group
from feast_tf.planning.plan import Plan
from feast_tf.planning.plan import Transfer
from feast_tf.planning.plan import build_plan
from feast_tf.planning.report import write_plan
from feast_tf.planning.text import format_plan
