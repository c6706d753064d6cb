"""A change of a running request's sampling: made in its plan, by the code that checks and resolves a GenerateRequest."""

from __future__ import annotations

import dataclasses

from tandem.v1 import orchestrator_pb2 as api

from .request import GenerationPlan, Limits, check_numbers
from .sampling_request import check_beside_form, check_sampling, resolve_sampling
from .vocabulary import Vocabulary

_NUMBERS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "num_speculative_tokens", "adaptive_speculative_tokens",
)  # fmt: skip


class SamplingUpdate:
    """What one call changes."""

    def __init__(self, update: api.UpdateSamplingRequest, vocabulary: Vocabulary, limits: Limits) -> None:
        """Checks all that can be checked without the request; raises InvalidArgument."""
        self._update = update
        self._vocabulary = vocabulary
        self._limits = limits
        self._asked = api.GenerateRequest()
        """The fields that are set, as a caller of Generate would have set them."""
        _apply(update, self._asked)
        check_numbers(self._asked, limits)
        check_sampling(self._asked, limits.vocabulary_size)

    async def change(self, plan: GenerationPlan) -> GenerationPlan:
        """The plan with the change; raises InvalidArgument where it doesn't go with what stays."""
        if plan.sampling.HasField("structured_output"):
            check_beside_form(self._asked)
        request = _as_request(plan)
        _apply(self._update, request)
        sampling = await resolve_sampling(
            request,
            self._vocabulary,
            self._limits.vocabulary_size,
            plan.prompt_tokens,
            plan.end_token_ids,
            frozenset(plan.sampling.end_token_ids),
        )
        return dataclasses.replace(
            plan,
            sampling=sampling,
            num_speculative_tokens=request.num_speculative_tokens,
            adaptive=request.adaptive_speculative_tokens,
        )


def _apply(update: api.UpdateSamplingRequest, request: api.GenerateRequest) -> None:
    """Sets what the update sets."""
    for name in _NUMBERS:
        if update.HasField(name):  # type: ignore[arg-type]
            setattr(request, name, getattr(update, name))
    if update.HasField("logit_bias"):
        request.logit_bias.clear()
        request.logit_bias.update(update.logit_bias.biases)
    if update.HasField("banned_token_ids"):
        request.banned_token_ids[:] = update.banned_token_ids.ids
    if update.HasField("allowed_token_ids"):
        request.allowed_token_ids[:] = update.allowed_token_ids.ids
    if update.HasField("bad_words"):
        request.bad_words[:] = update.bad_words.texts
        request.ClearField("bad_words_token_ids")
        request.bad_words_token_ids.extend(update.bad_words.token_ids)


def _as_request(plan: GenerationPlan) -> api.GenerateRequest:
    """A request whose sampling would be resolved to that of the plan."""
    sampling = plan.sampling
    return api.GenerateRequest(
        min_tokens=plan.min_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        acceptance_method=sampling.acceptance_method,
        num_speculative_tokens=plan.num_speculative_tokens,
        adaptive_speculative_tokens=plan.adaptive,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(zip(sampling.bias_token_ids, sampling.biases, strict=True)),
        banned_token_ids=sampling.banned_token_ids,
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words_token_ids=sampling.bad_words,
        logprobs=sampling.logprobs,
        top_logprobs=sampling.top_logprobs,
        logprobs_mode=sampling.logprobs_mode,
        structured_output=sampling.structured_output if sampling.HasField("structured_output") else None,
    )
