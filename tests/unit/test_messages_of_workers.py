"""What comes in one message of a worker is checked at once; one that lies in it is nothing to the others, and is blamed as if it were alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from orchestrator import proposals, verdicts
from orchestrator.drafting import PLAIN, Block, Proposed, _checked
from orchestrator.proposals import ReceivedProposal
from orchestrator.scoring import TARGET, Scoring, ScoringPolicy, TargetContractError, TargetPool
from orchestrator.verdicts import ReceivedVerdict
from tandem import wire
from tandem.acceptance import DraftContractError, Drafted, TargetRow, accept
from tandem.v1 import draft_pb2, sampling_pb2, target_pb2

VOCABULARY = 100
Token = tuple[int, list[int], list[float]]
GOOD: Token = (5, [3, 5, 9], [0.25, 0.5, 0.25])
OTHER: Token = (9, [9, 2, 4], [0.5, 0.125, 0.375])
SURE: Token = (7, [7], [1.0])


def token(token_id: int, ids: Sequence[int], q: Sequence[float]) -> draft_pb2.DraftedToken:
    return draft_pb2.DraftedToken(
        token_id=token_id, support_ids=wire.encode_ids(list(ids)), support_probs=wire.encode_probs(q)
    )


def received(*blocks: Sequence[Token]) -> list[ReceivedProposal]:
    """As of one message, with an error in its midst."""
    read, answers = proposals.reader(), []
    for block in blocks:
        assert read(draft_pb2.ProposalItem(error={}), None) is None
        item = draft_pb2.ProposalItem(proposal=draft_pb2.Proposal(tokens=[token(*each) for each in block]))
        answer = read(item, None)
        assert answer is not None
        answers.append(answer)
    return answers


def drafted(answer: ReceivedProposal, vocabulary_size: int = VOCABULARY) -> list[Drafted]:
    return answer.readable(vocabulary_size)()


def assert_block(found: Sequence[Drafted], block: Sequence[Token]) -> None:
    for one, (token_id, ids, q) in zip(found, block, strict=True):
        assert (one.token_id, one.support_ids.tolist(), one.q.tolist()) == (token_id, ids, q)
        assert one.support_ids[one.index] == token_id


MIXED: list[list[Token]] = [[GOOD, OTHER], [SURE, SURE], [OTHER], [GOOD, SURE], [SURE], [OTHER, GOOD, GOOD]]


@pytest.mark.parametrize("order", [1, -1])
def test_blocks_are_read_as_they_were_sent(order: int) -> None:
    """Of several sizes, and of several within a block; looked at in any order."""
    answers = received(*MIXED)
    for answer, block in list(zip(answers, MIXED, strict=True))[::order]:
        assert answer.supports == [wire.encode_ids(ids) for _, ids, _ in block]
        assert_block(drafted(answer), block)


LIES: list[tuple[Token, str]] = [
    ((5, [3, 5, VOCABULARY], [0.25, 0.5, 0.25]), "outside of the vocabulary"),
    ((5, [3, 5, 3], [0.25, 0.5, 0.25]), "twice"),
    ((5, [3, 5, 9], [0.25, 0.5, 0.5]), "sums to"),
    ((5, [3, 5, 9], [0.25, 0.25, 0.25]), "sums to"),
    ((5, [3, 5, 9], [0.25, float("nan"), 0.25]), "sums to"),
    ((5, [3, 5, 9], [-0.25, 1.0, 0.25]), "negative"),
    ((5, [3, 5, 9], [0.5, 0.0, 0.5]), "no mass"),
    ((8, [3, 5, 9], [0.25, 0.5, 0.25]), "no mass"),
    ((2**32 - 1, [3, 5, 9], [0.25, 0.5, 0.25]), "no mass"),
]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(("lie", "message"), LIES)
def test_a_draft_that_lies_is_blamed_alone(place: int, lie: Token, message: str) -> None:
    blocks = [[GOOD, OTHER], [OTHER, OTHER], [GOOD, GOOD]]
    blocks[place] = [GOOD, lie]
    for number, answer in enumerate(received(*blocks)):
        if number == place:
            with pytest.raises(DraftContractError, match=message):
                drafted(answer)
        else:
            assert_block(drafted(answer), blocks[number])


def test_vocabularies_of_two_sizes_in_one_message() -> None:
    """As after the target was replaced: each request has that of its beginning."""
    high: Token = (150, [150, 5, 9], [0.5, 0.25, 0.25])
    answers = received([GOOD], [high], [OTHER])
    assert_block(drafted(answers[0]), [GOOD])
    assert_block(drafted(answers[1], 200), [high])
    assert_block(drafted(answers[2], 200), [OTHER])
    with pytest.raises(DraftContractError, match="outside of the vocabulary"):
        drafted(received([GOOD], [high])[1])


# --- Verdicts ----------------------------------------------------------------------------------------------------------

Row = tuple[list[float], float, int]
ON_THREE: Row = ([0.5, 0.25, 0.125], 0.125, 7)
OTHER_ON_THREE: Row = ([0.0, 0.0, 0.75], 0.25, 8)
ON_ONE: Row = ([0.25], 0.75, 9)
PLAINLY: Row = ([], 1.0, 6)


def rows_of(verdict: Sequence[Row], proposed: Proposed, read: Any) -> ReceivedVerdict:
    rows = [
        target_pb2.TargetRow(support_probs=wire.encode_probs(p), outside_mass=mass, outside_token_id=token_id)
        for p, mass, token_id in verdict
    ]
    answer: ReceivedVerdict = read(target_pb2.VerdictItem(verdict=target_pb2.Verdict(rows=rows)), proposed)
    return answer


def judged(*sent: Sequence[Row], blocks: Sequence[Proposed] | None = None) -> list[ReceivedVerdict]:
    """As of one message, with an error in its midst."""
    read = verdicts.reader()
    assert read(target_pb2.VerdictItem(error={}), PLAIN) is None
    on = blocks if blocks is not None else [PLAIN] * len(sent)
    return [rows_of(verdict, proposed, read) for verdict, proposed in zip(sent, on, strict=True)]


def checked(answer: ReceivedVerdict, sizes: list[int]) -> list[TargetRow]:
    pool = TargetPool((), TARGET, lambda info: None, lambda: None)
    policy = ScoringPolicy(timeout=60.0, retry=0.3)
    return Scoring("r", pool, sampling_pb2.Sampling(), policy, VOCABULARY)._checked(answer, sizes, len(answer.rows))


VERDICTS: list[list[Row]] = [
    [ON_THREE, OTHER_ON_THREE, PLAINLY],
    [ON_ONE, ON_ONE],
    [PLAINLY],
    [ON_ONE, ON_THREE],
    [ON_THREE, PLAINLY],
    [ON_THREE, ON_ONE, OTHER_ON_THREE],
]


async def test_rows_are_read_as_they_were_sent() -> None:
    for answer, sent in zip(judged(*VERDICTS), VERDICTS, strict=True):
        sizes = [len(p) for p, _, _ in sent if p]
        for row, (p, mass, token_id) in zip(checked(answer, sizes), sent, strict=True):
            assert (row.p.tolist(), row.outside_mass, row.outside_token_id) == (p, mass, token_id)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (([0.5, 0.25, 0.0], 0.125, 7), "sums to"),
        (([0.5, 0.25, float("nan")], 0.125, 7), "sums to"),
        (([0.5, 0.25, 0.5], -0.25, 7), "sums to"),
        (([0.5, 0.25, 0.125], 0.125, VOCABULARY), "outside of the vocabulary"),
        (([0.5, 0.25], 0.25, 7), "3 probabilities"),
    ],
)
async def test_a_verdict_that_lies_is_blamed_alone(place: int, lie: Row, message: str) -> None:
    sent = [[ON_THREE, OTHER_ON_THREE, PLAINLY] for _ in range(3)]
    sent[place] = [ON_THREE, lie, PLAINLY]
    for number, answer in enumerate(judged(*sent)):
        if number == place:
            with pytest.raises(TargetContractError, match=message):
                checked(answer, [3, 3])
        else:
            assert [row.outside_token_id for row in checked(answer, [3, 3])] == [7, 8, 6]


def block(*tokens: Token, look_ahead: bool = False) -> Proposed:
    """Confirmed."""
    [answer] = received(tokens)
    count = len(tokens) - look_ahead
    proposed = Proposed(answer.token_ids[:count], answer.supports, answer.readable(VOCABULARY))
    proposed.block = _checked(proposed)
    return proposed


async def test_overlaps_are_those_of_each_row_by_itself() -> None:
    blocks = [block(GOOD, OTHER), block(OTHER, GOOD, GOOD, look_ahead=True), block(GOOD)]
    sent = [[ON_THREE, OTHER_ON_THREE, PLAINLY], [OTHER_ON_THREE, ON_THREE, ON_THREE], [ON_THREE, PLAINLY]]
    for proposed, answer in zip(blocks, judged(*sent, blocks=blocks), strict=True):
        assert proposed.block is not None
        rows = checked(answer, [3] * len(proposed.supports))
        drawn = [*proposed.block.drafted, *filter(None, [proposed.block.look_ahead])]
        for row, each in zip(rows, drawn, strict=False):
            assert row.overlap == float(np.minimum(row.p, each.q).sum(dtype=np.float64))
            row.overlap = None
        by_itself = accept(proposed.block.drafted, rows, [(0.0, 0.5)] * len(rows), proposed.block.look_ahead)
        assert len(by_itself.expected_acceptance) >= 1


@pytest.mark.parametrize("odd", ["unconfirmed", "a lie", "another size"])
async def test_no_overlaps_where_a_block_is_not_what_the_rows_are_on(odd: str) -> None:
    other = block(SURE) if odd == "another size" else block(GOOD)
    if odd != "another size":
        other.block = None if odd == "unconfirmed" else Block()
    blocks = [block(GOOD), other]
    answers = judged([ON_THREE, PLAINLY], [OTHER_ON_THREE, PLAINLY], blocks=blocks)
    rows = checked(answers[0], [3])
    assert [row.overlap for row in rows] == [None, None]
    assert accept(blocks[0].block.drafted, rows, [(0.0, 0.5)] * 2).expected_acceptance == [0.625]  # type: ignore[union-attr]
