"""What the target's engine is made of: a model, and the verifier that reads its logits."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal

from tandem.engine import loading
from tandem.engine.faults import ModelError
from tandem.engine.rank_group import RankLost, follow
from tandem.engine.ranks import ranks_from
from tandem.engine.scheduler import StepLimits
from tandem.engine.waiting_line import WaitingLimits
from tandem.engine.worker_process import Prepared
from target_service.config import TENSOR_PARALLEL, TargetConfig
from target_service.verifier import Verifier

logger = logging.getLogger(__name__)


def prepare(settings: TargetConfig) -> Prepared:
    """Loads the model; raises ModelError."""
    model = loading.load(_options(settings))
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


def run_part(settings: TargetConfig) -> int:
    """Runs a part of the model for rank 0, and returns the exit status."""
    options = _options(settings)
    try:
        lm, group = loading.load_part(options)
        # Rank 0 gets the signals too, and ends when its requests have: torchrun sends them to all.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        logger.info("running part %d of %d", group.ranks.rank, group.ranks.count)
        follow(lm, group)
    except (ModelError, RankLost) as error:
        logger.error("%s", error)
        return 1
    except Exception:
        # Whatever it is, only the end of this process tells rank 0, and an interpreter that takes torch down in order may
        # wait for kernels that wait for rank 0.
        logger.exception("part %d is broken", options.ranks.rank)
        return 1
    logger.info("stopped")
    return 0


def _options(settings: TargetConfig) -> loading.ModelOptions:
    ranks = ranks_from(os.environ, settings.tensor_parallel, TENSOR_PARALLEL)
    return dataclasses.replace(settings.model_options(), ranks=ranks)
