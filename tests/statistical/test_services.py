"""The law of whole token sequences through the real services and the real wire is the target's own.

Rosenblatt's transform: where x ~ p(. | context), F(x-1) + V p(x) is uniform if V is, independently at each position. So
every token of every sequence is tested against the target's law given exactly what precedes it, which is computed from
the model's logits with transformers' own warpers and none of our code. Within each context the tokens are ordered by
q/p, so that whatever leaks from the draft into the output gathers at one end.

Planted faults must be rejected by the very same test, so it is known to see what it is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import orchestrator_pb2_grpc, sampling_pb2
from tests.support.channels import open_async_channel
from tests.support.generation import PACED, gather, request
from tests.support.ports import free_port
from tests.support.reference import Reference
from tests.support.services import MODELS, running_stack

ALPHA = 1e-3
"""Of each p-value; the seeds are fixed, so what passes once passes always, up to float32 rounding of the machine."""
CHANGED_ALPHA = 1e-6
"""The same where a sampling is changed amid the requests: when that is, and so the sample, is another in each run."""
FAULT_ALPHA = 1e-9
PROMPT = [3, 4, 5]
TOKENS = 32
REQUESTS = 3_200
"""Times 32: 102,400 tokens for each setting and gamma."""
AHEAD_REQUESTS = 400
FAULT_REQUESTS = 1_000
CHANGED_REQUESTS = 240
CHANGED_CALLERS = 32
COUPLED_REQUESTS = 200
CONCURRENCY = 128
"""The more there are at a time, the less each token costs."""
BINS = 50
PAIR_BINS = 10

Sequences = NDArray[np.int64]
Uniforms = NDArray[np.float64]


@dataclass(frozen=True)
class Setting:
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def fields(self) -> dict[str, float]:
        return asdict(self)

    def penalised(self, logits: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Logits after `context` [n, length], [n, V]: repetition over all of it, the others over what follows the prompt."""
        if self.repetition_penalty != 1:
            logits = RepetitionPenaltyLogitsProcessor(self.repetition_penalty)(context, logits)
        output = context[:, len(PROMPT) :]
        counts = torch.zeros_like(logits).scatter_add_(1, output, torch.ones(output.shape, dtype=logits.dtype))
        return logits - self.frequency_penalty * counts - self.presence_penalty * (counts > 0)

    def warpers(self) -> LogitsProcessorList:
        warpers = LogitsProcessorList([TemperatureLogitsWarper(self.temperature)])
        if self.top_k:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        if self.min_p:
            warpers.append(MinPLogitsWarper(self.min_p))
        return warpers


SETTINGS = {
    "plain": Setting(1.0),
    "cool-top-k": Setting(0.7, top_k=6),
    "top-p": Setting(1.0, top_p=0.8),
    "hot-min-p": Setting(1.4, top_k=12, top_p=0.95, min_p=0.05),
}


class Laws:
    """p and q of the pair after any context."""

    def __init__(self) -> None:
        self._target = Reference(MODELS / "stat-target").model
        self._draft = Reference(MODELS / "stat-draft").model

    @torch.inference_mode()
    def uniforms(self, sequences: Sequences, setting: Setting) -> Uniforms:
        """Rosenblatt's transform of each token, shape of `sequences` [requests, tokens]. NaN marks a token without
        mass."""
        contexts = torch.cat([torch.tensor([PROMPT]).expand(len(sequences), -1), torch.from_numpy(sequences)], dim=1)
        ids = contexts[:, len(PROMPT) :]
        p = self._law(self._target, contexts, setting)
        q = self._law(self._draft, contexts, setting)
        before = torch.where(p > 0, q / p, torch.inf)
        order = torch.argsort(before, dim=-1, descending=True, stable=True)
        cumulative = torch.cumsum(p.gather(-1, order), dim=-1)
        place = (order == ids[..., None]).int().argmax(dim=-1, keepdim=True)
        mass = p.gather(-1, ids[..., None])[..., 0].numpy()
        low = cumulative.gather(-1, place)[..., 0].numpy() - mass
        spread = np.random.default_rng(20260101).random(low.shape)
        return np.where(mass > 0, low + spread * mass, np.nan)

    def _law(self, model: torch.nn.Module, contexts: torch.Tensor, setting: Setting) -> torch.Tensor:
        logits = model(contexts).logits[:, len(PROMPT) - 1 : -1].float()
        if setting != replace(setting, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0):
            steps = [setting.penalised(logits[:, i], contexts[:, : len(PROMPT) + i]) for i in range(logits.shape[1])]
            logits = torch.stack(steps, dim=1)
        rows = logits.reshape(-1, logits.shape[-1])
        warped = setting.warpers()(torch.zeros(len(rows), 1, dtype=torch.long), rows)
        return torch.softmax(warped.double(), -1).reshape(logits.shape)


def p_values(uniforms: Uniforms) -> dict[str, float]:
    """Chi-square of the uniforms themselves, of neighbours as pairs, and of the first tokens alone."""
    if np.isnan(uniforms).any():
        return {"a token without mass in p": 0.0}
    single = np.histogram(uniforms, BINS, (0, 1))[0]
    pairs = np.histogram2d(uniforms[:, :-1].ravel(), uniforms[:, 1:].ravel(), PAIR_BINS, ((0, 1), (0, 1)))[0]
    first = np.histogram2d(uniforms[:, 0], uniforms[:, 1], PAIR_BINS, ((0, 1), (0, 1)))[0]
    return {
        "tokens": float(stats.chisquare(single).pvalue),
        "neighbours": float(stats.chisquare(pairs.ravel()).pvalue),
        "first two": float(stats.chisquare(first.ravel()).pvalue),
    }


def sample(
    address: str, setting: Setting, gamma: int, requests: int, method: int = 0, concurrency: int = CONCURRENCY
) -> Sequences:
    """The completions of seeds 0, 1, 2, …, shape [requests, TOKENS]."""

    async def one(stub: orchestrator_pb2_grpc.OrchestratorServiceAsyncStub, seed: int) -> list[int]:
        fields = {"max_tokens": TOKENS, "seed": seed, "ignore_eos": True, **setting.fields()}
        call = stub.Generate(request(PROMPT, num_speculative_tokens=gamma, acceptance_method=method, **fields))
        result = gather([response async for response in call])
        assert result.speculation.degraded_rounds == 0
        return result.ids

    async def run() -> Sequences:
        sequences = np.zeros((requests, TOKENS), dtype=np.int64)
        async with open_async_channel(address) as channel:
            stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            seeds = iter(range(requests))

            async def caller() -> None:
                for seed in seeds:
                    sequences[seed] = await one(stub, seed)

            await asyncio.gather(*(caller() for _ in range(concurrency)))
        return sequences

    return asyncio.run(run())


@pytest.fixture(scope="module")
def laws() -> Laws:
    return Laws()


@contextlib.contextmanager
def stat_stack(folder: Path, faults: dict[str, str] | None = None, **options: str) -> Iterator[str]:
    """The pair for statistics, with room for all callers at once."""
    environment = {
        "TANDEM_MAX_RUNNING_REQUESTS": str(CONCURRENCY),
        "TANDEM_DRAFT_SLOTS": str(CONCURRENCY),
        "TANDEM_TARGET_SLOTS": str(CONCURRENCY),
        "TANDEM_DRAFT_TIMEOUT_SECONDS": "60",
        "TANDEM_LOG_LEVEL": "WARNING",
        **options,
    }
    with running_stack(folder, MODELS / "stat-target", MODELS / "stat-draft", environment, faults) as stack:
        yield stack.orchestrator.address


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with stat_stack(tmp_path_factory.mktemp("stat")) as found:
        yield found


@pytest.fixture(scope="module")
def sampled(address: str) -> Callable[[Setting, int, int], Sequences]:
    """`sample` from the pair as it is; what two tests want is sampled once."""
    return functools.cache(functools.partial(sample, address))


@pytest.mark.parametrize("gamma", [0, 1, 4])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_law_is_the_targets(
    sampled: Callable[[Setting, int, int], Sequences], laws: Laws, name: str, gamma: int
) -> None:
    sequences = sampled(SETTINGS[name], gamma, REQUESTS)
    found = p_values(laws.uniforms(sequences, SETTINGS[name]))
    assert min(found.values()) > ALPHA, found


def test_the_law_is_the_targets_with_penalties(address: str, laws: Laws) -> None:
    """Each row of a block has penalties of its own, at the draft as at the target."""
    setting = Setting(1.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3)
    sequences = sample(address, setting, 4, REQUESTS // 4)
    found = p_values(laws.uniforms(sequences, setting))
    assert min(found.values()) > ALPHA, found
    # The same tokens aren't those of the law without them.
    found = p_values(laws.uniforms(sequences, SETTINGS["plain"]))
    assert min(found.values()) < FAULT_ALPHA, found


FORMER, LATTER = Setting(1.4), Setting(0.35, repetition_penalty=1.3, presence_penalty=0.4)


def sample_changed(address: str, gamma: int, requests: int) -> tuple[Sequences, NDArray[np.int64]]:
    """Completions that begin under FORMER and go on under LATTER, and from which token on."""
    sequences, changed_at = np.zeros((requests, TOKENS), dtype=np.int64), np.zeros(requests, dtype=np.int64)

    async def one(stub: orchestrator_pb2_grpc.OrchestratorServiceAsyncStub, seed: int) -> None:
        fields = {"max_tokens": TOKENS, "seed": seed, "ignore_eos": True, **FORMER.fields()}
        name = f"changed-{seed}"
        call = stub.Generate(request(PROMPT, request_id=name, num_speculative_tokens=gamma, **fields))
        responses = aiter(call)
        received = [await anext(responses)]
        change = {field: value for field, value in asdict(LATTER).items() if value != getattr(FORMER, field)}
        answer = await stub.UpdateSampling(api.UpdateSamplingRequest(request_id=name, **change))
        sequences[seed] = gather([*received, *[response async for response in responses]]).ids
        changed_at[seed] = answer.completion_tokens

    async def run() -> None:
        async with contextlib.AsyncExitStack() as channels:
            seeds = iter(range(requests))

            async def caller() -> None:
                # Each on a connection that holds next to nothing back, or the request would be over before it is changed.
                channel = await channels.enter_async_context(open_async_channel(address, PACED))
                stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
                for seed in seeds:
                    await one(stub, seed)

            await asyncio.gather(*(caller() for _ in range(CHANGED_CALLERS)))

    asyncio.run(run())
    return sequences, changed_at


def changed_p_values(laws: Laws, sequences: Sequences, changed_at: NDArray[np.int64]) -> dict[str, float]:
    """Each token by the law in force at its place; and those right behind the change, where a kept block would be, by themselves."""
    places = np.arange(TOKENS)
    under_latter = places >= changed_at[:, None]
    uniforms = np.where(under_latter, laws.uniforms(sequences, LATTER), laws.uniforms(sequences, FORMER))
    behind = uniforms[under_latter & (places < changed_at[:, None] + 3)]
    assert behind.size > 2 * len(sequences), "most requests were over before they were changed"
    return {
        **p_values(uniforms),
        "behind the change": float(stats.chisquare(np.histogram(behind, PAIR_BINS, (0, 1))[0]).pvalue),
    }


def test_the_law_is_that_of_the_sampling_in_force(address: str, laws: Laws) -> None:
    sequences, changed_at = sample_changed(address, 4, CHANGED_REQUESTS)
    found = changed_p_values(laws, sequences, changed_at)
    assert min(found.values()) > CHANGED_ALPHA, found


def test_a_block_that_is_kept_over_a_change_is_found(tmp_path: Path, laws: Laws) -> None:
    with stat_stack(tmp_path, {"orchestrator": "block_of_the_former_sampling"}) as address:
        found = changed_p_values(laws, *sample_changed(address, 4, CHANGED_REQUESTS))
    print(found)
    assert found["behind the change"] < FAULT_ALPHA, found


@pytest.fixture(scope="module")
def look_ahead_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("look-ahead")
    with stat_stack(folder, TANDEM_LOOK_AHEAD="true", TANDEM_DRAFT_SUPPORT_SIZE="4") as found:
        yield found


def test_the_law_is_the_targets_with_look_ahead(look_ahead_address: str, laws: Laws) -> None:
    sequences = sample(look_ahead_address, SETTINGS["plain"], 3, REQUESTS)
    found = p_values(laws.uniforms(sequences, SETTINGS["plain"]))
    assert min(found.values()) > ALPHA, found


def test_coupled_output_is_that_of_plain_decoding_with_look_ahead(look_ahead_address: str, laws: Laws) -> None:
    coupled = sampling_pb2.ACCEPTANCE_METHOD_COUPLED
    plain = sample(look_ahead_address, SETTINGS["plain"], 0, COUPLED_REQUESTS, coupled)
    assert (sample(look_ahead_address, SETTINGS["plain"], 3, COUPLED_REQUESTS, coupled) == plain).all()
    found = p_values(laws.uniforms(plain, SETTINGS["plain"]))
    assert min(found.values()) > ALPHA, found


def test_the_law_is_the_targets_while_the_draft_works_ahead_and_has_ngrams(tmp_path: Path, laws: Laws) -> None:
    """Few requests at a time: a busy draft doesn't work ahead. That blocks are the same with it and without is proved
    token for token in tests/engine/test_ahead.py."""
    metrics = f"127.0.0.1:{free_port()}"
    options = {
        "TANDEM_DRAFT_AHEAD_ROWS": "6",
        "TANDEM_DRAFT_AHEAD_MEASURED": "false",
        "TANDEM_DRAFT_METHOD": "model+ngram",
        "TANDEM_DRAFT_METRICS_LISTEN": metrics,
        "TANDEM_LOOK_AHEAD": "true",
        "TANDEM_DRAFT_SUPPORT_SIZE": "4",
    }
    with stat_stack(tmp_path, **options) as address:
        sequences = sample(address, SETTINGS["plain"], 3, AHEAD_REQUESTS, concurrency=3)
        with urllib.request.urlopen(f"http://{metrics}/metrics") as page:
            counts = dict(line.rsplit(" ", 1) for line in page.read().decode().splitlines() if line[0] != "#")
    found = p_values(laws.uniforms(sequences, SETTINGS["plain"]))
    assert min(found.values()) > ALPHA, found
    for outcome in ("chain", "branch"):
        assert float(counts[f'tandem_draft_ahead_items_total{{outcome="{outcome}"}}']) > 20
    assert float(counts['tandem_draft_blocks_total{source="ngram"}']) > 20


def test_coupled_output_depends_on_the_seed_alone(address: str) -> None:
    coupled = sampling_pb2.ACCEPTANCE_METHOD_COUPLED
    plain = sample(address, SETTINGS["cool-top-k"], 0, COUPLED_REQUESTS, coupled)
    for gamma in (1, 2, 5, 8):
        assert (sample(address, SETTINGS["cool-top-k"], gamma, COUPLED_REQUESTS, coupled) == plain).all(), gamma


@pytest.mark.parametrize(
    ("module", "fault"),
    [
        ("orchestrator", "residual_from_p"),
        ("orchestrator", "q_rounded_after_sampling"),
        ("orchestrator", "next_row_after_rejection"),
        ("target_service", "rollback_off_by_one"),
    ],
)
def test_a_planted_fault_is_found(tmp_path: Path, laws: Laws, module: str, fault: str) -> None:
    with stat_stack(tmp_path, {module: fault}) as address:
        sequences = sample(address, SETTINGS["plain"], 4, FAULT_REQUESTS)
    found = p_values(laws.uniforms(sequences, SETTINGS["plain"]))
    assert min(found.values()) < FAULT_ALPHA, found


def test_the_distance_to_the_law_falls_with_the_root_of_the_sample(
    sampled: Callable[[Setting, int, int], Sequences], laws: Laws
) -> None:
    """Total variation of the histogram from the law: a bias, however small, would stop it from falling."""
    setting = SETTINGS["plain"]
    uniforms = laws.uniforms(sampled(setting, 4, REQUESTS), setting).ravel()
    for size in (1_000, 10_000, 100_000):
        shares = np.histogram(uniforms[:size], BINS, (0, 1))[0] / size
        distance = 0.5 * np.abs(shares - 1 / BINS).sum()
        # Of a sample without bias it is near BINS/2 * sqrt(2/pi * (1 - 1/BINS) / (BINS * size)).
        expected = BINS / 2 * np.sqrt(2 / np.pi * (1 - 1 / BINS) / (BINS * size))
        assert 0.5 * expected < distance < 1.6 * expected, size
