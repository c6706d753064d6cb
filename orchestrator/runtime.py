"""What all requests of one orchestrator share: vocabulary, worker pools, store, admission, and its readiness."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tandem.v1 import sampling_pb2, worker_pb2

from .admission import Admission
from .callers import Callers
from .config import OrchestratorConfig
from .crowd import Crowd
from .drafting import DRAFT, DraftingPolicy, DraftPool
from .errors import Unavailable
from .gamma_controller import AcceptancePrior, AdaptiveGamma, FixedGamma, GammaPolicy
from .request import GenerationPlan, Limits
from .round_costs import RoundCosts
from .scoring import TARGET, ScoringPolicy, TargetPool
from .session import Sessions
from .session_store import SessionStore, StoreFull, StoreUnavailable
from .speed_estimate import SpeedEstimate
from .vocabulary import Vocabulary

log = logging.getLogger(__name__)

READINESS_SECONDS = 0.5
STORE_HEALTH_SECONDS = 1.0
"""With the time between two looks, health tells of a store that hangs within two seconds, however long a commit may wait."""
RETRY_AFTER_SECONDS = 2.0
AWAY_SECONDS = 5.0
"""A target whose stream broke is back by then, or really away."""
GONE_SECONDS = 60.0
"""After so long what a target that is away was like doesn't bound requests any more."""


@dataclass(frozen=True, slots=True)
class _Hindrance:
    """What readiness lacks, and more of it for the operator alone."""

    what: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.detail}" if self.detail else self.what


def _refusals(pool: DraftPool | TargetPool) -> list[str]:
    """Why none of the pool is ready, where that is why."""
    return [] if pool.ready else pool.refusals


def _no_target() -> Unavailable:
    return Unavailable("no target is connected", "TARGET_UNAVAILABLE", RETRY_AFTER_SECONDS)


class Runtime:
    """Built once at start; closed at the end."""

    def __init__(
        self, config: OrchestratorConfig, vocabulary: Vocabulary, store: SessionStore, callers: Callers
    ) -> None:
        self.callers = callers
        self.vocabulary = vocabulary
        self.store = store
        self.sessions = Sessions(store, uuid.uuid4().hex, config.resume_seconds)
        self.reader_timeout = config.reader_timeout_seconds
        self.admission = Admission(config.max_running_requests, config.max_waiting_requests, config.max_waiting_seconds)
        self.drafting_policy = DraftingPolicy(
            config.draft_timeout_seconds, config.draft_backoff_seconds, config.look_ahead
        )
        self.scoring_policy = ScoringPolicy(config.target_timeout_seconds, config.target_retry_seconds)
        self._costs = RoundCosts(lambda: self.admission.running)
        self._crowd = Crowd(self._costs)
        self.speed = SpeedEstimate(self._costs)
        # Greedy and sampled requests differ too much to stand for one another.
        self._greedy_prior, self._sampled_prior = AcceptancePrior(), AcceptancePrior()
        self._config = config
        self._changed = asyncio.Event()
        self._waits_for_draft_since: float | None = None
        workers = config.worker_files()
        self.targets = TargetPool(config.target_addresses, TARGET, vocabulary.check_target, self._changed.set, workers)
        self.drafts = DraftPool(config.draft_addresses, DRAFT, vocabulary.check_draft, self._changed.set, workers)

    def limits_of_new(self) -> Limits:
        """The limits of a request that begins; raises Unavailable while no target is connected, where that isn't a moment's
        matter. What runs already has the time to wait for one."""
        if self.targets.away_seconds > min(self._config.target_retry_seconds, AWAY_SECONDS):
            raise _no_target()
        return self.limits()

    def limits(self) -> Limits:
        """What a request may ask for now; raises Unavailable while no target has described itself."""
        infos = self._target_infos()
        if not infos:
            raise _no_target()
        return Limits(
            context_length=min(info.context_length for info in infos),
            vocabulary_size=min(info.vocabulary_size for info in infos),
            max_tokens=self._config.max_tokens,
            max_prompt_characters=self._config.max_prompt_characters,
            max_speculative_tokens=min(
                self._config.max_speculative_tokens, *(info.max_speculative_tokens for info in infos)
            ),
            # Where there is to be no draft, plain decoding is what was asked for, and nothing is amiss with it.
            default_speculative_tokens=self._config.num_speculative_tokens if self.drafts.configured else 0,
            adaptive_by_default=self._config.adaptive_speculative_tokens,
            end_token_ids=self.vocabulary.end_token_ids.union(*(info.end_token_ids for info in infos)),
        )

    def gamma_policy(self, plan: GenerationPlan) -> GammaPolicy:
        """How the request comes by its gamma."""
        if not plan.adaptive:
            return FixedGamma(plan.num_speculative_tokens, self.speed)
        if not self.drafts.configured:
            return FixedGamma(0, self.speed)
        prior = self._sampled_prior if plan.sampling.temperature else self._greedy_prior
        free = (
            plan.sampling.acceptance_method == sampling_pb2.ACCEPTANCE_METHOD_COUPLED or not plan.sampling.temperature
        )
        seed = None if free else plan.sampling.seed
        return AdaptiveGamma(self._costs, prior, plan.num_speculative_tokens, self.speed, self._crowd, seed)

    def target_model(self) -> str:
        """The name of the target's model."""
        infos = self._target_infos()
        return infos[0].model if infos else ""

    def _target_infos(self) -> list[worker_pb2.GetModelInfoResponse]:
        """Of those that are there, or were a moment ago; of all that are known where there is none."""
        known = [(replica, replica.info) for replica in self.targets.replicas if replica.info is not None]
        present = [info for replica, info in known if replica.away_seconds <= GONE_SECONDS]
        return present or [info for _, info in known]

    async def watch_readiness(self, report: Callable[[bool, str, str], Awaitable[None]]) -> None:
        """Reports readiness, what is missing, and why a worker that is there is refused, whenever it changes, for as long as the
        task lives. The words are for everybody who may ask: addresses and the store's errors are for the log."""
        was: tuple[_Hindrance | None, str] | None = None
        ever_ready = False
        while True:
            hindrance = await self._hindrance(ever_ready)
            refusal = "; ".join(refusal for pool in (self.targets, self.drafts) for refusal in _refusals(pool))
            if (hindrance, refusal) != was:
                log.info("ready" if hindrance is None else f"not ready: {hindrance}")
                await report(hindrance is None, hindrance.what if hindrance is not None else "", refusal)
                was = hindrance, refusal
            ever_ready = ever_ready or hindrance is None
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), READINESS_SECONDS)
            except TimeoutError:
                continue

    async def _hindrance(self, ever_ready: bool) -> _Hindrance | None:
        if self.admission.draining:
            return _Hindrance("draining")
        if not self.targets.ready:
            return _Hindrance("no target is connected", "; ".join(self.targets.refusals))
        try:
            async with asyncio.timeout(STORE_HEALTH_SECONDS):
                await self.store.ping()
        except (StoreFull, StoreUnavailable) as error:
            return _Hindrance("the store is not available", str(error))
        except TimeoutError:
            return _Hindrance(f"the store does not answer within {STORE_HEALTH_SECONDS:g} s")
        return None if ever_ready else self._missing_draft()

    def _missing_draft(self) -> _Hindrance | None:
        """What a draft that isn't there keeps from the first readiness; later it only costs its speed.

        One of another vocabulary is a wrong configuration. One that is away is waited for a while, since services are
        often started together; then requests are decoded without it.
        """
        if self.drafts.ready or not self.drafts.configured:
            return None
        if refusals := _refusals(self.drafts):
            return _Hindrance("the draft is refused", "; ".join(refusals))
        now = time.monotonic()
        if self._waits_for_draft_since is None:
            self._waits_for_draft_since = now
        if now - self._waits_for_draft_since < self._config.draft_start_seconds:
            return _Hindrance("no draft is connected yet")
        return None

    async def close(self) -> None:
        """Ends all connections."""
        await self.drafts.close()
        await self.targets.close()
        await self.store.close()
