"""Configurations that between them hold every variant of every section."""

from __future__ import annotations

import copy
import typing
from collections.abc import Iterator
from typing import Any

from ppo_repro.config.files import build_config
from ppo_repro.config.run import RunConfig
from ppo_repro.config.section import Section
from ppo_repro.config.yaml_text import parse_yaml
from tests.support.paths import SMALL

FOLDER = {"kind": "folder", "path": "some/model"}
MIXTURE = {"kind": "tiny", "hidden_size": 16, "num_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
MIXTURE |= {"intermediate_size": 8, "vocab_size": 20, "warm_start_steps": 0, "warm_start_batch_size": 4}
MIXTURE |= {"warm_start_learning_rate": 1e-3, "experts": {"family": "mixtral", "count": 4, "per_token": 2}}
JSONL = {"kind": "jsonl", "path": "some.jsonl", "num_eval_prompts": 3}
EVALUATED = {"num_eval_prompts": 3}
GYM = {"kind": "reasoning_gym", "dataset": "chain_sum", "size": 9, **EVALUATED}
STEPS = {"kind": "steps", "weight": 2.0}
TRAINED = {"kind": "trained_model", "num_pairs": 8, "minibatch_size": 4, "learning_rate": 1e-3}
OWN_PAIRS = {"kind": "trained_model", "pairs": "pairs.jsonl", "minibatch_size": 4, "learning_rate": 1e-3}
ADAPTIVE = {"kind": "adaptive", "target_kl": 0.5}
WEIGHTS = {"kind": "truncated", "level": "sequence"}
REJECTION = [{"kind": "ratio", "low": 0.25, "high": 4.0}, {"kind": "divergence", "above": 1.0}, {"kind": "veto"}]
ROLLOUT = {"prompts_per_iteration": 24, "samples_per_prompt": 2, "max_response_tokens": 6}

# for every variant a configuration that has it, with what the variant needs; no two alike
TREES: dict[str, dict[str, Any]] = {
    "all usual": {},
    "model folder": {"model": FOLDER},
    "experts": {"model": MIXTURE},
    "task jsonl": {"model": FOLDER, "task": {**JSONL, "chat_template": True}},
    "task reasoning_gym": {"model": FOLDER, "task": {**GYM, "chat_template": True}},
    "task python": {"model": FOLDER, "task": {"kind": "python", "path": "task.py", "chat_template": True} | EVALUATED},
    "term format": {"reward": {"terms": [{"kind": "format"}]}},
    "steps": {"task": {"kind": "column_addition", "digits": 2, "size": 9} | EVALUATED, "reward": {"terms": [STEPS]}},
    "term length": {"reward": {"terms": [{"kind": "exact_match"}, {"kind": "length", "target": 3}]}},
    "term function": {"reward": {"terms": [{"kind": "function", "path": "rewards.py:g"}]}},
    "term trl": {"reward": {"terms": [{"kind": "trl", "path": "rewards.py:h", "conversational": True}]}},
    "term verl": {"reward": {"terms": [{"kind": "verl", "path": "rewards.py:i", "data_source": "openai/gsm8k"}]}},
    "term model": {"reward": {"terms": [{"kind": "model", "path": "some/reward_model"}]}},
    "term trained model": {"reward": {"terms": [TRAINED]}},
    "pairs of one's own": {"reward": {"terms": [OWN_PAIRS]}},
    "kl in reward, adaptive": {"kl": {"controller": ADAPTIVE}},
    "kl in loss": {"kl": {"placement": "loss"}},
    "no kl": {"kl": {"placement": "none"}},
    "group": {"advantages": {"kind": "group"}, "value": {"kind": "none"}, "kl": {"placement": "none"}},
    "head": {"value": {"kind": "head"}},
    "adaptive clip": {"ppo": {"objective": {"kind": "adaptive_clip", "target_kl": 0.01}}},
    "penalty": {"ppo": {"objective": {"kind": "kl_penalty"}}},
    "unclipped": {"ppo": {"objective": {"kind": "unclipped"}}},
    "policy gradient": {"ppo": {"objective": {"kind": "policy_gradient"}}},
    "importance weights": {"ppo": {"ratio_anchor": "old", "importance_weights": WEIGHTS}},
    "rejection": {"ppo": {"rejection": REJECTION}},
    "sequence clip": {"ppo": {"objective": {"kind": "sequence_clip"}}},
    "cispo": {"ppo": {"objective": {"kind": "cispo"}}},
    "clip cov": {"ppo": {"objective": {"kind": "clip_cov"}}},
    "kl cov": {"ppo": {"objective": {"kind": "kl_cov"}}},
    "lora": {"lora": {"rank": 2, "alpha": 4.0}},
    "value lora": {"value": {"learning_rate": 1e-3, "lora": {"rank": 2, "alpha": 4.0}}},
    "lag": {"mismatch": {"sampler": {"lag": 2}}},
    "cut and cold": {"rollout": {**ROLLOUT, "top_p": 0.9, "temperature": 0.7}},
    "rounded": {"mismatch": {"sampler": {"precision": {"weights": "int8", "rest": "bfloat16"}}}},
    "sampler stock": {"mismatch": {"sampler": {"stock": "bfloat16"}}},
    "sglang": {"rollout": {**ROLLOUT, "engine": {"kind": "sglang"}}, "kl": {"placement": "none"}},
    "stock sglang": {"rollout": {**ROLLOUT, "engine": {"kind": "sglang", "numerics": "stock"}}},
    "native": {"numerics": {"mode": "native", "max_context": 24}},
}


def tree(name: str = "all usual") -> dict[str, Any]:
    """`small.yaml` with the changes of TREES: other groups than `ppo` are replaced as a whole."""
    found: dict[str, Any] = parse_yaml(SMALL.read_text(encoding="utf-8"))
    changes = copy.deepcopy(TREES[name])
    return {**found, **changes, "ppo": {**found["ppo"], **changes.get("ppo", {})}}


def config_of(name: str) -> RunConfig:
    """That configuration."""
    return build_config(tree(name), "file")


def kinds_in(annotation: Any) -> Iterator[type[Section]]:
    """Every type of section that a configuration of this type can hold."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
        for field in annotation.model_fields.values():
            yield from kinds_in(field.annotation)
    for argument in typing.get_args(annotation):
        yield from kinds_in(argument)


def sections_in(value: Any) -> Iterator[Section]:
    """Every section that a configuration holds."""
    if isinstance(value, Section):
        yield value
        for name in type(value).model_fields:
            yield from sections_in(getattr(value, name))
    for item in value if isinstance(value, tuple) else ():
        yield from sections_in(item)
