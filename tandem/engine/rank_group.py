"""A model in parts, one for each rank: rank 0 says what is run, and all run it.

What a step needs is small, so it is broadcast: a command of fixed size, and the tokens after it. Each rank then runs the same
code over its own part of the weights and of the cache, and transformers' tensor-parallel layers put the parts together.

A rank that is gone takes the others with it, and so does a fault of one rank alone in what all compute: the others would wait
for its part, or take a later one for it. Rank 0 waits for each of them all the time, so it learns of it when nothing is
running, too; the others wait for rank 0's next command.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tandem.engine.causal_lm import CausalLM
from tandem.engine.faults import PieceNotFinite
from tandem.engine.feed import Feed
from tandem.engine.ranks import Ranks

logger = logging.getLogger(__name__)

_FOR_EVER = timedelta(days=3650)
"""A service may have nothing to do for long."""
_LONGEST_WAIT = timedelta(minutes=10)
"""For the parts of a forward, and for one another while the model loads."""
_END_SECONDS = 2.0
"""For the last command: it is a courtesy, the others end by the closed connection, too."""
_COMMAND_NUMBERS = 5
_FEED_NUMBERS = 4


class RankLost(RuntimeError):
    """Another rank is gone, and this one can't go on without it."""


class _Command(IntEnum):
    FORWARD = 0
    COPY = 1
    CLEAR = 2
    SELF_TEST = 3
    END = 4


class RankGroup:
    """The processes that share a model, connected."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        """Waits for the others to come. On a CPU the parts are put together by gloo, on CUDA by nccl."""
        self.ranks = ranks
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        dist.init_process_group(backend, timeout=_LONGEST_WAIT, rank=ranks.rank, world_size=ranks.count)
        self._commands = dist.new_group(backend="gloo", timeout=_FOR_EVER)
        self._lives = dist.new_group(backend="gloo", timeout=_FOR_EVER)
        self._ended = False
        self._lost = ""
        """Why the ranks can't go on together, once they can't."""

    def least(self, number: int) -> int:
        """The least of what the ranks say; all must ask, and each waits for all, as long as it takes. Raises RankLost."""
        found = torch.tensor([number])
        try:
            dist.all_reduce(found, dist.ReduceOp.MIN, group=self._commands)
        except RuntimeError as error:
            raise self._lose(error) from error
        return int(found)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around what all ranks compute with one another. Where it fails on this one, the others are in the midst of it and
        can't be called back: RankLost, and nothing is sent any more."""
        try:
            yield
        except (PieceNotFinite, RankLost):
            raise  # the one after the last exchange, on all ranks; the other has been noted
        except Exception as error:
            self._lost = f"rank {self.ranks.rank} failed in what all of them run"
            raise RankLost(self._lost) from error

    def send(self, command: _Command, *numbers: int) -> None:
        """Tells the others what comes. Rank 0 only."""
        self._broadcast(torch.tensor([command, *numbers] + [0] * (_COMMAND_NUMBERS - 1 - len(numbers))))

    def send_numbers(self, numbers: Sequence[int]) -> None:
        """What belongs to the command just sent."""
        self._broadcast(torch.tensor(numbers))

    def receive(self, count: int) -> list[int]:
        """So many numbers from rank 0."""
        numbers = torch.empty(count, dtype=torch.int64)
        self._broadcast(numbers)
        received: list[int] = numbers.tolist()
        return received

    def watch(self, lost: Callable[[str], None]) -> None:
        """Calls `lost` from another thread, with the reason, as soon as any of the other ranks is gone. Rank 0 only."""
        for rank in range(1, self.ranks.count):
            threading.Thread(target=self._wait_for_end, args=(rank, lost), name=f"rank {rank}", daemon=True).start()

    def end(self, *, in_step: bool) -> None:
        """Lets the others end, or leaves them to the end of the connection unless they are `in_step`: at the next command, with
        nobody in this process who sends another. Waits a moment at most. Rank 0 only."""
        self._ended = True
        if in_step and not self._lost:
            thread = threading.Thread(target=self._send_end, name="end", daemon=True)
            thread.start()
            thread.join(_END_SECONDS)

    def _send_end(self) -> None:
        with contextlib.suppress(RankLost):
            self.send(_Command.END)

    def _broadcast(self, numbers: torch.Tensor) -> None:
        if self._lost:
            raise RankLost(self._lost)
        try:
            dist.broadcast(numbers, 0, group=self._commands)
        except RuntimeError as error:
            raise self._lose(error) from error

    def _lose(self, error: RuntimeError) -> RankLost:
        self._lost = f"a rank of {self.ranks.count} is gone: {str(error).splitlines()[0]}"
        return RankLost(self._lost)

    def _wait_for_end(self, rank: int, lost: Callable[[str], None]) -> None:
        try:
            dist.recv(torch.empty(1), rank, group=self._lives)  # never sent: it ends with the connection
        except RuntimeError:
            if not self._ended:
                self._lost = f"rank {rank} of {self.ranks.count} is gone"
                lost(self._lost)


class LeadingLM:
    """Rank 0's model: whatever it does, the others do with it. Called from one thread only."""

    def __init__(self, lm: CausalLM, group: RankGroup) -> None:
        self._lm = lm
        self._group = group

    @property
    def slots(self) -> int:
        """Sessions the cache has room for."""
        return self._lm.slots

    @property
    def max_length(self) -> int:
        """Most tokens of a session."""
        return self._lm.max_length

    @property
    def padded_vocabulary_size(self) -> int:
        """Ids below this can be run."""
        return self._lm.padded_vocabulary_size

    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """As CausalLM's, and RankLost."""
        token_ids = np.concatenate([feed.token_ids for feed in feeds])
        numbers = [number for feed in feeds for number in (feed.slot, feed.start, feed.token_ids.size, feed.rows)]
        with self._group.together():
            self._group.send(_Command.FORWARD, len(feeds), token_ids.size)
            self._group.send_numbers([*numbers, *token_ids.tolist()])
            return self._lm.forward(feeds)

    def copy_tokens(self, source: int, target: int, start: int, end: int) -> None:
        """As CausalLM's."""
        self._group.send(_Command.COPY, source, target, start, end)
        self._lm.copy_tokens(source, target, start, end)

    def clear_slot(self, slot: int) -> None:
        """As CausalLM's."""
        self._group.send(_Command.CLEAR, slot)
        self._lm.clear_slot(slot)

    def synchronize(self) -> None:
        """Waits for this rank's device: what the others do enters into what it computes."""
        self._lm.synchronize()

    def self_test(self) -> None:
        """Raises RankLost, whatever the device raises."""
        with self._group.together():
            self._group.send(_Command.SELF_TEST)
            self._lm.self_test()


def follow(lm: CausalLM, group: RankGroup) -> None:
    """Does what rank 0 says until it says that it ends. Raises RankLost, and what a forward raises: this rank's part of
    the cache is then no longer what rank 0 takes it for."""
    while True:
        command, *numbers = group.receive(_COMMAND_NUMBERS)
        match _Command(command):
            case _Command.FORWARD:
                _forward(lm, _feeds(group, numbers[0], numbers[1]))
            case _Command.COPY:
                lm.copy_tokens(*numbers)
            case _Command.CLEAR:
                lm.clear_slot(numbers[0])
            case _Command.SELF_TEST:
                lm.self_test()
            case _Command.END:
                return


def _feeds(group: RankGroup, count: int, tokens: int) -> list[Feed]:
    numbers = group.receive(_FEED_NUMBERS * count + tokens)
    token_ids = np.array(numbers[_FEED_NUMBERS * count :], dtype=np.uint32)
    feeds, taken = [], 0
    for index in range(count):
        slot, start, size, rows = numbers[_FEED_NUMBERS * index : _FEED_NUMBERS * (index + 1)]
        feeds.append(Feed(slot, start, token_ids[taken : taken + size], rows))
        taken += size
    return feeds


def _forward(lm: CausalLM, feeds: Sequence[Feed]) -> Any:
    try:
        lm.forward(feeds)
    except PieceNotFinite:
        logger.warning("a forward gave logits that are not finite")  # on all ranks: rank 0 tells the request
