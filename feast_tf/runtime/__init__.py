"""Where TFF computations run: in this process, in an owned TFF worker, or in several workers.

    from feast_tf import runtime

    runtime.use("in_process", devices=["/device:GPU:0"])

before the first TFF computation runs; nothing else changes for the code that uses TFF.
"""

from feast_tf import versions

versions.require_federated()

from feast_tf.runtime.execution import ComputationError
from feast_tf.runtime.in_process import InProcessAsyncContext
from feast_tf.runtime.in_process import InProcessContext
from feast_tf.runtime.in_process import use_in_process
from feast_tf.runtime.remote import use_workers
from feast_tf.runtime.worker import Worker
from feast_tf.runtime.worker import use_worker

NAMES = ("in_process", "tff_worker", "tff_workers")


def use(name: str = "in_process", **options):
    """Makes a runtime the default of this process.

    Args:
      name: "in_process" (CPU or GPU; options of `InProcessContext`), "tff_worker" (TFF's own binary
        as a child process, CPU only) or "tff_workers" (`addresses`, workers on other machines).
      **options: of the runtime.

    Returns:
      What `use_in_process`, `use_worker` or `use_workers` returns.

    Raises:
      ValueError: there is no such runtime.
    """
    if name not in NAMES:
        raise ValueError(f"runtime must be one of {', '.join(NAMES)}, but is {name!r}")
    return {"in_process": use_in_process, "tff_worker": use_worker,
            "tff_workers": use_workers}[name](**options)
