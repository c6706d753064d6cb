"""The store's protocol as a state machine: two orchestrators, the real scripts on a real server, a model in Python.

Replies get lost, callers repeat themselves, owners act on what they believed before they were replaced, keys vanish,
scripts are flushed. After every step the server has to hold exactly what the model holds, and every call has to end as
the model says. The machine is worth something only if it finds faults: below are scripts with one each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from redis.asyncio.connection import AbstractConnection

from orchestrator import redis_scripts
from orchestrator.redis_scripts import Patience, Script, ScriptPipeline
from orchestrator.session_store import (
    AlreadyExists,
    AlreadyFinished,
    ChangedTooSoon,
    ConfigChanged,
    EpochConflict,
    FencedOff,
    Ownership,
    SessionStatus,
    SessionStore,
    Snapshot,
    StateLost,
    StoreConfig,
    StoreCounters,
    StoreScripts,
    Update,
    _nodes,
)
from tandem import wire
from tests.support.redis_servers import RedisServer

pytest_plugins = ("tests.support.redis_fixtures",)

OWNERS = ("A", "B")
REQUEST_IDS = ("r0", "r1")
REFUSALS = (AlreadyExists, AlreadyFinished, ChangedTooSoon, ConfigChanged, EpochConflict, FencedOff, StateLost)
RUNNING_TTL, FINISHED_TTL, ABANDONED_TTL, AGED_TTL = 900, 300, 150, 60


class LossyPipeline(ScriptPipeline):
    """Loses the replies of one exchange when told to: the server has done the work, the caller doesn't know."""

    lose_next = False

    async def _exchange(self, connection: AbstractConnection, calls: list[Any], asking: bool) -> None:
        if not self.lose_next:
            await super()._exchange(connection, calls, asking)
            return
        self.lose_next = False
        loop = asyncio.get_running_loop()
        ghosts = [redis_scripts._Call(call.script, call.words, loop.create_future(), False) for call in calls]
        await super()._exchange(connection, ghosts, asking)
        for ghost in ghosts:
            ghost.reply.exception()  # seen, as far as the event loop is concerned
        raise redis.ConnectionError("the reply is lost")


@dataclass
class Session:
    """What the model believes the server holds under one id."""

    owner: str
    tokens: list[int]
    prompt_length: int
    fence: int = 1
    epoch: int = 0
    ttl: int = RUNNING_TTL
    finish: bytes | None = None
    config: bytes = b"request"
    config_version: int = 0
    config_length: int = -1
    """Where the config came into force; the tokens behind it were drawn under it."""
    tokens_gone: bool = False

    def __post_init__(self) -> None:
        self.config_length = self.prompt_length

    @property
    def damaged(self) -> bool:
        return self.tokens_gone and bool(self.tokens)


@dataclass(eq=False)
class Holder:
    """An ownership, and where its holder believes the session to be."""

    owner: str
    ownership: Ownership
    session: Session
    epoch: int
    length: int
    last_commit: tuple[int, int, list[int]] | None = field(default=None)

    @property
    def request_id(self) -> str:
        return self.ownership.request_id


tokens_strategy = st.lists(st.integers(0, 5), min_size=1, max_size=3)


class StoreMachine(RuleBasedStateMachine):
    """Runs the steps against server and model."""

    holders: Bundle[Holder] = Bundle("holders")

    def __init__(self, server: RedisServer, scripts: StoreScripts, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.loop = loop
        self.raw = server.client()
        self.raw.flushall()
        self.pipelines: dict[str, LossyPipeline] = {}
        self.stores: dict[str, SessionStore] = {}
        config = StoreConfig(url=server.url, running_ttl=RUNNING_TTL, finished_ttl=FINISHED_TTL)
        for owner in OWNERS:
            counters = StoreCounters()
            self.pipelines[owner] = LossyPipeline(_nodes(config), Patience(5.0, 5, 5.0), counters.retried)
            self.stores[owner] = SessionStore(self.pipelines[owner], config, counters, scripts)
        self.sessions: dict[str, Session] = {}
        self.owned_by: dict[str, Ownership] = {}
        self.orphans: set[str] = set()
        self.read_for_update: dict[str, Snapshot] = {}
        """What the last update of each was made from."""

    def teardown(self) -> None:
        for store in self.stores.values():
            self.loop.run_until_complete(store.close())
        self.raw.close()

    def act(self, owner: str, lose_reply: bool, call: Callable[[SessionStore], Coroutine[Any, Any, Any]]) -> Any:
        """The outcome of a call, a StoreError as a value."""
        self.pipelines[owner].lose_next = lose_reply
        try:
            return self.loop.run_until_complete(call(self.stores[owner]))
        except REFUSALS as refusal:
            return refusal

    # Steps.

    @initialize(target=holders)
    def begin(self) -> Any:
        """With a session, without which there is little to do."""
        return self.create_as("A", "r0", [1, 2], False)

    @rule(
        target=holders,
        owner=st.sampled_from(OWNERS),
        request_id=st.sampled_from(REQUEST_IDS),
        prompt=st.lists(st.integers(0, 5), max_size=3),
        lose_reply=st.booleans(),
    )
    def create(self, owner: str, request_id: str, prompt: list[int], lose_reply: bool) -> Any:
        return self.create_as(owner, request_id, prompt, lose_reply)

    def create_as(self, owner: str, request_id: str, prompt: list[int], lose_reply: bool) -> Any:
        encoded = wire.encode_ids(prompt)
        outcome = self.act(
            owner, lose_reply, lambda store: store.create(request_id, b"print", b"request", encoded, owner)
        )
        if request_id in self.sessions:
            assert isinstance(outcome, AlreadyExists), outcome
            return multiple()
        assert isinstance(outcome, Ownership), outcome
        assert (outcome.fence, outcome.epoch, outcome.length) == (1, 0, len(prompt))
        session = self.sessions[request_id] = Session(owner, list(prompt), len(prompt))
        self.orphans.discard(request_id)
        self.owned_by[request_id] = outcome
        return Holder(owner, outcome, session, 0, len(prompt))

    @rule(
        holder=holders,
        tokens=tokens_strategy,
        epoch_off=st.sampled_from([0, 0, 0, 0, -1, 1]),
        length_off=st.sampled_from([0, 0, 0, 0, -1, 1]),
        lose_reply=st.booleans(),
    )
    def commit(self, holder: Holder, tokens: list[int], epoch_off: int, length_off: int, lose_reply: bool) -> None:
        self.commit_at(holder, holder.epoch + epoch_off, max(0, holder.length + length_off), tokens, lose_reply)

    @rule(holder=holders, change=st.sampled_from(["nothing", "a token", "the end"]), lose_reply=st.booleans())
    def repeat_a_commit(self, holder: Holder, change: str, lose_reply: bool) -> None:
        if holder.last_commit is not None:
            epoch, length, tokens = holder.last_commit
            if change == "a token":
                tokens = [tokens[0] + 1, *tokens[1:]]
            elif change == "the end":
                tokens = [*tokens, 0]
            self.commit_at(holder, epoch, length, tokens, lose_reply)

    def commit_at(self, holder: Holder, epoch: int, length: int, tokens: list[int], lose_reply: bool) -> None:
        encoded = wire.encode_ids(tokens)
        outcome = self.act(
            holder.owner, lose_reply, lambda store: store.commit(holder.ownership, epoch, length, encoded)
        )
        expected = self.expected_refusal(holder)
        if expected is None and self.sessions[holder.request_id].config_version > holder.ownership.config_version:
            session = self.sessions[holder.request_id]
            # A change raises the epoch by two, so one that has come since can't be at the caller's epoch, nor at the next one.
            since = session.epoch >= epoch + 2 and len(session.tokens) >= length
            expected = ConfigChanged if since else EpochConflict
        if expected is None:
            session = self.sessions[holder.request_id]
            if epoch == session.epoch and length == len(session.tokens) and session.finish is None:
                session.tokens += tokens
                session.epoch += 1
                holder.last_commit = (epoch, length, tokens)
                session.ttl = RUNNING_TTL
            elif epoch + 1 == session.epoch and session.tokens[length:] == tokens and length >= session.prompt_length:
                session.ttl = RUNNING_TTL if session.finish is None else session.ttl
            else:
                expected = EpochConflict
            holder.epoch, holder.length = session.epoch, len(session.tokens)
        self.check(outcome, expected)

    @rule(
        target=holders,
        owner=st.sampled_from(OWNERS),
        request_id=st.sampled_from(REQUEST_IDS),
        lose_reply=st.booleans(),
    )
    def take_over(self, owner: str, request_id: str, lose_reply: bool) -> Any:
        outcome = self.act(owner, lose_reply, lambda store: store.take_over(request_id, owner))
        session = self.sessions.get(request_id)
        if session is None or session.damaged:
            assert isinstance(outcome, StateLost), outcome
            return multiple()
        if session.finish is None:
            session.fence += 1
            session.owner = owner
            session.ttl = RUNNING_TTL
        self.check_snapshot(outcome, session)
        if session.finish is not None:
            assert outcome.ownership is None
            return multiple()
        self.owned_by[request_id] = outcome.ownership
        return Holder(owner, outcome.ownership, session, session.epoch, len(session.tokens))

    @rule(
        by=st.sampled_from(OWNERS),
        request_id=st.sampled_from(REQUEST_IDS),
        config=st.sampled_from([b"request", b"cool", b"hot"]),
        belief=st.sampled_from(["right", "right", "right", "an older version", "another config", "the change before"]),
        lose_reply=st.booleans(),
    )
    def update(self, by: str, request_id: str, config: bytes, belief: str, lose_reply: bool) -> None:
        """Anybody may, whoever owns it, with what it has read: that may be right, or what others have left behind."""
        session = self.sessions.get(request_id)
        before = self.read_for_update.get(request_id) if belief == "the change before" else None
        if before is None:
            before = self.believed(request_id, belief)
        outcome = self.act(by, lose_reply, lambda store: store.update(before, config))
        if session is None or session.damaged:
            self.check(outcome, StateLost)
            return
        again = session.config_version == before.config_version + 1 and session.config == config
        believed_right = (session.config_version, session.config) == (before.config_version, before.config)
        again = again or (session.finish is None and believed_right and session.config == config)
        if not again and session.finish is not None:
            self.check(outcome, AlreadyFinished)
            return
        if not again and not believed_right:
            self.check(outcome, ConfigChanged)
            return
        if not again and session.config_version and len(session.tokens) == session.config_length:
            self.check(outcome, ChangedTooSoon)
            return
        if not again:
            self.read_for_update[request_id] = before
            session.config, session.config_length = config, len(session.tokens)
            session.config_version += 1
            session.epoch += 2
        assert outcome == Update(session.config_version, session.config_length, took_effect=not again), outcome

    def believed(self, request_id: str, belief: str) -> Snapshot:
        """What somebody has read, as far as an update sends it along."""
        session = self.sessions.get(request_id) or Session("A", [], 0)
        version = session.config_version - (belief == "an older version")
        config = b"another" if belief == "another config" else session.config
        return Snapshot(
            request_id, 1, 0, 0, 0, SessionStatus.RUNNING, b"print", config, None, b"", "A", None, version, 0
        )  # fmt: skip

    @rule(holder=holders)
    def reread(self, holder: Holder) -> None:
        """The owner, or who was it once, looks again."""
        outcome = self.act(holder.owner, False, lambda store: store.reread(holder.ownership))
        session, expected = self.sessions.get(holder.request_id), self.expected_refusal(holder)
        if session is None or session.damaged:
            self.check(outcome, StateLost)
            return
        if expected is not None:
            self.check(outcome, expected)
            return
        self.check_snapshot(outcome, session)
        assert (outcome.ownership is None) == (session.finish is not None)
        if outcome.ownership is not None:
            assert outcome.ownership.config_version == session.config_version
            assert (outcome.ownership.fence, outcome.ownership.claim) == (session.fence, holder.ownership.claim)
            holder.ownership, holder.epoch, holder.length = outcome.ownership, session.epoch, len(session.tokens)

    @rule(
        holder=holders,
        result=st.sampled_from([b"", b"one", b"two"]),
        epoch_off=st.sampled_from([0, 0, 0, -1, 1]),
        lose_reply=st.booleans(),
    )
    def finish(self, holder: Holder, result: bytes, epoch_off: int, lose_reply: bool) -> None:
        epoch = holder.epoch + epoch_off
        outcome = self.act(holder.owner, lose_reply, lambda store: store.finish(holder.ownership, epoch, result))
        expected = self.expected_refusal(holder)
        if expected is None:
            session = self.sessions[holder.request_id]
            if session.config_version > holder.ownership.config_version:
                expected = ConfigChanged if session.epoch >= epoch + 2 else EpochConflict
            elif epoch != session.epoch or session.finish not in (None, result):
                expected = EpochConflict
            elif session.finish is None:
                session.finish = result
                session.ttl = FINISHED_TTL
        self.check(outcome, expected)

    @rule(holder=holders, how=st.sampled_from(["delete", "abandon", "abandon"]), lose_reply=st.booleans())
    def give_up(self, holder: Holder, how: str, lose_reply: bool) -> None:
        if how == "delete":
            outcome = self.act(holder.owner, lose_reply, lambda store: store.delete(holder.ownership))
        else:
            outcome = self.act(holder.owner, lose_reply, lambda store: store.abandon(holder.ownership, ABANDONED_TTL))
        session = self.sessions.get(holder.request_id)
        if session is not None and self.owned_by[holder.request_id].claim != holder.ownership.claim:
            self.check(outcome, FencedOff)
            return
        self.check(outcome, None)
        if how == "delete":
            self.sessions.pop(holder.request_id, None)
        elif session is not None and session.finish is None:
            session.ttl = ABANDONED_TTL

    @rule(owner=st.sampled_from(OWNERS), request_id=st.sampled_from(REQUEST_IDS))
    def read(self, owner: str, request_id: str) -> None:
        outcome = self.act(owner, False, lambda store: store.read(request_id))
        session = self.sessions.get(request_id)
        if session is None:
            assert outcome is None
        elif session.damaged:
            assert isinstance(outcome, StateLost), outcome
        else:
            self.check_snapshot(outcome, session)
            assert outcome.ownership is None

    # Misfortunes.

    @rule(request_id=st.sampled_from(REQUEST_IDS), keys=st.sampled_from(["state", "tokens", "state and tokens"]))
    def evict(self, request_id: str, keys: str) -> None:
        if "tokens" in keys:
            self.raw.delete(f"tandem:{{{request_id}}}:tokens")
            self.orphans.discard(request_id)
            if request_id in self.sessions:
                self.sessions[request_id].tokens_gone = True
        if "state" in keys:
            self.raw.delete(f"tandem:{{{request_id}}}:state")
            session = self.sessions.pop(request_id, None)
            if session is not None and not session.tokens_gone:
                self.orphans.add(request_id)

    @rule(request_id=st.sampled_from(REQUEST_IDS))
    def grow_old(self, request_id: str) -> None:
        seconds, _ = self.raw.time()
        for part in ("state", "tokens"):
            self.raw.expireat(f"tandem:{{{request_id}}}:{part}", seconds + AGED_TTL)
        if request_id in self.sessions:
            self.sessions[request_id].ttl = AGED_TTL

    @rule()
    def flush_scripts(self) -> None:
        self.raw.script_flush()

    # Checks.

    def expected_refusal(self, holder: Holder) -> type[Exception] | None:
        session = self.sessions.get(holder.request_id)
        if session is None:
            return StateLost
        if self.owned_by[holder.request_id].claim != holder.ownership.claim:
            return FencedOff
        return StateLost if session.damaged else None

    def check(self, outcome: Any, expected: type[Exception] | None) -> None:
        if expected is None:
            assert outcome is None, f"{outcome!r} where a success was due"
        else:
            assert type(outcome) is expected, f"{outcome!r} where {expected.__name__} was due"

    def check_snapshot(self, snapshot: Any, session: Session) -> None:
        assert isinstance(snapshot, Snapshot), snapshot
        assert snapshot.tokens == wire.encode_ids(session.tokens)
        assert (snapshot.fence, snapshot.epoch, snapshot.length) == (session.fence, session.epoch, len(session.tokens))
        assert (snapshot.prompt_length, snapshot.finish) == (session.prompt_length, session.finish)
        assert (snapshot.owner, snapshot.config, snapshot.request_fingerprint) == (
            session.owner,
            session.config,
            b"print",
        )
        in_force = (session.config_version, session.config_length)
        assert (snapshot.config_version, snapshot.config_length) == in_force
        if snapshot.ownership is not None:
            assert snapshot.ownership.config_version == session.config_version

    @invariant()
    def the_server_holds_what_the_model_holds(self) -> None:
        for request_id in REQUEST_IDS:
            state, tokens = f"tandem:{{{request_id}}}:state", f"tandem:{{{request_id}}}:tokens"
            with self.raw.pipeline(transaction=False) as pipeline:
                pipeline.hgetall(state).get(tokens).pttl(state).pexpiretime(state).pexpiretime(tokens)
                stored, encoded, ttl, *expiries = pipeline.execute()
            session = self.sessions.get(request_id)
            if session is None:
                assert not stored
                assert encoded is None or request_id in self.orphans
                continue
            assert int(stored[b"fence"]) == session.fence
            assert int(stored[b"epoch"]) == session.epoch
            assert int(stored[b"length"]) == len(session.tokens)
            assert (int(stored[b"config_version"]), stored[b"request"]) == (session.config_version, session.config)
            assert int(stored[b"config_length"]) == session.config_length
            assert stored[b"claim"] == self.owned_by[request_id].claim
            assert stored[b"status"] == (b"running" if session.finish is None else b"finished")
            assert stored.get(b"finish") == session.finish
            if not session.tokens_gone:
                assert encoded == wire.encode_ids(session.tokens)
                # Redis 7.0 counts each PEXPIRE of a script from its own instant.
                assert abs(expiries[0] - expiries[1]) < 5_000
            assert session.ttl * 1000 - 30_000 < ttl <= session.ttl * 1000


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.AbstractEventLoop]:
    # The pause before a repetition is for real servers; here the reply is lost on purpose.
    monkeypatch.setattr(redis_scripts, "_FIRST_BACKOFF", 0.0)
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def run(
    server: RedisServer, loop: asyncio.AbstractEventLoop, scripts: StoreScripts, examples: int, phases: list[Phase]
) -> None:
    run_state_machine_as_test(
        lambda: StoreMachine(server, scripts, loop),  # type: ignore[arg-type]
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_scripts_do_what_the_model_does(redis_server: RedisServer, loop: asyncio.AbstractEventLoop) -> None:
    run(redis_server, loop, StoreScripts.load(), 100, [Phase.generate, Phase.shrink])


FAULTS = {
    "commit without a fence": ("commit", "if fence ~= tonumber(ARGV[1]) or claim ~= ARGV[2] then", "if false then"),
    "commit that trusts the fence number": ("commit", " or claim ~= ARGV[2]", ""),
    "commit without the epoch": ("commit", "elseif epoch ~= base_epoch or ", "elseif "),
    "commit without the length": ("commit", " or length ~= base_length", ""),
    "commit to a finished session": ("commit", " or status ~= 'running'", ""),
    "commit that does not know itself": ("commit", "if epoch == base_epoch + 1 and", "if false and"),
    "commit that knows itself by number": ("commit", " == ARGV[5] then", " then"),
    "commit that fills a hole with zeros": ("commit", "if redis.call('STRLEN'", "if false and redis.call('STRLEN'"),
    "commit that keeps the epoch": ("commit", "'epoch', base_epoch + 1", "'epoch', base_epoch"),
    "commit at the wrong place": ("commit", "'SETRANGE', KEYS[2], base_length * 4", "'SETRANGE', KEYS[2], base_length"),
    "commit that lets the state expire": ("commit", "'PEXPIRE', KEYS[1], ARGV[6]", "'PTTL', KEYS[1]"),
    "commit that lets the tokens expire": ("commit", "'PEXPIRE', KEYS[2], ARGV[6]", "'PTTL', KEYS[2]"),
    "commit of tokens of the former sampling": (
        "commit",
        "if tonumber(version or 0) ~= tonumber(ARGV[7]) or (tag or '') ~= ARGV[8] then",
        "if false then",
    ),
    "finish that doesn't know of a change": (
        "finish",
        "if tonumber(version or 0) ~= tonumber(ARGV[6]) or (tag or '') ~= ARGV[7] then",
        "if false then",
    ),
    "update that keeps the version": ("update", "'config_version', base + 1", "'config_version', base"),
    "update that keeps the epoch": ("update", "'epoch', epoch + 2", "'epoch', epoch"),
    "update that leaves the epoch to a round under way": ("update", "'epoch', epoch + 2", "'epoch', epoch + 1"),
    "update that keeps the request": ("update", "'request', ARGV[3], ", ""),
    "update that forgets from where on": ("update", "'config_length', length, ", ""),
    "update over another one": ("update", "if version ~= base or", "if"),
    "update of another request": ("update", " or request ~= ARGV[2] then", " then"),
    "update of a finished session": ("update", "if status ~= 'running'", "if false"),
    "update that does not know itself": ("update", "in_force = version == base + 1 and", "in_force = false and"),
    "update that knows itself by number": ("update", "base + 1 and request == ARGV[3]", "base + 1"),
    "update right after another one": ("update", "if version > 0 and length == since", "if false"),
    "update that waits though it is the first": ("update", "if version > 0 and length", "if length"),
    "update that takes its own for another's": ("update", "if tag == ARGV[4] then", "if false then"),
    "update that takes another's for its own": ("update", "if tag == ARGV[4] then", "if true then"),
    "update of damaged tokens": ("update", "if redis.call('STRLEN'", "if false and redis.call('STRLEN'"),
    "take-over that forgets the version": ("take_over", "'config_version', 'config_length'", "'gone', 'config_length'"),
    "create over a session": ("create", "if fence then", "if false then"),
    "create that does not know itself": ("create", "claim == ARGV[1] and", "false and"),
    "take-over that keeps the fence": ("take_over", "'fence', 1)", "'fence', 0)"),
    "take-over that counts a retry": ("take_over", " and claim ~= ARGV[1]", ""),
    "take-over that keeps the claim": ("take_over", "'claim', ARGV[1], ", ""),
    "take-over of a finished session": ("take_over", "status == 'running' and ", ""),
    "finish without a fence": ("finish", "if fence ~= tonumber(ARGV[1]) or claim ~= ARGV[2] then", "if false then"),
    "finish without the epoch": ("finish", "if epoch ~= tonumber(ARGV[3])", "if false"),
    "finish that overwrites a result": ("finish", "if status ~= 'running'", "if false"),
    "delete without a fence": (
        "delete",
        "if tonumber(fence) ~= tonumber(ARGV[1]) or claim ~= ARGV[2] then",
        "if false then",
    ),
    "delete that forgets the tokens": ("delete", "'UNLINK', KEYS[1], KEYS[2]", "'UNLINK', KEYS[1]"),
    "abandonment without a fence": (
        "abandon",
        "if tonumber(fence) ~= tonumber(ARGV[1]) or claim ~= ARGV[2] then",
        "if false then",
    ),
    "abandonment of a finished session": ("abandon", "if status ~= 'running'", "if false"),
    "abandonment that keeps the tokens": ("abandon", "'PEXPIRE', KEYS[2], ARGV[3]", "'PTTL', KEYS[2]"),
    "read of damaged tokens": ("read", "if redis.call('STRLEN'", "if false and redis.call('STRLEN'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(one_redis_server: RedisServer, loop: asyncio.AbstractEventLoop, fault: str) -> None:
    script, right, wrong = FAULTS[fault]
    scripts = StoreScripts.load()
    body = getattr(scripts, script).body.decode()
    assert body.count(right) == 1, "the fault no longer fits the script"
    faulty = replace(scripts, **{script: Script.of(body.replace(right, wrong).encode())})
    with pytest.raises(AssertionError):
        run(one_redis_server, loop, faulty, 1_000, [Phase.generate])
