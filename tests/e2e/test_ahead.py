"""A draft that works ahead changes what a caller waits, and nothing that it sees."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tandem.v1 import sampling_pb2
from tests.support.channels import open_channel
from tests.support.generation import Generation, generate, generate_all, request
from tests.support.ports import free_port
from tests.support.reference import Reference
from tests.support.services import MODELS, running_stack

GAMMAS: dict[str, dict[str, Any]] = {
    **{str(gamma): {"num_speculative_tokens": gamma} for gamma in (0, 1, 2, 5, 8)},
    "auto": {"adaptive_speculative_tokens": True},
}
PROMPTS = [[5, 6, 7], [77] * 48, list(range(10, 90))]
TOKENS = 40
COUPLED = sampling_pb2.ACCEPTANCE_METHOD_COUPLED


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[grpc.Channel, str]]:
    """The tiny pair, its draft at work ahead; a channel, and where the draft's metrics are."""
    metrics = f"127.0.0.1:{free_port()}"
    environment = {
        "TANDEM_DRAFT_AHEAD_ROWS": "4",
        "TANDEM_DRAFT_AHEAD_MEASURED": "false",
        "TANDEM_DRAFT_METRICS_LISTEN": metrics,
        "TANDEM_DRAFT_TIMEOUT_SECONDS": "30",
        "TANDEM_DEBUG_INVARIANTS": "true",
    }
    folder = tmp_path_factory.mktemp("eager")
    with (
        running_stack(folder, MODELS / "tiny-target", MODELS / "tiny-draft", environment) as stack,
        open_channel(stack.orchestrator.address) as channel,
    ):
        yield channel, f"http://{metrics}/metrics"


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    reference = Reference(MODELS / "tiny-target")
    return [reference.greedy(prompt, TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("gamma", GAMMAS)
def test_greedy_is_token_exact(eager: tuple[grpc.Channel, str], expected: list[list[int]], gamma: str) -> None:
    """One at a time, where the draft has most time, and together, where it has least."""
    channel, _ = eager
    fields = {"temperature": 0, "max_tokens": TOKENS, **GAMMAS[gamma]}
    alone = [generate(channel, prompt, **fields) for prompt in PROMPTS]
    together = generate_all(channel, (request(prompt, **fields) for prompt in PROMPTS))
    for results in (alone, together):
        assert [result.ids for result in results] == expected
        assert sum(result.speculation.degraded_rounds for result in results) == 0


@pytest.mark.parametrize("method", ["REJECTION", "COUPLED"])
def test_sampled_text_is_that_of_a_draft_that_waits(
    eager: tuple[grpc.Channel, str], tiny_channel: grpc.Channel, method: str
) -> None:
    fields: dict[str, Any] = {
        "max_tokens": TOKENS,
        "num_speculative_tokens": 3,
        "acceptance_method": sampling_pb2.AcceptanceMethod.Value(f"ACCEPTANCE_METHOD_{method}"),
    }
    for seed in range(8):
        seen = [_seen(generate(channel, PROMPTS[0], seed=seed, **fields)) for channel in (eager[0], tiny_channel)]
        assert seen[0] == seen[1], seed


def test_output_of_a_form_is_that_of_a_draft_that_waits(
    eager: tuple[grpc.Channel, str], tiny_channel: grpc.Channel
) -> None:
    """Guesses are drafted with the session's own form, which goes back and forth between them and the request."""
    form = sampling_pb2.StructuredOutput(regex="([a-z]{1,4}=[0-9]{1,2}[;,]){3,9}")
    fields = {"max_tokens": TOKENS, "structured_output": form, "num_speculative_tokens": 3}
    for how in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3, "acceptance_method": 2}):
        eagerly, plain = (generate(channel, PROMPTS[0], **fields, **how) for channel in (eager[0], tiny_channel))  # type: ignore[arg-type]
        assert eagerly.seen == plain.seen
        assert eagerly.speculation.accepted_tokens > 0


def _seen(result: Generation) -> tuple[Any, ...]:
    assert result.speculation.degraded_rounds == 0
    return (*result.seen, result.kinds, list(result.speculation.accepted_tokens_per_position))


def test_the_draft_counts_what_came_of_it(eager: tuple[grpc.Channel, str]) -> None:
    channel, metrics = eager
    hits = [f'tandem_draft_ahead_items_total{{outcome="{kind}"}}' for kind in ("chain", "branch")]
    counts = _counts(metrics)
    # A draft that is never idle in time guesses nothing, so a busy machine needs more of them.
    for seed in range(40):
        if all(counts[hit] > 0 for hit in hits):
            break
        fields = {"temperature": 0} if seed % 2 else {"temperature": 0.5, "seed": seed, "acceptance_method": COUPLED}
        generate(channel, PROMPTS[seed % 3], max_tokens=100, ignore_eos=True, num_speculative_tokens=2, **fields)
        counts = _counts(metrics)
    assert all(counts[hit] > 0 for hit in hits)
    assert 0 < counts["tandem_draft_ahead_used_tokens_total"] < counts["tandem_draft_ahead_tokens_total"]
    assert counts["tandem_draft_ahead_failures_total"] == counts["tandem_invariant_violations_total"] == 0


def _counts(metrics: str) -> dict[str, float]:
    with urllib.request.urlopen(metrics) as page:
        lines = page.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
