"""From parsed arguments to what the client sends."""

from __future__ import annotations

import argparse
from pathlib import Path

from tandem.cli.arguments import AUTO
from tandem.cli.errors import USAGE, CliError
from tandem.client import GenerationOptions, LogprobsMode, Message, Method, Prompt, StructuredOutput

FLAGS = {
    "num_speculative_tokens": "--gamma",
    "adaptive_speculative_tokens": "--gamma",
    "acceptance_method": "--method",
    "stop_token_ids": "--stop-token-id",
    "banned_token_ids": "--ban-token-id",
    "allowed_token_ids": "--allow-token-id",
    "bad_words": "--bad-word",
    "top_logprobs": "--logprobs",
    "skip_special_tokens": "--keep-special-tokens",
    "token_offset": "--offset",
    "structured_output.json_schema": "--json-schema",
    "structured_output.regex": "--regex",
    "structured_output.grammar": "--grammar",
}
"""Of the contract's fields whose flags have other names."""


def options_of(arguments: argparse.Namespace) -> GenerationOptions:
    """The generation options among the arguments; what wasn't given is left to the server."""
    return GenerationOptions(
        max_tokens=arguments.max_tokens,
        min_tokens=arguments.min_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        seed=arguments.seed,
        method=Method(arguments.method) if arguments.method else None,
        num_speculative_tokens=None if arguments.gamma == AUTO else arguments.gamma,
        adaptive_speculative_tokens=True if arguments.gamma == AUTO else None,
        stop=tuple(arguments.stop),
        stop_token_ids=tuple(arguments.stop_token_id),
        ignore_eos=arguments.ignore_eos,
        repetition_penalty=arguments.repetition_penalty,
        presence_penalty=arguments.presence_penalty,
        frequency_penalty=arguments.frequency_penalty,
        logit_bias=dict(arguments.logit_bias) or None,
        banned_token_ids=tuple(arguments.ban_token_id),
        allowed_token_ids=tuple(arguments.allow_token_id),
        bad_words=tuple(arguments.bad_word),
        n=getattr(arguments, "n", None),
        skip_special_tokens=False if arguments.keep_special_tokens else None,
        logprobs=arguments.logprobs is not None,
        top_logprobs=arguments.logprobs or None,
        logprobs_mode=LogprobsMode(arguments.logprobs_mode) if arguments.logprobs_mode else None,
        structured_output=_form_of(arguments),
    )


def _form_of(arguments: argparse.Namespace) -> StructuredOutput | None:
    if arguments.json_schema is not None:
        return StructuredOutput(json_schema=_read(arguments.json_schema, "--json-schema"))
    if arguments.json_object:
        return StructuredOutput(json_object=True)
    if arguments.regex is not None:
        return StructuredOutput(regex=arguments.regex)
    if arguments.grammar is not None:
        return StructuredOutput(grammar=_read(arguments.grammar, "--grammar"))
    return None


def _read(file: str, flag: str) -> str:
    try:
        return Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"{flag}: {file} can't be read: {getattr(error, 'strerror', None) or error}", USAGE) from error


def prompt_of(arguments: argparse.Namespace, text: str) -> Prompt:
    """The prompt as a chat message, or as it stands with --raw."""
    if arguments.raw:
        return text
    system = [Message("system", arguments.system)] if arguments.system else []
    return [*system, Message("user", text)]
