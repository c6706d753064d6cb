"""Runs a service with a planted fault: `python -m tests.support.faulty_service MODULE FAULT`.

The statistical tests must reject the output of these, and alarms must tell of them; a test that lets one through proves nothing.
"""

from __future__ import annotations

import itertools
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np


def residual_from_p() -> None:
    """The recovered token is drawn from p instead of max(0, p - q)."""
    from tandem import acceptance

    def weights(p: Any, q: Any, outside_mass: float) -> Any:
        return np.append(p.astype(np.float64), outside_mass)

    acceptance.residual_weights = weights


def q_rounded_after_sampling() -> None:
    """The orchestrator sees q rounded to steps of 0.05, while the draft drew from the exact values."""
    from orchestrator import drafting

    checked = drafting._checked

    def rounded(proposed: drafting.Proposed) -> drafting.Block:
        block = checked(proposed)
        return replace(
            block,
            drafted=tuple(
                replace(drafted, q=np.maximum(np.round(drafted.q * 20) / 20, 0.05).astype(np.float32))
                for drafted in block.drafted
            ),
        )

    drafting._checked = rounded


def block_of_the_former_sampling() -> None:
    """An owner whose round was refused, since the sampling was changed, commits it all the same before it goes on."""
    from orchestrator.session_store import ConfigChanged, SessionStore, Stored

    commit = SessionStore.commit

    async def kept(self: SessionStore, ownership: Any, epoch: int, length: int, tokens: bytes, *rest: Any) -> None:
        try:
            await commit(self, ownership, epoch, length, tokens, *rest)
        except ConfigChanged as changed:
            now = (await self.reread(ownership)).ownership
            if now is None or changed.stored.length != length:
                raise
            await commit(self, now, now.epoch, now.length, tokens, *rest)
            raise ConfigChanged("", Stored(now.fence, now.epoch + 1, now.length + len(tokens) // 4)) from None

    SessionStore.commit = kept  # type: ignore[method-assign]


def next_row_after_rejection() -> None:
    """After a rejection the recovered token comes from the row after the rejected token."""
    from orchestrator import decoder
    from tandem import acceptance

    def accept(block: Sequence[Any], rows: Sequence[Any], uniforms: Sequence[Any], look_ahead: Any = None) -> Any:
        outcome = accept_rightly(block, rows, uniforms, look_ahead)
        if outcome.accepted == len(block):
            return outcome
        rejected, row = block[outcome.accepted], rows[outcome.accepted + 1]
        if row.p.size != rejected.q.size:
            return outcome
        wrong = acceptance._draw_residual(rejected, row, uniforms[outcome.accepted][1])
        return replace(outcome, token_ids=[*outcome.token_ids[:-1], wrong])

    accept_rightly = decoder.accept
    decoder.accept = accept


def rollback_off_by_one() -> None:
    """After a rejection the target's cache keeps the rejected token's keys and values in place of the recovered one's."""
    from tandem.engine.causal_lm import CausalLM

    forward = CausalLM.forward
    cached: dict[int, dict[int, int]] = {}

    def stale(self: CausalLM, feeds: Sequence[Any]) -> Any:
        return forward(self, [_stale_feed(cached.setdefault(feed.slot, {}), feed) for feed in feeds])

    CausalLM.forward = stale  # type: ignore[method-assign]


def _stale_feed(held: dict[int, int], feed: Any) -> Any:
    ids = feed.token_ids.copy()
    if feed.start and feed.start in held:
        ids[0] = held[feed.start]
    else:
        held.clear()
    for position in [position for position in held if position >= feed.start]:
        del held[position]
    held.update({feed.start + offset: int(token) for offset, token in enumerate(ids)})
    return replace(feed, token_ids=ids)


def penalties_inside_blocks() -> None:
    """Two faults, one for each kind of penalty: repetition still counts tokens that were rejected in an earlier round;
    presence and frequency count for every row of a block what precedes its first one."""
    from tandem.logit_adjustments import _Edits

    add_penalties = _Edits._add_penalties
    seen: dict[int, set[int]] = {}

    def wrong(self: _Edits, adjustment: Any, rows: Any, positions: Sequence[int], tokens: Any) -> None:
        if adjustment.presence_penalty or adjustment.frequency_penalty:
            positions = [positions[0]] * len(positions)
        add_penalties(self, adjustment, rows, positions, tokens)
        if adjustment.repetition_penalty != 1.0:
            now = set(tokens.tolist())
            rejected = np.array(sorted(seen.setdefault(id(adjustment), set()) - now), dtype=np.uint32)
            for row in rows.tolist() if rejected.size else ():
                self.repetitions.add(np.full(rejected.size, row), rejected, adjustment.repetition_penalty)
            seen[id(adjustment)] |= now

    _Edits._add_penalties = wrong  # type: ignore[method-assign]


def a_draft_gone_bad() -> None:
    """It is slow, offers the least likely token of a support that it calls all equally likely, and now and then its books say that
    the cache is not what it should be."""
    from draft_service.drafter import ModelDrafter
    from tandem.engine.slot_ledger import SlotLedger

    draw, ran, feeds = ModelDrafter._draw, SlotLedger.ran, itertools.count(1)

    def least_likely(self: ModelDrafter, *arguments: Any) -> Any:
        time.sleep(0.02)
        drawn, confidences = draw(self, *arguments)
        return [_least_likely(drafted) for drafted in drawn], confidences

    def forgetful(self: SlotLedger, feed: Any) -> None:
        ran(self, replace(feed, token_ids=feed.token_ids + 1) if next(feeds) % 25 == 0 else feed)

    ModelDrafter._draw = least_likely  # type: ignore[method-assign]
    SlotLedger.ran = forgetful  # type: ignore[method-assign]


def _least_likely(drafted: Any) -> Any:
    index, size = int(drafted.q.argmin()), drafted.q.size
    even = np.full(size, 1 / size, dtype=np.float32)
    return replace(drafted, token_id=int(drafted.support_ids[index]), q=even, index=index)


def form_inside_blocks() -> None:
    """Every row of a block has the mask of its first one."""
    from tandem import sampling
    from target_service import verifier

    mask = sampling.mask

    def wrong(scores: Any, forms: Sequence[Any], positions: Sequence[int], contexts: Any) -> Any:
        first: dict[int, int] = {}
        return mask(
            scores,
            forms,
            [first.setdefault(id(form), position) for form, position in zip(forms, positions, strict=True)],
            contexts,
        )

    assert verifier.sampling is sampling
    sampling.mask = wrong


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (
        residual_from_p,
        q_rounded_after_sampling,
        block_of_the_former_sampling,
        next_row_after_rejection,
        rollback_off_by_one,
        penalties_inside_blocks,
        a_draft_gone_bad,
        form_inside_blocks,
    )
}


if __name__ == "__main__":
    module, fault = sys.argv[1:3]
    del sys.argv[1:3]
    FAULTS[fault]()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
