"""From parsed arguments to what the client sends."""

from __future__ import annotations

import argparse

from tandem.cli.arguments import AUTO
from tandem.client import GenerationOptions, LogprobsMode, Message, Method, Prompt


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
    )


def prompt_of(arguments: argparse.Namespace, text: str) -> Prompt:
    """The prompt as a chat message, or as it stands with --raw."""
    if arguments.raw:
        return text
    system = [Message("system", arguments.system)] if arguments.system else []
    return [*system, Message("user", text)]
