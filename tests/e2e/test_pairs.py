"""Pairs that don't fit together well: padded vocabularies, short draft contexts, other tokens."""

from __future__ import annotations

import contextlib
import random
import re
import time
from pathlib import Path

import grpc
import pytest

from tandem.cli.interruptions import Interruptions
from tandem.cli.plan import Endpoint
from tandem.cli.readiness import open_probe
from tandem.v1 import orchestrator_pb2 as api
from tests.support.channels import open_channel
from tests.support.generation import generate, generate_all, refused_field, request
from tests.support.model_scripts import load_script
from tests.support.reference import Reference
from tests.support.services import MODELS, running_stack

variants = load_script("variants")
TARGET, DRAFT = MODELS / "tiny-target", MODELS / "tiny-draft"


@pytest.mark.parametrize("padded", ["draft", "target"])
def test_padding_of_the_vocabulary_is_never_proposed_nor_emitted(tmp_path: Path, padded: str) -> None:
    models = {"draft": DRAFT, "target": TARGET}
    models[padded] = variants.padded_vocabulary(models[padded], tmp_path / "padded", extra=64)
    prompt = [5, 6, 7, 8]
    expected = Reference(TARGET).greedy(prompt, 48)
    with (
        running_stack(tmp_path, models["target"], models["draft"]) as stack,
        open_channel(stack.orchestrator.address) as channel,
    ):
        for gamma in (0, 1, 5):
            result = generate(channel, prompt, temperature=0, max_tokens=48, num_speculative_tokens=gamma)
            assert result.ids == expected
            assert result.speculation.degraded_rounds == 0
            assert (result.speculation.accepted_tokens > 0) == (gamma > 0)
        hot = generate(channel, prompt, temperature=5, max_tokens=200, seed=1, ignore_eos=True)
        assert max(hot.ids) < 512
        # Rows that no token has are no ids that a caller may name, though the model would take them.
        for field, value in {
            "token_ids": api.TokenIds(ids=[5, 512]),
            "stop_token_ids": [575],
            "logit_bias": {575: 100.0},
            "allowed_token_ids": [512],
        }.items():
            named = {"token_ids": api.TokenIds(ids=prompt), "max_tokens": 8, "min_tokens": 2, field: value}
            assert refused_field(channel, **named) == field
        assert refused_field(channel, token_ids=api.TokenIds(ids=[5, 575])) == "token_ids"
        after = generate(channel, prompt, temperature=0, max_tokens=48, num_speculative_tokens=5)
        assert after.ids == expected


def test_a_short_draft_context_costs_only_speed(tmp_path: Path, same_channel: grpc.Channel) -> None:
    draft = variants.short_context(TARGET, tmp_path / "short", max_position_embeddings=64)
    generator = random.Random(3)
    prompts = {length: [generator.randrange(5, 500) for _ in range(length)] for length in (20, 60, 64, 65, 200)}
    with (
        running_stack(tmp_path, TARGET, draft) as stack,
        open_channel(stack.orchestrator.address) as channel,
    ):
        requests = {
            length: request(prompt, temperature=0, max_tokens=80, ignore_eos=True, num_speculative_tokens=4)
            for length, prompt in prompts.items()
        }
        results = dict(zip(requests, generate_all(channel, requests.values()), strict=True))
    plain = dict(zip(requests, generate_all(same_channel, requests.values()), strict=True))
    for length, result in results.items():
        assert result.ids == plain[length].ids
        assert list(result.speculation.degraded_reasons) == ["draft_context"]
        assert (result.speculation.draft_tokens > 0) == (length < 64)
        if length < 64:
            assert result.speculation.accepted_tokens == result.speculation.draft_tokens


@pytest.mark.parametrize("wrong", ["draft", "target"])
def test_other_token_strings_are_refused_before_readiness(tmp_path: Path, wrong: str) -> None:
    models = {"draft": DRAFT, "target": TARGET}
    other = variants.other_strings(models[wrong], tmp_path / "other")
    if wrong == "draft":
        models["draft"] = other
    environment = {"TANDEM_DRAFT_START_SECONDS": "1"}
    if wrong == "target":
        environment["TANDEM_TARGET_MODEL"] = str(other)
    with running_stack(tmp_path, models["target"], models["draft"], environment, wait_ready=False) as stack:
        refused = re.compile(f"{wrong}.* is refused: .*has other token strings")
        deadline = time.monotonic() + 60
        while not refused.search(stack.orchestrator.log.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(2)  # a draft that is only away would be waited for no longer
        assert not stack.orchestrator.serving()
        with open_probe(Endpoint("grpc", (stack.orchestrator.address,)), Interruptions()) as probe:
            deadline = time.monotonic() + 60
            while not (answer := probe()).final:
                assert time.monotonic() < deadline
        assert f"the {wrong} model" in answer.reason
        if wrong == "draft":
            with open_channel(stack.orchestrator.address) as channel:
                result = generate(channel, [5, 6, 7], max_tokens=3, num_speculative_tokens=4)
            assert list(result.speculation.degraded_reasons) == ["draft_incompatible"]


def test_the_orchestrator_is_ready_without_a_draft_and_uses_it_when_it_comes(tmp_path: Path) -> None:
    with (
        running_stack(tmp_path, TARGET, DRAFT, {"TANDEM_DRAFT_START_SECONDS": "1"}) as stack,
        contextlib.ExitStack() as end,
    ):
        stack.draft.kill()
        stack.orchestrator.stop()
        stack.orchestrator.start()
        stack.orchestrator.wait_serving()
        channel = end.enter_context(open_channel(stack.orchestrator.address))
        fields = {"temperature": 0, "max_tokens": 20, "num_speculative_tokens": 4}
        plain = generate(channel, [5, 6, 7], **fields)
        assert plain.speculation.draft_tokens == 0
        assert list(plain.speculation.degraded_reasons) == ["draft_unavailable"]
        stack.draft.start()
        stack.draft.wait_serving()
        deadline = time.monotonic() + 60
        while generate(channel, [5, 6, 7], **fields).speculation.draft_tokens == 0:
            assert time.monotonic() < deadline, "the draft is not used"
            time.sleep(0.2)
        assert generate(channel, [5, 6, 7], **fields).ids == plain.ids
