"""`python -m bench.profiled_orchestrator FILE`: the orchestrator under cProfile from a SIGUSR1 on, which comes when it is
warm, by the CPU time of its event loop.

Time in the compiled parts of gRPC and uvloop is the own time of `Runner.run`.
"""

from __future__ import annotations

import cProfile
import signal
import sys
import time

from orchestrator.__main__ import main


def profiled(file: str) -> int:
    """Runs the service to its end, writes the profile, and returns the exit status."""
    profile = cProfile.Profile(time.thread_time)
    signal.signal(signal.SIGUSR1, lambda *_: profile.enable())
    try:
        return main()
    finally:
        profile.disable()
        profile.dump_stats(file)


if __name__ == "__main__":
    sys.exit(profiled(sys.argv.pop(1)))
