"""Loading a model and giving it a slot cache: what runs once, before a worker is ready."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.distributed import DistributedConfig
from transformers.utils import logging as transformers_logging

from tandem import model_info
from tandem.engine import compiled_steps, forward_cost
from tandem.engine.causal_lm import FULL, SLIDING, AttentionPattern, CausalLM, layer_shapes
from tandem.engine.compiled_steps import CompiledSteps, CompileOptions, CompileStats
from tandem.engine.faults import ModelError
from tandem.engine.feed import Feed
from tandem.engine.forward_cost import ForwardCost
from tandem.engine.job import RaggedModel
from tandem.engine.joined_layers import JoinedLayers, can_be_joined
from tandem.engine.rank_group import LeadingLM, RankGroup, RankLost
from tandem.engine.ranks import ALONE, Ranks
from tandem.engine.slot_cache import SlotCache
from tandem.engine.step_shapes import StepShape, StepShapes
from tandem.engine.weight_layout import inputs_first_pays, lay_inputs_first
from tandem.structured_output import FormError, Forms
from tandem.wire import IdArray

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


_CPU_KV_BYTES = 2 << 30
_GPU_KV_SHARE = 0.8
"""Of the memory that is free once the model is there; activations and logits need the rest."""
_CONTEXT_WITHOUT_MODEL = 1 << 17


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model, and how to run it."""

    model: str
    """A name on the hub, or a folder."""
    revision: str = "main"
    device: str = "auto"
    dtype: str = "auto"
    gguf_file: str = ""
    trust_remote_code: bool = False
    threads: int = 0
    """CPU threads; 0 leaves torch's default."""
    slots: int = 32
    layers: int = 0
    """Only so many of the first layers; 0: all."""
    extra_slots: int = 0
    """For the engine's own use, beyond those for sessions."""
    context_length: int = 0
    """Most tokens of a session; 0: the model's own, as far as kv_memory_bytes allows."""
    kv_memory_bytes: int = 0
    """Memory for the KV cache; 0: 2 GiB on a CPU, most of what the model leaves free on a GPU. Each rank has as much."""
    ranks: Ranks = ALONE
    """The processes that share the model."""
    compiled: CompileOptions | None = None
    """How the steps that are no prefill are prepared; None: they run as they are."""
    verifies: bool = False
    """Whether logits of several tokens of a session are wanted in a step, or those of the last one."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is ready to run, and what GetModelInfo says about it."""

    lm: RaggedModel
    name: str
    vocabulary_size: int
    padded_vocabulary_size: int
    vocabulary_fingerprint: bytes
    end_token_ids: tuple[int, ...]
    context_length: int
    slots: int
    dtype: str
    device: str
    forward_cost: ForwardCost
    forms: Forms | None
    """None where the tokenizer can't be used for them."""
    group: RankGroup | None = None
    """The ranks that this one leads."""
    compile_stats: CompileStats | None = None
    """Of what was prepared, if anything was."""

    def end(self, *, stopped: bool) -> None:
        """Lets the other ranks end, if there are any; `stopped` says that the engine's thread has ended."""
        if self.group is not None:
            self.group.end(in_step=stopped)


@dataclass(frozen=True, slots=True)
class _OverSlots:
    """A model with its cache, checked."""

    model: Any
    tokenizer: Any
    lm: CausalLM
    group: RankGroup | None


def load(options: ModelOptions) -> ServedModel:
    """Loads the model, sizes its cache, and checks by a real forward that the engine computes what the model does.

    Raises ModelError.
    """
    try:
        return _load_to_serve(options)
    except RankLost as error:
        raise ModelError(str(error)) from error


def _load_to_serve(options: ModelOptions) -> ServedModel:
    loaded = _load(options)
    model, group = loaded.model, loaded.group
    lm = loaded.lm if group is None else LeadingLM(loaded.lm, group)
    strings = model_info.token_strings(loaded.tokenizer)
    vocabulary_size = min(len(strings), lm.padded_vocabulary_size)
    return ServedModel(
        lm=lm,
        name=f"{options.model}, {options.layers} layers" if options.layers else options.model,
        vocabulary_size=vocabulary_size,
        padded_vocabulary_size=lm.padded_vocabulary_size,
        vocabulary_fingerprint=model_info.vocabulary_fingerprint(strings[:vocabulary_size]),
        end_token_ids=tuple(model_info.end_token_ids(model.generation_config, loaded.tokenizer)),
        context_length=lm.max_length,
        slots=options.slots,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(loaded.lm.device),
        forward_cost=_measure_forward(lm, computes_padding=loaded.lm.computes_padding),
        forms=_forms(loaded.tokenizer),
        group=group,
        compile_stats=loaded.lm.compiled.stats if loaded.lm.compiled is not None else None,
    )


def load_part(options: ModelOptions) -> tuple[CausalLM, RankGroup]:
    """The part of the model of a rank that another one leads. Raises ModelError or RankLost."""
    loaded = _load(options)
    assert loaded.group is not None
    return loaded.lm, loaded.group


def _load(options: ModelOptions) -> _OverSlots:
    """The same steps on all ranks: they compute together from here on."""
    transformers_logging.disable_progress_bar()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = _device(options.device, options.ranks)
    if options.compiled is not None:
        compiled_steps.check_device(options.compiled, device)
    if device.type == "cpu":
        # transformers repeats keys and values for grouped-query attention unless told otherwise, at each call; here
        # that is 2.4 times slower, with the same bits. On a GPU the other way would miss the fast kernels.
        os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
    dtype = _dtype(options.dtype, device)
    group = _joined(options.ranks, device) if options.ranks.several else None
    model, tokenizer = _from_pretrained(options, dtype, device)
    if group is not None:
        group.least(0)  # they may load at different speeds, and what is computed together has a limit
    config = model.config.get_text_config()
    pattern = _attention_pattern(config)
    probe = _probe(model)
    shapes = layer_shapes(probe)
    bytes_per_token = sum(shape.numbers for shape in shapes) * probe.layers[0].keys.element_size()
    context_length = _context_length(options, config, bytes_per_token, device, _common_context(model, pattern))
    if group is not None:
        context_length = group.least(context_length)
    cache = SlotCache(shapes, options.slots + options.extra_slots, context_length, probe.layers[0].keys.dtype, device)
    logger.info(
        "KV cache: %d slots of %d tokens, %.1f MiB (%.1f KiB a token)",
        options.slots, context_length, cache.memory_bytes / 2**20, bytes_per_token / 2**10,
    )  # fmt: skip
    padded = int(model.get_output_embeddings().weight.shape[0])
    # The parts that ranks have are no plain tensors.
    lm = None
    if group is None and inputs_first_pays(model):
        # A compiler finds no way through a head that is packed.
        pack_head = options.verifies and options.compiled is None
        lm = _for_small_batches(model, pattern, cache, padded, pack_head=pack_head)
    if lm is None:
        lm = CausalLM(model, pattern, cache, padded)
        _check_against_model(model, lm)
    if options.compiled is not None:
        _prepare_steps(lm, options.compiled)
    return _OverSlots(model, tokenizer, lm, group)


def _joined(ranks: Ranks, device: torch.device) -> RankGroup:
    try:
        return RankGroup(ranks, device)
    except Exception as error:  # torch has many kinds for what goes wrong between processes
        raise ModelError(f"rank {ranks.rank} can't join the other {ranks.count - 1}: {_one_line(error)}") from error


def _device(name: str, ranks: Ranks) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if ranks.several:
        if name not in ("cpu", "cuda"):
            raise ModelError(
                f"device {name!r} is one alone, for {ranks.count} ranks: cpu, cuda and auto give each its own"
            )
        if name == "cpu" and torch.accelerator.is_available():
            raise ModelError(
                "device 'cpu' for several ranks: their parts go to the GPU that is there; hide it from them"
            )
        if name == "cuda":
            name = f"cuda:{ranks.local_rank}"
    try:
        device = torch.device(name)
        if ranks.several and device.type == "cuda":
            torch.cuda.set_device(device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {name!r} can't be used: {_one_line(error)}") from error
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _DTYPES[name]


def _from_pretrained(options: ModelOptions, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    if options.layers and options.gguf_file:
        raise ModelError("only some of the layers can't be taken from a GGUF file")
    source: dict[str, Any] = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    if options.gguf_file:
        source["gguf_file"] = options.gguf_file
    where = "folder" if Path(options.model).is_dir() else "no local folder of that name; on the hub"
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model, **source)
        config = AutoConfig.from_pretrained(options.model, **source)
        if options.layers:
            _cut(config, options)
        if options.ranks.several:
            _check_parts(config, options)
            source["distributed_config"] = DistributedConfig(tp_size=options.ranks.count)
        model = AutoModelForCausalLM.from_pretrained(
            options.model,
            dtype=dtype,
            config=config,
            attn_implementation=_attention_implementation(config),
            use_safetensors=None if options.gguf_file else True,
            **source,
        )
    except ModelError:
        raise
    except Exception as error:  # the loaders of a dozen libraries raise whatever they like
        raise ModelError(f"can't load model {options.model!r} ({where}): {_one_line(error)}") from error
    return (model if options.ranks.several else model.to(device)).eval(), tokenizer


def _check_parts(config: Any, options: ModelOptions) -> None:
    """Raises ModelError for a model that has no plan for its parts, or heads that can't be shared out evenly."""
    text, count = config.get_text_config(), options.ranks.count
    if not getattr(text, "base_model_tp_plan", None):
        raise ModelError(f"model type {text.model_type!r} has no plan for tensor parallelism in transformers")
    if options.gguf_file or options.trust_remote_code:
        raise ModelError("tensor parallelism is for safetensors and for transformers' own models")
    heads = {name: getattr(text, name, 0) or 0 for name in ("num_attention_heads", "num_key_value_heads")}
    for name, number in heads.items():
        if number % count:
            raise ModelError(f"{name} is {number}, which {count} ranks can't share evenly")


def _cut(config: Any, options: ModelOptions) -> None:
    """Leaves the first layers only; the embeddings, the last norm and the head stay. Raises ModelError."""
    text = config.get_text_config()
    if not options.layers <= text.num_hidden_layers:
        raise ModelError(f"{options.layers} layers of a model that has {text.num_hidden_layers}")
    text.num_hidden_layers = options.layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: options.layers]


def load_tokens_alone(options: ModelOptions, lm: Callable[[int, int], RaggedModel]) -> ServedModel:
    """What is said of a draft without a model: that of the tokenizer, as far as the model's head goes.
    `lm(context_length, padded_vocabulary_size)` makes what takes the model's place. Raises ModelError."""
    source: dict[str, Any] = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model, **source)
    except Exception as error:
        raise ModelError(f"can't load the tokenizer of {options.model!r}: {_one_line(error)}") from error
    try:
        head = int(AutoConfig.from_pretrained(options.model, **source).get_text_config().vocab_size)
    except Exception as error:
        raise ModelError(f"can't load the config of {options.model!r}: {_one_line(error)}") from error
    strings = model_info.token_strings(tokenizer)[:head]
    context_length = options.context_length or _CONTEXT_WITHOUT_MODEL
    return ServedModel(
        lm=lm(context_length, head),
        name=f"{options.model}, tokens alone",
        vocabulary_size=len(strings),
        padded_vocabulary_size=head,
        vocabulary_fingerprint=model_info.vocabulary_fingerprint(strings),
        end_token_ids=(),
        context_length=context_length,
        slots=options.slots,
        dtype="none",
        device="cpu",
        forward_cost=forward_cost.FREE_TOKENS,
        forms=_forms(tokenizer),
    )


def _forms(tokenizer: Any) -> Forms | None:
    try:
        return Forms(tokenizer)
    except FormError as error:
        logger.warning("no structured output: %s", error)
        return None


def _attention_implementation(config: Any) -> str:
    """sdpa, but for the few models that need more than it has (a cap on attention logits, sinks)."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    supported = model_class is None or getattr(model_class, "_supports_sdpa", True)
    return "sdpa" if supported else "eager"


def _attention_pattern(config: Any) -> AttentionPattern:
    """Raises ModelError for layers whose state can't be rolled back or isn't kept by position."""
    window: int | None = getattr(config, "sliding_window", None)
    declared = getattr(config, "layer_types", None) or [SLIDING if window else FULL]
    types = tuple(sorted(set(declared)))
    unsupported = set(types) - {FULL, SLIDING}
    if unsupported:
        raise ModelError(
            f"model type {config.model_type!r} has layers of type {', '.join(sorted(unsupported))}: "
            "only full and sliding-window attention can be rolled back"
        )
    if SLIDING in types and not window:
        raise ModelError(f"model type {config.model_type!r} has sliding-window layers but no window")
    return AttentionPattern(types, window)


@torch.inference_mode()
def _probe(model: Any) -> DynamicCache:
    """Runs one token to learn the shapes of the layers' keys and values."""
    cache = DynamicCache(config=model.config)
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        model(input_ids=token, cache=cache, use_cache=True, logits_to_keep=1)
    except Exception as error:
        raise ModelError(f"model type {model.config.model_type!r} can't be run: {_one_line(error)}") from error
    # Exactly these classes: subclasses add state of another kind.
    known = (DynamicLayer, DynamicSlidingWindowLayer)
    if not cache.layers or not all(type(layer) in known and layer.is_initialized for layer in cache.layers):
        raise ModelError(
            f"model type {model.config.model_type!r} keeps state other than keys and values (recurrent or linear "
            "attention), which can't be rolled back"
        )
    return cache


def _context_length(options: ModelOptions, config: Any, bytes_per_token: int, device: torch.device, common: int) -> int:
    """`common`: see `_common_context`."""
    own = min((limit for limit in (_model_context(config), common) if limit), default=0)
    if options.context_length:
        if own and options.context_length > own:
            raise ModelError(
                f"context length {options.context_length} is beyond the {own} tokens that the model allows"
            )
        return options.context_length
    memory = options.kv_memory_bytes or _default_kv_memory(device, _buffer_bytes(options, config))
    affordable = memory // (bytes_per_token * (options.slots + options.extra_slots)) - 1
    if affordable < 1:
        raise ModelError(f"KV memory of {memory} bytes holds no token for each of the {options.slots} slots")
    return min(own, affordable) if own else affordable


def _default_kv_memory(device: torch.device, reserved: int) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(_GPU_KV_SHARE * max(0, free - reserved))
    return _CPU_KV_BYTES


def _buffer_bytes(options: ModelOptions, config: Any) -> int:
    """Of the prepared steps, at most."""
    if options.compiled is None:
        return 0
    slots = options.slots + options.extra_slots
    return compiled_steps.most_buffer_bytes(options.compiled, slots, int(config.vocab_size))


def _model_context(config: Any) -> int:
    """Longest sequence whose positions have one meaning; 0 if the model has no limit.

    "longrope" changes the rotation of all positions once any sequence of the batch is longer than in pretraining: then
    keys in the cache are of the wrong kind, and a request's output depends on its neighbours'.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    variants = [rope, *(each for each in rope.values() if isinstance(each, dict))]  # one, or one for each layer type
    limits = [each["original_max_position_embeddings"] for each in variants if each.get("rope_type") == "longrope"]
    limits.append(getattr(config, "max_position_embeddings", 0) or 0)
    return min((int(limit) for limit in limits if limit), default=0)


def _common_context(model: Any, pattern: AttentionPattern) -> int:
    """The longest sequence that the declared layers and the model's own forward take for the same, where they differ; 0: they don't.

    A class may ignore a window that a config has from another one (Llama's does), or take it for all layers whatever types are declared
    (Mistral's). And transformers' caches go by the declaration: past the window its own outputs would hang on how they are made.
    """
    # With two types a forward has a mask for each. A model of somebody else's code may keep its window where no change of the config reaches it.
    if pattern.window is None or len(pattern.layer_types) > 1 or not type(model).__module__.startswith("transformers."):
        return 0
    if _looks_at_its_window(model) == (SLIDING in pattern.layer_types):
        return 0
    logger.warning(
        "the config declares layers of type %s and a window of %d tokens, which model type %r doesn't make of it: no session is longer",
        pattern.layer_types[0], pattern.window, model.config.model_type,
    )  # fmt: skip
    return pattern.window


def _spread_ids(count: int, vocabulary: int) -> IdArray:
    """Tokens from all over the vocabulary. The first ones may be reserved and all alike, and of such it says nothing where they stand."""
    return (np.arange(count) * vocabulary // count).astype(np.uint32)


@torch.inference_mode()
def _looks_at_its_window(model: Any) -> bool:
    """Whether the model's own forward, without a cache, hangs on the window of its config."""
    config = model.config.get_text_config()
    token_ids = torch.from_numpy(_spread_ids(7, config.vocab_size).astype(np.int64))[None].to(model.device)
    window, last = config.sliding_window, []
    try:
        for config.sliding_window in (1, 2):  # each sees itself alone, or one more
            last.append(model(input_ids=token_ids, use_cache=False).logits[0, -1])
    finally:
        config.sliding_window = window
    return not torch.equal(*last)


@torch.inference_mode()
def _check_against_model(model: Any, lm: CausalLM) -> None:
    """One real, ragged forward over the slot cache must give the logits of the model's own forward.

    This is what tells a model whose positions or masks the engine can't steer from one it can.
    """
    length = min(7, lm.cache.max_length)
    known = int(model.get_input_embeddings().weight.shape[0])  # a head may have more
    token_ids = _spread_ids(length, min(known, lm.padded_vocabulary_size))
    expected = model(input_ids=torch.from_numpy(token_ids.astype(np.int64))[None].to(model.device)).logits[0].float()
    first = max(1, length // 2)
    try:
        feeds = [Feed(0, 0, token_ids[:first], 1)]
        if lm.cache.slots > 1:
            feeds.append(Feed(1, 0, token_ids, length))
        begun = lm.forward(feeds)
        # Over the same slots, from the middle: the rest of the tokens beside one token fed again.
        feeds = [Feed(0, first, token_ids[first:], length - first)] if first < length else []
        if lm.cache.slots > 1:
            feeds.append(Feed(1, length - 1, token_ids[-1:], 1))
        logits = lm.forward(feeds) if feeds else begun  # one token, and one slot
    except Exception as error:
        raise ModelError(f"model type {model.config.model_type!r} can't use the cache: {_one_line(error)}") from error
    wanted = torch.cat([expected[first:], expected[-1:]])[: logits.shape[0]]  # of one token, the last is the first
    difference = _difference(logits, wanted)
    if not difference <= _tolerance(lm):
        raise ModelError(
            f"model type {model.config.model_type!r} gives other logits over the slot cache (relative difference "
            f"{difference:.2g}): it doesn't follow the positions and masks it is given"
        )


def _for_small_batches(
    model: Any, pattern: AttentionPattern, cache: SlotCache, padded: int, *, pack_head: bool
) -> CausalLM | None:
    """The model with its layers joined, where they are known; None where they are not, its weights laid out anew."""
    if not can_be_joined(model):
        logger.info("%d linear layers laid out for small batches", lay_inputs_first(model))
        return None
    try:
        lm = CausalLM(model, pattern, cache, padded, JoinedLayers(model, pack_head=pack_head))
        _check_against_model(model, lm)
    except Exception as error:  # noqa: BLE001 - whatever it is, the model's own layers are still there
        logger.warning("layers are not joined, since joined ones would be wrong: %s", _one_line(error))
        return None
    logger.info("the operations of %d layers are joined for small batches", len(cache.layers))
    return lm


def _prepare_steps(lm: CausalLM, options: CompileOptions) -> None:
    """Gives the model its prepared steps, each of which must give the logits of the forward as it is."""
    shapes = StepShapes(lm.cache.slots, options.longest_feed, options.longest_rows, lm.max_length)
    lm.compiled = CompiledSteps(lm.run, lm.columns, shapes, lm.padded_vocabulary_size, options)
    tokens = np.random.default_rng(0)

    def check(shape: StepShape) -> None:
        sizes = [1 + (shape.width - 1 + slot) % shape.width for slot in range(shape.rows)]
        feeds = [
            Feed(
                slot,
                shape.columns - size,
                tokens.integers(0, lm.padded_vocabulary_size, size, dtype=np.uint32),
                min(size, options.longest_rows),
            )
            for slot, size in enumerate(sizes)
        ]
        logits, expected = (
            lm.forward_in(shape, feeds),
            lm.forward_as_it_is(feeds),
        )  # the second would mend a false store
        difference = _difference(logits, expected)
        if not difference <= _tolerance(lm):
            raise ArithmeticError(f"{shape} gives other logits (relative difference {difference:.2g})")

    lm.cache.fill_with_noise()
    lm.compiled.prepare(check)
    for slot in range(lm.cache.slots):
        lm.clear_slot(slot)


def _tolerance(lm: CausalLM) -> float:
    return 1e-3 if lm.dtype == torch.float32 else 5e-2


def _difference(logits: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative to the largest one."""
    return float((logits - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6))


def _measure_forward(lm: RaggedModel, *, computes_padding: bool) -> ForwardCost:
    def run(size: int) -> None:
        lm.forward([Feed(0, 0, np.zeros(size, dtype=np.uint32), 1)]).cpu()

    cost = forward_cost.measure(run, lm.max_length, computes_padding=computes_padding)
    logger.info(
        "a forward of %s tokens takes %s ms",
        " / ".join(str(size) for size, _ in cost.points),
        " / ".join(f"{1e3 * seconds:.2f}" for _, seconds in cost.points),
    )
    return cost


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
