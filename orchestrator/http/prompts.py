"""What to complete: a completion's prompt, or the messages of a chat."""

from __future__ import annotations

from typing import Any

from tandem.v1 import orchestrator_pb2 as api

from .json_object import JsonObject

_ROLES = {"developer": "system"}
"""OpenAI's newer name, which templates don't know."""


def set_prompt(request: api.GenerateRequest, body: JsonObject) -> None:
    """Text or token ids, alone or as a list of one. Raises InvalidArgument."""
    prompt = body.value("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    elif isinstance(prompt, list) and any(isinstance(part, str | list) for part in prompt[:2]):
        raise body.refused("prompt", "several prompts in one request are not supported")
    if isinstance(prompt, list):
        # Set even where it is empty: no ids are a prompt too, and one that is refused.
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(JsonObject({"prompt": prompt}).integers("prompt"))
        return
    text = JsonObject({"prompt": prompt}).string("prompt")
    if text is None:
        raise body.refused("prompt", "must be text or a list of token ids")
    request.text = text


def set_messages(request: api.GenerateRequest, body: JsonObject) -> None:
    """Roles and texts. Raises InvalidArgument."""
    request.messages.SetInParent()
    for index, message in enumerate(body.items("messages")):
        fields = body.object_of(f"messages[{index}]", message)
        role = fields.string("role") or ""
        request.messages.messages.add(role=_ROLES.get(role, role), content=_content(fields))
        # What an answer has besides, for those who send it back as it came.
        fields.neutral("refusal", "")
        fields.neutral("tool_calls", [])
        fields.neutral("annotations", [])
        fields.refuse_unknown()


def _content(fields: JsonObject) -> str:
    if isinstance(fields.value("content"), list):
        return "".join(_part(fields, index, part) for index, part in enumerate(fields.items("content")))
    text = fields.string("content")
    if text is None:
        raise fields.refused("content", "must be text")
    return text


def _part(fields: JsonObject, index: int, part: Any) -> str:
    found = fields.object_of(f"content[{index}]", part)
    found.neutral("type", "text")
    text = found.string("text")
    found.refuse_unknown()
    if text is None:
        raise found.refused("text", "must be text")
    return text
