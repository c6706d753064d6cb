"""A service without a model: ready after a while, or misbehaving as it is told. Run by the supervisor under test."""

from __future__ import annotations

import argparse
import sys


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("listen")
    parser.add_argument(
        "--mode", choices=("good", "exits", "never-ready", "dies", "ignores-sigterm", "refuses"), default="good"
    )
    parser.add_argument("--pause", type=float, default=0.0)
    arguments = parser.parse_args()
    # Before gRPC is imported, for seconds on a slow machine: its log has this however soon it is looked at.
    print(f"starting as {arguments.mode}", flush=True)
    if arguments.mode == "exits":
        print("the model is broken: no such layer", file=sys.stderr)
        return 7
    from tests.cli.fake_server import serve

    serve(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
