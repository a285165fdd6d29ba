"""Where TFF computations run."""

from feast_tf import versions

versions.require_federated()

from feast_tf.runtime.worker import Worker
from feast_tf.runtime.worker import use_worker
