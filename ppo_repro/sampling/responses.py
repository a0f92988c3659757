"""Check the responses of samplers in other processes. The child of a user's class imports this file: no torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ppo_repro.base.float32 import FLOAT32_MAX
from ppo_repro.user.file import RefusedError

Response = tuple[list[int], list[float], str]  # ids, log-probs in nats, "stop" or "length"
ONE_EACH = "one (ids, logprobs, finish_reason) for each prompt"


@dataclass(frozen=True)
class UncutSampling:
    """Distribution to sample from: softmax(logits / temperature) over the whole vocabulary, without top-k and top-p."""

    temperature: float
    max_response_tokens: int  # the end token included
    end_ids: tuple[int, ...]  # tokens that end a response and are its last token
    vocab_size: int  # of the model; an id is below it


def checked_responses(value: Any, prompts: int, sampling: UncutSampling) -> list[Response]:
    """Return the responses of `generate` as plain data. Lists may be tuples, arrays or tensors.

    Raises RefusedError, with the fault, for the first wrong response.
    """
    responses = _plain(value)
    if not isinstance(responses, list | tuple):
        raise RefusedError(f"returned {shown_value(responses)}; must be a list, {ONE_EACH}")
    if len(responses) != prompts:
        raise RefusedError(f"returned {len(responses)} responses to {prompts} prompts; must be {ONE_EACH}")
    checked = []
    for index, response in enumerate(responses):
        try:
            checked.append(checked_response(response, sampling))
        except RefusedError as error:
            raise RefusedError(f"returned as response {index} {error}") from None
    return checked


def checked_response(response: Any, sampling: UncutSampling) -> Response:
    """Return one response as plain data. Raises RefusedError, with the fault, for a wrong one.

    A response that ends with an end token gets the finish reason `stop`, even at the length limit, where some samplers
    return `length`.
    """
    response = _plain(response)
    if not isinstance(response, list | tuple) or len(response) != 3:
        raise RefusedError(f"{shown_value(response)}; must be (ids, logprobs, finish_reason)")
    ids, logprobs, reason = map(_plain, response)
    for name, values in (("ids", ids), ("logprobs", logprobs)):
        if not isinstance(values, list | tuple):
            raise RefusedError(f"{shown_value(values)} as {name}; must be a list of numbers")
    ids, logprobs = [_plain(token) for token in ids], [_plain(number) for number in logprobs]
    _check_ids(ids, sampling)
    _check_logprobs(logprobs, len(ids))
    return list(ids), [float(number) for number in logprobs], _finish_reason(reason, ids, sampling)


def _check_ids(ids: Sequence[Any], sampling: UncutSampling) -> None:
    limit, last = sampling.max_response_tokens, sampling.vocab_size - 1
    if not 1 <= len(ids) <= limit:
        raise RefusedError(f"{len(ids)} ids; must be 1 to rollout.max_response_tokens = {limit}")
    for place, token in enumerate(ids):
        if type(token) is not int or not 0 <= token <= last:
            raise RefusedError(f"the id {shown_value(token)} at place {place}; must be a whole number in 0..{last}")
        if token in sampling.end_ids and place < len(ids) - 1:
            raise RefusedError(f"tokens after the end token {token} at place {place}; the end token must be the last")


def _check_logprobs(logprobs: Sequence[Any], tokens: int) -> None:
    if len(logprobs) != tokens:
        raise RefusedError(
            f"{len(logprobs)} log-probs for {tokens} ids; must be one for each id, the end token included"
        )
    for place, number in enumerate(logprobs):
        if type(number) not in (int, float) or not -FLOAT32_MAX <= number <= 0:  # NaN is in no range
            raise RefusedError(
                f"the log-prob {shown_value(number)} at place {place}; must be a finite number of nats, at most 0"
            )


def _finish_reason(reason: Any, ids: Sequence[int], sampling: UncutSampling) -> str:
    if reason not in ("stop", "length"):
        raise RefusedError(f"the finish reason {shown_value(reason)}; must be 'stop' or 'length'")
    limit, ended = sampling.max_response_tokens, ids[-1] in sampling.end_ids
    if ended and (reason == "stop" or len(ids) == limit):
        return "stop"
    if ended:
        raise RefusedError(f"the finish reason 'length' after the end token {ids[-1]}; must be 'stop'")
    if reason == "stop":
        raise RefusedError(
            f"the finish reason 'stop' after token {ids[-1]}, none of the end tokens {list(sampling.end_ids)}; keep "
            "the end token, or say 'length'"
        )
    if len(ids) == limit:
        return "length"
    raise RefusedError(
        f"the finish reason 'length' after {len(ids)} ids; must be rollout.max_response_tokens = {limit} then"
    )


def _plain(value: Any) -> Any:
    """Return an array or a tensor as lists or a number; return any other value unchanged."""
    return value.tolist() if hasattr(value, "tolist") and callable(value.tolist) else value


def shown_value(value: Any) -> str:
    """Return a value for an error message, in one short line."""
    if isinstance(value, list | tuple):
        return f"{len(value)} entries"
    text = " ".join(repr(value).split())[:100]
    return text if value is None or isinstance(value, str | int | float) else f"{text} of type {type(value).__name__}"
