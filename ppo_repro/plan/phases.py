"""What each phase of a run needs beside the models that stay: which operands and sums are there at the same time.

The stages free the operands of a model that rests, and after the update the sums of gradients. So a phase has the
operands of the models at work in it. Those of a frozen weight that several models share are there once, and stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from ppo_repro.plan.memory import (
    LOGITS_AT_ONCE,
    Plan,
    Resident,
    activation_bytes,
    cache_bytes,
    frozen_model,
    layer_workspace_bytes,
    logits_bytes,
    operand_bytes,
    stock_model,
    trained_model,
)
from ppo_repro.plan.models import Linear, ModelShape
from ppo_repro.plan.work import Work


@dataclass(frozen=True)
class _Matrices:
    """The matrices of a run by the models that have operands of them."""

    policy: tuple[Linear, ...]  # those that it trains
    value: tuple[Linear, ...]  # those that it trains, or shares with no one at work at the same time
    reference: tuple[Linear, ...]  # those that no other model uses
    shared: tuple[Linear, ...]  # frozen, of the reference and of a model in training
    reward: tuple[Linear, ...]
    sampler: tuple[Linear, ...] = ()  # those of a sampler that rounds otherwise than the policy

    def without_experts(self) -> _Matrices:
        """All but the matrices of experts."""
        kept = {f.name: tuple(m for m in getattr(self, f.name) if not m.of_expert) for f in fields(self)}
        return _Matrices(**kept)


def make_plan(
    policy: ModelShape, value: ModelShape | None, reward: ModelShape | None, work: Work, value_is_reward: bool = False
) -> Plan:
    """The memory of policy, reference and, where the run has them, value model and reward model.

    `value` is the shape of the causal model or classifier whose trunk the value model copies, with its adapters;
    `value_is_reward`: it is the reward model's. A value head on the policy's trunk is not counted: it is as small as a
    row of the embedding.
    """
    causes, unrounded = work.causes, policy
    policy = causes.trainer.marked(policy)
    trained = [trained_model("policy", policy, policy.head, 0, work, work.lora_rank)]
    if value is not None:
        head = Linear(1, value.hidden)
        trained.append(trained_model("value model", value, head, 1, work, work.value_lora_rank))
    frozen = [frozen_model("reference", policy, work)]
    if reward is not None:
        frozen.append(frozen_model("reward model", reward, _with_whole_models(work)))
    matrices = _divided(policy, value, reward, work, value_is_reward)
    if causes.sampler_differs:
        sampler = causes.sampler.marked(unrounded)
        matrices = replace(matrices, sampler=(*sampler.linears, sampler.head))
    version = 4 * trained[0].trained_parameters
    stay = {"older policies": work.older_policies * version} if work.older_policies else {}
    # while older ones sample, the present one waits beside them
    waiting = {"older policies": (work.older_policies + 1) * version} if work.older_policies else {}
    phases = {
        "loading": _loading(policy, value, work),
        "rollout": {**waiting, **_operands(_rollout_operands, matrices, work), **_rollout(policy, work)},
        "scoring": {**stay, **_operands(_scoring_operands, matrices, work), **_scoring(policy, work)},
        "update": {
            **stay,
            **_operands(_update_operands, matrices, work),
            # of several processes that divide them, those of one model are freed before the other's step
            "gradient sums": (max if work.zero > 1 and work.processes > 1 else sum)(r.gradient_sums for r in trained),
            "gradients": sum(r.gradients for r in trained),
            **_update(policy, value, work),
        },
    }
    return Plan(work, (*trained, *frozen, *_copies(policy, work.causes.sampler_stock)), phases)


def _copies(shape: ModelShape, number: int) -> list[Resident]:
    """The sampler's copy that computes as torch does, beside the policy; `number` bytes each, 0: there is none."""
    return [stock_model("sampler's copy", shape, number)] if number else []


def _divided(
    policy: ModelShape, value: ModelShape | None, reward: ModelShape | None, work: Work, value_is_reward: bool
) -> _Matrices:
    everything = (*policy.linears, policy.head)
    by_policy = [not work.lora_rank or m.adapted for m in policy.linears] + [not work.lora_rank]
    lends_to_value = [False] * len(everything)
    of_value: tuple[Linear, ...] = ()
    if value is not None:
        own = tuple(
            m
            for m in value.linears
            if not work.value_lora_rank or m.adapted or value_is_reward or work.causes.trainer.renews_layers
        )
        of_value = (*own, Linear(1, value.hidden))
        if work.value_lora_rank and not value_is_reward:
            lends_to_value = [not m.adapted for m in value.linears] + [False]
    # a module that rounds has operands of its own
    rounding = work.causes.trainer
    renewed = [rounding.renews_layers] * len(policy.linears) + [rounding.renews_head]
    about = tuple(zip(lends_to_value, by_policy, renewed, strict=True))
    is_shared = [(lends or not trains) and not own for lends, trains, own in about]
    return _Matrices(
        policy=tuple(m for m, (_, trains, own) in zip(everything, about, strict=True) if trains or own),
        value=of_value,
        reference=tuple(m for m, shared in zip(everything, is_shared, strict=True) if not shared),
        shared=tuple(m for m, shared in zip(everything, is_shared, strict=True) if shared),
        reward=() if reward is None else (*reward.linears, reward.head),
    )


def _operands(count: Callable[[_Matrices, Work], int], m: _Matrices, work: Work) -> dict[str, int]:
    """The operands of a phase; those of experts by themselves, as an expert that no token takes has none."""
    everything, certain = count(m, work), count(m.without_experts(), work)
    return {"operands": certain} | ({"operands of experts": everything - certain} if everything > certain else {})


def _with_whole_models(work: Work) -> Work:
    """The same where no weights are divided: each process has all of a reward model."""
    return replace(work, zero=min(work.zero, 2))


def _rollout_operands(m: _Matrices, work: Work) -> int:
    stays = operand_bytes(m.shared, work, True)
    if work.causes.sampler_stock:
        return stays
    return stays + operand_bytes(m.sampler if work.causes.sampler_differs else m.policy, work, False)


def _scoring_operands(m: _Matrices, work: Work) -> int:
    """Beside the policy's those of the reference, then of the value model, then of the reward model."""
    of_reward = operand_bytes(m.reward, _with_whole_models(work), False)
    if work.in_pieces:
        return max(operand_bytes((*m.policy, *m.reference, *m.value), work, False), of_reward)
    one_by_one = (operand_bytes(others, work, False) for others in (m.reference, m.value))
    stays = operand_bytes(m.shared, work, True) + operand_bytes(m.policy, work, False)
    return stays + max(of_reward, *one_by_one)


def _update_operands(m: _Matrices, work: Work) -> int:
    if work.in_pieces:  # one matrix at a time is whole
        return operand_bytes((*m.policy, *m.value), work, True)
    stepping = [operand_bytes(matrices, work, True) for matrices in (m.policy, m.value)]
    stays = operand_bytes(m.shared, work, True)
    if work.reference_in_steps:
        stays += operand_bytes(m.reference, work, False)
    return stays + (sum(stepping) if work.side_by_side else max(stepping))


def _loading(policy: ModelShape, value: ModelShape | None, work: Work) -> dict[str, int]:
    """Models are copied whole before they share what they do not train; one after the other."""
    adapted = [shape for shape, rank in ((policy, work.lora_rank), (value, work.value_lora_rank)) if shape and rank]
    copies = max((4 * shape.parameters for shape in adapted), default=0)
    # each process reads a model whole, and copies it before it keeps its part
    if work.tensor * work.pipeline > 1 or work.in_pieces:
        return {"model as it is read": 4 * policy.whole, "copies before sharing": 4 * policy.whole}
    found = {"model as it is read": 4 * policy.parameters, "copies before sharing": copies}
    if number := work.causes.sampler_stock:
        found["copies before rounding"] = (4 - number) * policy.parameters
    return found


def _rollout(shape: ModelShape, work: Work) -> dict[str, int]:
    prompts = work.slots * (work.max_context - work.max_response_tokens)
    return {
        "key/value cache": cache_bytes(shape, work),
        "one layer": layer_workspace_bytes(shape, prompts, work) + 8 * prompts * shape.hidden,
        # logits, a masked copy, and float64 noise
        "logits": work.slots * shape.vocab_size * 16,
    }


def _scoring(shape: ModelShape, work: Work) -> dict[str, int]:
    tokens = work.forward_sequences * (work.max_context - 1)
    rows = _rows_at_once(shape, work.forward_sequences, work)
    return {
        "hidden states": 2 * 4 * tokens * shape.hidden,
        "one layer": layer_workspace_bytes(shape, tokens, work),
        # of policy and reference; without a backward pass exact numerics need nothing else as wide as they are
        "logits": 2 * (4 * rows * shape.vocab_size if work.has_kernels else logits_bytes(shape, rows, work)),
    }


def _rows_at_once(shape: ModelShape, sequences: int, work: Work) -> int:
    """Of the response tokens of some sequences those whose logits are there at the same time."""
    return min(sequences * work.max_response_tokens, max(1, LOGITS_AT_ONCE // shape.vocab_size))


def _update(shape: ModelShape, value: ModelShape | None, work: Work) -> dict[str, int]:
    """The update of the policy, which needs logits; that of a value model is the same without them."""
    row = work.max_context - 1
    tokens = work.update_sequences * row
    stepping = [shape] if value is None else [shape, value]
    steps = len(stepping) if work.side_by_side else 1
    kept = (activation_bytes(s, tokens, tokens if work.packed else row, work) for s in stepping)
    return {
        "activations": (sum if work.side_by_side else max)(kept),
        "logits": logits_bytes(shape, _rows_at_once(shape, work.update_sequences, work), work),
        "one layer": steps * layer_workspace_bytes(shape, tokens, work),
        # the merged weights of one matrix, on their way into the model
        "merging": 4 * max((m.size for m in shape.linears if m.adapted), default=0),
    }
