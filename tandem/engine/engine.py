"""Continuous batching: items come in from streams, join the next step, and leave when they are done.

The engine lives in its step thread, which alone touches sessions, slots and the model. The methods for the event loop
only post commands. Cancels and releases are commands too, so they take effect between steps: a slot is never handed on
while a forward uses it.

The form of an output is compiled beside that thread: it may take tens of milliseconds, which hold up its own session alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic

import torch

from tandem.engine.compiled_steps import CompileStats
from tandem.engine.draft_stats import DraftStats
from tandem.engine.faults import ItemFault, invalid
from tandem.engine.gathering import Gathering
from tandem.engine.idle import AheadStats, IdleWork, SlotWork
from tandem.engine.job import JobT, Method, RaggedModel, WorkItem
from tandem.engine.sampling_fields import has_form, params_of
from tandem.engine.scheduler import Batch, Scheduler, StepLimits
from tandem.engine.session import Session
from tandem.engine.slot_ledger import SlotLedger
from tandem.engine.slot_pool import Move, SlotPool
from tandem.engine.step_thread import StepThread
from tandem.engine.stream import Answer, Stream
from tandem.engine.waiting_line import NO_WAITING, SlotShares, WaitingLimits, WaitingLine, WaitingStats
from tandem.engine.work import Step
from tandem.sampling import SamplingParams
from tandem.structured_output import Forms, FormStats
from tandem.v1 import worker_pb2

logger = logging.getLogger(__name__)

MAX_REQUEST_ID_CHARACTERS = 160
"""A caller's 128, and room for the number of the ownership behind it."""
MAX_SALT_CHARACTERS = 128
_STOP_SECONDS = 5.0
_TIMER_SLACK_SECONDS = 0.05


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, and levels now; written by the step thread, to be read from anywhere."""

    forwards: int = 0
    feeds: int = 0
    """Sessions in all forwards: divided by `forwards`, the batch size that was reached."""
    tokens: int = 0
    failed_forwards: int = 0
    invariant_violations: int = 0
    prefix_tokens: int = 0
    """Tokens of the prefixes that sessions were opened with."""
    shared_tokens: int = 0
    """How many of them were in the cache already."""
    shared_sessions: int = 0
    """Sessions that began with such tokens."""
    busy_seconds: float = 0.0
    gatherings: int = 0
    """Steps that waited a moment for sessions which were about to come back."""
    gathering_seconds: float = 0.0
    sessions: int = 0
    slots_used: int = 0
    running: int = 0
    waiting: int = 0
    line: WaitingStats = field(default_factory=WaitingStats)
    most_tokens: int = 0
    """Padded tokens that a forward of several items may have: falls where the memory turns out too small."""
    ahead: AheadStats = field(default_factory=AheadStats)
    draft: DraftStats = field(default_factory=DraftStats)
    compiled: CompileStats = field(default_factory=CompileStats)
    forms: FormStats = field(default_factory=FormStats)


class Engine(Generic[JobT]):
    """A model at work for many streams."""

    def __init__(
        self,
        lm: RaggedModel,
        method: Method[Any, JobT],
        loop: asyncio.AbstractEventLoop,
        *,
        limits: StepLimits,
        waiting: WaitingLimits = NO_WAITING,
        slots_per_stream: int = 0,
        displace: bool = False,
        on_death: Callable[[], None],
        reuse_prefixes: bool = True,
        idle: IdleWork | None = None,
        forms: Forms | None = None,
        gather: bool = False,
        debug_invariants: bool = False,
    ) -> None:
        """`slots_per_stream`: cache slots that a stream may hold; 0: all there are. `displace`: a session that finds no slot may
        take one from a stream with more of them, where a session that is lost costs its request nothing but speed. `gather`:
        steps wait a moment for sessions that are about to come back, where it pays."""
        self.stats = EngineStats()
        self._lm = lm
        self._method = method
        self._loop = loop
        self._on_death = on_death
        for_sessions = lm.slots - (idle.slots if idle is not None else 0)
        self._slots = SlotPool(for_sessions, reuse=reuse_prefixes)
        self._ledger = SlotLedger(lm.slots, lm.max_length) if debug_invariants else None
        self._forms = forms
        if forms is not None:
            self.stats.forms = forms.stats
        self._compiler = ThreadPoolExecutor(1, "forms")
        """The thread that `forms` belongs to, if there are any."""
        self._idle = idle
        self._scheduler: Scheduler[JobT] = Scheduler(limits)
        if idle is not None:
            self.stats.ahead = idle.stats
            work = SlotWork(lm, self._ledger, self._slots, lambda: self._scheduler.most_tokens)
            idle.attach(work, for_sessions)
        self._gathering: Gathering[Session] | None = (
            Gathering(limits.forward_cost, lambda: min(limits.decode_tokens, self._scheduler.most_tokens))
            if gather
            else None
        )
        self._gathering_since: float | None = None
        self._short_feed = limits.short_feed
        self._jobs: dict[Session, JobT] = {}
        self._shares = SlotShares(slots_per_stream)
        self._line = WaitingLine(waiting, self._shares)
        self._displaces = displace
        self._answers: dict[Stream, list[Answer]] = defaultdict(list)
        self._leaving = 0
        """Times that answers were handed to the event loop, which has not sent them yet, as far as is known."""
        self._draining = False
        self._drained = asyncio.Event()
        self._sessions = 0
        self._thread = StepThread("engine", self._step, lambda _: self._call_loop(self._on_death))

    # For the event loop.

    def start(self) -> None:
        """Starts the step thread."""
        self._thread.start()

    def stop(self) -> bool:
        """Ends the step thread; what runs is dropped. False if it hangs in a step."""
        stopped = self._thread.stop(_STOP_SECONDS)
        self._compiler.shutdown(wait=False, cancel_futures=True)
        return stopped

    def submit(self, stream: Stream, items: Sequence[WorkItem]) -> None:
        """Takes items; each is answered once through `stream.deliver`, unless the stream is closed first."""
        self._thread.post(partial(self._arrived, stream, items, time.perf_counter()))

    def release(self, stream: Stream, request_ids: Sequence[str]) -> None:
        """Ends sessions, where they exist; what they run is answered CANCELLED."""
        self._thread.post(partial(self._release_all, stream, request_ids))

    def close(self, stream: Stream) -> None:
        """Ends all sessions of the stream, without answers."""
        self._thread.post(partial(self._close, stream))

    async def drain(self) -> None:
        """Refuses new sessions from now on, and waits until the last session has ended."""
        self._thread.post(self._start_draining)
        await self._drained.wait()

    async def admitted(self) -> None:
        """Waits until all items submitted so far are admitted or refused, and so no longer held as messages."""
        await self.call(_nothing)
        await self._loop.run_in_executor(self._compiler, _nothing)
        await self.call(_nothing)

    async def call(self, function: Callable[[], None]) -> None:
        """Runs `function` in the step thread and waits for it; its exception is raised here."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._thread.post(partial(self._run_for, function, done))
        await done

    # In the step thread.

    def _arrived(self, stream: Stream, items: Sequence[WorkItem], at: float) -> None:
        """Items came at that time: maybe long ago, as a forward takes."""
        if self._gathering is not None:
            for item in items:
                session = stream.sessions.get(item.request_id)
                if session is not None:
                    self._gathering.arrived(session, at)
        self._admit_all(stream, items)

    def _admit_all(self, stream: Stream, items: Sequence[WorkItem]) -> None:
        if stream.closed:
            return
        for item in items:
            if item.request_id in stream.held:
                stream.held[item.request_id].append(item)
            elif self._forms is not None and has_form(item):
                self._hold(stream, item)
            else:
                self._admit_or_fail(stream, item, partial(params_of, item, None))

    def _hold(self, stream: Stream, item: WorkItem) -> None:
        """Compiles the item's form; what comes for its session meanwhile stays behind it."""
        held = stream.held[item.request_id] = [item]
        compiled = self._compiler.submit(params_of, item, self._forms)

        def go_on() -> None:
            if stream.held.get(item.request_id) is held:  # else the session was released, or the stream closed
                del stream.held[item.request_id]
                self._admit_or_fail(stream, item, compiled.result)
                self._admit_all(stream, held[1:])

        compiled.add_done_callback(lambda _: self._thread.post(go_on))

    def _admit_or_fail(self, stream: Stream, item: WorkItem, params: Callable[[], SamplingParams]) -> None:
        session = stream.sessions.get(item.request_id)
        try:
            self._admit(stream, item, session, params)
        except ItemFault as fault:
            self._fail(stream, item.request_id, item.cache_epoch, fault, session)
        except Exception:
            logger.exception("admission failed", extra={"request_id": item.request_id, "cache_epoch": item.cache_epoch})
            if session is not None:
                session.drop()
            self._fail(stream, item.request_id, item.cache_epoch, _internal(), session)

    def _admit(
        self, stream: Stream, item: WorkItem, known: Session | None, params: Callable[[], SamplingParams]
    ) -> None:
        session = known if known is not None else self._new_session(item)
        session.check_epoch(item.cache_epoch)
        sampling = params() if item.HasField("sampling") else session.sampling
        if sampling is None:
            raise invalid("sampling", "missing in the first item of the session")
        job = self._method.admit(item)
        session.sampling = sampling
        self._replace_running(session, item.cache_epoch)
        session.apply(item.prefix, job.block, self._lm.max_length, self._lm.padded_vocabulary_size)
        job.session, job.stream, job.sampling = session, stream, sampling
        seated = session.slot is not None
        if not seated and not self._seat(stream, session) and not self._seat_instead(stream, session):
            self._wait(stream, session)
        if known is None:
            stream.sessions[item.request_id] = session
            self._sessions += 1
        self._jobs[session] = job
        if session.slot is not None:
            self._begin(job, reused=0 if seated else session.cached_length)

    def _begin(self, job: JobT, reused: int) -> None:
        """The session has its slot: the job takes part from the next step on."""
        job.work.prefill_tokens = job.session.prefix_length - job.session.cached_length
        job.work.reused_tokens = reused
        try:
            self._method.begin(job)
        except Exception as error:  # noqa: BLE001 - logged and answered
            self._fail_running(job, error)
            return
        self._scheduler.add(job)
        if job.result is not None:
            self._finish(job)

    def _seat(self, stream: Stream, session: Session) -> bool:
        """Gives the session a slot, and what of its prefix the cache holds already; False if no slot is free for it."""
        turn = self._line.first()
        if self._shares.has_all(stream) or (turn is not None and turn[1] is not session):
            return False
        seat = self._slots.acquire(session)
        if seat is None:
            return False
        session.slot = seat.slot
        try:
            for move in seat.moves:
                self._copy(move)
        except Exception:
            self._slots.release(session)
            self._slots.forget(move.target for move in seat.moves)
            raise
        session.cached_length = seat.shared
        self._shares.took(stream)
        self._line.leave(stream, session)
        self.stats.prefix_tokens += session.prefix_length
        self.stats.shared_tokens += seat.shared
        self.stats.shared_sessions += seat.shared > 0
        return True

    def _seat_instead(self, stream: Stream, session: Session) -> bool:
        """Gives the session the slot of another one, of the stream that holds the most: one that is idle and has the least to
        read again. False where that stream then would have fewer than this one."""
        richest, most = self._shares.largest()
        if (
            not self._displaces
            or richest is None
            or most < self._shares.held(stream) + 2
            or self._shares.has_all(stream)
        ):
            return False
        seated = (each for each in richest.sessions.values() if each.slot is not None)
        displaced = min(seated, key=lambda each: (each in self._jobs, each.cached_length))
        del richest.sessions[displaced.request_id]
        job = self._end(richest, displaced)
        self.stats.line.displaced += 1
        if job is not None:
            fault = ItemFault(
                worker_pb2.ERROR_REASON_RESOURCE_EXHAUSTED, "its slot went to another orchestrator's request"
            )
            self._fail(richest, displaced.request_id, job.cache_epoch, fault, displaced)
        return self._seat(stream, session)

    def _wait(self, stream: Stream, session: Session) -> None:
        """Puts the session last in its stream's line, or leaves it where it is there; raises ItemFault if no more may wait."""
        if session in self._line:
            return
        if self._line.is_full():
            last = self._line.last_of_many(stream)
            if last is None:
                self.stats.line.full += 1
                raise self._full(stream)
            self.stats.line.gave_way += 1
            self._turn_away(*last, self._full(last[0]))
        self._line.join(stream, session, time.monotonic())
        seconds = self._line.limits.seconds
        self._call_loop(partial(self._loop.call_later, seconds, self._thread.post, self._end_long_waits))

    def _full(self, stream: Stream) -> ItemFault:
        held, slots, waiting = self._shares.held(stream), self._slots.slots, len(self._line)
        message = f"all {slots} cache slots are in use, and {waiting} sessions wait for one"
        if self._shares.has_all(stream):
            message = (
                f"this orchestrator holds {held} of {slots} cache slots, as many as it may, and {waiting} sessions wait"
            )
        return ItemFault(worker_pb2.ERROR_REASON_RESOURCE_EXHAUSTED, message)

    def _seat_waiting(self) -> None:
        """Slots may be free: they go to those who wait, in turns (see `waiting_line`)."""
        while (turn := self._line.first()) is not None:
            stream, session = turn
            job = self._jobs.get(session)
            if job is not None:  # else its last item was refused, and the next one may wait again
                try:
                    if not self._seat(stream, session):
                        return
                    self._begin(job, reused=session.cached_length)
                except Exception as error:  # noqa: BLE001 - logged and answered
                    self._fail_running(job, error)
            self._line.leave(stream, session)

    def _end_long_waits(self) -> None:
        # A timer may come a little early, and there is one for each wait only.
        seconds = self._line.limits.seconds
        for stream, session in self._line.came_before(time.monotonic() - seconds + _TIMER_SLACK_SECONDS):
            fault = ItemFault(
                worker_pb2.ERROR_REASON_RESOURCE_EXHAUSTED, f"no cache slot became free within {seconds:g} s"
            )
            self.stats.line.late += 1
            self._turn_away(stream, session, fault)

    def _turn_away(self, stream: Stream, session: Session, fault: ItemFault) -> None:
        """Ends the wait of a session, and the session; one whose last item was refused has nothing to wait for."""
        self._line.leave(stream, session)
        job = self._jobs.get(session)
        if job is not None:
            self._end(stream, session)
            del stream.sessions[session.request_id]
            self._fail(stream, session.request_id, job.cache_epoch, fault, session)

    def _copy(self, move: Move) -> None:
        self._lm.copy_tokens(move.source, move.target, move.start, move.end)
        if self._ledger is not None:
            self._ledger.copied(move.source, move.target, move.start, move.end)

    def _share_prefills(self) -> None:
        """Prefills that have a beginning in common take turns at it, each going on from where the other got to."""
        for job in self._scheduler.prefills():
            move = self._slots.more_shared(job.session)
            if move is None:
                continue
            try:
                self._copy(move)
            except Exception as error:  # noqa: BLE001 - logged and answered
                self._fail_running(job, error)
                continue
            job.session.cached_length = move.end
            self.stats.shared_tokens += move.end - move.start
            self.stats.shared_sessions += job.work.reused_tokens == 0
            job.work.reused_tokens += move.end - move.start
            job.work.prefill_tokens -= move.end - move.start

    def _new_session(self, item: WorkItem) -> Session:
        if not 1 <= len(item.request_id) <= MAX_REQUEST_ID_CHARACTERS:
            raise invalid(
                "request_id", f"{len(item.request_id)} characters instead of 1 to {MAX_REQUEST_ID_CHARACTERS}"
            )
        if self._draining:
            raise ItemFault(worker_pb2.ERROR_REASON_DRAINING, "shutting down: no new session")
        if item.prefix.base_length:
            raise ItemFault(worker_pb2.ERROR_REASON_CACHE_MISS, "no such session on this stream")
        if len(item.cache_salt) > MAX_SALT_CHARACTERS:
            raise invalid("cache_salt", f"{len(item.cache_salt)} characters, at most {MAX_SALT_CHARACTERS} allowed")
        return Session(item.request_id, item.cache_salt)

    def _replace_running(self, session: Session, epoch: int) -> None:
        """A newer item takes over. Of the same epoch it is a retry, and the one answer is for both."""
        job = self._jobs.pop(session, None)
        if job is None:
            return
        self._scheduler.remove(job)
        if job.cache_epoch == epoch:
            self._answers[job.stream].append(Answer(session.request_id, epoch, None))
        else:
            fault = ItemFault(worker_pb2.ERROR_REASON_CANCELLED, "a newer item of the session replaced this one")
            self._fail(job.stream, session.request_id, job.cache_epoch, fault, session)

    def _release_all(self, stream: Stream, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            session = stream.sessions.pop(request_id, None)
            job = self._end(stream, session) if session is not None else None
            fault = ItemFault(worker_pb2.ERROR_REASON_CANCELLED, "the session was released")
            for ended in ([job] if job is not None else []) + stream.held.pop(request_id, []):
                self._fail(stream, request_id, ended.cache_epoch, fault, session)
        self._seat_waiting()
        self._count_levels()

    def _close(self, stream: Stream) -> None:
        stream.closed = True
        for session in stream.sessions.values():
            self._end(stream, session)
        stream.sessions.clear()
        stream.held.clear()
        self._answers.pop(stream, None)
        self._seat_waiting()
        self._count_levels()

    def _end(self, stream: Stream, session: Session) -> JobT | None:
        """Gives the slot back; returns the job that was running."""
        job = self._jobs.pop(session, None)
        if job is not None:
            self._scheduler.remove(job)
        self._sessions -= 1
        self._line.leave(stream, session)
        if self._idle is not None:
            self._idle.ended(session)
        if self._gathering is not None:
            self._gathering.ended(session)
        if session.slot is not None:
            self._slots.release(session)
            self._shares.gave_back(stream)
        return job

    def _start_draining(self) -> None:
        self._draining = True
        for stream, session in self._line.all():
            self._turn_away(
                stream, session, ItemFault(worker_pb2.ERROR_REASON_DRAINING, "shutting down: no slot any more")
            )

    def _run_for(self, function: Callable[[], None], done: asyncio.Future[None]) -> None:
        try:
            function()
        except Exception as error:  # noqa: BLE001 - handed to the caller
            self._call_loop(partial(_set_exception, done, error))
        else:
            self._call_loop(partial(_set_result, done))

    def _step(self) -> float | None:
        """One step, if it is time for it; returns how long to wait for commands before the next, None: until one comes."""
        self._flush()
        wait = self._gathering_seconds()
        if wait:
            return wait
        if self._idle is not None and self._may_be_idle:
            self._idle.step()
        self._share_prefills()
        for batch in self._scheduler.plan():
            self._run(batch)
            self._flush()  # a chunk of prefill that comes next holds no answers up
        self._count_levels()
        return 0.0 if len(self._scheduler) or self._may_be_idle else None

    @property
    def _may_be_idle(self) -> bool:
        """Whether idle work has its time: not while answers are on their way, since both threads take turns at the interpreter,
        and what the answers are for is what idle work hides behind."""
        return self._idle is not None and self._idle.wanted and not len(self._scheduler) and not self._leaving

    def _gathering_seconds(self) -> float:
        """How long this step should wait for sessions that are about to come back."""
        if self._gathering is None:
            return 0.0
        now = time.perf_counter()
        wait = self._gathering.seconds(self._scheduler.short_feeds(), now)
        if wait and self._gathering_since is None:
            self._gathering_since = now
        elif not wait and self._gathering_since is not None:
            self.stats.gatherings += 1
            self.stats.gathering_seconds += now - self._gathering_since
            self._gathering_since = None
        return wait

    def _count_levels(self) -> None:
        self.stats.sessions = self._sessions
        self.stats.slots_used = self._slots.used
        self.stats.running = len(self._scheduler)
        self.stats.waiting = len(self._line)
        self.stats.line.most_held = self._shares.largest()[1]
        self.stats.most_tokens = self._scheduler.most_tokens
        if self._draining and not self._sessions:
            self._call_loop(self._drained.set)

    def _run(self, batch: Batch[JobT]) -> None:
        """One forward and what is made of it. Where that fails, each of its jobs is tried alone: one bad item, or a
        batch too large for the memory, is no reason to fail the others."""
        began_ns, began = time.time_ns(), time.perf_counter()
        done, error = self._forward(batch, began_ns)
        if error is None:
            self._count(batch, began_ns, time.perf_counter() - began)
            for job in done:
                self._finish(job)
            return
        self.stats.failed_forwards += 1
        if len(batch.jobs) > 1:
            logger.warning("a forward of %d jobs failed; trying each alone", len(batch.jobs), exc_info=error)
            # Its frames hold what the failed forward had allocated, and it may have failed for want of memory.
            traceback.clear_frames(error.__traceback__)
            if _is_out_of_memory(error):
                self._scheduler.halve(batch)
                logger.warning("out of memory: from now on %d tokens in a forward at most", self._scheduler.most_tokens)
            error = None
            for job, feed in zip(batch.jobs, batch.feeds, strict=True):
                self._run(Batch([job], [feed]))
            return
        self._fail_running(batch.jobs[0], error)
        self._lm.self_test()  # a device that is beyond repair ends the thread here

    def _forward(self, batch: Batch[JobT], began_ns: int) -> tuple[list[JobT], Exception | None]:
        """Runs the feeds and hands their logits to the method; returns the jobs that are done, or what went wrong."""
        ready: list[JobT] = []
        try:
            logits = self._lm.forward(batch.feeds)
            for job, feed in zip(batch.jobs, batch.feeds, strict=True):
                job.work.ran(began_ns, len(batch.jobs))
                job.session.cached_length = feed.start + feed.token_ids.size
                if self._ledger is not None:
                    self._ledger.ran(feed)
                if feed.rows:
                    ready.append(job)
            if ready:
                self._method.consume(ready, logits)
            else:  # nothing was read, so the device may not be done: its time, and its faults, are this forward's
                self._lm.synchronize()
        except Exception as error:  # noqa: BLE001 - whatever a model raises; logged and answered
            return [], error
        return [job for job in ready if job.result is not None], None

    def _finish(self, job: JobT) -> None:
        session = job.session
        if self._gathering is not None:
            self._gathering.answered(session, job.rows, time.perf_counter())
        if self._ledger is not None:
            try:
                session.check()
                self._ledger.check(session)
                self._method.check(job)
            except Exception as error:  # noqa: BLE001 - logged and answered
                self.stats.invariant_violations += 1
                self._fail_running(job, error)
                return
        self._scheduler.remove(job)
        del self._jobs[session]
        if self._idle is not None:
            self._idle.answered(job)
        self._answers[job.stream].append(
            Answer(
                session.request_id,
                job.cache_epoch,
                job.result,
                cached_length=job.held,
                unread_tokens=job.unread,
                work=job.work,
            )
        )

    def _fail_running(self, job: JobT, error: Exception) -> None:
        """Answers INTERNAL and logs the traceback."""
        session = job.session
        logger.error(
            "an item failed; the cache of its session is dropped",
            exc_info=error,
            extra={"request_id": session.request_id, "cache_epoch": job.cache_epoch},
        )
        self._scheduler.remove(job)
        del self._jobs[session]
        session.drop()
        if session.slot is not None:
            # What failed may have left keys and values that aren't finite, and they would be read, with no weight.
            self._lm.clear_slot(session.slot)
        self._fail(job.stream, session.request_id, job.cache_epoch, _internal(), session)

    def _count(self, batch: Batch[JobT], began_ns: int, seconds: float) -> None:
        sizes = [feed.token_ids.size for feed in batch.feeds]
        tokens = sum(sizes)
        self.stats.forwards += 1
        self.stats.feeds += len(batch.feeds)
        self.stats.tokens += tokens
        self.stats.busy_seconds += seconds
        if self._gathering is not None and max(sizes) <= self._short_feed:
            self._gathering.ran(sizes, seconds)
        step = Step(began_ns, len(batch.jobs), tokens, seconds)
        for job in batch.jobs:
            job.work.took(step)

    def _fail(self, stream: Stream, request_id: str, epoch: int, fault: ItemFault, session: Session | None) -> None:
        seen, cached = (session.epoch, session.cached_length) if session is not None else (epoch, 0)
        self._answers[stream].append(Answer(request_id, epoch, None, error=fault.to_proto(seen, cached)))

    def _flush(self) -> None:
        """Hands all answers to the event loop in one call."""
        if self._answers:
            answers, self._answers = self._answers, defaultdict(list)
            if self._idle is None:
                self._call_loop(partial(_deliver, answers))
            else:
                self._leaving += 1
                self._call_loop(partial(_deliver_and_tell, answers, partial(self._thread.post, self._left)))

    def _left(self) -> None:
        self._leaving -= 1

    def _call_loop(self, function: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            logger.debug("the event loop is closed")


def _deliver(answers: dict[Stream, list[Answer]]) -> None:
    for stream, batch in answers.items():
        stream.deliver(batch)


def _deliver_and_tell(answers: dict[Stream, list[Answer]], left: Callable[[], None]) -> None:
    """Calls `left` when those that write them have had their turn of the loop."""
    try:
        _deliver(answers)
    finally:
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, left)


def _set_result(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _set_exception(done: asyncio.Future[None], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)


def _nothing() -> None:
    pass


def _is_out_of_memory(error: Exception) -> bool:
    """A CPU's allocator has no type of its own for it."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def _internal() -> ItemFault:
    return ItemFault(worker_pb2.ERROR_REASON_INTERNAL, "a fault inside the worker; its log has the details")
