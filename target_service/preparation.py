"""What the target's engine is made of: a model, and the verifier that reads its logits."""

from __future__ import annotations

from tandem.engine import loading
from tandem.engine.engine import WaitingLimits
from tandem.engine.scheduler import StepLimits
from tandem.engine.worker_process import Prepared
from target_service.config import TargetConfig
from target_service.verifier import Verifier


def prepare(settings: TargetConfig) -> Prepared:
    """Loads the model; raises ModelError."""
    model = loading.load(settings.model_options())
    return Prepared(
        model,
        Verifier(model.vocabulary_size, settings.max_speculative_tokens),
        StepLimits(
            short_feed=settings.max_speculative_tokens + 1,
            prefill_chunk=settings.prefill_chunk,
            forward_cost=model.forward_cost,
        ),
        waiting=WaitingLimits(settings.max_waiting, settings.max_waiting_seconds),
        gather=settings.gather,
    )
