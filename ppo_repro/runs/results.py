"""Read the results of a run: typed facts that the terminal, `--json` and the page of the run tell. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from ppo_repro.config.control import ControlConfig
from ppo_repro.config.kinds import CONTROL, DPO, LANGUAGE
from ppo_repro.config.run import RunConfig
from ppo_repro.config.tasks import RewardConfig, Verifier
from ppo_repro.records import reader
from ppo_repro.records.folder import load_any_recorded_config
from ppo_repro.records.manifest import FinalResults, Head, Manifest, load
from ppo_repro.records.notes import Accuracy, OnCard, read_accuracy, read_card
from ppo_repro.statistics.draws import NONE, Draws, draws_of

DRAW_COLUMNS = ("old_logprobs", "entropies", "sequence", "cumulative_probs")  # they say how a token was drawn


class Change(NamedTuple):
    """The first and the last value of a number."""

    first: float
    last: float

    def __str__(self) -> str:
        """Return the change in three digits: `rose from 0.246 to 0.637`, `stayed at 0.000`."""
        first, last = f"{self.first:.3f}", f"{self.last:.3f}"
        if first == last:
            return f"stayed at {last}"
        return f"{'rose' if self.last > self.first else 'fell'} from {first} to {last}"


@dataclass(frozen=True)
class AgreementCounts:
    """Recorded counts of unequal bits between sampler and trainer, in the iterations that a run computed itself."""

    tokens: int
    unequal_old_rollout_logprobs: int
    first_minibatch_tokens: int  # in the first minibatch of each iteration, before any step
    unequal_values: int  # of the first minibatches, when computed again
    unequal_first_ratios: int  # not exactly 1
    max_abs_old_rollout: float  # nats


@dataclass(frozen=True)
class LanguageFigures:
    """Figures of PPO on a language model, by their names in `--json`."""

    sampled_score_first: float
    sampled_score_last: float
    reward_first: float
    reward_last: float
    accuracy_before: float  # greedy, of held-out prompts
    accuracy_after: float
    score_before: float  # mean score of the same responses
    score_after: float
    cut_fraction: float  # of all responses, cut at rollout.max_response_tokens
    is_judged: bool  # whether responses are right or wrong, so that the accuracies mean something
    numerical_accuracy: Accuracy | None  # of the log-probs at the start
    card: OnCard | None


@dataclass(frozen=True)
class LanguageResults:
    """Results of PPO on a language model."""

    config: RunConfig
    agreement: AgreementCounts
    draws: Draws
    figures: LanguageFigures


@dataclass(frozen=True)
class ControlFigures:
    """Figures of PPO in an environment, by their names in `--json`. The returns are undiscounted."""

    episodes: int
    last_100_return: float  # training episodes; all if there are fewer; NaN if the run is not complete
    eval_before: float  # likeliest actions; NaN if no evaluation episodes are configured
    eval_after: float


@dataclass(frozen=True)
class ControlResults:
    """Results of PPO in an environment, whose tokens are environment steps."""

    config: ControlConfig
    agreement: AgreementCounts
    figures: ControlFigures


@dataclass(frozen=True)
class DPOFigures:
    """Figures of a complete DPO run, by their names in `--json`; None without a task."""

    steps: int
    loss_first: float  # nats, mean over the pairs of a minibatch
    loss_last: float
    eval_pairs: int
    eval_pair_accuracy: float
    accuracy_before: float | None  # greedy
    accuracy_after: float | None
    ref_kl_per_sequence: float | None  # nats


PPOResults = LanguageResults | ControlResults


def read_results(run_dir: Path, recorded: Manifest, rows: pd.DataFrame) -> PPOResults | DPOFigures:
    """Read the results of a complete run; `rows` is its table `iterations`."""
    if recorded.kind == DPO:
        return _dpo_figures(run_dir, recorded, rows)
    draws, config = NONE, load_any_recorded_config(run_dir, recorded)
    is_drawn = isinstance(config, RunConfig) and _are_drawn(config)
    for index in recorded.own_iterations if is_drawn else ():  # one iteration in memory at a time
        tokens = reader.read_tokens(run_dir, iterations=[index], columns=DRAW_COLUMNS, recorded=recorded)
        draws += draws_of_records(index, tokens)
    return ppo_results(run_dir, recorded, rows, draws)


def ppo_results(run_dir: Path, recorded: Manifest, rows: pd.DataFrame, draws: Draws) -> PPOResults:
    """Return the results of a run of PPO, complete or not, from its table `iterations` and the draws of its tokens."""
    config, final = load_any_recorded_config(run_dir, recorded), recorded.final
    own = reader.own_rows(rows, recorded)  # a fork's origin has another configuration
    agreement = recorded_agreement(own)
    if isinstance(config, ControlConfig):
        returns = _evaluated(rows, "eval_return", final)
        last_100_return = float(final.get("last_100_return", math.nan))
        episodes = int(rows["episodes"].sum())
        return ControlResults(config, agreement, ControlFigures(episodes, last_100_return, returns.first, returns.last))
    assert isinstance(config, RunConfig)
    accuracy, score = (_evaluated(rows, name, final) for name in ("eval_accuracy", "eval_score"))
    figures = LanguageFigures(
        sampled_score_first=float(own["score_mean"].iloc[0]),
        sampled_score_last=float(own["score_mean"].iloc[-1]),
        reward_first=float(own["reward_mean"].iloc[0]),
        reward_last=float(own["reward_mean"].iloc[-1]),
        accuracy_before=accuracy.first,
        accuracy_after=accuracy.last,
        score_before=score.first,
        score_after=score.last,
        cut_fraction=float((own["truncated_fraction"] * own["sequences"]).sum() / own["sequences"].sum()),
        is_judged=is_judged(run_dir, recorded, config.reward),
        numerical_accuracy=read_accuracy(run_dir, recorded),
        card=read_card(run_dir, recorded),
    )
    return LanguageResults(config, agreement, draws if _are_drawn(config) else NONE, figures)


def _are_drawn(config: RunConfig) -> bool:
    """Return whether the recorded tokens were drawn. Tokens that were encoded again were not."""
    return not config.mismatch.trainer.retokenize


def recorded_agreement(own: pd.DataFrame) -> AgreementCounts:
    """Add the counts of some rows of `iterations`."""
    return AgreementCounts(
        tokens=int(own["tokens"].sum()),
        unequal_old_rollout_logprobs=int(own["unequal_old_rollout_logprobs"].sum()),
        first_minibatch_tokens=int(own["first_minibatch_tokens"].sum()),
        unequal_values=int(own["unequal_values"].sum()),
        unequal_first_ratios=int(own["unequal_first_ratios"].sum()),
        max_abs_old_rollout=float(own["max_abs_old_rollout"].max(skipna=False)),
    )


def _evaluated(rows: pd.DataFrame, name: str, final: FinalResults) -> Change:
    """Return the first and the last evaluation, which may be a final result; NaN if nothing was evaluated."""
    values = [*rows[name].dropna(), *([final[name]] if name in final else [])] or [math.nan]
    return Change(float(values[0]), float(values[-1]))


def _dpo_figures(run_dir: Path, recorded: Manifest, rows: pd.DataFrame) -> DPOFigures:
    final, has_task = recorded.final, "eval_accuracy" in recorded.final
    loss = reader.read_steps(run_dir, columns=["loss"])["loss"]
    held_out = reader.read_table("margins", run_dir, iterations=[0], columns=["held_out"])["held_out"]
    return DPOFigures(
        steps=len(loss),
        loss_first=float(loss.iloc[0]),
        loss_last=float(loss.iloc[-1]),
        eval_pairs=int(held_out.sum()),
        eval_pair_accuracy=float(rows["eval_pair_accuracy"].iloc[-1]),
        accuracy_before=float(rows["eval_accuracy"].iloc[0]) if has_task else None,
        accuracy_after=float(final["eval_accuracy"]) if has_task else None,
        ref_kl_per_sequence=float(final["ref_kl_per_sequence"]) if has_task else None,
    )


def draws_of_records(iteration: int, tokens: pd.DataFrame) -> Draws:
    """Measure the draws of one iteration, from the columns DRAW_COLUMNS of its tokens."""
    logprobs, entropies, sequences, known = (tokens[name].to_numpy() for name in DRAW_COLUMNS)
    return draws_of(logprobs, entropies, sequences, known, seed=iteration)


def is_judged(run_dir: Path, recorded: Manifest, reward: RewardConfig) -> bool:
    """Return whether responses of a language run are right or wrong.

    They are if the prompts have answers or the task has a verifier, unless a user's function is the only reward.
    """
    first = recorded.own_iterations[:1]
    answers = reader.read_sequences(run_dir, columns=["answer"], iterations=first, recorded=recorded)["answer"]
    is_known = any(isinstance(term, Verifier) for term in reward.terms) or bool((answers != "").any())
    return reward.judges and is_known


def score_of(run_dir: Path, head: Head) -> float | None:
    """Return the number by which runs of this kind are compared; None if there is none so far.

    Language: the last mean score of the held-out responses. Gymnasium: the mean return of the likeliest actions, or of
    the last episodes. DPO: the share of held-out pairs in the right order.
    """
    for name in ("eval_score", "eval_return", "last_100_return"):
        if name in head.final and not math.isnan(score := float(head.final[name])):
            return score
    if not head.num_iterations:
        return None
    column = {LANGUAGE: "eval_score", CONTROL: "episode_return_mean", DPO: "eval_pair_accuracy"}[head.kind]
    recorded = load(run_dir)
    for index in reversed(range(head.num_iterations)):
        rows = reader.read_iterations(run_dir, iterations=[index], columns=[column], recorded=recorded)
        if rows[column].notna().all():
            return float(rows[column].item())
    return None
