"""Where two paths part: nowhere in deterministic numerics, at a module in native ones, at a planted fault."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import PreTrainedModel

from ppo_repro.checks.bisect import SamplerTrace, compare_ops, first_divergent_op, sample
from ppo_repro.checks.probe import Mode
from ppo_repro.rollout.engine import Sampling
from ppo_repro.rollout.torch_engine import TorchEngine
from tests.support.cli import Cli
from tests.support.models import CONTEXT, policy, unequal
from tests.support.sampler import STOPS, requests_of

pytestmark = pytest.mark.usefixtures("row_noise")

SAMPLINGS = {"plain": Sampling(1.0, 0, 1.0, 10), "cut": Sampling(1.3, 0, 0.8, 10)}


@cache
def subject(architecture: str, mode: Mode, sampling: str = "plain") -> SamplerTrace:
    return sample(policy(architecture, mode), STOPS, mode, CONTEXT, requests_of(6, 11), SAMPLINGS[sampling])


def planted(model: PreTrainedModel, module: str) -> PreTrainedModel:
    """A copy with one weight of one module moved."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_submodule(module).weight.view(-1)[:8] += 0.25
    return other


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_no_op_differs_in_deterministic_numerics_and_one_does_in_native(architecture: str) -> None:
    s = subject(architecture, "deterministic")
    found = compare_ops(s, s.policy)
    assert first_divergent_op(found) == ""
    assert all(op.outputs_equal for op in found)
    assert [(op.layer, op.op) for op in found] == [
        *((-1, "embeddings"), (0, "layer"), (1, "layer"), (-1, "last_norm"), (-1, "lm_head"), (-1, "log_probs"))
    ]
    s = subject(architecture, "native")
    native = compare_ops(s, s.policy)
    first = next(op for op in native if not op.outputs_equal)
    assert first_divergent_op(native).startswith("layer 0 ")
    assert first.layer == 0
    # every input before the first difference is the same, so it starts inside this block or is attention itself
    assert all(op.inputs_equal for op in native if op.order < first.order)


@pytest.mark.parametrize(
    ("module", "named"),
    [
        ("model.layers.0.self_attn.v_proj", "layer 0 layer"),
        ("model.layers.1.input_layernorm", "layer 1 layer"),
        ("model.norm", "last_norm"),
        ("lm_head", "lm_head"),
    ],
)
def test_a_planted_fault_is_found_where_it_is(module: str, named: str) -> None:
    s = subject("llama", "deterministic")
    ops = compare_ops(s, planted(s.policy, module))
    assert first_divergent_op(ops) == named
    found = next(op for op in ops if not op.outputs_equal)
    assert found.inputs_equal
    assert found.max_abs > 0
    assert found.rel_l2 > 0
    assert 0 <= found.frac_bitwise_equal < 1


def test_a_fault_before_the_first_rounding_difference_is_found_in_native_numerics() -> None:
    s = subject("llama", "native")
    ops = compare_ops(s, planted(s.policy, "model.layers.0.input_layernorm"))
    assert first_divergent_op(ops) == "layer 0 input_layernorm"


@pytest.mark.parametrize("mode", ["deterministic", "native"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_decoded_path_is_the_engines(mode: Mode, sampling: str) -> None:
    """The same seats and the same order of work: native numerics repeat themselves too."""
    s = subject("qwen3", mode, sampling)
    completions = TorchEngine(s.policy, STOPS, mode, CONTEXT, 6, 0).generate(requests_of(6, 11), SAMPLINGS[sampling])
    logprobs = torch.cat([c.logprobs for c in completions])
    assert [c.response_ids for c in completions] == [c.response_ids for c in s.completions]
    assert unequal(s.decoded["log_probs"][1][:, 0], logprobs) == 0
    forward = compare_ops(s, s.policy)[-1]
    assert forward.outputs_equal == (mode == "deterministic")


def test_the_command_on_a_run(deterministic_run: Path, tmp_path: Path, cli: Cli) -> None:
    found = cli.json("bisect", deterministic_run, "--out", tmp_path)
    assert found["first_divergent_op"] == {"deterministic": "", "native": "layer 0 self_attn.q_proj"}
    folder = Path(found["folder"])
    ops = pd.read_parquet(folder / "mismatch_op.parquet").sort_values("order")
    starts = ops[ops["inputs_equal"] & ~ops["outputs_equal"]]
    assert set(starts["mode"]) == {"native"}
    assert starts["op"].iloc[0] == "self_attn.q_proj"
    assert starts["layer"].iloc[0] == 0
    assert starts["rel_l2"].iloc[0] < 1e-5
    assert len(found["ops"]) == len(ops)


def test_what_cannot_be_bisected_is_refused(deterministic_run: Path, cli: Cli) -> None:
    assert "--set goes with a configuration" in cli.refusal("bisect", deterministic_run, "--set", "seed=1")
