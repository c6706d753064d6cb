"""A KV cache of fixed slots: one preallocated store per layer, in which a token's column is its position.

A slot holds one session. Rolling back is forgetting a length: columns beyond it are masked, since a query at position p
sees exactly the columns 0 .. p, and they are written again before they are seen. Nothing is copied or freed.

Each slot has one column more than the longest session, the trash column: padding of a ragged batch is written there
and never read. Sliding-window layers keep the full history too, under a narrower mask, so that they can roll back.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores for one token."""

    heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers(self) -> int:
        """Numbers for one token, keys and values together."""
        return self.heads * (self.key_dim + self.value_dim)


class StepView:
    """Which part of the stores one forward writes and reads: set before it, and seen by all layers."""

    def __init__(self) -> None:
        self.write: torch.Tensor | None = None
        """Row of the store, slot * columns + column, for each token of the padded batch: int64 [batch * width]."""
        self.slots: slice | torch.Tensor = slice(0)
        """The slots of the batch in order: a slice where they are adjacent (read without a copy), else int64 [batch]."""
        self.columns = 0
        """Columns to read: the longest session of the batch, this forward's tokens included."""
        self.held: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        """What each layer reads, [batch, heads, columns, dim], where it is read without a copy."""


class SlotLayer(CacheLayerMixin):
    """The store of one layer: keys and values [slots, columns, heads, dim]."""

    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, view: StepView, index: int) -> None:
        super().__init__()
        self.keys = keys
        self.values = values
        self._key_rows = keys.view(-1, *keys.shape[2:])
        self._value_rows = values.view(-1, *values.shape[2:])
        self._columns = keys.shape[1]
        self._view = view
        self._index = index
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the states of the step, [batch, heads, width, dim], and returns all that its queries may see,
        [batch, heads, columns, dim]."""
        return self.store(_rows(key_states), _rows(value_states))

    def store(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for states [batch * width, heads, dim]."""
        view = self._view
        assert view.write is not None
        self._key_rows.index_copy_(0, view.write, keys)
        self._value_rows.index_copy_(0, view.write, values)
        if view.held is not None:
            return view.held[self._index]
        return _read(self._key_rows, self._columns, view), _read(self._value_rows, self._columns, view)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: stores are allocated at once."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002
        """Columns and offset of the keys; the engine passes its own mask, models may still ask."""
        return self._view.columns, 0

    def get_seq_length(self) -> int:
        """0: sessions differ in length, so positions are always given per token."""
        return 0

    def get_max_length(self) -> int:
        """Most tokens a slot holds."""
        return int(self.keys.shape[1]) - 1


def _rows(states: torch.Tensor) -> torch.Tensor:
    batch, heads, width, dim = states.shape
    return states.transpose(1, 2).reshape(batch * width, heads, dim)


def _read(rows: torch.Tensor, columns: int, view: StepView) -> torch.Tensor:
    held = rows.view(-1, columns, *rows.shape[1:])[:, : view.columns]
    read = held[view.slots] if isinstance(view.slots, slice) else held.index_select(0, view.slots)
    return read.transpose(1, 2)


class SlotCache(Cache):
    """The stores of all layers, in the form that transformers' models update."""

    def __init__(
        self, shapes: list[LayerShape], slots: int, max_length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.slots = slots
        self.max_length = max_length
        self.columns = max_length + 1
        self.trash = max_length
        sizes = [size for shape in shapes for size in ((shape.heads, shape.key_dim), (shape.heads, shape.value_dim))]
        # Zeroed, not empty: a masked column still meets a weight of 0, and 0 times garbage may be NaN.
        self._stores = {
            size: torch.zeros(count, slots, self.columns, *size, dtype=dtype, device=device)
            for size, count in Counter(sizes).items()
        }
        """[layers' keys and values, slots, columns, heads, dim] for all of one size: what is done to a slot is done to
        all layers at once."""
        self._sizes = sizes
        self.layers: list[SlotLayer]
        self._view = StepView()
        super().__init__(
            layers=[SlotLayer(*pair, self._view, index) for index, pair in enumerate(self._pairs(self._stores))]
        )

    def _pairs(self, stores: dict[tuple[int, int], torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The keys and values of each layer, of parts of the stores."""
        each = {size: iter(store.unbind(0)) for size, store in stores.items()}
        ordered = [next(each[size]) for size in self._sizes]
        return list(zip(ordered[::2], ordered[1::2], strict=True))

    def begin(self, write: torch.Tensor, slots: slice | torch.Tensor, columns: int) -> None:
        """Points all layers at the part of the stores that the forward uses: see StepView."""
        self._view.write, self._view.slots, self._view.columns = write, slots, columns
        # For all layers at once, which takes a fraction of what it does in each. A compiler sees each layer's own part alone.
        at_once = isinstance(slots, slice) and not torch.compiler.is_compiling()
        self._view.held = self._held(slots, columns) if at_once else None

    def _held(self, slots: slice | torch.Tensor, columns: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return self._pairs({size: store[:, slots, :columns].transpose(2, 3) for size, store in self._stores.items()})

    def end(self) -> None:
        """The forward is over. What a compiler has traced then leaves nothing behind that would have to be made."""
        self._view.write, self._view.slots, self._view.columns, self._view.held = None, slice(0), 0, None

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Copies columns of one slot to another."""
        for store in self._stores.values():
            store[:, target, start:end] = store[:, source, start:end]

    def clear(self, slot: int) -> None:
        """Zeroes a slot, as all are at first."""
        for store in self._stores.values():
            store[:, slot].zero_()

    def fill_with_noise(self) -> None:
        """For checks: whatever is read where it should not be shows."""
        for store in self._stores.values():
            store.normal_()

    @property
    def memory_bytes(self) -> int:
        """Bytes of all stores."""
        return sum(store.nbytes for store in self._stores.values())
