"""Resuming, by the store alone: what must be there before the owner is disturbed."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import pytest

from orchestrator.errors import Aborted, DeadEnd, NotFound, Overloaded, RequestFailed, Unavailable
from orchestrator.request import GenerationPlan
from orchestrator.session import STORE_FAULTS, Sessions, as_failure
from orchestrator.session_store import SessionStore, StoreConfig
from tandem import wire
from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import sampling_pb2
from tests.support.redis_servers import RedisServer

pytest_plugins = ("tests.support.redis_fixtures",)

PLAN = GenerationPlan(
    request_id="owned",
    prompt=wire.encode_ids([5, 6, 7]),
    prompt_tokens=3,
    sampling=sampling_pb2.Sampling(),
    num_speculative_tokens=2,
    adaptive=False,
    max_tokens=10,
    min_tokens=0,
    end_token_ids=frozenset(),
    stop=(),
    include_stop=False,
    cache_salt="",
)


def no_target() -> NoReturn:
    raise Unavailable("no target is connected yet", "TARGET_UNAVAILABLE", 1.0)


async def test_where_no_target_is_known_the_owner_is_left_alone(one_redis_server: RedisServer) -> None:
    store = await SessionStore.connect(StoreConfig(url=one_redis_server.url, socket_timeout=30))
    owner, other = Sessions(store, "A", 60.0), Sessions(store, "B", 60.0)
    resumption = api.GenerateRequest(request_id="owned", token_offset=0)
    ownership = (await owner.create(PLAN, api.GenerateRequest(request_id="owned", text="x"), "model", "")).ownership
    assert ownership is not None
    with pytest.raises(Unavailable):
        await other.resume(resumption, "", no_target)
    await store.commit(ownership, 0, 3, wire.encode_ids([8]))
    taken = await other.resume(resumption, "", lambda: None)
    assert taken.committed == wire.encode_ids([8])
    with pytest.raises(STORE_FAULTS) as fault:
        await store.commit(ownership, 1, 4, wire.encode_ids([9]))
    assert isinstance(as_failure(fault.value), Aborted)
    # What is finished is read, target or not: nobody is disturbed.
    assert taken.ownership is not None
    await store.finish(taken.ownership, 1, api.GenerationFinish().SerializeToString())
    assert (await other.resume(resumption, "", no_target)).committed == wire.encode_ids([8])
    await store.close()


@pytest.mark.parametrize(
    ("failure", "kept"),
    [
        (Unavailable("away", "TARGET_UNAVAILABLE", 1.0), True),
        (Aborted("taken over", "TAKEN_OVER"), True),
        (Overloaded("unread", "READER_TOO_SLOW"), True),
        (DeadEnd("too complex", "DEAD_END"), False),
    ],
)
async def test_what_would_fail_again_is_not_kept(
    one_redis_server: RedisServer, failure: RequestFailed, kept: bool
) -> None:
    """Not even for a caller that has resumed before."""
    store = await SessionStore.connect(StoreConfig(url=one_redis_server.url, socket_timeout=30))
    sessions, request_id = Sessions(store, "A", 60.0), f"failed-{failure.reason}"
    plan, resumption = replace(PLAN, request_id=request_id), api.GenerateRequest(request_id=request_id, token_offset=0)
    await sessions.create(plan, api.GenerateRequest(request_id=request_id, text="x"), "model", "")
    session = await sessions.resume(resumption, "", lambda: None)
    await sessions.abandon(session, may_return=True, failure=failure)
    if kept:
        assert (await sessions.resume(resumption, "", lambda: None)).ownership is not None
    else:
        with pytest.raises(NotFound):
            await sessions.resume(resumption, "", lambda: None)
    await store.close()
