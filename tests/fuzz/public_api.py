"""Random requests to the public API, by hypothesis over the message: python -m tests.fuzz.public_api [requests].

Each one is answered to its end or refused in the way that the contract says; after each hundred a canary, a request whose answer
is known, must be answered as ever. Bytes that are no message are among them.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tandem.v1 import orchestrator_pb2 as api
from tests.support.channels import open_channel
from tests.support.generation import gather, request
from tests.support.services import MODELS, running_stack

REQUESTS = 20_000
CANARY_EVERY = 100
MAX_TOKENS = 8
UPDATES_EVERY = 10
FINISHED = "finished"
VOCABULARY = 512
METHOD = "/tandem.v1.OrchestratorService/Generate"
UPDATE = "/tandem.v1.OrchestratorService/UpdateSampling"
ENVIRONMENT = {
    "TANDEM_MAX_TOKENS": str(MAX_TOKENS),
    "TANDEM_TARGET_CONTEXT_LENGTH": "256",
    "TANDEM_DRAFT_TIMEOUT_SECONDS": "10",
}

_UINT32 = st.integers(0, 2**32 - 1)
_FLOAT = st.sampled_from([0.0, 1.0, 0.5, 1e-30, 1e30, -1.0, float("nan"), float("inf"), 2.0]) | st.floats(width=32)
_TEXT = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(["<|user|>", "\x00", "a" * 300, "[0-9]+"])
_ID = st.integers(0, VOCABULARY - 1) | st.sampled_from([0, VOCABULARY, 2**32 - 1])
_IDS = st.lists(_ID, max_size=6)
_SEQUENCES = st.lists(st.builds(lambda ids: {"ids": ids}, _IDS), max_size=3)
_FORM = st.fixed_dictionaries({}) | st.one_of(
    st.builds(lambda text: {"regex": text}, _TEXT | st.from_regex(r"\[a-z\]\{1,3\}[a-c(|)*+?]{0,6}")),
    st.builds(
        lambda text: {"json_schema": text}, _TEXT | st.sampled_from(["{}", '{"type": "integer"}', '{"enum": [1]}'])
    ),
    st.builds(
        lambda text: {"grammar": text}, _TEXT | st.sampled_from(['start: "a" | start "b"', "start: A\nA: /a|b/"])
    ),
    st.builds(lambda value: {"json_object": value}, st.booleans()),
)
_ENUM = st.integers(0, 4)
_MESSAGES = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["user", "system", "assistant"]) | _TEXT,
        _TEXT,
    ),
    max_size=3,
)
_PROMPT = st.one_of(
    st.builds(lambda text: {"text": text}, _TEXT),
    st.builds(lambda ids: {"token_ids": {"ids": ids}}, _IDS),
    st.builds(lambda messages: {"messages": {"messages": messages}}, _MESSAGES),
    st.just({}),
)
_SMALL = st.integers(0, 9) | _UINT32
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "request_id": st.sampled_from(["", "again", "x" * 129, "#", "n#1"]) | _TEXT,
    "token_offset": _SMALL,
    "max_tokens": st.integers(1, MAX_TOKENS) | _UINT32,
    "min_tokens": _SMALL,
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), _FLOAT),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), _FLOAT),
    "top_k": _SMALL,
    "seed": st.integers(0, 2**64 - 1),
    "acceptance_method": _ENUM,
    "num_speculative_tokens": _SMALL,
    **dict.fromkeys(("stop", "bad_words"), st.lists(_TEXT, max_size=18)),
    **dict.fromkeys(("stop_token_ids", "banned_token_ids", "allowed_token_ids"), _IDS),
    "logit_bias": st.dictionaries(_ID, _FLOAT, max_size=4),
    "bad_words_token_ids": _SEQUENCES,
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "logprobs", "echo"), st.booleans()),
    **dict.fromkeys(("skip_special_tokens", "adaptive_speculative_tokens", "token_by_token"), st.booleans()),
    "top_logprobs": _SMALL,
    "logprobs_mode": _ENUM,
    "n": st.integers(0, 3) | _UINT32,
    "structured_output": _FORM,
    "cache_salt": _TEXT,
}
_SOUND_ID = st.integers(1, VOCABULARY - 1)
_WORDS = st.text(st.characters(codec="ascii", categories=("Ll", "Zs")), min_size=1, max_size=12).filter(str.strip)
_UNIT = st.floats(0.0, 1.0, width=32)
SOUND: dict[str, st.SearchStrategy[Any]] = {
    "request_id": st.just(""),
    "max_tokens": st.integers(2, MAX_TOKENS),
    "min_tokens": st.integers(0, 2),
    "temperature": st.just(0.0) | st.floats(0.0, 2.0, width=32),
    "top_p": st.floats(0.125, 1.0, width=32),
    "min_p": _UNIT,
    "repetition_penalty": st.floats(0.5, 2.0, width=32),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), st.floats(-2.0, 2.0, width=32)),
    "top_k": st.integers(0, VOCABULARY),
    "seed": st.integers(0, 2**64 - 1),
    "acceptance_method": st.integers(0, 2),
    "num_speculative_tokens": st.integers(0, 8),
    "stop": st.lists(_WORDS, max_size=4),
    "bad_words": st.lists(_WORDS, max_size=3),
    **dict.fromkeys(("stop_token_ids", "banned_token_ids"), st.lists(_SOUND_ID, max_size=6)),
    # Many enough that bans leave some of them.
    "allowed_token_ids": st.lists(_SOUND_ID, min_size=64, max_size=80, unique=True),
    "logit_bias": st.dictionaries(_SOUND_ID, st.floats(-100.0, 100.0, width=32), max_size=4),
    "bad_words_token_ids": st.lists(
        st.builds(lambda ids: {"ids": ids}, st.lists(_SOUND_ID, min_size=1, max_size=3)), max_size=3
    ),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "echo"), st.booleans()),
    **dict.fromkeys(("skip_special_tokens", "adaptive_speculative_tokens", "token_by_token"), st.booleans()),
    "logprobs": st.just(True),
    "logprobs_mode": st.integers(0, 2),
    "n": st.integers(1, 3),
    "structured_output": st.sampled_from(
        [{"regex": "[0-9]+"}, {"json_schema": "{}"}, {"json_object": True}, {"grammar": "start: A\nA: /a|b/"}]
    ),
    "cache_salt": _WORDS,
}
"""What a field may be beside most others; a request of these is good but for combinations that can't be."""
_SOUND_PROMPT = st.one_of(
    st.builds(lambda text: {"text": text}, _WORDS),
    st.builds(lambda ids: {"token_ids": {"ids": ids}}, st.lists(_SOUND_ID, min_size=1, max_size=6)),
    st.builds(lambda text: {"messages": {"messages": [{"role": "user", "content": text}]}}, _WORDS),
)
_NOT_BESIDE_A_FORM = {
    "ignore_eos", "min_tokens", "banned_token_ids", "allowed_token_ids", "bad_words", "bad_words_token_ids",
}  # fmt: skip
_CHOSEN = st.lists(st.sampled_from(sorted(SOUND)), max_size=6, unique=True)
_WILD = st.sampled_from([0, 0, 0, 0, 0, 0, 0, 1, 1, 2])
"""How many fields of a request may be anything."""


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A request on the wire: mostly one that is good, or was but for a field or two; some are cut off, or no message."""
    fields = {name: draw(SOUND[name]) for name in draw(_CHOSEN)}
    if "structured_output" in fields:
        fields = {name: value for name, value in fields.items() if name not in _NOT_BESIDE_A_FORM}
    prompt = draw(_SOUND_PROMPT)
    for _ in range(draw(_WILD)):
        name = draw(st.sampled_from([*sorted(FIELDS), "prompt"]))
        if name == "prompt":
            prompt = draw(_PROMPT)
        else:
            fields[name] = draw(FIELDS[name])
    data = api.GenerateRequest(**prompt, **fields).SerializeToString()
    how = draw(st.integers(0, 40))
    if how == 0:
        return draw(st.binary(max_size=40))
    if how == 1:
        return data[: draw(st.integers(0, len(data)))]
    return data


_CHANGES: dict[str, st.SearchStrategy[Any]] = {
    **{name: FIELDS[name] | SOUND[name] for name in ("temperature", "top_p", "min_p", "repetition_penalty")},
    **{name: FIELDS[name] | SOUND[name] for name in ("presence_penalty", "frequency_penalty", "top_k")},
    **{name: FIELDS[name] for name in ("num_speculative_tokens", "adaptive_speculative_tokens")},
    "logit_bias": st.builds(lambda biases: {"biases": biases}, FIELDS["logit_bias"] | SOUND["logit_bias"]),
    **dict.fromkeys(("banned_token_ids", "allowed_token_ids"), st.builds(lambda ids: {"ids": ids}, _IDS)),
    "bad_words": st.builds(
        lambda texts, ids: {"texts": texts, "token_ids": ids}, FIELDS["bad_words"] | SOUND["bad_words"], _SEQUENCES
    ),
}


@st.composite
def updates(draw: st.DrawFn) -> bytes:
    """A change on the wire: of a request that is finished, of none, or no message."""
    fields = {name: draw(_CHANGES[name]) for name in draw(st.lists(st.sampled_from(sorted(_CHANGES)), max_size=3))}
    request_id = draw(st.sampled_from([FINISHED, FINISHED, "nobody", "", "#"]))
    data = api.UpdateSamplingRequest(request_id=request_id, **fields).SerializeToString()
    return data if draw(st.integers(0, 9)) else data[: draw(st.integers(0, len(data)))]


class Fuzz:
    """The calls, and what became of them."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._call: Callable[..., Any] = channel.unary_stream(METHOD, None, api.GenerateResponse.FromString)
        canary = request("def read(path):\n", temperature=0.0, max_tokens=MAX_TOKENS, num_speculative_tokens=3)
        self._canary = canary.SerializeToString()
        self._known = gather(self._call(self._canary, timeout=60)).seen
        finished = request("x", request_id=FINISHED, max_tokens=2).SerializeToString()
        assert list(self._call(finished, timeout=60))
        self._update: Callable[..., Any] = channel.unary_unary(UPDATE, None, api.UpdateSamplingResponse.FromString)
        self.outcomes: Counter[str] = Counter()
        self.updates: Counter[str] = Counter()
        self.canaries = 0

    def send(self, data: bytes) -> None:
        """One request; raises AssertionError where its end isn't one of the contract's."""
        try:
            responses = list(self._call(data, timeout=60))
        except grpc.RpcError as error:
            self._check_failure(error)
            self.outcomes[error.code().name] += 1
        else:
            finished = [response.index for response in responses if response.HasField("finish")]
            assert sorted(finished) == list(range(len(finished)))
            assert finished
            self.outcomes["OK"] += 1
        if sum(self.outcomes.values()) % CANARY_EVERY == 0:
            self.canary()

    def send_update(self, data: bytes) -> None:
        """One change, of a request that isn't running: it is refused by the name of a field, or since there is nothing to change."""
        try:
            self._update(data, timeout=60)
        except grpc.RpcError as error:
            self._check_failure(error)
            self.updates[error.code().name] += 1
        else:
            raise AssertionError("nothing is there to be changed")

    def canary(self) -> None:
        """Raises AssertionError unless the known request has its known answer."""
        assert gather(self._call(self._canary, timeout=60)).seen == self._known
        self.canaries += 1

    def _check_failure(self, error: Any) -> None:
        code = error.code()
        assert code in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.NOT_FOUND,
            grpc.StatusCode.ALREADY_EXISTS,
            grpc.StatusCode.FAILED_PRECONDITION,
        ), (code, error.details())
        status = rpc_status.from_call(error)
        assert len(status.SerializeToString()) < 1000
        if code == grpc.StatusCode.INVALID_ARGUMENT:
            refused = error_details_pb2.BadRequest()
            assert any(detail.Unpack(refused) for detail in status.details)
            field = refused.field_violations[0].field.split(".")[0]
            assert field in {"request", "prompt", *api.GenerateRequest.DESCRIPTOR.fields_by_name}, field


def run(channel: grpc.Channel, count: int, *, always_the_same: bool = False) -> Fuzz:
    """Sends so many requests; raises AssertionError, with the smallest request that hypothesis finds."""
    fuzz = Fuzz(channel)

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=always_the_same,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(requests(), updates())
    def each(data: bytes, update: bytes) -> None:
        fuzz.send(data)
        if sum(fuzz.outcomes.values()) % UPDATES_EVERY == 0:
            fuzz.send_update(update)

    each()
    fuzz.canary()
    return fuzz


def main() -> None:
    """A stack of the tiny pair, and the long form."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else REQUESTS
    folder = Path(tempfile.mkdtemp(prefix="tandem-fuzz-"))
    with (
        running_stack(folder, MODELS / "tiny-target", MODELS / "tiny-draft", ENVIRONMENT) as stack,
        open_channel(stack.orchestrator.address) as channel,
    ):
        fuzz = run(channel, count)
    print(
        f"{sum(fuzz.outcomes.values())} requests, {fuzz.canaries} canaries: {dict(fuzz.outcomes)}; updates: {dict(fuzz.updates)}"
    )


if __name__ == "__main__":
    main()
