"""`python -m bench.profiled_orchestrator FILE`: the orchestrator under cProfile from a SIGUSR1 on, which comes when it is
warm, by the CPU time of its event loop.

Time in the compiled parts of gRPC and uvloop is the own time of `Runner.run`.
"""

from __future__ import annotations

import cProfile
import signal
import sys
import time
from typing import NoReturn

from orchestrator.__main__ import main
from tandem import grpc_server


def profiled(file: str) -> NoReturn:
    """Runs the service to its end, and writes the profile just before the process ends, as services do, at once."""
    profile = cProfile.Profile(time.thread_time)
    signal.signal(signal.SIGUSR1, lambda *_: profile.enable())
    end_process = grpc_server.end_process

    def write_and_end(status: int) -> NoReturn:
        profile.disable()
        profile.dump_stats(file)
        end_process(status)

    grpc_server.end_process = write_and_end
    write_and_end(main())


if __name__ == "__main__":
    profiled(sys.argv.pop(1))
