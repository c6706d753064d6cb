"""Distil a small draft model from a teacher's recorded distributions.

The student is a narrow Llama with the teacher's tokenizer. Most of its weights are the embedding table, which starts as
a PCA of the teacher's, so that only the few layers above it have to be learned from nothing:

    python models/distill.py --data train.npz --heldout heldout.npz \\
        --teacher models/smollm2-135m-instruct --output models/smol-draft --minutes 60

``--init FOLDER`` continues from a student instead; the shape flags may ask for more layers, heads or MLP columns than
it has, and everything new starts with zero output projections, so that training goes on from exactly where it stood.
``--cut`` drops the last layers instead.

The loss is KL(teacher || student) plus the total variation distance, on the teacher's 48 likeliest tokens and one more
outcome for all the rest. KL alone spends the student's small capacity on the tails; the total variation distance is
1 - sum_x min(p, q), which is 1 - the acceptance probability of speculative decoding, so it is the thing itself, but its
gradient vanishes where the student is hopeless. Together they beat either.

The softmax runs over the tokens that some position of the batch needs plus a uniform sample of the others, weighted to
stand for all of them: an unbiased estimate of the normaliser at a quarter of the cost. Evaluation is exact.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from optimization import Schedule, make_optimizers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Samples:
    """Answers of the teacher with the distributions they were drawn from, as ``sample_teacher.py`` writes them.

    ``sequences[i]`` is prompt + answer, [prompt_len + answer_len] token ids. The recorded rows of answer i are
    ``rows[i]:rows[i + 1]`` of ``top_ids`` and ``top_logprobs`` ([tokens, k], temperature 1, natural log); row j is
    the distribution of answer token j, thus the output at position ``prompt_len + j - 1``.
    """

    sequences: list[IntArray]
    prompt_len: IntArray
    rows: IntArray
    top_ids: NDArray[np.uint16]
    top_logprobs: NDArray[np.float16]

    def __len__(self) -> int:
        return len(self.sequences)


def load_samples(paths: Sequence[Path]) -> Samples:
    """Read one or more sample files as one set."""
    sequences: list[IntArray] = []
    prompt_lens, answer_lens, ids, logprobs = [], [], [], []
    for path in paths:
        with np.load(path) as file:
            prompt_ends = np.cumsum(file["prompt_len"], dtype=np.int64)
            answer_ends = np.cumsum(file["answer_len"], dtype=np.int64)
            prompts = np.split(file["prompt_ids"].astype(np.int64), prompt_ends[:-1])
            answers = np.split(file["answer_ids"].astype(np.int64), answer_ends[:-1])
            sequences += [np.concatenate(pair) for pair in zip(prompts, answers, strict=True)]
            prompt_lens.append(file["prompt_len"].astype(np.int64))
            answer_lens.append(file["answer_len"].astype(np.int64))
            ids.append(file["top_ids"])
            logprobs.append(file["top_logprobs"])
    rows = np.concatenate([[0], np.cumsum(np.concatenate(answer_lens))])
    return Samples(sequences, np.concatenate(prompt_lens), rows, np.concatenate(ids), np.concatenate(logprobs))


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences and, flattened over all answers, where the teacher's rows belong."""

    input_ids: Tensor  # [batch, length]
    positions: Tensor  # [tokens], index into the flattened [batch * length] outputs
    top_ids: Tensor  # [tokens, k]
    top_logprobs: Tensor  # [tokens, k]


def make_batch(samples: Samples, chosen: IntArray) -> Batch:
    """Padding is on the right, where causal attention never looks, so no mask is needed."""
    # The last token of an answer is never an input.
    length = max(len(samples.sequences[i]) for i in chosen) - 1
    input_ids = np.zeros((len(chosen), length), dtype=np.int64)
    positions, rows = [], []
    for row, index in enumerate(chosen):
        tokens = samples.sequences[index][:-1]
        input_ids[row, : len(tokens)] = tokens
        first = row * length + samples.prompt_len[index] - 1
        count = samples.rows[index + 1] - samples.rows[index]
        positions.append(np.arange(first, first + count))
        rows.append(np.arange(samples.rows[index], samples.rows[index + 1]))
    picked = np.concatenate(rows)
    return Batch(
        torch.from_numpy(input_ids),
        torch.from_numpy(np.concatenate(positions)),
        torch.from_numpy(samples.top_ids[picked].astype(np.int64)),
        torch.from_numpy(samples.top_logprobs[picked].astype(np.float32)),
    )


def endless_batches(samples: Samples, size: int, rng: np.random.Generator) -> Iterator[Batch]:
    """Shuffled epochs; answers of similar length share a batch, so that little compute goes into padding."""
    lengths = np.array([len(sequence) for sequence in samples.sequences])
    while True:
        noisy = lengths + rng.uniform(0, 16, len(lengths))
        groups = np.array_split(np.argsort(noisy), max(1, len(lengths) // size))
        for group in rng.permutation(len(groups)):
            yield make_batch(samples, groups[group])


def loss_on(
    student: LlamaForCausalLM, batch: Batch, negatives: int, dropout: float, tv_weight: float
) -> tuple[Tensor, float]:
    """The loss [scalar], and the overlap sum min(p, q) on the teacher's top tokens, from the sampled softmax."""
    table = student.get_input_embeddings().weight
    inputs = nn.functional.dropout(nn.functional.embedding(batch.input_ids, table), dropout)
    hidden = student.model(inputs_embeds=inputs, use_cache=False).last_hidden_state
    hidden = hidden.reshape(-1, hidden.shape[-1])[batch.positions]

    needed, columns = torch.unique(batch.top_ids, return_inverse=True)
    others = torch.ones(table.shape[0], dtype=torch.bool)
    others[needed] = False
    rest = others.nonzero().squeeze(1)
    sampled = rest[torch.randint(len(rest), (negatives,))]
    logits = hidden @ table[torch.cat([needed, sampled])].T
    # Each sampled token stands for len(rest) / negatives tokens of the vocabulary.
    weight = torch.zeros(logits.shape[1])
    weight[len(needed) :] = math.log(len(rest) / negatives)
    log_q = logits.gather(1, columns) - torch.logsumexp(logits + weight, dim=1, keepdim=True)

    log_p, p, q = batch.top_logprobs, batch.top_logprobs.exp(), log_q.exp()
    p_rest = (1 - p.sum(1)).clamp_min(1e-6)
    q_rest = (1 - q.sum(1)).clamp_min(1e-6)
    kl = (p * (log_p - log_q)).sum(1) + p_rest * (p_rest.log() - q_rest.log())
    tv = 0.5 * ((p - q).abs().sum(1) + (p_rest - q_rest).abs())
    overlap = torch.minimum(p, q).sum(1).mean().item()
    return (kl + tv_weight * tv).mean(), overlap


@torch.inference_mode()
def evaluate(student: LlamaForCausalLM, samples: Samples, size: int = 8) -> dict[str, float]:
    """Agreement with the recorded rows: exact softmax of the student, the teacher known on its top 48 only.

    At T = 1 the sum of min(p, q) runs over those 48 tokens, which is a lower bound. At T = 0.7 the teacher's row is
    renormalised over them. ``measure_pair.py`` has exact numbers and needs the teacher.
    """
    student.eval()
    totals = np.zeros(3)
    count = 0
    table = student.get_output_embeddings().weight
    for start in range(0, len(samples), size):
        batch = make_batch(samples, np.arange(start, min(start + size, len(samples))))
        hidden = student.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        logits = hidden.reshape(-1, hidden.shape[-1])[batch.positions] @ table.T
        columns = batch.top_ids
        q = torch.softmax(logits, dim=1).gather(1, columns)
        q_cool = torch.softmax(logits / 0.7, dim=1).gather(1, columns)
        p_cool = torch.softmax(batch.top_logprobs / 0.7, dim=1)
        totals[0] += torch.minimum(batch.top_logprobs.exp(), q).sum().item()
        totals[1] += torch.minimum(p_cool, q_cool).sum().item()
        totals[2] += (logits.argmax(1) == columns[:, 0]).sum().item()
        count += len(columns)
    overlap, overlap_cool, argmax = totals / count
    return {"overlap_t1": overlap, "overlap_t07": overlap_cool, "argmax": argmax}


def pca(table: Tensor, width: int) -> Tensor:
    """The rows of ``table`` [vocabulary, d] in their ``width`` strongest directions, [vocabulary, width].

    Uncentred: inner products are what the output layer computes, so they are what is kept.
    """
    rows = table.float()
    _, vectors = torch.linalg.eigh(rows.T @ rows)  # ascending eigenvalues
    return rows @ vectors[:, -width:].flip(1)


def fresh_student(teacher: Path, shape: argparse.Namespace) -> LlamaForCausalLM:
    """A student that knows nothing but the teacher's embeddings, compressed."""
    source = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    config = LlamaConfig(
        vocab_size=source.config.vocab_size,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=32,
        intermediate_size=shape.intermediate,
        max_position_embeddings=source.config.max_position_embeddings,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=source.config.bos_token_id,
        eos_token_id=source.config.eos_token_id,
        pad_token_id=source.config.pad_token_id,
    )
    student = LlamaForCausalLM(config)
    compressed = pca(source.get_input_embeddings().weight.detach(), shape.hidden)
    # Logits of a fresh model should be small: norms like 0.02-initialised rows, directions from the PCA.
    compressed *= 0.02 * math.sqrt(shape.hidden) / compressed.norm(dim=1).mean()
    student.get_input_embeddings().weight.data.copy_(compressed)
    return student


def grow(student: LlamaForCausalLM, shape: argparse.Namespace) -> LlamaForCausalLM:
    """The same function in a larger shape: what is new reaches the output only through zero columns."""
    config = copy.deepcopy(student.config)
    config.num_hidden_layers = max(config.num_hidden_layers, shape.layers)
    config.num_attention_heads = max(config.num_attention_heads, shape.heads)
    config.num_key_value_heads = max(config.num_key_value_heads, shape.kv_heads)
    config.intermediate_size = max(config.intermediate_size, shape.intermediate)
    old_group = student.config.num_attention_heads // student.config.num_key_value_heads
    if config.num_attention_heads // config.num_key_value_heads != old_group:
        raise ValueError("query heads per key head must stay the same, or old heads would read new keys")
    grown = LlamaForCausalLM(config)
    old = student.state_dict()
    with torch.no_grad():
        for layer in grown.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        for name, value in grown.state_dict().items():
            if name in old:
                value[tuple(slice(size) for size in old[name].shape)] = old[name]
    return grown


def cut(student: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """The first ``layers`` layers of ``student`` only, to be trained on for a few minutes.

    A layer of a model this narrow costs mostly the overhead of calling it, so depth is dear when it runs. It is worth
    having while it learns: the layers below are better than those of a student that was shallow from the start.
    """
    config = copy.deepcopy(student.config)
    config.num_hidden_layers = layers
    shallow = LlamaForCausalLM(config)
    kept = shallow.state_dict().keys()
    shallow.load_state_dict({name: value for name, value in student.state_dict().items() if name in kept})
    return shallow


def save(student: LlamaForCausalLM, output: Path, report: dict[str, float]) -> None:
    """Write bfloat16 weights and the numbers they were chosen for; the weights appear in one rename."""
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=output.parent) as temporary:
        copy.deepcopy(student).to(torch.bfloat16).save_pretrained(temporary)
        for file in sorted(Path(temporary).iterdir(), key=lambda file: file.suffix == ".safetensors"):
            file.chmod(0o644)
            file.replace(output / file.name)
    (output / "distillation.json").write_text(json.dumps(report, indent=2) + "\n")


def copy_tokenizer(teacher: Path, output: Path) -> None:
    """The draft must speak the target's tokens and stop where it stops: the same files, byte for byte."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        if (teacher / name).is_file():
            shutil.copyfile(teacher / name, output / name)


def train(student: LlamaForCausalLM, data: Samples, heldout: Samples, options: argparse.Namespace) -> None:
    """Train for ``options.minutes``; keep the average weights that overlap best on ``heldout``.

    The schedule follows the clock, so that a slow or busy machine ends the cosine too, only with fewer steps.
    """
    output: Path = options.output
    average = copy.deepcopy(student).requires_grad_(False)
    optimizers = make_optimizers(student, options.lr, options.embedding_lr, options.decay)
    schedule = Schedule(optimizers)
    batches = endless_batches(data, options.batch, np.random.default_rng(options.seed))
    best = evaluate(student, heldout)
    print(f"start {format_report(best)}", flush=True)
    save(student, output, best)
    started = reported = time.monotonic()
    tokens, step, running = 0, 0, 0.0
    budget = options.minutes * 60
    while (now := time.monotonic()) - started < budget:
        schedule.set((now - started) / budget)
        batch = next(batches)
        student.train()
        loss, overlap = loss_on(student, batch, options.negatives, options.dropout, options.tv_weight)
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        tokens += len(batch.positions)
        running = overlap if step == 1 else 0.98 * running + 0.02 * overlap
        keep = min(options.average, step / (step + 10))
        with torch.no_grad():
            for mean, value in zip(average.parameters(), student.parameters(), strict=True):
                mean.lerp_(value, 1 - keep)
        if now - reported > options.report_minutes * 60:
            reported = now
            best = keep_if_better(average, heldout, output, best, f"{step} {tokens} {running:.4f}", now - started)
    keep_if_better(average, heldout, output, best, f"{step} {tokens} {running:.4f}", budget)


def keep_if_better(
    model: LlamaForCausalLM,
    heldout: Samples,
    output: Path,
    best: dict[str, float],
    label: str,
    seconds: float,
) -> dict[str, float]:
    """Evaluate, print, and save where the overlap at T = 1 rose."""
    report = evaluate(model, heldout)
    better = report["overlap_t1"] > best["overlap_t1"]
    if better:
        save(model, output, report)
    print(
        f"{seconds / 60:5.1f} min {label} {format_report(report)}{' *' if better else ''}",
        flush=True,
    )
    return report if better else best


def format_report(report: dict[str, float]) -> str:
    return " ".join(f"{name} {value:.4f}" for name, value in report.items())


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Distil a draft model from sample_teacher.py's files.")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="training samples (.npz)")
    parser.add_argument("--heldout", type=Path, required=True, help="samples on other topics (.npz)")
    parser.add_argument("--teacher", type=Path, required=True, help="the target's folder")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--init", type=Path, help="continue from this student")
    parser.add_argument("--cut", action="store_true", help="with --init: keep only the first --layers layers")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--report-minutes", type=float, default=3.0)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--batch", type=int, default=8, help="answers in a step")
    parser.add_argument("--negatives", type=int, default=1024, help="tokens sampled for the softmax")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--embedding-lr", type=float, default=1.5e-3)
    parser.add_argument("--decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1, help="on the embedded inputs")
    parser.add_argument("--tv-weight", type=float, default=1.0)
    parser.add_argument("--average", type=float, default=0.995, help="decay of the weights' mean")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    if options.init:
        student = LlamaForCausalLM.from_pretrained(options.init, dtype=torch.float32)
        student = cut(student, options.layers) if options.cut else grow(student, options)
    else:
        student = fresh_student(options.teacher, options)
    print(f"{student.num_parameters() / 1e6:.2f} M parameters", flush=True)
    train(student, load_samples(options.data), load_samples([options.heldout]), options)
    copy_tokenizer(options.teacher, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
