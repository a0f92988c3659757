"""Steps of `device_check` that time the card beside stock torch; every time is in seconds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from ppo_repro.checks.plan import plan_run
from ppo_repro.config.files import load_config
from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import make_policy, policy_logits
from ppo_repro.models.tiny import make_tokenizer
from ppo_repro.numerics.linear import PackedMatrix, linear, multiply
from ppo_repro.numerics.optimizer import SLOTS, AdamWSettings, Optimizer, weights_digest
from ppo_repro.numerics.rows import slots_of
from ppo_repro.numerics.token_statistics import sample_tokens, token_statistics
from ppo_repro.rollout.engine import Request, Sampling
from ppo_repro.rollout.torch_engine import TorchEngine
from ppo_repro.runs.summary import summarise
from tests.gpu.check import Check, Results, unequal
