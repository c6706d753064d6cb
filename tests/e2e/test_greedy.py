"""Greedy output is the target's own, token for token, whatever the draft and whatever gamma.

The oracle is transformers' `generate` in float32, which shares none of our code.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from tests.support.channels import open_channel
from tests.support.generation import Generation, generate_all, request
from tests.support.reference import Reference
from tests.support.services import MODELS, running_stack

GAMMAS = (0, 1, 2, 5, 8)
AUTO = -1
"""Chosen anew for each round."""
PROMPTS = 100
TINY_TOKENS = 32
SMOL_TOKENS = 12


@pytest.fixture(scope="module")
def tiny_prompts() -> list[list[int]]:
    """Random ids of random lengths: nothing about the prompt may matter. One repeats itself, which finds near ties."""
    generator = random.Random(20260101)
    prompts = [[generator.randrange(3, 500) for _ in range(generator.randrange(1, 120))] for _ in range(PROMPTS - 1)]
    return [*prompts, [77] * 48]


@pytest.fixture(scope="module")
def tiny_expected(tiny_prompts: list[list[int]]) -> list[list[int]]:
    reference = Reference(MODELS / "tiny-target")
    return [reference.greedy(prompt, TINY_TOKENS) for prompt in tiny_prompts]


def _run(channel: grpc.Channel, prompts: Sequence[Sequence[int]], gamma: int, tokens: int) -> list[Generation]:
    fields: dict[str, Any] = (
        {"adaptive_speculative_tokens": True} if gamma == AUTO else {"num_speculative_tokens": gamma}
    )
    return generate_all(channel, (request(prompt, temperature=0, max_tokens=tokens, **fields) for prompt in prompts))


@pytest.mark.parametrize("gamma", [*GAMMAS, AUTO])
@pytest.mark.parametrize("pair", ["tiny_channel", "same_channel", "random_draft_channel"])
def test_the_tiny_pairs_are_token_exact(
    pair: str,
    gamma: int,
    tiny_prompts: list[list[int]],
    tiny_expected: list[list[int]],
    request: pytest.FixtureRequest,
) -> None:
    results = _run(request.getfixturevalue(pair), tiny_prompts, gamma, TINY_TOKENS)
    assert [result.ids for result in results] == tiny_expected
    drafted = sum(result.speculation.draft_tokens for result in results)
    accepted = sum(result.speculation.accepted_tokens for result in results)
    assert sum(result.speculation.degraded_rounds for result in results) == 0
    if gamma == AUTO:
        sizes = {len(result.speculation.draft_tokens_per_position) for result in results}
        # It goes by times, and may find that no block pays.
        assert len(sizes) > 1 or drafted == 0, "the choice never changed"
        return
    assert (drafted > 0) == (gamma != 0)
    if gamma and pair == "same_channel":
        assert accepted == drafted
    elif gamma and pair == "tiny_channel":
        assert 0.15 < _acceptance_of_first_position(results) < 0.95
    elif gamma:
        assert _acceptance_of_first_position(results) < 0.1


def _acceptance_of_first_position(results: Sequence[Generation]) -> float:
    drafted = sum(result.speculation.draft_tokens_per_position[0] for result in results)
    return sum(result.speculation.accepted_tokens_per_position[0] for result in results) / drafted


def test_a_draft_that_is_the_target_is_always_accepted(same_channel: grpc.Channel) -> None:
    """Any acceptance below 1 is a cache fault, even if the text is right."""
    for gamma in (1, 2, 3, 5, 8):
        (result,) = generate_all(
            same_channel,
            [request([5, 6, 7], temperature=0, max_tokens=300, ignore_eos=True, num_speculative_tokens=gamma)],
        )
        statistics = result.speculation
        assert statistics.accepted_tokens == statistics.draft_tokens > 0
        assert list(statistics.accepted_tokens_per_position) == list(statistics.draft_tokens_per_position)
        assert statistics.rounds == -(-300 // (gamma + 1))
        assert statistics.expected_accepted_tokens == pytest.approx(statistics.draft_tokens)


def test_sampled_output_of_equal_models_is_always_accepted(same_channel: grpc.Channel) -> None:
    """p and q agree to rounding, so a rejection has a probability near zero and the residual next to no mass."""
    results = generate_all(
        same_channel,
        (request([5, 6, 7], temperature=1, top_k=40, max_tokens=64, ignore_eos=True, seed=seed) for seed in range(100)),
    )
    drafted = sum(result.speculation.draft_tokens for result in results)
    assert sum(result.speculation.accepted_tokens for result in results) >= 0.999 * drafted


@pytest.fixture(scope="module")
def smol_channel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[grpc.Channel]:
    folder = tmp_path_factory.mktemp("smol")
    environment = {
        "TANDEM_TARGET_DTYPE": "float32",
        "TANDEM_DRAFT_DTYPE": "float32",
        "TANDEM_DRAFT_TIMEOUT_SECONDS": "60",
    }
    with (
        running_stack(folder, MODELS / "smollm2-135m-instruct", MODELS / "smol-draft", environment) as stack,
        open_channel(stack.orchestrator.address) as channel,
    ):
        yield channel


SUBJECTS = ["the sea", "a bicycle", "bread", "winter", "numbers", "music", "a city", "trees", "an old book", "the moon"]
QUESTIONS = [
    "Describe {} in one sentence.",
    "Write a haiku about {}.",
    "Why do people like {}?",
    "What is the opposite of {}?",
    "List three words about {}.",
    "Say something false about {}.",
    "def about_{}(",
    "{}, {}, {}, {},",
    "Once upon a time there was {} and",
    "1. {}\n2.",
]


@pytest.mark.timeout(3600)
def test_the_demo_pair_is_token_exact(smol_channel: grpc.Channel) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODELS / "smollm2-135m-instruct")
    prompts = [
        tokenizer(question.replace("{}", subject))["input_ids"] for question in QUESTIONS for subject in SUBJECTS
    ]
    assert len(prompts) == PROMPTS

    def plain() -> list[list[int]]:
        reference = Reference(MODELS / "smollm2-135m-instruct")
        return [reference.greedy(prompt, SMOL_TOKENS) for prompt in prompts]

    with ThreadPoolExecutor(1) as beside:  # the services leave most of a core to it
        reference = beside.submit(plain)
        runs = {gamma: _run(smol_channel, prompts, gamma, SMOL_TOKENS) for gamma in GAMMAS}
        expected = reference.result()
    for gamma, results in runs.items():
        assert [result.ids for result in results] == expected, f"gamma {gamma}"
        assert sum(result.speculation.degraded_rounds for result in results) == 0
        assert (sum(result.speculation.accepted_tokens for result in results) > 0) == (gamma > 0)
