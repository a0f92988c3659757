"""Rewards written for other stacks, called as those stacks call them: TRL's `reward_funcs` and verl's `compute_score`.

Each call is about one response. A score must follow from prompt, response and answer alone, and a batch of one makes
sure of it: which responses are judged together depends on the layout of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ppo_repro.config.reward import CalledReward, TrlReward, VerlReward

Function = Callable[..., object]


def adapter(term: CalledReward) -> Callable[[Function], Function]:
    """What makes of a function of the term's kind one of prompt, response, answer and the prompt's other fields."""
    if isinstance(term, TrlReward):
        return lambda function: _trl(function, term.conversational)
    if isinstance(term, VerlReward):
        return lambda function: _verl(function, term.data_source)
    return as_it_is


def as_it_is(function: Function) -> Function:
    """The function itself."""
    return function


def _trl(function: Function, conversational: bool) -> Function:
    """`reward_func(prompts=[...], completions=[...], **columns) -> [float]`, each list of one entry."""

    def score(prompt: str, response: str, answer: str, fields: Mapping[str, Any] | None = None) -> object:
        prompts: object = prompt
        completions: object = response
        if conversational:
            prompts, completions = [{"role": "user", "content": prompt}], [{"role": "assistant", "content": response}]
        columns = {name: [value] for name, value in {"answer": answer, **(fields or {})}.items()}
        columns = {name: value for name, value in columns.items() if name not in ("prompts", "completions")}
        scores: Any = function(prompts=[prompts], completions=[completions], **columns)
        try:
            (only,) = scores
        except (TypeError, ValueError):
            kind = f"{type(scores).__name__} of {len(scores)}" if hasattr(scores, "__len__") else type(scores).__name__
            raise ValueError(
                f"must return a list with one number for each completion, 1 here; returned {kind}"
            ) from None
        return only

    return score


def _verl(function: Function, data_source: str) -> Function:
    """`compute_score(data_source, solution_str, ground_truth, extra_info) -> float`, or a dict with `score`."""

    def score(prompt: str, response: str, answer: str, fields: Mapping[str, Any] | None = None) -> object:
        given = dict(fields or {})
        source = given.pop("data_source", data_source)
        extra = given.get("extra_info", given)
        found = function(data_source=source, solution_str=response, ground_truth=answer, extra_info=extra)
        if isinstance(found, dict):
            if "score" not in found:
                raise ValueError(f"must return a number or a dict with 'score'; returned one with {sorted(found)}")
            return found["score"]
        return found

    return score
