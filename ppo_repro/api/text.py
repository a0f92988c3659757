"""Sample from a deterministic model, and compute log-probs of existing tokens: both have the same bits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_repro.api.model import begin_pass, check_number, is_whole, layout_of, logits_at, max_context
from ppo_repro.base.errors import UserError
from ppo_repro.base.seeding import sample_seed
from ppo_repro.config.rollout import MAX_TEMPERATURE, MIN_TEMPERATURE
from ppo_repro.config.section import MAX_COUNT, MAX_FLOAT
from ppo_repro.models.load import stop_ids
from ppo_repro.numerics.token_statistics import token_statistics
from ppo_repro.sampler import Request, Sampling
from ppo_repro.sampling.built_in import BuiltInSampler

MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Response:
    """One sampled response of T tokens."""

    text: str | None  # without special tokens; None if no tokenizer was given
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]  # [T], the end token included
    logprobs: Tensor  # [T] float32, nats, under the distribution sampled from
    finish_reason: str  # "stop" after an end token, "length" at the limit


def logprobs(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    position_ids: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Compute the differentiable log-prob of each token, log softmax(logits / temperature).

    Every log-prob has the same bits in every layout, and equals the log-prob of `generate` if top-k and top-p cut
    nothing.

    Args:
        model: a model of `deterministic`.
        input_ids: [R, L] int64.
        attention_mask: [R, L], 1 for tokens and 0 for padding before or after them; None: no padding.
        position_ids: [R, L], from 0 in every sequence of a packed row; None: one sequence in each row.
        temperature: above 0.

    Returns:
        Log-probs in nats, float32 [R, L]; 0 at padding and at the first token of a sequence, which nothing predicts.

    Raises:
        UserError: a stock model, wrong shapes, ids outside the vocabulary, holes in the mask, or a temperature of 0 or
            less.

    Source: ppo_repro/numerics/README.md has the order of each sum. The example of `generate` calls this function.
    """
    check_number("logprobs: temperature", temperature, MIN_TEMPERATURE, MAX_TEMPERATURE)
    layout = layout_of(model, input_ids, attention_mask, position_ids)
    rows = torch.nonzero(layout.follows().reshape(-1))[:, 0]
    flat = layout.input_ids.reshape(-1)
    full = torch.zeros(flat.shape)
    if len(rows):
        logits = logits_at(model, layout, rows)
        scored, _ = token_statistics(logits, flat[rows + 1], temperature, None, "deterministic")
        full = full.index_copy(0, rows + 1, scored)
    return full.view(layout.real.shape).to(input_ids.device)


def generate(
    model: PreTrainedModel,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    stop: Sequence[int] | None = None,
    seed: int = 0,
    seeds: Sequence[int] | None = None,
    slots: int = 64,
) -> list[Response]:
    """Sample one response to each prompt from a deterministic model, in their order, by cached decoding.

    A token follows from logits, seed and position alone (Gumbel-max with hash noise, as in SGLang's seeded sampler), so
    a response depends on its prompt and its seed, not on `slots`. The seed follows from `seed` and the prompt's index.

    Args:
        model: a model of `deterministic`.
        prompts: texts, which need `tokenizer`, or lists of token ids.
        sampling: temperature, cuts, length.
        tokenizer: the model's tokenizer.
        stop: ids of end tokens; None: the end tokens of the tokenizer and of the model's generation config.
        seed: seed of all responses, in [0, 2^63).
        seeds: a seed for each response, such as the recorded seeds of a run; replaces `seed`.
        slots: sequences to decode at once.

    Returns:
        A response to each prompt: text, token ids, log-probs in nats, float32.

    Raises:
        UserError: a stock model, an empty or too long prompt, ids outside the vocabulary, or no end token is known.

    Source: Gumbel-max; ppo_repro/numerics/definition/sampling.py describes the noise.

    >>> import torch, ppo_repro
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=89, hidden_size=48, num_hidden_layers=2, num_attention_heads=4)
    >>> model = ppo_repro.deterministic(LlamaForCausalLM(config).eval())
    >>> sampling = ppo_repro.Sampling(temperature=0.8, max_response_tokens=8)
    >>> first, second = ppo_repro.generate(model, [[5, 6, 7], [8, 9]], sampling)
    >>> tokens = torch.tensor([[*first.prompt_ids, *first.response_ids]])
    >>> again = ppo_repro.logprobs(model, tokens, temperature=0.8)[0, 3:]
    >>> bool((again == first.logprobs).all())
    True
    """
    check_number("generate: slots", slots, 1, MAX_COUNT, whole=True)
    check_number("generate: seed", seed, 0, MAX_SEED, whole=True)
    check_number("generate: sampling.temperature", sampling.temperature, MIN_TEMPERATURE, MAX_TEMPERATURE)
    check_number("generate: sampling.top_k", sampling.top_k, 0, MAX_COUNT, whole=True)
    check_number("generate: sampling.top_p", sampling.top_p, 1 / MAX_FLOAT, 1.0)
    check_number("generate: sampling.max_response_tokens", sampling.max_response_tokens, 1, MAX_COUNT, whole=True)
    begin_pass(model)
    if isinstance(prompts, str) or not len(prompts):
        raise UserError("generate: prompts must be a list of texts or of lists of token ids, with at least one")
    ids = [_encoded(prompt, tokenizer, model) for prompt in prompts]
    context, limit = max(map(len, ids)) + sampling.max_response_tokens, max_context(model)
    if context > limit:
        raise UserError(
            f"generate: the longest prompt and max_response_tokens = {sampling.max_response_tokens} are together "
            f"{context} tokens, more than {limit}, the model's context; shorten one of them"
        )
    ends = _ends(model, tokenizer) if stop is None else frozenset(_token_ids("stop", stop, model))
    sampler = BuiltInSampler(model, ends, "deterministic", context, slots, 0)
    requests = [Request(*pair) for pair in zip(ids, _seeds(seed, seeds, len(ids)), strict=True)]
    responses = []
    for request, c in zip(requests, sampler.generate(requests, sampling), strict=True):
        text = None if tokenizer is None else str(tokenizer.decode(list(c.response_ids), skip_special_tokens=True))
        responses.append(Response(text, request.prompt_ids, c.response_ids, c.logprobs, c.finish_reason))
    return responses


def _encoded(
    prompt: str | Sequence[int], tokenizer: PreTrainedTokenizerBase | None, model: PreTrainedModel
) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        return _token_ids("a prompt", prompt, model)
    if tokenizer is None:
        raise UserError("generate: prompts are texts; give their tokenizer=, or lists of token ids")
    return tuple(tokenizer(prompt)["input_ids"])


def _token_ids(name: str, ids: Sequence[int], model: PreTrainedModel) -> tuple[int, ...]:
    """Return token ids as integers. Raises UserError unless all are in the vocabulary."""
    vocab_size = model.config.vocab_size
    values = ids.tolist() if isinstance(ids, Tensor) else ids
    if not isinstance(values, Collection) or not all(is_whole(i) and 0 <= i < vocab_size for i in values):
        raise UserError(f"generate: {name} = {values!r:.60}: must be a list of token ids in 0..{vocab_size - 1}")
    return tuple(int(i) for i in values)


def _seeds(seed: int, seeds: Sequence[int] | None, count: int) -> list[int]:
    """Return the seed of each response. Raises UserError unless `seeds` is None or has one for each."""
    if seeds is None:
        return [sample_seed(seed, 0, "generate", index) for index in range(count)]
    if not isinstance(seeds, Collection) or len(seeds) != count:
        raise UserError(f"generate: seeds = {seeds!r:.60}: must be {count} whole numbers, one for each prompt")
    for index, own in enumerate(seeds):
        check_number(f"generate: seeds[{index}]", own, 0, MAX_SEED, whole=True)
    return [int(own) for own in seeds]


def _ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    if tokenizer is not None:
        return stop_ids(model, tokenizer)
    declared = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = declared if isinstance(declared, list) else [declared]
    if any(i is None for i in ids):
        raise UserError("generate: the model names no end token; give stop=[...] or its tokenizer")
    return frozenset(ids)
