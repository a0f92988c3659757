"""PPO written down once more, in stock torch and float64, takes the optimizer steps that a run recorded.

The steps are those of a run's second iteration, from the checkpoint before it: moments, learning rates and statistics
of returns are of a run under way. Only records and checkpoints are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, fields, replace

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ppo_repro.numerics.adamw import OptimizerState
from ppo_repro.records import manifest, reader
from ppo_repro.runs import checkpoint
from tests.support.language import tiny_run


@dataclass(frozen=True)
class Settings:
    """What the run is told and the textbook takes."""

    temperature: float = 0.8
    gamma: float = 0.9
    gae_lambda: float = 0.8
    clip_low: float = 0.04
    clip_high: float = 0.1
    entropy_coef: float = 0.02
    kl_coef: float = 0.1
    early_stop_kl: float = 0.003
    epochs: int = 2
    value_epochs: int = 3
    value_clip: float = 0.02
    learning_rate: float = 1e-3
    value_learning_rate: float = 2e-3
    beta2: float = 0.9
    eps: float = 1e-4
    weight_decay: float = 0.5
    max_grad_norm: float = 1.5


S = Settings()
OVERRIDES = (
    *("ppo.iterations=2", "ppo.schedule=linear", "ppo.aggregation=sequence_mean", "model.warm_start_steps=20"),
    *("reward.terms=[{kind: length, target: 3}]", "evaluation.every=9", "numerics.accuracy_sequences=0"),
    "checkpoints={every: 1, keep: 2}",
    *(f"rollout.temperature={S.temperature}", "rollout.top_p=0.9"),
    f"kl={{placement: loss, estimator: k3, kl_coef: {S.kl_coef}}}",
    f"advantages={{kind: gae, gamma: {S.gamma}, gae_lambda: {S.gae_lambda}}}",
    f"value={{kind: separate, learning_rate: {S.value_learning_rate}, epochs: {S.value_epochs}, "
    f"clip_range: {S.value_clip}, normalize_returns: true}}",
    f"ppo.objective={{clip_range: {S.clip_low}, clip_range_high: {S.clip_high}}}",
    *(f"ppo.epochs={S.epochs}", f"ppo.early_stop_kl={S.early_stop_kl}", f"ppo.entropy_coef={S.entropy_coef}"),
    *(f"ppo.learning_rate={S.learning_rate}", f"ppo.max_grad_norm={S.max_grad_norm}"),
    *(f"ppo.adam_beta2={S.beta2}", f"ppo.adam_eps={S.eps}", f"ppo.weight_decay={S.weight_decay}"),
)
RATE_FACTOR = 0.5  # linear, in the second of two iterations
TOLERANCE = 2e-5  # of float32 beside float64


@dataclass(frozen=True)
class Recorded:
    """A run's second iteration."""

    reference: PreTrainedModel
    before: checkpoint.Checkpoint
    after: checkpoint.Checkpoint
    earlier_returns: Tensor  # of the first iteration's tokens
    responses: pd.DataFrame
    tokens: pd.DataFrame
    updates: pd.DataFrame
    steps: pd.DataFrame


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    run_dir = tiny_run(tmp_path_factory.mktemp("textbook"), *OVERRIDES)
    files = manifest.load(run_dir).files
    names = [f"checkpoints/iteration-{n:06d}.safetensors" for n in (1, 2)]
    before, after = (checkpoint.load(run_dir / name, files[name]) for name in names)
    earlier = reader.read_tokens(run_dir, iterations=[0], columns=["returns"])["returns"].to_numpy("float64")
    readers = reader.read_sequences, reader.read_tokens, reader.read_updates, reader.read_steps
    tables = [read(run_dir, iterations=[1]) for read in readers]
    reference = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / "reference", dtype=torch.float64)
    return Recorded(reference, before, after, torch.from_numpy(earlier), *tables)


def advantages_of(tokens: pd.DataFrame, s: Settings) -> tuple[Tensor, Tensor]:
    """Whitened advantages and returns: each a sum over what follows in the response."""
    advantages, returns, decay = list[float](), list[float](), s.gamma * s.gae_lambda
    for _, rows in tokens.groupby("sequence"):
        values = [*rows["values"], 0.0]
        errors = [r + s.gamma * after - v for r, v, after in zip(rows["rewards"], values, values[1:], strict=False)]
        found = [sum(decay**k * error for k, error in enumerate(errors[t:])) for t in range(len(errors))]
        advantages += found
        returns += [a + v for a, v in zip(found, values, strict=False)]
    a = torch.tensor(advantages, dtype=torch.float64)
    return (a - a.mean()) / (a.var(correction=0) + 1e-8).sqrt(), torch.tensor(returns, dtype=torch.float64)


class ValueModel(nn.Module):
    def __init__(self, trunk: PreTrainedModel) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(trunk.config.hidden_size, 1)


class Trained:
    """A network and torch's AdamW, which goes on from the moments of a checkpoint."""

    def __init__(self, network: nn.Module, saved: OptimizerState, learning_rate: float, s: Settings) -> None:
        self.network, self.max_grad_norm = network, s.max_grad_norm
        about = {"betas": (0.9, s.beta2), "eps": s.eps, "weight_decay": s.weight_decay}
        self.adamw = torch.optim.AdamW(network.parameters(), learning_rate * RATE_FACTOR, **about)
        for name, parameter in network.named_parameters():
            moments = {"exp_avg": saved.first[name].double(), "exp_avg_sq": saved.second[name].double()}
            self.adamw.state[parameter] = {"step": torch.tensor(float(saved.steps[name])), **moments}

    def step(self, loss: Tensor) -> float:
        """Take a step; the gradient norm before clipping."""
        self.adamw.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.network.parameters(), self.max_grad_norm)
        self.adamw.step()
        return norm.item()


class Textbook:
    """Both networks as they were before the iteration, and the steps of the iteration."""

    def __init__(self, recorded: Recorded, s: Settings) -> None:
        self.recorded, self.s, before = recorded, s, recorded.before
        policy, value_model = deepcopy(recorded.reference), ValueModel(deepcopy(recorded.reference.model)).double()
        policy.load_state_dict({**before.policy, "lm_head.weight": before.policy["model.embed_tokens.weight"]})
        value_model.load_state_dict(dict(before.value_model))
        self.policy = Trained(policy, before.policy_optimizer, s.learning_rate, s)
        self.value_model = Trained(value_model, before.value_optimizer, s.value_learning_rate, s)
        self.advantages, self.returns = advantages_of(recorded.tokens, s)
        # the value model predicts in units of the returns so far
        self.mean, self.scale = recorded.earlier_returns.mean(), recorded.earlier_returns.std(correction=0)

    def steps(self) -> Iterator[dict[str, float]]:
        """Take every step of the iteration on its recorded minibatch; yields columns of the table `steps`."""
        stopped = False
        for (epoch, _), updates in self.recorded.updates.groupby(["epoch", "minibatch"]):
            responses, figures = sorted(set(updates["sequence"])), dict[str, float]()
            if epoch < self.s.epochs and not stopped:
                figures |= self.policy_step(responses)
                stopped = figures["approx_kl"] > self.s.early_stop_kl
            if epoch < self.s.value_epochs:
                figures |= self.value_step(responses)
            yield figures

    def policy_step(self, responses: list[int]) -> dict[str, float]:
        s, rows, weights = self.s, self.rows(responses), self.weights(responses)
        new, entropies, _ = self.distributions(responses, rows)
        a, log_ratio = self.advantages[rows], new - self.column("rollout_logprobs", rows)
        ratio, to_reference = log_ratio.exp(), self.column("ref_logprobs", rows) - new
        surrogate = torch.minimum(ratio * a, ratio.clamp(1 - s.clip_low, 1 + s.clip_high) * a)
        losses = -surrogate - s.entropy_coef * entropies + s.kl_coef * (to_reference.exp() - 1 - to_reference)
        loss = (weights * losses).sum()
        clipped = ((ratio > 1 + s.clip_high) & (a > 0)) | ((ratio < 1 - s.clip_low) & (a < 0))
        return {
            "policy_loss": loss.item(),
            "entropy": entropies.mean().item(),
            "approx_kl": (ratio - 1 - log_ratio).mean().item(),
            "clip_fraction": clipped.double().mean().item(),
            "grad_norm": self.policy.step(loss),
        }

    def value_step(self, responses: list[int]) -> dict[str, float]:
        rows, bound = self.rows(responses), self.s.value_clip * self.scale
        old, target = self.column("values", rows), self.returns[rows]
        new = self.predictions(responses) * self.scale + self.mean
        error, bounded_error = new - target, old + (new - old).clamp(-bound, bound) - target
        losses = 0.5 * torch.maximum(error**2, bounded_error**2) / self.scale**2
        loss = (self.weights(responses) * losses).sum()
        return {
            "value_loss": loss.item(),
            "value_clip_fraction": (bounded_error**2 > error**2).double().mean().item(),
            "value_grad_norm": self.value_model.step(loss),
        }

    def rows(self, responses: list[int]) -> list[int]:
        """Where the tokens of some responses are in the table `tokens`."""
        return [row for i in responses for row in self.recorded.tokens.index[self.recorded.tokens["sequence"] == i]]

    def weights(self, responses: list[int]) -> Tensor:
        """The mean over responses of their token means."""
        lengths = [int(self.recorded.responses["response_length"][i]) for i in responses]
        return torch.tensor([1 / (len(lengths) * n) for n in lengths for _ in range(n)], dtype=torch.float64)

    def column(self, name: str, rows: list[int]) -> Tensor:
        return torch.from_numpy(self.recorded.tokens[name].to_numpy("float64"))[rows]

    def texts(self, responses: list[int]) -> Iterator[tuple[Tensor, int]]:
        """The tokens of each prompt with its response, and how many are the prompt's."""
        for _, row in self.recorded.responses.loc[responses].iterrows():
            yield torch.tensor([*row["prompt_ids"], *row["response_ids"]]), len(row["prompt_ids"])

    def distributions(self, responses: list[int], rows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs, entropies and sums of squared probabilities of the tokens, over what top-p kept."""
        outputs = [(self.policy.network(ids[None]).logits[0, n - 1 : -1], ids[n:]) for ids, n in self.texts(responses)]
        logits, tokens = (torch.cat(column) for column in zip(*outputs, strict=True))
        removed = torch.ones_like(logits, dtype=torch.bool)
        for row, kept in zip(removed, self.recorded.tokens["kept_tokens"][rows], strict=True):
            row[list(kept)] = False
        logprobs = (logits / self.s.temperature).masked_fill(removed, -math.inf).log_softmax(-1)
        entropies = -(logprobs.exp() * logprobs.masked_fill(removed, 0.0)).sum(-1)
        return logprobs.gather(1, tokens[:, None])[:, 0], entropies, logprobs.exp().square().sum(-1)

    def predictions(self, responses: list[int]) -> Tensor:
        """What the value model says before each token, in its own unit."""
        network = self.value_model.network
        assert isinstance(network, ValueModel)
        hidden = [network.trunk(ids[None]).last_hidden_state[0, n - 1 : -1] for ids, n in self.texts(responses)]
        return network.head(torch.cat(hidden))[:, 0]


FIGURES = (
    *("policy_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm"),
    *("value_loss", "value_clip_fraction", "value_grad_norm"),
)


def is_as_recorded(textbook: Textbook) -> bool:
    """Take steps up to the first one with a figure that is not the recorded one; whether there is none."""
    recorded = textbook.recorded.steps[[*FIGURES]].to_dict("records")
    without_a_step = dict.fromkeys(FIGURES, math.nan)
    return all(
        {**without_a_step, **figures} == pytest.approx(row, rel=0, abs=TOLERANCE, nan_ok=True)
        for figures, row in zip(textbook.steps(), recorded, strict=True)
    )


def test_every_step_and_the_weights_after_them_are_those_of_the_textbook(recorded: Recorded) -> None:
    textbook = Textbook(recorded, S)
    assert is_as_recorded(textbook)
    for name, parameter in textbook.policy.network.named_parameters():
        assert (parameter - recorded.after.policy[name]).abs().max() < TOLERANCE, name
    for name, parameter in textbook.value_model.network.named_parameters():
        assert (parameter - recorded.after.value_model[name]).abs().max() < TOLERANCE, name


def test_what_is_recorded_of_each_token_before_the_first_step_is_over_what_top_p_kept(recorded: Recorded) -> None:
    textbook = Textbook(recorded, S)
    responses = recorded.responses.index.tolist()
    found = textbook.distributions(responses, textbook.rows(responses))
    for name, values in zip(("old_logprobs", "entropies", "prob_sq_sums"), found, strict=True):
        assert (values - textbook.column(name, textbook.rows(responses))).abs().max() < TOLERANCE, name


@pytest.mark.parametrize("field", [field.name for field in fields(Settings)])
def test_a_textbook_with_half_of_one_setting_takes_other_steps(field: str, recorded: Recorded) -> None:
    """The negative control."""
    assert not is_as_recorded(Textbook(recorded, replace(S, **{field: getattr(S, field) / 2})))


def test_an_early_stop_at_twice_its_threshold_would_have_come_later(recorded: Recorded) -> None:
    assert not is_as_recorded(Textbook(recorded, replace(S, early_stop_kl=2 * S.early_stop_kl)))
