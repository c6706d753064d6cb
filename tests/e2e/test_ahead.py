"""A draft that works ahead changes what a caller waits, and nothing that it sees.

That goes for what sampling with a draft got wrong elsewhere, too, which is here case by case: H01 reports a q that the token was
not drawn from (transformers #47932), H02 loses the recovered token (openvino.genai #4190), H03 fails where p = q (transformers
#28508), H04 parts from plain decoding at near ties (transformers #39421), H05 cuts q without drawing from what is left
(local-inference-lab/vllm #585). What a waiting draft leads to has the target's law (tests/statistical), so the text of one that
works ahead has to be that very text. Drafts that are greedy whatever is asked (H01), of another dtype (H03) or cut to eight tokens
(H05) are in tests/engine/test_ahead.py.
"""

from __future__ import annotations

import contextlib
import itertools
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.v1 import sampling_pb2
from tests.support.channels import open_channel
from tests.support.generation import Generation, generate, generate_all, request
from tests.support.model_scripts import load_script
from tests.support.reference import Reference
from tests.support.services import MODELS, ServiceProcess, Stack, running_stack

GAMMAS: dict[str, dict[str, Any]] = {
    **{str(gamma): {"num_speculative_tokens": gamma} for gamma in (0, 1, 2, 5, 8)},
    "auto": {"adaptive_speculative_tokens": True},
}
PROMPTS = [[5, 6, 7], [77] * 48, list(range(10, 90))]
TOKENS = 40
REJECTION = sampling_pb2.ACCEPTANCE_METHOD_REJECTION
COUPLED = sampling_pb2.ACCEPTANCE_METHOD_COUPLED
WAITING = {"tiny": "tiny_channel", "random": "random_draft_channel", "same": "same_channel"}
"""By pair: the same models with a draft that waits."""
MOST_REQUESTS = 60
"""A draft that is never idle in time guesses nothing, so a busy machine needs more of them until a guess is of use."""
HIT = 'tandem_draft_ahead_items_total{{outcome="{}"}}'


@dataclass(frozen=True)
class Eager:
    """A pair whose draft works ahead."""

    channel: grpc.Channel
    stack: Stack

    def counts(self) -> dict[str, float]:
        """The draft's counters, by their names with labels."""
        return _counts(self.stack.draft)

    def hits(self) -> float:
        """Blocks that were there before they were asked for, or their beginnings."""
        counts = self.counts()
        return counts[HIT.format("chain")] + counts[HIT.format("branch")]

    def check_sound(self) -> None:
        """Nothing failed, and each slot has held what its session believes."""
        for worker in (self.stack.draft, self.stack.target):
            assert _counts(worker)["tandem_invariant_violations_total"] == 0
        assert self.counts()["tandem_draft_ahead_failures_total"] == 0


def _counts(worker: ServiceProcess) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{worker.metrics}/metrics") as page:
        lines = page.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


@contextlib.contextmanager
def working_ahead(folder: Path, draft: Path, **options: str) -> Iterator[Eager]:
    """The tiny target, and this draft."""
    environment = {
        "TANDEM_DRAFT_AHEAD_ROWS": "4",
        "TANDEM_DRAFT_AHEAD_MEASURED": "false",
        "TANDEM_DEBUG_INVARIANTS": "true",
        **options,
    }
    with (
        running_stack(folder, MODELS / "tiny-target", draft, environment) as stack,
        open_channel(stack.orchestrator.address) as channel,
    ):
        yield Eager(channel, stack)


@pytest.fixture(scope="module")
def eager_tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Eager]:
    with working_ahead(tmp_path_factory.mktemp("eager"), MODELS / "tiny-draft") as eager:
        yield eager


@pytest.fixture(scope="module")
def eager_random(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Eager]:
    """The draft of `random_draft_channel`."""
    folder = tmp_path_factory.mktemp("eager-random")
    draft = load_script("variants").random_draft(MODELS / "tiny-draft", folder / "draft", seed=7)
    with working_ahead(folder, draft) as eager:
        yield eager


@pytest.fixture(scope="module")
def eager_same(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Eager]:
    """The draft is the target, and its q is cut nowhere: p = q at every temperature."""
    whole = {"TANDEM_DRAFT_SUPPORT_SIZE": "512"}
    with working_ahead(tmp_path_factory.mktemp("eager-same"), MODELS / "tiny-target", **whole) as eager:
        yield eager


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    reference = Reference(MODELS / "tiny-target")
    return [reference.greedy(prompt, TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("gamma", GAMMAS)
def test_greedy_is_token_exact(eager_tiny: Eager, expected: list[list[int]], gamma: str) -> None:
    """One at a time, where the draft has most time, and together, where it has least. H04: the second prompt repeats itself,
    which finds near ties."""
    fields = {"temperature": 0, "max_tokens": TOKENS, **GAMMAS[gamma]}
    alone = [generate(eager_tiny.channel, prompt, **fields) for prompt in PROMPTS]
    together = generate_all(eager_tiny.channel, (request(prompt, **fields) for prompt in PROMPTS))
    for results in (alone, together):
        assert [result.ids for result in results] == expected
        assert sum(result.speculation.degraded_rounds for result in results) == 0


@dataclass(frozen=True)
class Case:
    """Requests by which a draft that works ahead is compared with one that waits."""

    pair: str
    fields: dict[str, Any]
    requests: int = 2


CASES = {
    "plain": Case("tiny", {"num_speculative_tokens": 3}, requests=16),
    "H01-top-k": Case("tiny", {"num_speculative_tokens": 4, "top_k": 50}),
    "H01-top-p": Case("tiny", {"num_speculative_tokens": 4, "top_p": 0.8}),
    "H01-both": Case("tiny", {"num_speculative_tokens": 4, "top_k": 50, "top_p": 0.8}),
    "H01-min-p": Case("tiny", {"num_speculative_tokens": 4, "top_k": 50, "top_p": 0.8, "min_p": 0.02}),
    "H02-gamma-1": Case("random", {"num_speculative_tokens": 1}),
    "H02-gamma-5": Case("random", {"num_speculative_tokens": 5}),
}


@pytest.mark.parametrize("name", CASES)
def test_sampled_text_is_that_of_a_draft_that_waits(name: str, request: pytest.FixtureRequest) -> None:
    """Under both methods, until some blocks were drafted ahead."""
    case = CASES[name]
    eager: Eager = request.getfixturevalue(f"eager_{case.pair}")
    waiting: grpc.Channel = request.getfixturevalue(WAITING[case.pair])
    before = eager.hits()
    for seed in itertools.count():
        if seed >= case.requests and eager.hits() > before:
            break
        assert seed < MOST_REQUESTS, "no block was drafted ahead"
        fields = {
            "seed": seed,
            "acceptance_method": (REJECTION, COUPLED)[seed % 2],
            "max_tokens": TOKENS,
            **case.fields,
        }
        seen = [_seen(generate(channel, PROMPTS[0], **fields)) for channel in (eager.channel, waiting)]
        assert seen[0] == seen[1], seed
    eager.check_sound()


def _seen(result: Generation) -> tuple[Any, ...]:
    assert result.speculation.degraded_rounds == 0
    return (*result.seen, result.kinds, list(result.speculation.accepted_tokens_per_position))


def test_long_texts_over_shared_prefixes_are_those_of_a_draft_that_waits(
    eager_random: Eager, random_draft_channel: grpc.Channel
) -> None:
    """H02: 200 tokens, nearly all of them recovered or bonus ones, and nearly every guess a wrong one."""
    fields = {"max_tokens": 200, "ignore_eos": True, "num_speculative_tokens": 1}
    hows = [{"seed": 1, "acceptance_method": method} for method in (REJECTION, COUPLED)]
    before = [_counts(worker) for worker in (eager_random.stack.draft, eager_random.stack.target)]
    asked = [request(PROMPTS[2], **fields, **how) for how in hows]
    for some in (asked[:1], asked[1:]):  # those that come second find the prompt in the caches
        found, expected = (generate_all(channel, some) for channel in (eager_random.channel, random_draft_channel))
        assert [_seen(result) for result in found] == [_seen(result) for result in expected]
    after = [_counts(worker) for worker in (eager_random.stack.draft, eager_random.stack.target)]
    for one, other in zip(before, after, strict=True):
        assert other["tandem_prefix_cache_hits_total"] > one["tandem_prefix_cache_hits_total"]
    missed = HIT.format("miss")
    assert after[0][missed] > before[0][missed]
    eager_random.check_sound()


def test_a_draft_that_is_the_target_is_always_accepted(eager_same: Eager, same_channel: grpc.Channel) -> None:
    """H03: p = q, so that a residual has no mass, and any acceptance below 1 is a fault."""
    fields = {"max_tokens": 64, "ignore_eos": True, "num_speculative_tokens": 5}
    # What the cut of a waiting draft's q would change is compared with nothing: there it isn't the target.
    hows: list[tuple[bool, dict[str, Any]]] = [
        (False, {"acceptance_method": REJECTION}),
        (True, {"acceptance_method": REJECTION, "top_k": 50}),
        (True, {"acceptance_method": COUPLED}),
    ]
    before = eager_same.hits()
    for seed in itertools.count():
        if seed >= 3 and eager_same.hits() > before:
            break
        assert seed < MOST_REQUESTS, "no block was drafted ahead"
        compared, how = hows[seed % 3]
        result = generate(eager_same.channel, PROMPTS[0], seed=seed, **fields, **how)
        statistics = result.speculation
        assert statistics.degraded_rounds == 0
        assert statistics.rounds == -(-64 // 6)
        assert list(statistics.accepted_tokens_per_position) == list(statistics.draft_tokens_per_position)
        assert statistics.expected_accepted_tokens == pytest.approx(statistics.draft_tokens, rel=1e-4)
        if compared:
            assert result.seen == generate(same_channel, PROMPTS[0], seed=seed, **fields, **how).seen
    eager_same.check_sound()


def test_output_of_a_form_is_that_of_a_draft_that_waits(eager_tiny: Eager, tiny_channel: grpc.Channel) -> None:
    """Guesses are drafted with the session's own form, which goes back and forth between them and the request."""
    form = sampling_pb2.StructuredOutput(regex="([a-z]{1,4}=[0-9]{1,2}[;,]){3,9}")
    fields = {"max_tokens": TOKENS, "structured_output": form, "num_speculative_tokens": 3}
    for how in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3, "acceptance_method": 2}):
        eagerly, plain = (
            generate(channel, PROMPTS[0], **fields, **how)  # type: ignore[arg-type]
            for channel in (eager_tiny.channel, tiny_channel)
        )
        assert eagerly.seen == plain.seen
        assert eagerly.speculation.accepted_tokens > 0


def test_the_draft_counts_what_came_of_it(eager_tiny: Eager) -> None:
    hits = [HIT.format(outcome) for outcome in ("chain", "branch")]
    counts = eager_tiny.counts()
    for seed in range(MOST_REQUESTS):
        if all(counts[hit] > 0 for hit in hits):
            break
        fields = {"temperature": 0} if seed % 2 else {"temperature": 0.5, "seed": seed, "acceptance_method": COUPLED}
        generate(
            eager_tiny.channel,
            PROMPTS[seed % 3],
            max_tokens=100,
            ignore_eos=True,
            num_speculative_tokens=2,
            **fields,
        )
        counts = eager_tiny.counts()
    assert all(counts[hit] > 0 for hit in hits)
    assert 0 < counts["tandem_draft_ahead_used_tokens_total"] < counts["tandem_draft_ahead_tokens_total"]
    eager_tiny.check_sound()
