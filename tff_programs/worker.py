"""Starts a TFF worker that other machines can use, and ends it with this program.

    python -m tff_programs.worker --port=10000

**The worker has no authentication, listens on all interfaces and runs whatever graph it is sent.**
Reach it through a private network, a tunnel (ssh -L) or a network policy, never through the open
internet.
"""

from __future__ import annotations

from tff_programs import environment  # isort: skip  (first: it prepares TensorFlow's import)
import sys

from absl import flags

from tff_programs import flags as program_flags

_PORT = flags.DEFINE_integer("port", 10000, "Port to listen on.", lower_bound=1, upper_bound=65535)


def main(argv) -> None:
    del argv
    program_flags.log_own_lines()
    from feast_tf import runtime

    # As the default runtime: that drops TFF's own one, which complains when Python ends.
    worker = runtime.use("tff_worker", worker=runtime.Worker(port=_PORT.value))
    print(f"TFF worker ready on port {worker.port}; it has no authentication, keep it private",
          flush=True)
    code = worker.process.wait()
    sys.exit(f"worker: TFF's worker ended with exit code {code}")


if __name__ == "__main__":
    program_flags.run_main(main)
