"""Terms of configurations, reductions and other frameworks in plain words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pandas as pd
from pydantic import BaseModel

TERMS = {
    "token_mean": "averaged over all tokens alike, whatever response they are in",
    "seq_mean_token_sum": "summed over the tokens of each response, then averaged over the responses",
    "seq_mean_token_mean": "averaged over the tokens of each response, then over the responses",
    "seq_mean": "one number for each response, averaged over the responses",
    "ratio_of_sums": "the sum over everything, divided by the number of units in everything",
    "k1": "mean of -log r: unbiased, noisy, can be negative",
    "k2": "mean of (log r)^2 / 2: never negative, slightly biased",
    "k3": "mean of r - 1 - log r: never negative and unbiased",
    "grad_zero": "share of tokens whose gradient the clip removed",
    "band_out": "share of tokens whose ratio is outside the clip bounds, whether or not that changes the gradient",
    "dual_zero": "share of tokens whose gradient only the dual clip removed",
    "vf_grad_zero": "share of tokens whose value gradient the value clip removed",
    "clip_floor": "share that would be clipped before any step, by the mismatch of sampler and trainer alone",
    "anchor": "the log-probs that a ratio is measured against: the sampler's (rollout) or the trainer's (old)",
    "ratio": "exp(new log-prob - anchor): how much likelier the policy now makes a token than when it was sampled",
    "advantage": "how much better a token turned out than was expected",
    "GAE": "generalized advantage estimation: advantages from rewards and predicted values, smoothed by gae_lambda",
    "explained variance": "1: values predict the returns exactly; 0: no better than their mean; below 0: worse",
    "nats": "natural units of information: 1 nat = 1.44 bit",
}

# (last part of a field's name, value) -> what that choice does
CHOICES = {
    ("aggregation", "token_mean"): "every token of a minibatch counts alike, so long responses weigh more",
    ("aggregation", "sequence_mean"): "tokens are averaged in each response first, so every response counts alike",
    ("aggregation", "sequence_sum"): "tokens are summed in each response, then averaged over the responses",
    ("ratio_anchor", "rollout"): "ratios are measured against the log-probs of the sampler",
    ("ratio_anchor", "old"): "ratios are measured against log-probs computed again by the trainer",
    ("kind", "clip"): "the clipped surrogate of PPO: no push beyond 1 - clip_range and 1 + clip_range",
    ("kind", "adaptive_clip"): "the clipped surrogate with a clip range that follows the KL",
    ("kind", "kl_penalty"): "no clip; a penalty on the KL to the anchor instead",
    ("kind", "unclipped"): "neither clip nor penalty",
    ("kind", "policy_gradient"): "REINFORCE: log-prob times advantage, without a ratio",
    ("kind", "gae"): "advantages per token, from a value model",
    ("kind", "group"): "GRPO: the score compared with the other responses to the same prompt; no value model",
    ("kind", "separate"): "a value model with weights of its own",
    ("kind", "head"): "a value head on the policy's own layers",
    ("placement", "reward"): "the KL to the reference is subtracted from the reward of each token",
    ("placement", "loss"): "the KL to the reference is a term of the loss",
    ("placement", "none"): "the KL to the reference is recorded and charged nowhere",
    ("whiten", "full"): "shifted to mean 0 and scaled to variance 1",
    ("whiten", "scale"): "scaled to variance 1, mean kept",
    ("whiten", "none"): "left as they are",
    ("mode", "deterministic"): "every sum in one written order, so no layout changes a bit",
    ("mode", "native"): "stock torch, whose sums depend on the layout",
}


def terms() -> pd.DataFrame:
    """term, in words."""
    return pd.DataFrame(list(TERMS.items()), columns=["term", "in words"])


def explained(text: str) -> str:
    """The terms that occur in a text, with their meaning; empty where none does."""
    found = [term for term in TERMS if re.search(rf"(?<![\w-]){re.escape(term)}(?![\w-])", text)]
    return "; ".join(f"{term}: {TERMS[term]}" for term in found)


def config_in_words(config: BaseModel) -> pd.DataFrame:
    """field, value, in words: every field of a configuration, with what its choice does or what the field is."""
    return pd.DataFrame(_rows(config, ""), columns=["field", "value", "in words"])


def _rows(model: BaseModel, prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in type(model).model_fields.items():
        value, path = getattr(model, name), f"{prefix}{name}"
        parts = value if isinstance(value, tuple) else (value,)
        sections = [part for part in parts if isinstance(part, BaseModel)]
        for number, section in enumerate(sections):
            yield from _rows(section, f"{path}.{number}." if isinstance(value, tuple) else f"{path}.")
        if not sections:
            words = CHOICES.get((name, value)) if isinstance(value, str) else None
            shown = value if isinstance(value, str) else json.dumps(value)
            yield path, shown, words or field.description or ""
