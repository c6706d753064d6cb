"""Drafts that are no model of their own: n-grams of the request itself, and the first layers of the target beside them."""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from tandem.v1 import draft_pb2_grpc, sampling_pb2, worker_pb2
from tests.support.channels import open_channel
from tests.support.generation import generate_all, request
from tests.support.ports import free_port
from tests.support.reference import Reference
from tests.support.services import MODELS, running_stack

TARGET = MODELS / "tiny-target"
WAYS = {
    "ngram": {"TANDEM_DRAFT_METHOD": "ngram"},
    "shallow+ngram": {
        "TANDEM_DRAFT_METHOD": "model+ngram",
        "TANDEM_DRAFT_LAYERS": "1",
        "TANDEM_DRAFT_AHEAD_ROWS": "4",
        "TANDEM_DRAFT_AHEAD_MEASURED": "false",
        "TANDEM_DRAFT_STOP_BELOW": "0.2",
    },
}
GAMMAS: dict[str, dict[str, Any]] = {
    **{str(gamma): {"num_speculative_tokens": gamma} for gamma in (0, 1, 2, 5, 8)},
    "auto": {"adaptive_speculative_tokens": True},
}
PROMPTS = [[5, 6, 7], [77] * 48, [*range(10, 60), *range(10, 40)]]
TOKENS = 60


@dataclass(frozen=True)
class Served:
    """A stack with one of the WAYS to draft."""

    channel: grpc.Channel
    way: str
    metrics: str

    def counts(self) -> dict[str, float]:
        """The draft's counters, by their names with labels."""
        with urllib.request.urlopen(self.metrics) as page:
            lines = page.read().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


@pytest.fixture(scope="module", params=WAYS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    metrics = f"127.0.0.1:{free_port()}"
    environment = {
        "TANDEM_DRAFT_METRICS_LISTEN": metrics,
        **WAYS[request.param],
        "TANDEM_DEBUG_INVARIANTS": "true",
        "TANDEM_DRAFT_TIMEOUT_SECONDS": "30",
    }
    with contextlib.ExitStack() as stack:
        folder = tmp_path_factory.mktemp(request.param)
        services = stack.enter_context(running_stack(folder, TARGET, TARGET, environment))
        channel = stack.enter_context(open_channel(services.orchestrator.address))
        draft = draft_pb2_grpc.DraftServiceStub(stack.enter_context(open_channel(services.draft.address)))
        assert draft.GetModelInfo(worker_pb2.GetModelInfoRequest()).reads_later
        yield Served(channel, request.param, f"http://{metrics}/metrics")


def check_what_drafted(before: dict[str, float], after: dict[str, float]) -> None:
    """Both sources did, and some of the model's blocks ended early."""
    for name in (
        'tandem_draft_blocks_total{source="model"}',
        'tandem_draft_blocks_total{source="ngram"}',
        "tandem_draft_stopped_blocks_total",
    ):
        assert after[name] > before[name], name
    assert after["tandem_invariant_violations_total"] == 0


def test_greedy_is_token_exact_at_every_gamma(served: Served) -> None:
    reference, before = Reference(TARGET), served.counts()
    expected = [reference.greedy(prompt, TOKENS) for prompt in PROMPTS]
    for gamma, fields in GAMMAS.items():
        asked = (request(prompt, temperature=0, max_tokens=TOKENS, **fields) for prompt in PROMPTS)
        results = generate_all(served.channel, asked)
        assert [result.ids for result in results] == expected, gamma
        assert sum(result.speculation.degraded_rounds for result in results) == 0
        accepted = sum(result.speculation.accepted_tokens for result in results)
        # An adaptive one goes by times, and may find that no block pays.
        assert gamma == "auto" or (accepted > 0) == (gamma != "0"), gamma
    if "TANDEM_DRAFT_STOP_BELOW" in WAYS[served.way]:
        check_what_drafted(before, served.counts())


def test_coupled_text_is_a_function_of_the_seed(served: Served, tiny_channel: grpc.Channel) -> None:
    fields = {"max_tokens": 40, "acceptance_method": sampling_pb2.ACCEPTANCE_METHOD_COUPLED}
    before = served.counts()
    for number in (0, 1, 5):
        asked = [request(PROMPTS[0], seed=seed, num_speculative_tokens=number, **fields) for seed in range(4)]
        form = sampling_pb2.StructuredOutput(regex="([a-z]=[0-9],){5,9}")  # n-grams repeat what it forbids
        asked.append(request(PROMPTS[0], seed=9, num_speculative_tokens=number, structured_output=form, **fields))
        seen = [[result.seen for result in generate_all(each, asked)] for each in (served.channel, tiny_channel)]
        assert seen[0] == seen[1]
    if "TANDEM_DRAFT_STOP_BELOW" in WAYS[served.way]:
        check_what_drafted(before, served.counts())
