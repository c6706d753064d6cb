"""A causal language model over a slot cache: one padded forward for a ragged batch of sessions.

Rows are aligned at the right, so that the wanted logits are the last ones of every row and `logits_to_keep` serves any
transformers model, whatever it does between its last hidden state and its logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.engine.compiled_steps import CompiledSteps
from tandem.engine.faults import PieceNotFinite
from tandem.engine.feed import Feed
from tandem.engine.joined_layers import JoinedLayers
from tandem.engine.slot_cache import LayerShape, SlotCache
from tandem.engine.step_shapes import StepShape

FULL = "full_attention"
SLIDING = "sliding_attention"
_MOST_REAL = 0.8
"""Share of tokens that are no padding, up to which these alone are computed: it takes two more copies in each layer."""


@dataclass(frozen=True, slots=True)
class AttentionPattern:
    """How far the layers look back."""

    layer_types: tuple[str, ...]
    """The different types among the layers."""
    window: int | None
    """Tokens that a sliding layer sees, the query's own included."""


class CausalLM:
    """A transformers model with the slots of its sessions. Called from one thread only."""

    def __init__(
        self,
        model: Any,
        pattern: AttentionPattern,
        cache: SlotCache,
        padded_vocabulary_size: int,
        joined: JoinedLayers | None = None,
    ) -> None:
        """`joined` are the layers of the model, if they are run in another form than its own."""
        self._model = model
        self._joined = joined
        self._pattern = pattern
        self.cache = cache
        self.padded_vocabulary_size = padded_vocabulary_size
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        # Eager attention adds its mask to the scores: a boolean one would be added as 0 and 1, silently. Joined layers
        # take what all of them would make of a boolean one.
        self._additive_mask = joined is not None or model.config._attn_implementation == "eager"
        self.columns = torch.arange(cache.columns, device=self.device)
        """The numbers of the columns, of which a forward looks at the first."""
        self.compiled: CompiledSteps | None = None
        """What runs the steps of fixed shapes, if anything does."""

    @property
    def slots(self) -> int:
        """Sessions the cache has room for."""
        return self.cache.slots

    @property
    def max_length(self) -> int:
        """Most tokens of a session."""
        return self.cache.max_length

    @property
    def computes_padding(self) -> bool:
        """Whether feeds of unlike sizes take what as many of the largest size would."""
        return self._joined is None or self.compiled is not None

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """Runs the feeds, of different sessions, and stores their keys and values.

        Returns the wanted logits, float32 [sum of rows, padded vocabulary], in the order of the feeds. Adjacent slots
        in rising order are the fast case. Raises PieceNotFinite where a piece of a prefill, whose logits nobody reads,
        left keys and values that aren't numbers: they would outlast their request, as a prefix for others to share.
        """
        compiled = self.compiled
        shape = compiled.shape_for(feeds) if compiled is not None else None
        if compiled is None or shape is None:
            return self.forward_as_it_is(feeds)
        return self.forward_in(shape, feeds)

    @torch.inference_mode()
    def forward_in(self, shape: StepShape, feeds: Sequence[Feed]) -> torch.Tensor:
        """The same, in a prepared shape that holds the feeds."""
        assert self.compiled is not None
        at = [feed.slot for feed in feeds]
        logits = self.compiled.run(shape, self._pack(feeds, at, np.arange(shape.rows), shape.width))
        _check_pieces(logits, feeds, at)
        return _wanted_rows(logits, feeds, at)

    @torch.inference_mode()
    def forward_as_it_is(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """The same, not compiled: no larger than these feeds need."""
        batch, width = len(feeds), max(feed.token_ids.size for feed in feeds)
        at = range(batch)
        packed = self._pack(feeds, at, np.array([feed.slot for feed in feeds]), width)
        on_device = torch.from_numpy(packed).to(self.device, non_blocking=True)
        columns = max(feed.start + feed.token_ids.size for feed in feeds)
        keep = max(1, *(feed.rows for feed in feeds))
        cells = on_device[: 3 * batch * width].view(3, batch, width)
        adjacent = _as_slice(feeds)
        slots = on_device[3 * batch * width :] if adjacent is None else adjacent
        if self._joined is not None and _mostly_padding(feeds, width):
            return self._run_without_padding(self._joined, feeds, cells, slots, self.columns[:columns]).float()
        logits = self.run(cells, slots, self.columns[:columns], keep, sees_all=self._sees_all(feeds, columns))
        _check_pieces(logits, feeds, at)
        whole = all(feed.rows == keep for feed in feeds)
        return (logits.flatten(0, 1) if whole else _wanted_rows(logits, feeds, at)).float()

    def _sees_all(self, feeds: Sequence[Feed], columns: int) -> bool:
        """Whether each token sees all columns: then the layers that are known here need no mask."""
        return (
            self._joined is not None
            and self._pattern.window is None
            and all(feed.start == columns - 1 for feed in feeds)  # so each has one token
        )

    def run(
        self,
        cells: torch.Tensor,
        slots: slice | torch.Tensor,
        held: torch.Tensor,
        keep: int,
        *,
        sees_all: bool = False,
    ) -> torch.Tensor:
        """The forward itself: ids, positions and store rows [3, batch, width], the slots [batch], and the columns that are
        looked at, `sees_all` if all of them are by every token. Returns the logits of the last `keep` tokens of each row, 0: of
        all."""
        token_ids, positions = cells[0], cells[1]
        self.cache.begin(cells[2].reshape(-1), slots, held.shape[0])
        logits = (
            self._models_logits(token_ids, positions, self._mask(positions, held), keep)
            if self._joined is None
            else self._joined.logits(
                token_ids, positions, None if sees_all else self._mask(positions, held), self.cache, keep
            )
        )
        self.cache.end()
        return logits

    def _run_without_padding(
        self,
        joined: JoinedLayers,
        feeds: Sequence[Feed],
        cells: torch.Tensor,
        slots: slice | torch.Tensor,
        held: torch.Tensor,
    ) -> torch.Tensor:
        """The same for feeds that all want logits: only their tokens are computed, and only the wanted logits, [sum of rows,
        padded vocabulary]."""
        token_ids, positions, write = cells
        batch, width = token_ids.shape
        ends = width * np.arange(1, batch + 1)
        real = _last_of_each(ends, [feed.token_ids.size for feed in feeds]).to(self.device)
        wanted = _last_of_each(np.cumsum([feed.token_ids.size for feed in feeds]), [feed.rows for feed in feeds])
        self.cache.begin(write.flatten()[real], slots, held.shape[0])
        mask = self._mask(positions, held)
        logits = joined.wanted_logits(token_ids, positions, mask, self.cache, real, wanted.to(self.device))
        self.cache.end()
        return logits

    def _models_logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | dict[str, torch.Tensor], keep: int
    ) -> torch.Tensor:
        output = self._model(
            input_ids=token_ids,
            attention_mask=mask,
            position_ids=positions,
            cache=self.cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        logits: torch.Tensor = output.logits
        return logits

    @torch.inference_mode()
    def copy_tokens(self, source: int, target: int, start: int, end: int) -> None:
        """Gives slot `target` the keys and values of the tokens start to end of slot `source`."""
        self.cache.copy(source, target, start, end)

    @torch.inference_mode()
    def clear_slot(self, slot: int) -> None:
        """Zeroes the slot: a masked column has a weight of 0, and 0 times NaN is NaN."""
        self.cache.clear(slot)

    def synchronize(self) -> None:
        """Waits for the device, which works on its own once a forward has been handed to it; a CPU is never behind."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    @torch.inference_mode()
    def self_test(self) -> None:
        """Runs one token without the cache; raises whatever the device raises."""
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        self._model(input_ids=token, use_cache=False).logits.cpu()

    def _pack(
        self, feeds: Sequence[Feed], at: Sequence[int], slots: NDArray[np.int64], width: int
    ) -> NDArray[np.int64]:
        """Ids, positions and store rows [3, batch, width], then the slots [batch], in one buffer: one transfer. Feed i is row
        at[i]; a row of no feed is padding alone."""
        batch = slots.size
        packed = np.empty(3 * batch * width + batch, dtype=np.int64)
        if batch == len(feeds) == 1 and width == feeds[0].token_ids.size:
            self._pack_one(packed, feeds[0])
            return packed
        token_ids, positions, write = packed[: 3 * batch * width].reshape(3, batch, width)
        packed[3 * batch * width :] = slots
        starts, sizes = np.zeros((2, batch), dtype=np.int64)
        starts[at] = [feed.start for feed in feeds]
        sizes[at] = [feed.token_ids.size for feed in feeds]
        # Padding repeats the first position, which is always visible to itself: no row of the mask is empty.
        offsets = np.arange(width) - (width - sizes)[:, None]
        real = offsets >= 0
        np.maximum(offsets, 0, out=positions)
        positions += starts[:, None]
        write[:] = np.where(real, positions, self.cache.trash)
        write += slots[:, None] * self.cache.columns
        token_ids[:] = 0
        token_ids[real] = np.concatenate([feeds[index].token_ids for index in np.argsort(at)])
        return packed

    def _pack_one(self, packed: NDArray[np.int64], feed: Feed) -> None:
        """The same for one feed, which has no padding, at a fraction of the time."""
        width = feed.token_ids.size
        packed[:width] = feed.token_ids
        packed[width : 2 * width] = np.arange(feed.start, feed.start + width)
        packed[2 * width : 3 * width] = packed[width : 2 * width] + feed.slot * self.cache.columns
        packed[3 * width] = feed.slot

    def _mask(self, positions: torch.Tensor, held: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """True where a query may look, [batch, 1, width, columns]; one for each layer type if they differ."""
        seen_from = positions[:, None, :, None]
        masks = {FULL: held <= seen_from}
        if self._pattern.window is not None:
            masks[SLIDING] = masks[FULL] & (held > seen_from - self._pattern.window)
        if self._additive_mask:
            masks = {name: self._additive(mask) for name, mask in masks.items()}
        types = self._pattern.layer_types
        return masks[types[0]] if len(types) == 1 else masks

    def _additive(self, mask: torch.Tensor) -> torch.Tensor:
        dtype = self.dtype
        return torch.zeros((), dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def layer_shapes(cache: Any) -> list[LayerShape]:
    """The shapes of the layers of a cache that a model has filled."""
    return [LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in cache.layers]


def _mostly_padding(feeds: Sequence[Feed], width: int) -> bool:
    """Whether it pays to compute the tokens of the feeds alone. A piece of a prefill, which wants no logits, is as wide as can be."""
    tokens = sum(feed.token_ids.size for feed in feeds)
    return tokens <= _MOST_REAL * width * len(feeds) and all(feed.rows for feed in feeds)


def _last_of_each(ends: NDArray[np.int64], counts: Sequence[int]) -> torch.Tensor:
    """The last so many numbers below each end, in rising order."""
    return torch.from_numpy(
        np.concatenate([np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
    )


def _as_slice(feeds: Sequence[Feed]) -> slice | None:
    first = feeds[0].slot
    if all(feed.slot == first + index for index, feed in enumerate(feeds)):
        return slice(first, first + len(feeds))
    return None


def _check_pieces(logits: torch.Tensor, feeds: Sequence[Feed], at: Sequence[int]) -> None:
    """What is not a number among the keys and values of a piece is seen by its last token, so by that one's logits, but for
    the keys of a sliding layer whose window is smaller than the piece."""
    pieces = [row for row, feed in zip(at, feeds, strict=True) if not feed.rows]
    # Less than infinity is any number, and minus infinity, which some models have for ids that no token has.
    if pieces and not bool((logits[pieces, -1] < torch.inf).all()):
        raise PieceNotFinite("a piece of a prefill gave logits that are not finite")


def _wanted_rows(logits: torch.Tensor, feeds: Sequence[Feed], at: Sequence[int]) -> torch.Tensor:
    """A copy of the wanted ones among logits [batch, rows, vocabulary], feed after feed."""
    keep = logits.shape[1]
    ends = [(row + 1) * keep for row in at]
    wanted = [end - feed.rows + row for end, feed in zip(ends, feeds, strict=True) for row in range(feed.rows)]
    rows = torch.tensor(wanted, dtype=torch.int64).to(logits.device, non_blocking=True)
    return logits.flatten(0, 1).index_select(0, rows)
