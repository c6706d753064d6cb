"""`python -m bench peers`: Tandem beside transformers' `generate`, alone and assisted, with the same pair on the same cores.

Each prompt is decoded in all ways, one after the other, `repeats` times over, so that a machine whose speed drifts treats all alike.
Tandem runs the draft and the target with so many threads each; transformers runs one after the other in one process with the threads
of both, as far as there are cores. All get the same prompt ids, nothing of a prompt is in a cache beforehand, and end tokens count as
any other.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tandem.v1 import orchestrator_pb2 as api

from .peers_results import Decoded, PeersResult, PeersRow, peers_rows
from .progress import steps
from .prompts import PROMPT_CLASSES, prompt_class
from .running_pair import Ahead, ModelPair, RunningPair, Way, running_pair
from .services import REPOSITORY, NotMeasured
from .transformers_peer import Asked, Told

ALONE, ASSISTED = "transformers", "transformers, assisted"
LARGEST_ANSWER = 1 << 20
"""Bytes of a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersOptions:
    """What to measure."""

    models: ModelPair = field(default_factory=ModelPair)
    ways: Sequence[Way] = (Way(0, ahead=False), Way(2, ahead=False), Way(3, ahead=False), Way(None, ahead=False))
    """Tandem's; plain decoding must be among them."""
    cases: Sequence[tuple[str, float]] = tuple(
        (each.name, temperature) for each in PROMPT_CLASSES for temperature in (0.0, 1.0)
    )
    max_tokens: int = 48
    prompts: int = 1
    repeats: int = 2


class _Peer:
    """transformers, in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, asked: Asked) -> Told:
        """One request; raises RuntimeError where the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(dataclasses.asdict(asked)).encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("transformers gave up; see above")
        return Told(**json.loads(line))


async def measure(options: PeersOptions) -> PeersResult:
    """Runs all cases in all ways."""
    rows: list[PeersRow] = []
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        ahead = Ahead() if any(way.ahead for way in options.ways) else None
        async with (
            running_pair(options.models, Path(folder), ahead=ahead) as services,
            _running_peer(options.models) as peer,
        ):
            await services.warm_up(options.ways)
            for name, temperature in steps(options.cases, "peers"):
                rows += peers_rows(name, temperature, await _case(services, peer, options, name, temperature))
    return PeersResult(str(options.models), _peer_threads(options.models), options.max_tokens, rows)


async def _case(
    services: RunningPair, peer: _Peer, options: PeersOptions, name: str, temperature: float
) -> list[dict[str, Decoded]]:
    """One turn after the other: what each way made of the same prompt."""
    turns = []
    for index, repeat in itertools.product(range(options.prompts), range(options.repeats)):
        messages = prompt_class(name).messages
        message = messages[index % len(messages)]
        prompt = (await peer.ask(Asked((), message, 0, 0.0, 0, assisted=False))).token_ids
        turn: dict[str, Decoded] = {}
        for way in options.ways:
            turn[f"Tandem {way}"] = await _tandem(services, way, prompt, options, temperature, seed=1000 + repeat)
        for label, assisted in ((ALONE, False), (ASSISTED, True)):
            asked = Asked(tuple(prompt), "", options.max_tokens, temperature, 1000 + repeat, assisted)
            told = await peer.ask(asked)
            turn[label] = Decoded(tuple(told.token_ids), tuple(told.arrivals), tuple(told.tokens))
        turns.append(turn)
    return turns


async def _tandem(
    services: RunningPair, way: Way, prompt: Sequence[int], options: PeersOptions, temperature: float, seed: int
) -> Decoded:
    request = api.GenerateRequest(
        token_ids=api.TokenIds(ids=prompt),
        max_tokens=options.max_tokens,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        seed=seed,
        ignore_eos=True,
    )
    heard = await services.decode(request, way)
    if heard.finish.speculation.degraded_rounds:
        raise NotMeasured(f"rounds without the draft: {list(heard.finish.speculation.degraded_reasons)}")
    return Decoded(heard.token_ids, tuple(arrival - heard.asked for arrival in heard.arrivals), heard.tokens)


def _peer_threads(models: ModelPair) -> int:
    return min(2 * models.threads, os.cpu_count() or 1)


@asynccontextmanager
async def _running_peer(models: ModelPair) -> AsyncIterator[_Peer]:
    threads = str(_peer_threads(models))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.transformers_peer"),
        *(str(models.target), str(models.draft), models.dtype, threads),
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LARGEST_ANSWER,
    )
    try:
        yield _Peer(process)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
