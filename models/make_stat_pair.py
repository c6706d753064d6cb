"""Make the pair for statistical tests: ``stat-target`` and ``stat-draft``, in seconds, no training.

    python models/make_stat_pair.py            # -> models/stat-target, models/stat-draft

Whether an output distribution is exact shows only over hundreds of thousands of draws, and the joint
law of two tokens has V * V outcomes: so V is 20 and a forward costs next to nothing. The weights are
random, scaled so that rows are neither flat nor one-hot and change with the whole context, not only
with the last token (a cache that forgets would go unnoticed otherwise). The draft is the target with
noise on every matrix, so that about half of what it proposes is accepted.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from make_tiny_pair import save
from measure_pair import measure, overlap
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|end|>"
CHARACTERS = "abcdefghijklmnopqr "
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
HIDDEN = 24


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for a character; what isn't in the alphabet is dropped. Decoding joins them again."""
    vocabulary = {END: 0} | {character: i + 1 for i, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[^a-r ]"), "removed"),
            pre_tokenizers.Split(Regex("."), "isolated"),
        ]
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def make_target() -> LlamaForCausalLM:
    """One layer whose attention looks far back and whose output depends on what it sees there."""
    config = LlamaConfig(
        vocab_size=len(CHARACTERS) + 1,
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=48,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    gains = {"q_proj": 1.0, "k_proj": 1.0, "v_proj": 1.5, "o_proj": 1.8, "lm_head": 1.6}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                kind = name.split(".")[-2]
                fan_in = 1 if kind == "embed_tokens" else weight.shape[1]
                weight.normal_(0.0, gains.get(kind, 1.2) / math.sqrt(fan_in))
    return model


def with_noise(model: LlamaForCausalLM, share: float) -> LlamaForCausalLM:
    """A copy whose matrices keep their scale but are ``share`` noise."""
    noisy = copy.deepcopy(model)
    with torch.no_grad():
        for weight in noisy.parameters():
            if weight.ndim == 2:
                noise = torch.randn_like(weight) * weight.std()
                weight.mul_(math.sqrt(1 - share**2)).add_(noise, alpha=share)
    return noisy


@torch.inference_mode()
def context_dependence(model: LlamaForCausalLM, count: int = 500, length: int = 12) -> float:
    """Mean total variation between the rows of two contexts that end in the same four tokens."""
    first = torch.randint(1, model.config.vocab_size, (count, length))
    second = torch.randint(1, model.config.vocab_size, (count, length))
    second[:, -4:] = first[:, -4:]
    rows = [model(input_ids=ids, use_cache=False).logits[:, -1] for ids in (first, second)]
    return 1 - float(overlap(rows[0], rows[1], 1.0).mean())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make the pair of models for statistical tests.")
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--noise", type=float, default=0.4, help="share of noise in the draft")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)

    tokenizer = make_tokenizer()
    target = make_target().eval()
    draft = with_noise(target, options.noise).eval()
    save(target, tokenizer, options.folder / "stat-target")
    save(draft, tokenizer, options.folder / "stat-draft")

    contexts = torch.randint(1, len(tokenizer), (200, 32)).tolist()
    print(measure(target, draft, [(ids, 1) for ids in contexts]))
    print(f"log V = {math.log(len(tokenizer)):.3f}")
    print(f"total variation from tokens more than four back: {context_dependence(target):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
