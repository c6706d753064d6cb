"""Make the tiny pair that the tests run on: ``tiny-target`` and ``tiny-draft``, in a few minutes.

    python models/make_tiny_pair.py            # -> models/tiny-target, models/tiny-draft

The text is what every Python has, the standard library's sources and docstrings, so the models say
something that looks like Python and the answers to chat prompts look like docstrings and end. The
draft is distilled from the target until they agree about as well as real pairs do, which random
weights never would: with those, every path behind an accepted token would go untested.
"""

from __future__ import annotations

import argparse
import ast
import math
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from measure_pair import measure
from numpy.typing import NDArray
from optimization import Schedule, make_optimizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 512
CONTEXT = 1024
END = "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Enough for a minute of training; modules in pure Python that every platform has.
MODULES = (
    *("argparse", "ast", "bisect", "calendar", "cmd", "codecs", "collections/__init__"),
    *("configparser", "contextlib", "copy", "csv", "dataclasses", "datetime", "decimal"),
    *("difflib", "dis", "doctest", "enum", "fileinput", "fnmatch", "fractions", "ftplib"),
    *("functools", "getopt", "glob", "gzip", "heapq", "imaplib", "inspect", "ipaddress"),
    *("locale", "mailbox", "mimetypes", "netrc", "ntpath", "numbers", "optparse", "os"),
    *("pdb", "pickle", "pickletools", "platform", "poplib", "posixpath", "pprint", "profile"),
    *("pstats", "queue", "random", "reprlib", "sched", "selectors", "shelve", "shlex", "shutil"),
    *("smtplib", "socket", "socketserver", "ssl", "statistics", "string", "subprocess"),
    *("tarfile", "tempfile", "textwrap", "threading", "timeit", "tokenize", "trace"),
    *("traceback", "types", "typing", "uuid", "warnings", "wave", "weakref", "zipapp", "zipfile"),
)
HELD_OUT = ("bdb", "graphlib", "filecmp", "secrets", "linecache")


def module_sources(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name, source) of those of ``names`` that this Python has as one file."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for name in names:
        path = root / f"{name}.py"
        if path.is_file():
            yield name.removesuffix("/__init__"), path.read_text(encoding="utf-8", errors="replace")


def docstring_chats(module: str, source: str) -> Iterator[str]:
    """A question and its answer for everything in ``source`` that has a docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            text = ast.get_docstring(node)
            if text and len(text) > 20:
                answer = text.split("\n\n")[0]
                question = f"What does {module}.{node.name} do?"
                yield f"<|user|>{question}{END}<|assistant|>{answer}{END}"


def documents(names: Sequence[str]) -> list[str]:
    """Sources in pieces of about a screen and chats, every one ended by the end token."""
    texts: list[str] = []
    for module, source in module_sources(names):
        texts += [source[i : i + 1500] + END for i in range(0, len(source), 1500)]
        texts += 3 * list(docstring_chats(module, source))
    return texts


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every string can be encoded, since all 256 bytes are tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def make_model(hidden: int, layers: int, heads: int) -> LlamaForCausalLM:
    """A Llama with two query heads for every key head."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=16,
        intermediate_size=3 * hidden,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def windows(ids: NDArray[np.int64], count: int, length: int, rng: np.random.Generator) -> Tensor:
    """``count`` random windows of ``length`` tokens, [count, length]."""
    starts = rng.integers(0, len(ids) - length, count)
    return torch.from_numpy(ids[starts[:, None] + np.arange(length)])


def train(model: LlamaForCausalLM, ids: NDArray[np.int64], steps: int, teacher: LlamaForCausalLM | None) -> None:
    """Language modelling on ``ids``, or, with a teacher, KL plus total variation to its rows."""
    optimizers = make_optimizers(model, lr=1e-2, embedding_lr=1e-2, decay=0.01)
    schedule = Schedule(optimizers)
    rng = np.random.default_rng(0)
    for step in range(steps):
        schedule.set((step + 1) / steps)
        batch = windows(ids, 16, 192, rng)
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
        log_q = torch.log_softmax(logits, dim=-1)
        if teacher is None:
            loss = -log_q.gather(2, batch[:, 1:, None]).mean()
        else:
            with torch.no_grad():
                rows = teacher(input_ids=batch, use_cache=False).logits[:, :-1]
                log_p = torch.log_softmax(rows, dim=-1)
            p = log_p.exp()
            kl = (p * (log_p - log_q)).sum(-1).mean()
            loss = kl + 0.5 * (p - log_q.exp()).abs().sum(-1).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            print(f"  step {step + 1} of {steps}: loss {loss.item():.3f}", flush=True)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Put model and tokenizer into ``output``, the weights last."""
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=output.parent) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        for file in sorted(Path(temporary).iterdir(), key=lambda f: f.suffix == ".safetensors"):
            file.chmod(0o644)
            file.replace(output / file.name)


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[NDArray[np.int64]]:
    return [np.array(ids, dtype=np.int64) for ids in tokenizer(list(texts))["input_ids"]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make the pair of models that the tests run on.")
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--target-steps", type=int, default=500)
    parser.add_argument("--draft-steps", type=int, default=500)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)

    texts = documents(MODULES)
    np.random.default_rng(0).shuffle(texts)
    tokenizer = make_tokenizer(texts)
    ids = np.concatenate(encode(tokenizer, texts))
    print(f"{len(texts)} documents, {len(ids)} tokens", flush=True)

    target = make_model(hidden=64, layers=2, heads=4)
    train(target, ids, options.target_steps, teacher=None)
    save(target.eval(), tokenizer, options.folder / "tiny-target")
    draft = make_model(hidden=32, layers=1, heads=2)
    train(draft, ids, options.draft_steps, teacher=target)
    save(draft.eval(), tokenizer, options.folder / "tiny-draft")

    held_out = [(row[:512], 1) for row in encode(tokenizer, documents(HELD_OUT)) if len(row) > 1]
    agreement = measure(target, draft, held_out)
    print(f"held-out modules: {agreement}, of at most {math.log(VOCABULARY):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
