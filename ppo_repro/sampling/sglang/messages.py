"""Make messages to `/generate` and read the answers.

A wrong message can kill a server, so every field of a message is checked first. Every used field of an answer is
checked too: a response of the wrong length, from other weights, or with a log-prob that is no float32 of at most 0 ends
the run.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.base.errors import UserError
from ppo_repro.numerics.families import decoder_layers, mixture_layers
from ppo_repro.sampler import Completion, Request, Sampling, check_request
from ppo_repro.sampling.responses import Response, UncutSampling, checked_response, shown_value
from ppo_repro.sampling.sglang.plugin import kept_tokens
from ppo_repro.user.file import RefusedError


@dataclass(frozen=True)
class RoutedLayers:
    """Shape of a model's routes. SGLang returns experts for every layer, zeros for a dense layer."""

    layers: int
    mixtures: tuple[int, ...]  # the layers with a router
    experts: int  # experts of each router
    per_token: int  # experts that compute one token


def routed_layers(policy: PreTrainedModel) -> RoutedLayers:
    """Return the layers and experts of a mixture of experts."""
    config = policy.config
    experts = config.num_local_experts if hasattr(config, "num_local_experts") else config.num_experts
    return RoutedLayers(
        len(decoder_layers(policy)), tuple(mixture_layers(policy)), int(experts), int(config.num_experts_per_tok)
    )


def read_routes(text: Any, inputs: int, routed: RoutedLayers) -> Tensor:
    """Decode the routes of `Completion.routes`, int32 [inputs, M k]. Raises ValueError if `text` has another form."""
    if not isinstance(text, str):
        raise ValueError("returned no routed_experts; start the server with --enable-return-routed-experts")
    try:
        flat = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"returned routed_experts that are no base64 of int32 ({error})") from error
    if flat.size != inputs * routed.layers * routed.per_token:
        raise ValueError(f"returned {flat.size} routed_experts for {inputs} tokens, {routed.layers} layers")
    routes = flat.reshape(inputs, routed.layers, routed.per_token)[:, list(routed.mixtures)]
    rises = bool((np.diff(routes, axis=-1) > 0).all())
    if not rises or routes.min(initial=0) < 0 or routes.max(initial=0) >= routed.experts:
        raise ValueError(f"returned routed_experts that are not {routed.per_token} of {routed.experts} by rising index")
    return torch.from_numpy(routes.reshape(inputs, len(routed.mixtures) * routed.per_token).astype(np.int32))


ALL_TOKENS = -1  # SGLang's top_k that cuts nothing


@dataclass(frozen=True)
class Batch:
    """The requests that one server gets in one message, and what every answer must satisfy."""

    requests: Sequence[Request]
    sampling: Sampling
    wanted: UncutSampling
    routed: RoutedLayers | None = None  # None if the answers need no routes


def generate_body(batch: Batch, max_context: int) -> dict[str, Any]:
    """Make the message to `/generate` for a batch. Raises UserError if a request cannot be served."""
    sampling, wanted = batch.sampling, batch.wanted
    if sampling.top_p != kept_tokens.shortest(sampling.top_p):
        raise UserError(f"rollout.top_p = {sampling.top_p}: SGLang keeps a float32 of it; give it in up to 6 digits")
    for request in batch.requests:
        check_request(request, sampling, wanted.vocab_size, max_context)
    shared = {
        "max_new_tokens": sampling.max_response_tokens,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "stop_token_ids": list(wanted.end_ids),
    }
    cuts = {"top_k": sampling.top_k or ALL_TOKENS, "top_p": sampling.top_p} if sampling.cuts else {}
    shared = {**shared, **cuts}
    return {
        "input_ids": [list(request.prompt_ids) for request in batch.requests],
        "sampling_params": [{**shared, "sampling_seed": request.seed} for request in batch.requests],
        "return_logprob": True,
        "stream": False,
        **({} if batch.routed is None else {"return_routed_experts": True}),
    }


def read_completions(answer: Any, batch: Batch, version: str, url: str) -> list[Completion]:
    """Return the completions of a `/generate` answer, in the order of the requests.

    Raises UserError, with the fault, for a wrong answer, and for weights of another version than `version`.
    """
    requests, wanted = batch.requests, batch.wanted
    if not isinstance(answer, list) or len(answer) != len(requests):
        raise UserError(f"{url}: answered {shown_value(answer)} to {len(requests)} requests; must be one answer each")

    def completion(item: Any, request: Request) -> Completion:
        meta = _field(item, "meta_info", dict)
        _check_version(meta, version)
        if meta.get("prompt_tokens") != len(request.prompt_ids):
            read = shown_value(meta.get("prompt_tokens"))
            raise ValueError(f"read a prompt of {len(request.prompt_ids)} tokens as {read}")
        tokens, drawn, reason = _response(item, meta, wanted)
        latency, inputs = _field(meta, "e2e_latency", float | int), len(request.prompt_ids) + len(tokens) - 1
        if not math.isfinite(latency):
            raise ValueError(f"returned {latency!r} as e2e_latency; must be a finite number of seconds")
        logprobs = torch.tensor(drawn, dtype=torch.float32)
        mass, kept = torch.zeros(len(tokens)), torch.empty(len(tokens), 0, dtype=torch.uint8)
        if batch.sampling.cuts:
            logprobs, mass, kept = kept_tokens.read(meta.get(kept_tokens.KEPT), tokens, wanted.vocab_size)
        return Completion(
            response_ids=tuple(tokens),
            logprobs=logprobs,
            log_kept_mass=mass,
            kept_tokens=kept,
            finish_reason=reason,
            server=url,
            latency=latency,
            routes=None if batch.routed is None else read_routes(meta.get("routed_experts"), inputs, batch.routed),
        )

    try:
        return [completion(item, request) for item, request in zip(answer, requests, strict=True)]
    except RefusedError as error:
        raise UserError(f"{url}: returned {error}") from error
    except ValueError as error:
        raise UserError(f"{url}: {error}") from error


def _response(item: dict[str, Any], meta: dict[str, Any], wanted: UncutSampling) -> Response:
    """Return the tokens of a response, their log-probs, and why the response ended."""
    rows = _field(meta, "output_token_logprobs", list)
    tokens = _field(item, "output_ids", list)
    if any(not isinstance(row, list) or len(row) < 2 for row in rows) or [row[1] for row in rows] != tokens:
        raise ValueError("returned log-probs of other tokens than those of the response")
    ended = meta.get("finish_reason")
    kind = ended.get("type") if isinstance(ended, dict) else None
    if kind not in ("stop", "length"):
        raise ValueError(f"ended a response with finish_reason {shown_value(ended)}; must be stop or length")
    if tokens and tokens[-1] in wanted.end_ids:
        kind = "stop"  # an end token at the limit, where SGLang says `length`
    tokens, drawn, reason = checked_response((tokens, [row[0] for row in rows], kind), wanted)
    if any(float(np.float32(logprob)) != logprob for logprob in drawn):
        raise ValueError("returned a log-prob that is no float32; is this an SGLang server of a supported release?")
    return tokens, drawn, reason


def _check_version(meta: dict[str, Any], version: str) -> None:
    spans = meta.get("weight_versions")
    versions = {str(meta.get("weight_version"))}
    if isinstance(spans, list):
        versions |= {str(span.get("version") if isinstance(span, dict) else span) for span in spans}
    if versions != {version}:
        others = ", ".join(sorted(versions - {version}))
        raise ValueError(
            f"sampled with weights {others!r}, must be {version!r}: it was restarted, or somebody else updates it"
        )


def _field(item: Any, name: str, kind: type | UnionType) -> Any:
    value = item.get(name) if isinstance(item, dict) else None
    if not isinstance(value, kind):
        raise ValueError(f"its answer has no {name}; is this an SGLang server of a supported release?")
    return value
