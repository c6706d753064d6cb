"""A form is compiled beside the steps: it holds up its own session, in which the order is kept, and no other."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from transformers import AutoTokenizer

from tandem.structured_output import Form, Forms
from tandem.v1 import sampling_pb2
from tests.engine.harness import GREEDY, Client, Engines, reason, settled, verify_item
from tests.engine.models import over_slots, random_ids, random_model
from tests.support.services import MODELS

TOKENS = random_ids(1, 9)


class HeldForms(Forms):
    """Compiles when it is let."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.let = threading.Event()

    def form(self, sampling: sampling_pb2.Sampling) -> Form:
        assert self.let.wait(240)
        return super().form(sampling)


@pytest.fixture
def forms() -> HeldForms:
    return HeldForms(AutoTokenizer.from_pretrained(MODELS / "tiny-target"))


@pytest.fixture
async def client(engines: Engines, forms: HeldForms) -> Client:
    return Client(engines.target(over_slots(random_model()), forms=forms))


def item(name: str, epoch: int = 0, regex: str = "", base: int = 0) -> Any:
    sampling = sampling_pb2.Sampling()
    sampling.CopyFrom(GREEDY)
    if regex:
        sampling.MergeFrom(
            sampling_pb2.Sampling(structured_output={"regex": regex}, prompt_length=9, end_token_ids=[0])
        )
    return verify_item(name, epoch, TOKENS, base, sampling=None if base else sampling)


async def test_others_go_on_while_a_form_is_compiled(client: Client, forms: HeldForms) -> None:
    held = asyncio.create_task(client.ask_all([item("a", 0, "[ab]"), item("a", 1, base=8), item("b", 0, "(")]))
    await asyncio.sleep(0)
    assert reason(await client.ask(item("c"))) == ""
    assert not held.done()
    forms.let.set()
    first, second, bad = await held
    # The second of the session came behind the first, and took its place; the tokens that it builds on are known from there.
    assert [reason(each) for each in (first, second, bad)] == ["CANCELLED", "", "INVALID_ARGUMENT"]


async def test_what_is_released_or_closed_meanwhile_leaves_nothing(client: Client, forms: HeldForms) -> None:
    gone = Client(client.engine)
    client.engine.submit(gone.stream, [item("gone", 0, "[ab]")])
    held = asyncio.create_task(client.ask_all([item("a", 0, "[ab]"), item("a", 1, base=8)]))
    await asyncio.sleep(0)
    client.engine.release(client.stream, ["a"])
    client.engine.close(gone.stream)
    assert [reason(each) for each in await held] == ["CANCELLED", "CANCELLED"]
    again = asyncio.create_task(client.ask(item("a", 2, "[ab]")))
    await asyncio.sleep(0)
    forms.let.set()
    assert reason(await again) == ""
    await settled(client.engine)
    assert (client.engine.stats.sessions, gone.answers) == (1, [])
