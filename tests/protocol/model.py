"""An explicit-state model of epochs, commits and take-overs: orchestrators that crash, pause and are cut off, one store, one caller.

The model is small enough to be read beside the Lua scripts: the store is one tuple, an orchestrator is another, and each step is
one thing that may happen next. `explore` walks every order of steps, breadth first, up to the bounds, and holds the invariants
against every state. A fault changes one rule; `explore` must find a state that breaks an invariant, by a shortest path.

What is modelled: a commit is sent, may reach the store or not, may be answered or not, and is sent again when the answer is missing;
the next round's tokens are made before the answer (one verification ahead); a caller that loses patience resumes at any
orchestrator with the number of tokens it has; an owner that was fenced off ends its stream. Messages that are under way may arrive late,
after the sender has gone. Somebody may change the sampling: the store puts another version in force, once a token was committed under the
one before, and an owner learns of it by its next commit, rereads, and draws anew. The tokens of a round are a function of their
position alone (greedy or COUPLED), or not (SAMPLED): then two owners draw different tokens for one position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

Tokens = tuple[str, ...]


@dataclass(frozen=True)
class Store:
    """The session's hash and its tokens."""

    fence: int = 1
    epoch: int = 0
    tokens: Tokens = ()
    version: int = 0
    changed_at: int = 0
    """Tokens that were committed when the version came into force."""


@dataclass(frozen=True)
class Owner:
    """What one orchestrator believes."""

    name: str
    state: str = "idle"
    """idle, running, or ended."""
    fence: int = 0
    epoch: int = 0
    """Of the round that is being committed."""
    tokens: Tokens = ()
    """Committed as far as it knows."""
    pending: Tokens = ()
    """The round whose commit is under way; it is retried until it is answered."""
    emitted: int = 0
    """Tokens of its stream that the caller was sent."""
    version: int = 0
    """Of the sampling that it draws under."""


@dataclass(frozen=True)
class Message:
    """A commit under way."""

    fence: int
    epoch: int
    length: int
    tokens: Tokens
    sender: str
    version: int = 0


@dataclass(frozen=True)
class Reply:
    """The store's answer under way."""

    to: str
    fence: int
    epoch: int
    outcome: str
    length: int = 0
    """Of what the store holds."""
    version: int = 0
    """Of the commit that is answered."""


@dataclass(frozen=True)
class World:
    """One state."""

    store: Store
    owners: tuple[Owner, ...]
    caller: Tokens = ()
    """What the caller has, over all its streams."""
    listens_to: str = ""
    messages: frozenset[Message] = frozenset()
    replies: frozenset[Reply] = frozenset()
    crashes: int = 0
    resumes: int = 0
    sends: int = 0
    updates: int = 0
    history: Tokens = ()
    """Every token that was ever committed at its position: what must never change."""
    highest_epoch: int = 0
    refused: str = ""
    """The rightful owner whose commit was refused, if there was one."""


@dataclass(frozen=True)
class Rules:
    """The protocol; a fault is one field that isn't as it should be."""

    checks_fence: bool = True
    checks_position: bool = True
    """Epoch and length; each alone would do here, since every round has a token."""
    knows_retries: bool = True
    raises_fence: bool = True
    emits_after_commit: bool = True
    replays_from_store: bool = True
    retries_the_same_tokens: bool = True
    checks_version: bool = True
    drops_the_round: bool = True
    """An owner whose sampling was changed draws its round anew."""
    rereads_what_is_committed: bool = True
    """And takes a round for committed whose commit was stored before the change, though its answer was lost."""
    changes_wait_for_a_commit: bool = True


@dataclass(frozen=True)
class Bounds:
    """How far to look."""

    rounds: int = 2
    tokens_per_round: int = 1
    crashes: int = 1
    resumes: int = 2
    sends: int = 3
    updates: int = 0


class Broken(AssertionError):
    """An invariant doesn't hold; the message has the steps that lead there."""


def explore(rules: Rules, bounds: Bounds) -> int:
    """The number of states there are; raises Broken."""
    start = World(
        Store(),
        (Owner("A", "running", fence=1), Owner("B")),
        listens_to="A",
    )
    came_from: dict[World, tuple[World, str] | None] = {start: None}
    queue = deque([start])
    while queue:
        world = queue.popleft()
        problem = violation(world)
        if problem:
            raise Broken(f"{problem}: {' > '.join(_path(world, came_from))}")
        for step, following in steps(world, rules, bounds):
            if following not in came_from:
                came_from[following] = (world, step)
                queue.append(following)
    return len(came_from)


def _path(world: World, came_from: dict[World, tuple[World, str] | None]) -> list[str]:
    steps_taken: list[str] = []
    link = came_from[world]
    while link is not None:
        world, step = link
        steps_taken.append(step)
        link = came_from[world]
    return steps_taken[::-1]


def violation(world: World) -> str:
    """Which invariant a state breaks; empty if none."""
    stored = world.store.tokens
    if stored[: len(world.history)] != world.history:
        return "a committed token was lost or changed"
    if world.caller != stored[: len(world.caller)]:
        return "the caller has what is not committed"
    if [token[0] for token in stored] != [str(position) for position in range(len(stored))]:
        return "a token is missing or doubled"
    if any(token[-1] != str(world.store.version) for token in stored[world.store.changed_at :]):
        return "a token of the former sampling behind the change"
    if world.store.version > len(stored) + 1:
        return "changes keep the request from going on"
    if world.store.epoch < world.highest_epoch:
        return "the epoch goes back"
    if world.refused:
        return "the rightful owner is refused"
    return ""


def steps(world: World, rules: Rules, bounds: Bounds) -> Iterator[tuple[str, World]]:
    """Everything that may happen next."""
    for index, owner in enumerate(world.owners):
        yield from _rounds(world, index, owner, rules, bounds)
        yield from _crash(world, index, owner, bounds)
        yield from _resume(world, index, owner, rules, bounds)
    yield from _update(world, rules, bounds)
    for message in world.messages:
        yield f"commit of {message.sender} is lost", replace(world, messages=world.messages - {message})
        yield from _deliver(world, message, rules)
    for reply in world.replies:
        yield f"answer to {reply.to} is lost", replace(world, replies=world.replies - {reply})
        yield from _answered(world, reply, rules)


def _with_owner(world: World, index: int, owner: Owner, **changes: object) -> World:
    owners = tuple(owner if place == index else each for place, each in enumerate(world.owners))
    return replace(world, owners=owners, **changes)  # type: ignore[arg-type]


def _rounds(world: World, index: int, owner: Owner, rules: Rules, bounds: Bounds) -> Iterator[tuple[str, World]]:
    """A round is ready: its commit is sent. Without an answer it is sent again."""
    if owner.state != "running" or world.sends >= bounds.sends or owner.epoch - 2 * owner.version >= bounds.rounds:
        return
    # What a round gives depends on who draws, and on luck: the model has sampled tokens, the hardest case.
    for count in range(1, bounds.tokens_per_round + 1):
        # The last character is the sampling that it was drawn under.
        fresh = tuple(f"{len(owner.tokens) + place}{owner.name}{owner.fence}{owner.version}" for place in range(count))
        pending = owner.pending or fresh
        if not rules.retries_the_same_tokens:
            pending = fresh
        elif owner.pending and count > 1:
            continue
        message = Message(owner.fence, owner.epoch, len(owner.tokens), pending, owner.name, owner.version)
        if message in world.messages:
            continue
        sent = replace(owner, pending=pending)
        following = _with_owner(world, index, sent, messages=world.messages | {message}, sends=world.sends + 1)
        if not rules.emits_after_commit:
            following = _emitted(following, index, sent, sent.tokens + pending)
        yield f"{owner.name} commits {','.join(pending)}", following


def _crash(world: World, index: int, owner: Owner, bounds: Bounds) -> Iterator[tuple[str, World]]:
    if owner.state == "running" and world.crashes < bounds.crashes:
        yield f"{owner.name} crashes", _with_owner(world, index, Owner(owner.name), crashes=world.crashes + 1)


def _resume(world: World, index: int, owner: Owner, rules: Rules, bounds: Bounds) -> Iterator[tuple[str, World]]:
    """The caller turns to this orchestrator, whatever became of the other. It may be the same one: then it starts anew."""
    if world.resumes >= bounds.resumes or len(world.caller) > len(world.store.tokens):
        return
    fence = world.store.fence + (1 if rules.raises_fence else 0)
    source = world.store.tokens if rules.replays_from_store else world.caller
    taken = Owner(
        owner.name, "running", fence, world.store.epoch, source, emitted=len(world.caller), version=world.store.version
    )
    following = _with_owner(
        world,
        index,
        taken,
        store=replace(world.store, fence=fence),
        listens_to=owner.name,
        resumes=world.resumes + 1,
        # Whoever was asked before under this name has forgotten.
        replies=frozenset(reply for reply in world.replies if reply.to != owner.name),
    )
    yield f"the caller resumes at {owner.name}", _emitted(following, index, taken, source)


def _update(world: World, rules: Rules, bounds: Bounds) -> Iterator[tuple[str, World]]:
    """Somebody changes the sampling, whoever runs the request."""
    store = world.store
    too_soon = store.version > 0 and len(store.tokens) == store.changed_at
    if world.updates < bounds.updates and not (too_soon and rules.changes_wait_for_a_commit):
        # The epoch rises by two: past the round that the owner may have begun ahead of its commit.
        changed = replace(store, version=store.version + 1, changed_at=len(store.tokens), epoch=store.epoch + 2)
        yield (
            "the sampling is changed",
            replace(world, store=changed, updates=world.updates + 1, highest_epoch=changed.epoch),
        )


def _emitted(world: World, index: int, owner: Owner, tokens: Tokens) -> World:
    """The caller is sent what it lacks, if it still listens."""
    if world.listens_to != owner.name:
        return world
    caller = world.caller + tokens[len(world.caller) :]
    return _with_owner(world, index, replace(owner, emitted=len(tokens)), caller=caller)


def _deliver(world: World, message: Message, rules: Rules) -> Iterator[tuple[str, World]]:
    """The store runs the script; the message may have been under way for long."""
    store, outcome = world.store, ""
    length = message.length + len(message.tokens)
    if rules.checks_fence and message.fence != store.fence:
        outcome = "fenced"
    elif rules.checks_version and message.version < store.version:
        outcome = "changed"
    elif (
        rules.knows_retries
        and store.epoch == message.epoch + 1
        and len(store.tokens) == length
        and store.tokens[message.length :] == message.tokens
    ):
        outcome = "done"
    elif rules.checks_position and (store.epoch, len(store.tokens)) != (message.epoch, message.length):
        outcome = "conflict"
    else:
        # As SETRANGE does: what lies beyond stays.
        tokens = store.tokens[: message.length] + message.tokens + store.tokens[length:]
        store = replace(store, epoch=message.epoch + 1, tokens=tokens)
        outcome = "done"
    history = world.history + store.tokens[len(world.history) :]
    reply = Reply(message.sender, message.fence, message.epoch, outcome, len(store.tokens), message.version)
    yield (
        f"commit of {message.sender} arrives",
        replace(
            world,
            store=store,
            history=history,
            highest_epoch=max(world.highest_epoch, store.epoch),
            messages=world.messages - {message},
            replies=world.replies | {reply},
        ),
    )


def _answered(world: World, reply: Reply, rules: Rules) -> Iterator[tuple[str, World]]:
    index = next(place for place, owner in enumerate(world.owners) if owner.name == reply.to)
    owner = world.owners[index]
    rest = world.replies - {reply}
    expected = owner.state == "running" and (owner.fence, owner.epoch) == (reply.fence, reply.epoch) and owner.pending
    if not expected:
        yield f"an answer that {owner.name} does not wait for", replace(world, replies=rest)
        return
    if reply.outcome == "changed":
        yield f"{owner.name} rereads", _reread(world, index, owner, reply, rules)
        return
    if reply.outcome != "done":
        refused = owner.name if owner.fence == world.store.fence and world.listens_to == owner.name else world.refused
        ended = replace(owner, state="ended")
        yield f"{owner.name} is {reply.outcome}", _with_owner(world, index, ended, replies=rest, refused=refused)
        return
    tokens = owner.tokens + owner.pending
    after = replace(owner, epoch=owner.epoch + 1, tokens=tokens, pending=())
    yield f"{owner.name} goes on", _emitted(_with_owner(world, index, after, replies=rest), index, after, tokens)


def _reread(world: World, index: int, owner: Owner, reply: Reply, rules: Rules) -> World:
    """The owner reads what is in force and what is committed. Where it was replaced meanwhile, it learns of that later: nothing is
    emitted of what it may read of another."""
    rest, store = world.replies - {reply}, world.store
    if owner.fence != store.fence:
        return _with_owner(world, index, replace(owner, state="ended"), replies=rest)
    was_stored = rules.rereads_what_is_committed and len(store.tokens) > len(owner.tokens)
    tokens = owner.tokens + owner.pending if was_stored else owner.tokens
    pending = owner.pending if not rules.drops_the_round and not was_stored else ()
    after = replace(owner, epoch=store.epoch, version=store.version, tokens=tokens, pending=pending)
    return _emitted(_with_owner(world, index, after, replies=rest), index, after, tokens)
