"""One request of an HTTP caller, read and checked as far as that can be done without the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tandem.v1 import orchestrator_pb2 as api

from ..request import MAX_COMPLETIONS
from .json_object import JsonObject
from .parameters import max_tokens_of, set_parameters
from .prompts import set_messages, set_prompt

Kind = Literal["chat", "completion"]

DEFAULT_COMPLETION_TOKENS = 16
"""What OpenAI's completions have had from the beginning, and vLLM's too. A chat goes on to its end."""


@dataclass(frozen=True, slots=True)
class Inquiry:
    """What is to be generated, and how it is to be told."""

    kind: Kind
    request: api.GenerateRequest
    model: str | None
    stream: bool
    include_usage: bool
    """A chunk with the usage at the end of a stream."""
    return_tokens: bool
    """Each token with its id and its kind; our own addition."""
    max_tokens_name: str
    """Under which of its names the caller set the limit."""
    form_name: str
    """Under which of its names the caller set the form of the output."""

    def name_for_caller(self, field: str) -> str:
        """A field of the GenerateRequest as this caller knows it."""
        prompt = "messages" if self.kind == "chat" else "prompt"
        if field.startswith("structured_output"):
            return self.form_name
        renamed = {"text": prompt, "token_ids": prompt, "prompt": prompt, "messages.role": "messages"}
        if self.kind == "completion":
            renamed["top_logprobs"] = "logprobs"  # where it is the number of the likeliest
        return self.max_tokens_name if field == "max_tokens" else renamed.get(field, field)


def read_inquiry(kind: Kind, values: dict[str, Any], request_id: str) -> Inquiry:
    """Raises InvalidArgument with the name of the field at fault."""
    body = JsonObject(values)
    request = api.GenerateRequest(request_id=request_id)
    model = body.string("model")
    if kind == "chat":
        set_messages(request, body)
        max_tokens, name = max_tokens_of(body, "max_completion_tokens", "max_tokens")
        request.logprobs = bool(body.boolean("logprobs"))
        request.top_logprobs = body.integer("top_logprobs") or 0
        _refuse_other_chats(body)
    else:
        set_prompt(request, body)
        max_tokens, name = max_tokens_of(body, "max_tokens")
        max_tokens = DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens
        request.echo = bool(body.boolean("echo"))
        likeliest = body.integer("logprobs")
        request.logprobs, request.top_logprobs = likeliest is not None, likeliest or 0
        if request.echo and request.logprobs:
            raise body.refused("logprobs", "of an echoed prompt are not supported")
        _refuse_other_completions(body)
    if max_tokens is not None:
        request.max_tokens = max_tokens
    set_parameters(request, body)
    if request.n > MAX_COMPLETIONS:  # each has its choice in the answer, before the plan is made
        raise body.refused("n", f"must be 1 to {MAX_COMPLETIONS}")
    stream, include_usage = _stream(body)
    return_tokens = bool(body.boolean("return_tokens"))
    body.refuse_unknown()
    form_name = "structured_outputs" if body.has("structured_outputs") else "response_format"
    return Inquiry(kind, request, model, stream, include_usage, return_tokens, name, form_name)


def _stream(body: JsonObject) -> tuple[bool, bool]:
    stream = bool(body.boolean("stream"))
    options = body.object("stream_options")
    if options is None:
        return stream, False
    if not stream:
        raise body.refused("stream_options", "is only for a stream")
    include_usage = bool(options.boolean("include_usage"))
    options.neutral("include_obfuscation", False)
    options.neutral("continuous_usage_stats", False)
    options.refuse_unknown()
    return stream, include_usage


def _refuse_other_completions(body: JsonObject) -> None:
    body.neutral("suffix", "")
    body.neutral("add_special_tokens", True)


def _refuse_other_chats(body: JsonObject) -> None:
    body.neutral("echo", False)
    body.neutral("tools", [])
    body.neutral("tool_choice", "none", "auto")
    body.neutral("functions", [])
    body.neutral("function_call", "none", "auto")
    body.neutral("parallel_tool_calls", True, False)
    body.neutral("modalities", ["text"])
    body.neutral("audio")
    body.neutral("prediction")
    body.neutral("reasoning_effort", "none")
    body.neutral("verbosity", "medium")
    body.neutral("web_search_options")
    body.neutral("add_generation_prompt", True)
    body.neutral("continue_final_message", False)
    body.neutral("add_special_tokens", False)
