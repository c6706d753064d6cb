"""A pair of models as running services, and the ways to have a request decoded by them: what `pair`, `peers`, `network` and
`acceptance` measure on."""

from __future__ import annotations

import contextlib
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from tandem.v1 import orchestrator_pb2 as api

from .caller import Heard, generate
from .delayed_link import DelayedLink
from .prompts import PROMPT_CLASSES
from .services import REPOSITORY, NotMeasured, Planned, free_address, run_all, running_store
from .worker_times import WorkerStreams, worker_streams

TARGET = REPOSITORY / "models" / "smollm2-135m-instruct"
DRAFT = REPOSITORY / "models" / "smol-draft"
WARM_UP_TOKENS = 48
"""An adaptive gamma must have met the costs of rounds."""
DRAFT_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPair:
    """Two models, and how they run."""

    target: Path = TARGET
    draft: Path = DRAFT
    dtype: str = "float32"
    threads: int = 1
    """Of each."""

    def __str__(self) -> str:
        return f"{self.target.name} with {self.draft.name}: {self.dtype}, {self.threads} thread{'s' if self.threads > 1 else ''} each"


@dataclass(frozen=True, slots=True)
class Ahead:
    """A draft that works ahead."""

    rows: int = 4
    """Outcomes at a time."""
    measured: bool = True
    """Whether it leaves that while rounds turn out longer with it."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a request is decoded, where that is not a fixed gamma with a draft that waits."""

    gamma: int | None
    """None: adaptive."""
    ahead: bool

    @classmethod
    def parse(cls, text: str) -> Way:
        """From "auto", "2+ahead" or "auto+ahead"; raises ValueError."""
        gamma, plus, ahead = text.partition("+")
        if plus and ahead != "ahead":
            raise ValueError(text)
        return cls(None if gamma == "auto" else int(gamma), bool(plus))

    def __str__(self) -> str:
        return ("auto" if self.gamma is None else str(self.gamma)) + ("+ahead" if self.ahead else "")


@dataclass(frozen=True, slots=True)
class RunningPair:
    """Where the services are reached."""

    near: grpc.aio.Channel
    """An orchestrator beside the workers."""
    eager: grpc.aio.Channel | None
    """One whose draft works ahead, where a way asks for it."""
    eager_metrics: str
    """That draft's metrics, host:port; empty where there is none."""
    far: grpc.aio.Channel | None
    """One that reaches the workers over `links`, if there are any."""
    links: tuple[DelayedLink, ...]
    workers: WorkerStreams

    async def decode(self, request: api.GenerateRequest, way: Way) -> Heard:
        """Runs `request` in that way, with nothing of its prompt in any cache."""
        asked = api.GenerateRequest()
        asked.CopyFrom(request)
        asked.cache_salt = uuid.uuid4().hex
        if way.gamma is None:
            asked.ClearField("num_speculative_tokens")
            asked.adaptive_speculative_tokens = True
        else:
            asked.num_speculative_tokens = way.gamma
        calls = self.eager if way.ahead else self.near
        if calls is None:
            raise NotMeasured("no draft works ahead")
        return await generate(calls, asked)

    async def warm_up(self, ways: Iterable[Way]) -> None:
        """What is made on first use is made, and the orchestrators, which are ready without a draft, have found it."""
        request = PROMPT_CLASSES[0].request(0)
        request.max_tokens = WARM_UP_TOKENS
        deadline = time.monotonic() + DRAFT_SECONDS
        for way in ways:
            while (await self.decode(request, way)).finish.speculation.degraded_rounds:
                if time.monotonic() > deadline:
                    raise NotMeasured(f"the orchestrator found no draft for {way}")

    def ahead_items(self) -> dict[str, float]:
        """What the draft that works ahead counted; empty where there is none."""
        if not self.eager_metrics:
            return {}
        with urllib.request.urlopen(f"http://{self.eager_metrics}/metrics") as page:
            lines = page.read().decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if line.startswith("tandem_draft_ahead_"))
        return {name: float(value) for name, _, value in pairs if not name.endswith("_created")}


@contextlib.asynccontextmanager
async def running_pair(
    models: ModelPair, folder: Path, *, ahead: Ahead | None = None, far: bool = False
) -> AsyncIterator[RunningPair]:
    """Starts the services; `ahead`, `far`: with what RunningPair has of that kind."""
    draft, target, eager, metrics = (free_address() for _ in range(4))
    async with contextlib.AsyncExitStack() as stack:
        workers = [planned_worker("target", target, models), planned_worker("draft", draft, models)]
        if ahead is not None:
            works_ahead = {
                "TANDEM_DRAFT_AHEAD_ROWS": str(ahead.rows),
                "TANDEM_DRAFT_AHEAD_MEASURED": str(ahead.measured).lower(),
                "TANDEM_DRAFT_METRICS_LISTEN": metrics,
            }
            workers.append(planned_worker("draft", eager, models, works_ahead))
        run_all(stack, workers, folder)
        links = tuple(stack.enter_context(DelayedLink(worker)) for worker in (draft, target)) if far else ()
        redis_url = stack.enter_context(running_store(folder))
        reached = {"near": (draft, target)}
        if ahead is not None:
            reached["eager"] = (eager, target)
        if far:
            reached["far"] = (links[0].address, links[1].address)
        listen = {name: free_address() for name in reached}
        run_all(
            stack,
            [_orchestrator(name, listen[name], *reached[name], models.target, redis_url) for name in reached],
            folder,
        )
        calls = {
            name: await stack.enter_async_context(grpc.aio.insecure_channel(address))
            for name, address in listen.items()
        }
        yield RunningPair(
            near=calls["near"],
            eager=calls.get("eager"),
            eager_metrics=metrics if ahead is not None else "",
            far=calls.get("far"),
            links=links,
            workers=await stack.enter_async_context(worker_streams(draft, target)),
        )


def planned_worker(role: str, listen: str, models: ModelPair, more: Mapping[str, str] | None = None) -> Planned:
    """A draft or a target of the pair, with `more` of its variables."""
    environment = {
        "LISTEN": listen,
        "MODEL": str(models.target if role == "target" else models.draft),
        "DTYPE": models.dtype,
        "THREADS": str(models.threads),
        "SLOTS": "4",
    }
    named = {f"TANDEM_{role.upper()}_{name}": value for name, value in environment.items()}
    module = f"{role}_service"
    return Planned(
        f"{module}-{listen}", module, {**named, "OMP_NUM_THREADS": str(models.threads), **(more or {})}, listen
    )


def _orchestrator(name: str, listen: str, draft: str, target: str, tokenizer: Path, redis_url: str) -> Planned:
    environment = {
        "TANDEM_ORCHESTRATOR_LISTEN": listen,
        "TANDEM_DRAFT_ADDRESSES": draft,
        "TANDEM_TARGET_ADDRESSES": target,
        "TANDEM_TOKENIZER": str(tokenizer),
        "TANDEM_REDIS_URL": redis_url,
        # A slow machine must not turn a round of speculation into a plain one.
        "TANDEM_DRAFT_TIMEOUT_SECONDS": "30",
        # Sampled, a whole block that stands is of use to a draft that works ahead only if its next token was tested too.
        "TANDEM_LOOK_AHEAD": str(name == "eager").lower(),
    }
    return Planned(f"orchestrator-{name}", "orchestrator", environment, listen)
