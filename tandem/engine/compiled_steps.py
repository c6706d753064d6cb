"""Forwards of fixed shapes that are prepared before the first request: compiled by inductor, recorded as CUDA graphs, or both.

A decode step is short, and much of it is the time in which the interpreter asks for one kernel after the other. Inductor makes
fewer and larger kernels of a forward; a CUDA graph is asked for as a whole. Both want shapes that come again (`step_shapes.py`),
and a graph wants its inputs and outputs in the same place each time: here they are, one buffer for all shapes.

Everything is compiled, recorded, and compared with the forward as it is, before the worker serves. Nothing is compiled for a
request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from numpy.typing import NDArray

from tandem.engine.faults import ModelError
from tandem.engine.feed import Feed
from tandem.engine.step_shapes import MOST_TOKENS, StepShape, StepShapes

logger = logging.getLogger(__name__)

_INDUCTOR, _GRAPHS = "inductor", "graphs"

_MOST_COMPILATIONS = 64
"""Of all models in a process. Sizes are symbols but for 1, so one takes four, and maybe more where a symbol meets a limit of the
model. (torch could count them apart, but where it notes whose turn it is, it doesn't tell threads apart.)"""


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """How steps are prepared."""

    way: str
    """inductor, graphs or inductor+graphs."""
    variable: str
    """Is named where it can't be done."""
    longest_feed: int
    """Most tokens of a session in a step that is no prefill."""
    longest_rows: int
    """Most logits that are wanted of a session."""

    @property
    def inductor(self) -> bool:
        """Whether steps are compiled."""
        return _INDUCTOR in self.way

    @property
    def graphs(self) -> bool:
        """Whether steps are recorded as CUDA graphs."""
        return _GRAPHS in self.way


@dataclass(slots=True)
class CompileStats:
    """Counters, to be read from anywhere."""

    shapes: int = 0
    """Ready to be run."""
    compilations: int = 0
    """By inductor, before the first request."""
    late_compilations: int = 0
    """What would have been one after it: not done, and the end of compiled forwards."""
    forwards: int = 0
    """Run in one of these shapes."""


def check_device(options: CompileOptions, device: torch.device) -> None:
    """Raises ModelError that is about the variable where the device has no CUDA graphs."""
    if options.graphs and device.type != "cuda":
        raise ModelError(f"{options.way}: a {device.type} has no CUDA graphs", options.variable)


def most_buffer_bytes(options: CompileOptions, slots: int, vocabulary_size: int) -> int:
    """What the buffers take at most; before it is known how long sessions can be."""
    logits = min(slots, MOST_TOKENS) if options.longest_rows == 1 else MOST_TOKENS
    return int(MOST_TOKENS * 3 * torch.int64.itemsize + logits * vocabulary_size * torch.float32.itemsize)


class Step(Protocol):
    """CausalLM.run."""

    def __call__(
        self, cells: torch.Tensor, slots: slice | torch.Tensor, held: torch.Tensor, keep: int
    ) -> torch.Tensor: ...


class CompiledSteps:
    """The prepared shapes of one model. Called from one thread at a time."""

    def __init__(
        self, step: Step, columns: torch.Tensor, shapes: StepShapes, vocabulary_size: int, options: CompileOptions
    ) -> None:
        """`columns`: the numbers of the cache's columns, on the device of the model."""
        self.stats = CompileStats()
        self._options = options
        self._shapes = shapes
        self._columns = columns
        device = columns.device
        self._keep = 1 if shapes.longest_rows == 1 else 0
        tokens = max(shape.tokens for shape in shapes.all())
        rows = max(self._logits_of(shape) for shape in shapes.all())
        self._cells = torch.zeros(3 * tokens, dtype=torch.int64, device=device)
        self._logits = torch.zeros(rows, vocabulary_size, dtype=torch.float32, device=device)
        self._ready: dict[StepShape, Callable[[], object]] = {}
        self._pool: Any = None
        self._serving = False

        def run(cells: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
            return step(cells, slice(0, cells.shape[1]), held, self._keep)

        self._step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = run
        if options.inductor:
            self._step = torch.compile(
                run,
                fullgraph=True,
                backend=self._compiled_graph,
                recompile_limit=_MOST_COMPILATIONS,
            )

    @property
    def memory_bytes(self) -> int:
        """Bytes of the buffers."""
        return int(self._cells.nbytes + self._logits.nbytes)

    def shape_for(self, feeds: Sequence[Feed]) -> StepShape | None:
        """The shape in which to run the feeds; None: as they are."""
        shape = self._shapes.holding(feeds)
        return shape if shape in self._ready and not self.stats.late_compilations else None

    @torch.inference_mode()
    def run(self, shape: StepShape, packed: NDArray[Any]) -> torch.Tensor:
        """Runs ids, positions and store rows [3, rows, width]; what follows them in `packed` is ignored. Returns the logits
        that are wanted at most, float32 [rows, 1 or width, vocabulary], in a buffer that the next run overwrites."""
        size = 3 * shape.tokens
        self._cells[:size].copy_(torch.from_numpy(packed[:size]), non_blocking=True)
        self._ready[shape]()
        self.stats.forwards += 1
        return self._output(shape)

    @torch.inference_mode()
    def prepare(self, check: Callable[[StepShape], None]) -> None:
        """Compiles and records all shapes; `check` runs one and raises ModelError if it computes something else. Raises
        ModelError that is about the variable."""
        began = time.perf_counter()
        try:
            for shape in self._shapes.all():
                self._ready[shape] = self._prepared(shape)
                check(shape)
        except Exception as error:  # whatever a compiler raises
            reason = " ".join(str(error).split("\n")[:2])  # the second says what was raised inside the compiler
            problem = f"{self._options.way} can't run this model: {type(error).__name__}: {reason[:300]}"
            raise ModelError(problem, self._options.variable) from error
        self._serving = True
        self.stats.shapes = len(self._ready)
        self.stats.forwards = 0
        logger.info(
            "%s: %d shapes in %.1f s, %d compilations, %.1f MiB of buffers",
            self._options.way, self.stats.shapes, time.perf_counter() - began, self.stats.compilations,
            self.memory_bytes / 2**20,
        )  # fmt: skip

    def _prepared(self, shape: StepShape) -> Callable[[], object]:
        cells = self._cells[: 3 * shape.tokens].view(3, shape.rows, shape.width)
        held = self._columns[: shape.columns]
        self._mark(cells, held)
        output = self._output(shape)

        def run() -> None:
            output.copy_(self._step(cells, held))

        cells.zero_()  # ids and positions; rows of the store may be anything that is there
        run()
        return self._recorded(run) if self._options.graphs else run

    def _mark(self, cells: torch.Tensor, held: torch.Tensor) -> None:
        """Sizes that vary are symbols to the compiler, which gives 1 a kernel of its own in any case."""
        rows, widths, columns = self._shapes.varying()
        for tensor, dimension, varies in ((cells, 1, rows), (cells, 2, widths), (held, 0, columns)):
            if varies and tensor.shape[dimension] > 1:
                torch._dynamo.mark_dynamic(tensor, dimension)

    def _recorded(self, run: Callable[[], None]) -> Callable[[], object]:
        """A CUDA graph of `run`. What the shapes allocate on the way is in one pool: only one of them runs at a time."""
        with torch.cuda.device(self._cells.device):  # which need not be the first one
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # libraries set themselves up in the first runs, which can't be recorded
                run()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                run()
        replay: Callable[[], object] = graph.replay
        return replay

    def _compiled_graph(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """The backend: inductor, which is counted. While serving it is not asked: that would take as long as a start."""
        if not self._serving:
            self.stats.compilations += 1
            return cast(Callable[..., Any], torch._inductor.compile(graph, inputs))
        self.stats.late_compilations += 1
        logger.error("a forward of a prepared shape would have to be compiled anew: no more compiled ones")
        return cast(Callable[..., Any], graph.forward)

    def _output(self, shape: StepShape) -> torch.Tensor:
        size = self._logits_of(shape)
        return self._logits[:size].view(shape.rows, size // shape.rows, -1)

    def _logits_of(self, shape: StepShape) -> int:
        return shape.rows if self._keep else shape.tokens
