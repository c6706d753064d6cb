"""The ways to draft, by configuration: a causal language model, whole or its first layers, n-grams without a model, or both."""

from __future__ import annotations

from functools import partial

from draft_service.ahead import DraftAhead
from draft_service.ahead_gain import AheadGain
from draft_service.catch_up import CatchUp
from draft_service.combined import CombinedDrafter
from draft_service.config import BOTH, NGRAM, DraftConfig
from draft_service.drafter import ModelDrafter
from draft_service.ngram import NgramDrafter, TokensAlone
from tandem.engine import loading
from tandem.engine.draft_stats import DraftStats
from tandem.engine.scheduler import StepLimits
from tandem.engine.worker_process import Prepared

_FREE_TOKENS_CHUNK = 1 << 20


def prepare(settings: DraftConfig) -> Prepared:
    """Loads what the configured way needs; raises ModelError."""
    return _ngram(settings) if settings.method == NGRAM else _model(settings)


def _model(settings: DraftConfig) -> Prepared:
    model = loading.load(settings.model_options())
    gain = AheadGain() if settings.ahead_measured else None
    ahead = DraftAhead(settings.ahead_rows, model.vocabulary_size, gain=gain) if settings.ahead_rows else None
    stats = DraftStats()
    drafter = ModelDrafter(
        model.vocabulary_size,
        settings.support_size,
        settings.max_speculative_tokens,
        ahead,
        stop_below=settings.stop_below,
        stats=stats,
    )
    limits = StepLimits(
        short_feed=settings.max_speculative_tokens + 1,
        prefill_chunk=settings.prefill_chunk,
        forward_cost=model.forward_cost,
    )
    if settings.method != BOTH:
        return Prepared(model, drafter, limits, displace=True, idle=ahead, stats=stats)
    ngram = NgramDrafter(model.vocabulary_size, settings.max_speculative_tokens)
    both = CombinedDrafter(drafter, ngram, model.vocabulary_size, stats)
    idle = CatchUp(settings.prefill_chunk, stats, ahead)
    return Prepared(model, both, limits, displace=True, idle=idle, stats=stats, reads_later=True)


def _ngram(settings: DraftConfig) -> Prepared:
    model = loading.load_tokens_alone(settings.model_options(), partial(TokensAlone, settings.slots))
    drafter = NgramDrafter(model.vocabulary_size, settings.max_speculative_tokens)
    return Prepared(model, drafter, StepLimits(prefill_chunk=_FREE_TOKENS_CHUNK), displace=True, reads_later=True)
