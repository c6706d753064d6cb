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

from tandem.engine.faults import PieceNotFinite
from tandem.engine.feed import Feed
from tandem.engine.slot_cache import LayerShape, SlotCache, StepView

FULL = "full_attention"
SLIDING = "sliding_attention"


@dataclass(frozen=True, slots=True)
class AttentionPattern:
    """How far the layers look back."""

    layer_types: tuple[str, ...]
    """The different types among the layers."""
    window: int | None
    """Tokens that a sliding layer sees, the query's own included."""


class CausalLM:
    """A transformers model with the slots of its sessions. Called from one thread only."""

    def __init__(self, model: Any, pattern: AttentionPattern, cache: SlotCache, padded_vocabulary_size: int) -> None:
        self._model = model
        self._pattern = pattern
        self.cache = cache
        self.padded_vocabulary_size = padded_vocabulary_size
        self.device: torch.device = model.device
        # Eager attention adds its mask to the scores: a boolean one would be added as 0 and 1, silently.
        self._additive_mask = model.config._attn_implementation == "eager"
        self._columns = torch.arange(cache.columns, device=self.device)

    @property
    def slots(self) -> int:
        """Sessions the cache has room for."""
        return self.cache.slots

    @property
    def max_length(self) -> int:
        """Most tokens of a session."""
        return self.cache.max_length

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """Runs the feeds, of different sessions, and stores their keys and values.

        Returns the wanted logits, float32 [sum of rows, padded vocabulary], in the order of the feeds. Adjacent slots
        in rising order are the fast case. Raises PieceNotFinite where a piece of a prefill, whose logits nobody reads,
        left keys and values that aren't numbers: they would outlast their request, as a prefix for others to share.
        """
        batch = len(feeds)
        width = max(feed.token_ids.size for feed in feeds)
        packed, columns = self._pack(feeds, width)
        on_device = torch.from_numpy(packed).to(self.device, non_blocking=True)
        cells = on_device[: 3 * batch * width].view(3, batch, width)
        token_ids, positions = cells[0], cells[1]
        slots = _as_slice(feeds)
        self.cache.begin(
            StepView(cells[2].reshape(-1), on_device[3 * batch * width :] if slots is None else slots, columns)
        )
        keep = max(1, *(feed.rows for feed in feeds))
        output = self._model(
            input_ids=token_ids,
            attention_mask=self._mask(positions, columns),
            position_ids=positions,
            cache=self.cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        _check_pieces(output.logits, feeds)
        return _wanted_rows(output.logits, feeds, keep).float()

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

    def _pack(self, feeds: Sequence[Feed], width: int) -> tuple[NDArray[np.int64], int]:
        """Ids, positions and store rows [3, batch, width], then the slots [batch], in one buffer: one transfer."""
        batch = len(feeds)
        packed = np.empty(3 * batch * width + batch, dtype=np.int64)
        token_ids, positions, write = packed[: 3 * batch * width].reshape(3, batch, width)
        slots = packed[3 * batch * width :]
        slots[:] = [feed.slot for feed in feeds]
        starts = np.array([feed.start for feed in feeds])
        sizes = np.array([feed.token_ids.size for feed in feeds])
        # Padding repeats the first position, which is always visible to itself: no row of the mask is empty.
        offsets = np.arange(width) - (width - sizes)[:, None]
        real = offsets >= 0
        np.maximum(offsets, 0, out=positions)
        positions += starts[:, None]
        write[:] = np.where(real, positions, self.cache.trash)
        write += slots[:, None] * self.cache.columns
        token_ids[:] = 0
        token_ids[real] = np.concatenate([feed.token_ids for feed in feeds])
        return packed, int((starts + sizes).max())

    def _mask(self, positions: torch.Tensor, columns: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """True where a query may look, [batch, 1, width, columns]; one for each layer type if they differ."""
        seen_from = positions[:, None, :, None]
        held = self._columns[:columns]
        masks = {FULL: held <= seen_from}
        if self._pattern.window is not None:
            masks[SLIDING] = masks[FULL] & (held > seen_from - self._pattern.window)
        if self._additive_mask:
            masks = {name: self._additive(mask) for name, mask in masks.items()}
        types = self._pattern.layer_types
        return masks[types[0]] if len(types) == 1 else masks

    def _additive(self, mask: torch.Tensor) -> torch.Tensor:
        dtype = self._model.dtype
        return torch.zeros((), dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def layer_shapes(cache: Any) -> list[LayerShape]:
    """The shapes of the layers of a cache that a model has filled."""
    return [LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in cache.layers]


def _as_slice(feeds: Sequence[Feed]) -> slice | None:
    first = feeds[0].slot
    if all(feed.slot == first + index for index, feed in enumerate(feeds)):
        return slice(first, first + len(feeds))
    return None


def _check_pieces(logits: torch.Tensor, feeds: Sequence[Feed]) -> None:
    """What is not a number among the keys and values of a piece is seen by its last token, so by that one's logits, but for
    the keys of a sliding layer whose window is smaller than the piece."""
    pieces = [index for index, feed in enumerate(feeds) if not feed.rows]
    # Less than infinity is any number, and minus infinity, which some models have for ids that no token has.
    if pieces and not bool((logits[pieces, -1] < torch.inf).all()):
        raise PieceNotFinite("a piece of a prefill gave logits that are not finite")


def _wanted_rows(logits: torch.Tensor, feeds: Sequence[Feed], keep: int) -> torch.Tensor:
    flat = logits.reshape(-1, logits.shape[-1])
    if all(feed.rows == keep for feed in feeds):
        return flat
    wanted = [index * keep + keep - feed.rows + row for index, feed in enumerate(feeds) for row in range(feed.rows)]
    return flat.index_select(0, torch.tensor(wanted, dtype=torch.int64).to(flat.device, non_blocking=True))
