"""The columns that the levels `full` and `deep` add to the tables of a language run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppo_repro.buffers import Iteration, MinibatchUpdate, TensorGradient
from ppo_repro.config.records import Level
from ppo_repro.ppo.corrections import correction_names
from ppo_repro.records.arrow import AllNull, Lists, WithNulls

Columns = dict[str, Any]
_ROWS_AT_ONCE = 1024  # of kept tokens, which are whole vocabularies while they are unpacked


def columns_above_lean(item: Iteration, level: Level) -> dict[str, Columns]:
    """For each table what a level records beyond `lean`."""
    if level == "lean":
        return {}
    found = {"sequences": _sequences(item), "tokens": _tokens(item), "updates": _updates(item), "steps": _steps(item)}
    if level == "deep":
        found["tokens"] |= _top_logits(item) | _routes(item)
        found["steps"] |= _gradients(item, "policy") | _gradients(item, "value")
    return found


def or_null(values: Tensor | None, count: int) -> np.ndarray | AllNull:
    """A column of `count` rows; null without values."""
    return AllNull(count) if values is None else values.numpy()


def of_step(update: MinibatchUpdate, model: str, name: str) -> Any:
    """A field of the policy's or the value model's step; None without a step."""
    step = getattr(update, model)
    return None if step is None else getattr(step, name)


def per_token(item: Iteration, model: str, name: str) -> np.ndarray | WithNulls | AllNull:
    """A per-token column of the policy's or the value model's steps; null where there was none."""
    columns = [of_step(u, model, name) for u in item.updates]
    sizes = [len(u.tokens) for u in item.updates]
    if all(column is None for column in columns):
        return AllNull(sum(sizes))
    values = torch.cat([torch.zeros(n) if c is None else c for n, c in zip(sizes, columns, strict=True)]).numpy()
    if all(column is not None for column in columns):
        return values
    return WithNulls(values, np.repeat([column is not None for column in columns], sizes))


def _sequences(item: Iteration) -> Columns:
    return {
        "server": list(item.rollout.servers),
        "latency": list(item.rollout.latencies),
    }


def _tokens(item: Iteration) -> Columns:
    rewards, count = item.rewards, len(item.rollout.response_ids)
    return {
        "kept_tokens": _kept(item.rollout.kept_tokens.numpy()),
        "reverse_ref_kl": or_null(item.forward.reverse_ref_kl, count),
        "placed_scores": rewards.placed_scores.numpy(),
        "raw_rewards": rewards.raw_rewards.numpy(),
    }


def _kept(bits: np.ndarray) -> Lists | AllNull:
    """Bit sets [N, W] uint8 as lists of ids; null where they have no width."""
    if bits.shape[1] == 0:
        return AllNull(len(bits))
    ids, counts = [], []
    for start in range(0, len(bits), _ROWS_AT_ONCE):
        kept = np.unpackbits(bits[start : start + _ROWS_AT_ONCE], axis=1)
        ids.append(np.nonzero(kept)[1].astype(np.int32))
        counts.append(kept.sum(1, dtype=np.int64))
    return Lists(np.concatenate(ids), np.concatenate(counts))


def _updates(item: Iteration) -> Columns:
    of_policy = ("surrogates", "penalty_terms", "importance_weights", "kl_terms")
    return {
        "loss_weights": torch.cat([u.loss_weights for u in item.updates]).numpy(),
        "policy_losses": per_token(item, "policy", "losses"),
        **{name: per_token(item, "policy", name) for name in of_policy},
        "correction": _corrections(item),
        "value_losses": per_token(item, "value", "losses"),
    }


def _corrections(item: Iteration) -> list[str | None] | AllNull:
    """What the corrections did to each token, by name; null where the policy takes no step, or none is configured."""
    by_step = [(len(u.tokens), of_step(u, "policy", "corrections")) for u in item.updates]
    if all(changes is None for _, changes in by_step):
        return AllNull(sum(count for count, _ in by_step))
    names: list[str | None] = []
    for count, changes in by_step:
        names += [None] * count if changes is None else correction_names(changes)
    return names


def _steps(item: Iteration) -> Columns:
    names = ("surrogate_loss", "penalty_loss", "entropy_loss", "kl_loss")
    return {name: [of_step(u, "policy", name) for u in item.updates] for name in names}


def _top_logits(item: Iteration) -> Columns:
    rollout, forward = item.rollout, item.forward
    return {
        "rollout_top_ids": _lists(rollout.top_ids),
        "rollout_top_logits": _lists(rollout.top_logits),
        "policy_top_ids": _lists(forward.top_ids),
        "policy_top_logits": _lists(forward.top_logits),
        "ref_top_ids": _lists(forward.ref_top_ids),
        "ref_top_logits": _lists(forward.ref_top_logits),
    }


def _routes(item: Iteration) -> Columns:
    return {"rollout_routes": _lists(item.rollout.token_routes()), "policy_routes": _lists(item.forward.routes)}


def _lists(rows: Tensor) -> Lists | AllNull:
    """Rows [N, K] as lists of K; null for K = 0."""
    count, width = rows.shape
    return Lists(rows.numpy().reshape(-1), np.full(count, width, np.int64)) if width else AllNull(count)


def _gradients(item: Iteration, model: str) -> Columns:
    return gradient_columns(f"{model}_", [of_step(u, model, "gradients") for u in item.updates])


def gradient_columns(prefix: str, steps: list[tuple[TensorGradient, ...] | None]) -> Columns:
    """The four columns of gradients by tensor; null for steps without any."""

    def column(name: str) -> list[list[float] | None]:
        return [[getattr(g, name) for g in step] if step else None for step in steps]

    return {
        f"{prefix}tensors": [" ".join(g.name for g in step) if step else None for step in steps],
        f"{prefix}tensor_grad_norms": column("norm"),
        f"{prefix}tensor_grad_max_abs": column("max_abs"),
        f"{prefix}tensor_grad_zeros": column("zeros"),
    }
