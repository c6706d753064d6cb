"""A target whose steps inductor has really compiled: as a process, from its start to tokens."""

from __future__ import annotations

import json
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

from tandem.v1 import target_pb2
from tandem.wire import decode_probs
from tests.engine.harness import GREEDY, verify_item
from tests.support.channels import open_channel
from tests.support.ports import free_port
from tests.support.reference import Reference
from tests.support.services import MODELS
from tests.telemetry.scrape import Scrape, scrape
from tests.workers.client import reason, verify_stream
from tests.workers.conftest import StartWorker

PROMPT = [5, 9, 300, 77, 41]
TOKENS = 18


def counters(scraped: Scrape) -> tuple[float, float, float]:
    """Shapes that are ready, what was compiled at the start, and what since."""
    return (
        scraped.value("tandem_compiled_shapes"),
        scraped.value("tandem_compilations_total", when="start"),
        scraped.value("tandem_compilations_total", when="serving"),
    )


def taken(block: Sequence[int], verdict: target_pb2.Verdict) -> list[int]:
    """The tokens of a greedy round: what stands of the block, and the target's own after that."""
    accepted = 0
    while accepted < len(block) and decode_probs(verdict.rows[accepted].support_probs, 1)[0] > 0.5:
        accepted += 1
    return [*block[:accepted], verdict.rows[accepted].outside_token_id]


@pytest.mark.skipif(
    shutil.which("g++") is None or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="inductor needs g++ and Python's headers",
)
def test_all_is_compiled_before_it_serves_and_greedy_is_greedy_at_every_gamma(start_worker: StartWorker) -> None:
    metrics = f"127.0.0.1:{free_port()}"
    process = start_worker(COMPILE="inductor", SLOTS="1", METRICS_LISTEN=metrics)

    process.wait_serving(850)  # two compilations, of which most is the C++ compiler's time
    ready = counters(scrape(metrics))
    assert ready[0] >= 4
    assert ready[1] >= 1
    assert ready[2] == 0
    said = [json.loads(line)["message"] for line in process.log.read_text().splitlines()]
    compiled, serving = (next(at for at, line in enumerate(said) if part in line) for part in ("inductor:", "serving "))
    assert compiled < serving
    expected = Reference(MODELS / "tiny-target").greedy(PROMPT, TOKENS + 6)
    with open_channel(process.address) as channel:
        for gamma in (0, 1, 2, 5):
            stream = verify_stream(channel)
            committed, base, epoch = list(PROMPT), 0, 0
            while len(committed) < len(PROMPT) + TOKENS:
                done = len(committed) - len(PROMPT)
                block = expected[done : done + gamma]
                block[2:] = [(token + 1) % 512 for token in block[2:]]  # falls
                item = verify_item(f"at-{gamma}", epoch, committed, base, block, sampling=GREEDY if not epoch else None)
                answer = stream.ask(item)
                assert reason(answer) == ""
                committed += taken(block, answer.verdict)
                base, epoch = len(committed) - 1, epoch + 1
                assert answer.verdict.cached_length >= base
            assert committed[len(PROMPT) :] == expected[: len(committed) - len(PROMPT)], gamma
            stream.send([], release=[f"at-{gamma}"])
    scraped = scrape(metrics)
    assert counters(scraped) == ready
    assert scraped.value("tandem_compiled_forwards_total") >= TOKENS
