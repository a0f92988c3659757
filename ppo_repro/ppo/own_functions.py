"""Calls of the user's functions with a batch, and checks of their results.

Their signatures:

    def loss(batch: ObjectiveBatch, ...) -> Tensor | tuple[Tensor, Tensor]: ...
    def advantages(batch: AdvantageBatch, ...) -> Tensor: ...
    def estimate(logprobs: Tensor, ref_logprobs: Tensor, ...) -> Tensor: ...
    def place(batch: ScoreBatch, ...) -> Tensor: ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ppo_repro.base.errors import UserError
from ppo_repro.base.user_file import UserCallable
from ppo_repro.ppo.objectives import ClipFlag, probability_ratios
from ppo_repro.ppo.own_batches import AdvantageBatch, ObjectiveBatch, ScoreBatch, Tokens

_FLAG_TYPES = (torch.bool, torch.uint8)
_FLOAT32 = (torch.float32,)


@dataclass(frozen=True)
class Own:
    """A user's function, called with `parameters` by name."""

    function: UserCallable
    parameters: Mapping[str, Any]

    def refused(self, what: str) -> UserError:
        """Return an error that names the function and its mistake `what`."""
        return self.function.refused(what)

    def _called(self, *arguments: object) -> Any:
        return self.function(*arguments, **self.parameters)

    def _numbers(self, found: object, lengths: Mapping[int, str], dtypes: Sequence[torch.dtype] = _FLOAT32) -> Tensor:
        """Return `found` if it is a tensor of one of the lengths and dtypes. Raises UserError otherwise."""
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        allowed = f"must be a {names} tensor {' or '.join(f'[{n}], {of}' for n, of in lengths.items())}"
        if not isinstance(found, Tensor):
            raise self.refused(f"returned a {type(found).__name__}; {allowed}")
        if found.dim() != 1 or len(found) not in lengths or found.dtype not in dtypes:
            raise self.refused(f"returned a tensor {list(found.shape)} {str(found.dtype)[6:]}; {allowed}")
        return found

    def _finite(self, found: Tensor, tokens: Tokens | None = None) -> Tensor:
        wrong = (~found.isfinite()).nonzero()[:, 0].tolist()
        if wrong:
            of = "" if tokens is None else place_of(tokens, wrong[0])
            more = f" and {len(wrong) - 1} more tokens" * (len(wrong) > 1)
            raise self.refused(f"returned {float(found.detach()[wrong[0]]):g}{of}{more}; must be finite")
        return found


def place_of(tokens: Tokens, index: int) -> str:
    """Return the response and the position of a token as text."""
    return f" at response {int(tokens.responses[index])}, position {int(tokens.positions[index])}"


@dataclass(frozen=True)
class OwnObjective(Own):
    """A user's objective; the loop multiplies its losses by the corrections, and adds KL and entropy terms."""

    chooses_tokens: ClassVar[bool] = False

    def ratios(self, new_logprobs: Tensor, anchor_logprobs: Tensor, responses: Tensor) -> Tensor:
        """Return the ratio of each token, [n] float32."""
        return probability_ratios(new_logprobs, anchor_logprobs)

    def losses(self, batch: ObjectiveBatch) -> tuple[Tensor, Tensor]:
        """Call the function; return its loss of each token, [n] float32, and the ClipFlag of each token, uint8.

        The loss of a response becomes the loss of each of its tokens. Flags are UNKNOWN unless the function also
        returns which tokens it clipped: bool [n], or ClipFlags, uint8 [n]. Raises UserError for other results.
        """
        found, flags = self._called(batch), None
        if isinstance(found, tuple):
            if len(found) != 2:
                raise self.refused(f"returned {len(found)} values; must return the loss, or loss and cut tokens")
            found, flags = found
        tokens, responses = len(batch.responses), len(batch.response_lengths)
        of = {responses: "a loss for each response, not reduced", tokens: "a loss for each token, not reduced"}
        losses = self._numbers(found, of)
        losses = losses if len(losses) == tokens else batch.of_tokens(losses)
        return self._finite(losses, batch), self._flags(flags, batch)

    def _flags(self, flags: object, batch: ObjectiveBatch) -> Tensor:
        if flags is None:
            return torch.full(batch.responses.shape, ClipFlag.UNKNOWN, dtype=torch.uint8)
        if not isinstance(flags, Tensor) or flags.shape != batch.responses.shape or flags.dtype not in _FLAG_TYPES:
            tokens = f"a bool tensor [{len(batch.responses)}], true where the gradient is cut"
            raise self.refused(f"returned as second value something else than {tokens}")
        if flags.dtype == torch.uint8:
            if bool((flags >= len(ClipFlag)).any()):
                raise self.refused(f"returned {int(flags.max())} as ClipFlag; must be below {len(ClipFlag)}")
            return flags
        side = torch.where(batch.ratios.detach() > 1.0, int(ClipFlag.CLIP_HIGH), int(ClipFlag.CLIP_LOW))
        return torch.where(flags, side, int(ClipFlag.NONE)).to(torch.uint8)


@dataclass(frozen=True)
class OwnAdvantages(Own):
    """A user's estimator of advantages."""

    def advantages(self, batch: AdvantageBatch) -> Tensor:
        """Call the function; return the advantages [n] float32. Raises UserError for other results."""
        tokens, responses = len(batch.responses), len(batch.response_lengths)
        of = {responses: "one for each response", tokens: "an advantage for each token"}
        found = self._numbers(self._called(batch), of)
        return self._finite(found if len(found) == tokens else batch.of_tokens(found), batch)


@dataclass(frozen=True)
class OwnEstimator(Own):
    """A user's estimator of KL(policy || reference)."""

    def estimate(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """Call the function; return the KL of each token, [n] float32, nats. Raises UserError for other results."""
        found = self._called(logprobs, ref_logprobs)
        return self._finite(self._numbers(found, {len(logprobs): "a KL for each token, in nats"}))


@dataclass(frozen=True)
class OwnPlacement(Own):
    """A user's placement of scores on tokens."""

    def place(self, batch: ScoreBatch) -> Tensor:
        """Call the function; return its rewards before the KL penalty, [n] float32 or float64, as float64.

        Raises UserError for other results.
        """
        of = {len(batch.responses): "a reward for each token"}
        found = self._numbers(self._called(batch), of, (torch.float32, torch.float64))
        return self._finite(found.to(torch.float64), batch)
