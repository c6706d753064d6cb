"""From the fields of an OpenAI request to those of a GenerateRequest: the same names, but for a few.

A field that isn't honoured is refused by its name, unless its value asks for nothing.
"""

from __future__ import annotations

import json

from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import sampling_pb2

from ..errors import InvalidArgument
from .json_object import MAX_UINT64, JsonObject

METHODS = {
    "rejection": int(sampling_pb2.ACCEPTANCE_METHOD_REJECTION),
    "coupled": int(sampling_pb2.ACCEPTANCE_METHOD_COUPLED),
}
LOGPROBS_MODES = {
    "raw": int(sampling_pb2.LOGPROBS_MODE_RAW),
    "processed": int(sampling_pb2.LOGPROBS_MODE_PROCESSED),
}
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_INTEGERS = ("n", "min_tokens", "num_speculative_tokens")
_BOOLEANS = (
    "ignore_eos", "include_stop_str_in_output", "adaptive_speculative_tokens", "skip_special_tokens", "token_by_token",
)  # fmt: skip
_ID_LISTS = ("stop_token_ids", "banned_token_ids", "allowed_token_ids")
_FORMS = ("json", "regex", "choice", "grammar", "json_object")
_WITHOUT_EFFECT = ("user", "safety_identifier", "prompt_cache_key")
"""Said to be for the operator's books and for OpenAI's own caches: the answer is the same without."""


def set_parameters(request: api.GenerateRequest, body: JsonObject) -> None:
    """Everything but the prompt and max_tokens. Raises InvalidArgument; what the values may be is checked later."""
    values: dict[str, float | int | bool | None] = {
        **{name: body.number(name) for name in _NUMBERS},
        **{name: body.integer(name) for name in _INTEGERS},
        **{name: body.boolean(name) for name in _BOOLEANS},
        "seed": body.integer("seed", MAX_UINT64),
        "logprobs_mode": body.choice("logprobs_mode", LOGPROBS_MODES),
        "acceptance_method": body.choice("acceptance_method", METHODS),
        "top_k": 0 if body.value("top_k") == -1 else body.integer("top_k"),  # -1 is vLLM's word for all
    }
    for name, value in values.items():
        if value is not None:
            setattr(request, name, value)
    for name in _ID_LISTS:
        getattr(request, name).extend(body.integers(name))
    request.stop.extend(body.strings("stop"))
    request.cache_salt = body.string("cache_salt") or ""
    request.logit_bias.update(body.numbers_by_id("logit_bias"))
    _set_bad_words(request, body)
    _set_form(request, body)
    for name in _WITHOUT_EFFECT:
        body.string(name)
    _refuse_what_is_not_supported(body)


def max_tokens_of(body: JsonObject, *names: str) -> tuple[int | None, str]:
    """The limit under whichever of its names the request has it, and that name."""
    given = [(value, name) for name in names if (value := body.integer(name)) is not None]
    if len({value for value, _ in given}) > 1:
        raise InvalidArgument(given[0][1], f"contradicts {given[1][1]}")
    return given[0] if given else (None, names[0])


def _set_bad_words(request: api.GenerateRequest, body: JsonObject) -> None:
    request.bad_words.extend(body.strings("bad_words"))
    name = "bad_words_token_ids"
    for ids in body.items(name):
        request.bad_words_token_ids.add().ids.extend(JsonObject({name: ids}).integers(name))


def _set_form(request: api.GenerateRequest, body: JsonObject) -> None:
    """OpenAI's `response_format`, or vLLM's `structured_outputs` with one of its kinds."""
    wanted = body.object("response_format")
    if wanted is not None:
        _set_response_format(request.structured_output, wanted)
        if not request.structured_output.WhichOneof("form"):
            request.ClearField("structured_output")
    ours = body.object("structured_outputs")
    if ours is None:
        return
    given = [name for name in _FORMS if ours.has(name)]
    ours.refuse_unknown()
    if len(given) != 1 or request.HasField("structured_output"):
        raise body.refused("structured_outputs", f"must be one of {', '.join(_FORMS)}, and without response_format")
    form = request.structured_output
    match given[0]:
        case "json":
            form.json_schema = _schema(ours, "json")
        case "json_object":
            form.json_object = bool(ours.boolean("json_object"))
        case "choice":
            form.grammar = _one_of(ours)
        case name:
            setattr(form, name, ours.string(name))


def _set_response_format(form: sampling_pb2.StructuredOutput, wanted: JsonObject) -> None:
    kind = wanted.string("type")
    if kind == "json_object":
        form.json_object = True
    elif kind == "json_schema":
        about = wanted.object("json_schema")
        if about is None or not about.has("schema"):
            raise wanted.refused("json_schema", "must have a schema")
        form.json_schema = _schema(about, "schema")
        about.boolean("strict")  # it always is
        for name in ("name", "description"):  # for the model's eyes, at OpenAI
            about.string(name)
        about.refuse_unknown()
    elif kind != "text":
        raise wanted.refused("type", "must be text, json_object or json_schema")
    wanted.refuse_unknown()


def _schema(fields: JsonObject, name: str) -> str:
    """As text, whichever way it came; JSON that can't be text is refused."""
    schema = fields.value(name)
    if isinstance(schema, str):
        return fields.string(name) or ""
    try:
        return json.dumps(schema, ensure_ascii=False).encode().decode()
    except UnicodeEncodeError:
        raise fields.refused(name, "has half of a surrogate pair in its text") from None


def _one_of(fields: JsonObject) -> str:
    """A grammar for one of some texts."""
    texts = fields.strings("choice")
    if not texts:
        raise fields.refused("choice", "must be a list of texts")
    return "start: " + " | ".join(json.dumps(text) for text in texts)


def _refuse_what_is_not_supported(body: JsonObject) -> None:
    body.neutral("best_of", body.integer("n") or 1)
    body.neutral("use_beam_search", False)
    body.neutral("length_penalty", 1, 1.0)
    body.neutral("early_stopping", False)
    body.neutral("spaces_between_special_tokens", True)
    body.neutral("prompt_logprobs", 0)
    body.neutral("truncate_prompt_tokens")
    body.neutral("store", False)
    body.neutral("metadata", {})
    body.neutral("service_tier", "auto", "default")
