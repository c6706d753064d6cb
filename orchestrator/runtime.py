"""What all requests of one orchestrator share: vocabulary, worker pools, store, admission, and its readiness."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable

from tandem.v1 import worker_pb2

from .admission import Admission
from .callers import Callers
from .config import OrchestratorConfig
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
        self._costs = RoundCosts()
        self.speed = SpeedEstimate(self._costs)
        # Greedy and sampled requests differ too much to stand for one another.
        self._greedy_prior, self._sampled_prior = AcceptancePrior(), AcceptancePrior()
        self._config = config
        self._changed = asyncio.Event()
        self._waits_for_draft_since: float | None = None
        workers = config.worker_files()
        self.targets = TargetPool(config.target_addresses, TARGET, vocabulary.check_target, self._changed.set, workers)
        self.drafts = DraftPool(config.draft_addresses, DRAFT, vocabulary.check_draft, self._changed.set, workers)

    def limits(self) -> Limits:
        """What a request may ask for now; raises Unavailable while no target has described itself."""
        infos = self._target_infos()
        if not infos:
            raise Unavailable("no target is connected yet", "TARGET_UNAVAILABLE", RETRY_AFTER_SECONDS)
        return Limits(
            context_length=min(info.context_length for info in infos),
            vocabulary_size=min(info.vocabulary_size for info in infos),
            max_tokens=self._config.max_tokens,
            max_prompt_characters=self._config.max_prompt_characters,
            max_speculative_tokens=min(
                self._config.max_speculative_tokens, *(info.max_speculative_tokens for info in infos)
            ),
            default_speculative_tokens=self._config.num_speculative_tokens,
            adaptive_by_default=self._config.adaptive_speculative_tokens,
            end_token_ids=self.vocabulary.end_token_ids.union(*(info.end_token_ids for info in infos)),
        )

    def gamma_policy(self, plan: GenerationPlan) -> GammaPolicy:
        """How the request comes by its gamma."""
        if not plan.adaptive:
            return FixedGamma(plan.num_speculative_tokens, self.speed)
        if not self.drafts.replicas:
            return FixedGamma(0, self.speed)
        prior = self._sampled_prior if plan.sampling.temperature else self._greedy_prior
        return AdaptiveGamma(self._costs, prior, plan.num_speculative_tokens, self.speed)

    def target_model(self) -> str:
        """The name of the target's model."""
        infos = self._target_infos()
        return infos[0].model if infos else ""

    def _target_infos(self) -> list[worker_pb2.GetModelInfoResponse]:
        return [replica.info for replica in self.targets.replicas if replica.info is not None]

    async def watch_readiness(self, report: Callable[[bool], Awaitable[None]]) -> None:
        """Reports readiness whenever it changes, for as long as the task lives."""
        was: str | None = "not asked yet"
        ever_ready = False
        while True:
            hindrance = await self._hindrance(ever_ready)
            if hindrance != was:
                log.info("ready" if hindrance is None else f"not ready: {hindrance}")
                await report(hindrance is None)
                was = hindrance
            ever_ready = ever_ready or hindrance is None
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), READINESS_SECONDS)
            except TimeoutError:
                continue

    async def _hindrance(self, ever_ready: bool) -> str | None:
        if self.admission.draining:
            return "draining"
        if not self.targets.ready:
            return "; ".join(["no target is connected", *self.targets.refusals])
        try:
            async with asyncio.timeout(STORE_HEALTH_SECONDS):
                await self.store.ping()
        except (StoreFull, StoreUnavailable) as error:
            return f"the store is not available: {error}"
        except TimeoutError:
            return f"the store does not answer within {STORE_HEALTH_SECONDS:g} s"
        return None if ever_ready else self._missing_draft()

    def _missing_draft(self) -> str | None:
        """What a draft that isn't there keeps from the first readiness; later it only costs its speed.

        One of another vocabulary is a wrong configuration. One that is away is waited for a while, since services are
        often started together; then requests are decoded without it.
        """
        if self.drafts.ready or not self.drafts.configured:
            return None
        if self.drafts.refusals:
            return "; ".join(self.drafts.refusals)
        now = time.monotonic()
        if self._waits_for_draft_since is None:
            self._waits_for_draft_since = now
        if now - self._waits_for_draft_since < self._config.draft_start_seconds:
            return "no draft is connected yet"
        return None

    async def close(self) -> None:
        """Ends all connections."""
        await self.drafts.close()
        await self.targets.close()
        await self.store.close()
