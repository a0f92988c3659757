"""The user's functions that the loop calls with tensors: they are loaded once, and every result is checked.

Their signatures:

    def loss(batch: ObjectiveBatch, ...) -> Tensor | tuple[Tensor, Tensor]: ...
    def advantages(batch: AdvantageBatch, ...) -> Tensor: ...
    def estimate(logprobs: Tensor, ref_logprobs: Tensor, ...) -> Tensor: ...
    def place(batch: ScoreBatch, ...) -> Tensor: ...
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ppo_repro.base.errors import UserError
from ppo_repro.config.section import CheckedFunction
from ppo_repro.ppo.objectives import ClipFlag, TokenLosses, probability_ratios
from ppo_repro.ppo.own_batches import AdvantageBatch, ObjectiveBatch, ScoreBatch, Tokens
from ppo_repro.user.file import UserCallable, load_callable

_FLAG_TYPES = (torch.bool, torch.uint8)
_FLOAT32 = (torch.float32,)
_FOLDER = "the current folder (os.chdir)"
_SUBNORMAL = 1e-310


@dataclass(frozen=True)
class Own:
    """A user's function, called with `parameters` by name."""

    function: UserCallable
    parameters: Mapping[str, Any]

    def refused(self, what: str) -> UserError:
        """Return an error that names the function and its mistake `what`."""
        return self.function.refused(what)

    def _called(self, arguments: Mapping[str, Tokens | Tensor]) -> Any:
        """Call the function with copies of its positional arguments, so that nothing that it writes reaches the run.

        Raises UserError if it fails, writes into a tensor, differentiates into the policy, or leaves another setting
        of the process.
        """
        copies = {name: _copied(value) for name, value in arguments.items()}
        before, tensors = settings_of_process(), [x for argument in arguments.items() for _, x in _named(*argument)]
        hooks = [tensor.register_hook(self._no_backward) for tensor in tensors if tensor.requires_grad]
        try:
            result = self.function(*copies.values(), **deepcopy(dict(self.parameters)))
            require_settings(self.function, before)
        finally:
            for hook in hooks:
                hook.remove()
            if before[_FOLDER] not in ("", _folder()):
                os.chdir(str(before[_FOLDER]))  # the folder of the run may be relative to it
        if changed := [name for argument in copies.items() for name, tensor in _named(*argument) if tensor._version]:
            raise self.refused(f"changes {changed[0]} in place; let it change a copy")
        return result

    def _no_backward(self, gradient: Tensor) -> None:
        raise self.refused("calls backward() itself; let it return the loss alone, which the run differentiates")

    def _numbers(self, result: object, lengths: Mapping[int, str], dtypes: Sequence[torch.dtype] = _FLOAT32) -> Tensor:
        """Return `result` if it is a tensor of one of the lengths and dtypes. Raises UserError otherwise."""
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        allowed = f"must be a {names} tensor {' or '.join(f'[{n}], {meaning}' for n, meaning in lengths.items())}"
        if not isinstance(result, Tensor):
            raise self.refused(f"returned a {type(result).__name__}; {allowed}")
        if result.dim() != 1 or len(result) not in lengths or result.dtype not in dtypes:
            raise self.refused(f"returned a tensor {list(result.shape)} {str(result.dtype)[6:]}; {allowed}")
        return result.clone()  # the function may keep its tensor, and write into it later

    def _finite(self, numbers: Tensor, tokens: Tokens | None = None) -> Tensor:
        wrong = (~numbers.isfinite()).nonzero()[:, 0].tolist()
        if wrong:
            place = "" if tokens is None else place_of(tokens, wrong[0])
            more = f" and {len(wrong) - 1} more tokens" * (len(wrong) > 1)
            raise self.refused(f"returned {float(numbers.detach()[wrong[0]]):g}{place}{more}; must be finite")
        return numbers


def settings_of_process() -> dict[str, object]:
    """Return the settings of the process that a user's code could change for the whole run."""
    return {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        "torch's number of threads": torch.get_num_threads(),
        "torch's inference mode": torch.is_inference_mode_enabled(),
        "torch's grad mode": torch.is_grad_enabled(),
        "torch's autocast": torch.is_autocast_enabled("cpu"),
        "torch's use of deterministic algorithms": torch.get_deterministic_debug_mode(),
        "torch's precision of matrix products": torch.get_float32_matmul_precision(),
        "how torch treats subnormal numbers": _SUBNORMAL * 0.5 == 0.0,
        _FOLDER: _folder(),
    }


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # someone removed it during the run
        return ""


def require_settings(function: UserCallable, before: Mapping[str, object]) -> None:
    """Raise UserError, naming the function, if the settings of the process are no longer `before`."""
    after = settings_of_process()
    for name, value in before.items():
        if after[name] != value:
            advice = ": it moves the relative paths of the run; take absolute paths instead" if name == _FOLDER else ""
            raise function.refused(f"or its file changes {name}, which the whole run shares; let it leave that{advice}")


def _copied(argument: Tokens | Tensor) -> Tokens | Tensor:
    """Return a batch or tensor in memory of its own. Gradients pass."""
    if isinstance(argument, Tensor):
        return argument.clone()
    return replace(argument, **{name: tensor.clone() for name, tensor in _named("", argument)})


def _named(name: str, value: Tokens | Tensor) -> list[tuple[str, Tensor]]:
    """Return the tensors of an argument with their names: the columns of a batch, or the argument itself."""
    if isinstance(value, Tensor):
        return [(name, value)]
    columns = [(field.name, getattr(value, field.name)) for field in fields(value)]
    return [(column_name, column) for column_name, column in columns if column is not None]


def place_of(tokens: Tokens, index: int) -> str:
    """Return the response and the position of a token as text."""
    return f" at response {int(tokens.responses[index])}, position {int(tokens.positions[index])}"


@dataclass(frozen=True)
class OwnObjective(Own):
    """A user's objective. The loop multiplies its losses by the corrections, and adds KL and entropy terms."""

    def ratios(self, new_logprobs: Tensor, anchor_logprobs: Tensor, responses: Tensor) -> Tensor:
        """Return the ratio of each token, [n] float32."""
        return probability_ratios(new_logprobs, anchor_logprobs)

    def losses(self, batch: ObjectiveBatch) -> TokenLosses:
        """Call the function; return its loss of each token as the surrogate, and the ClipFlag of each token.

        The loss of a response becomes the loss of each of its tokens. Flags are UNKNOWN unless the function also
        returns which tokens it clipped: bool [n], or ClipFlags, uint8 [n]. Raises UserError for other results.
        """
        result, flags = self._called({"batch": batch}), None
        if isinstance(result, tuple):
            if len(result) != 2:
                raise self.refused(f"returned {len(result)} values; must return the loss, or loss and cut tokens")
            result, flags = result
        tokens, responses = len(batch.responses), len(batch.response_lengths)
        lengths = {responses: "a loss for each response, not reduced", tokens: "a loss for each token, not reduced"}
        losses = self._numbers(result, lengths)
        losses = losses if len(losses) == tokens else batch.of_tokens(losses)
        return TokenLosses(self._finite(losses, batch), None, self._flags(flags, batch))

    def _flags(self, flags: object, batch: ObjectiveBatch) -> Tensor:
        if flags is None:
            return torch.full(batch.responses.shape, ClipFlag.UNKNOWN, dtype=torch.uint8)
        if not isinstance(flags, Tensor) or flags.shape != batch.responses.shape or flags.dtype not in _FLAG_TYPES:
            tokens = f"a bool tensor [{len(batch.responses)}], true where the gradient is cut"
            raise self.refused(f"returned as second value something else than {tokens}")
        if flags.dtype == torch.uint8:
            if wrong := set(flags.tolist()) - set(ClipFlag):
                allowed = ", ".join(map(str, ClipFlag))
                raise self.refused(f"returned {min(wrong)} as ClipFlag; must be one of {allowed}")
            return flags.clone()
        side = torch.where(batch.ratios.detach() > 1.0, int(ClipFlag.CLIP_HIGH), int(ClipFlag.CLIP_LOW))
        return torch.where(flags, side, int(ClipFlag.NONE)).to(torch.uint8)


@dataclass(frozen=True)
class OwnAdvantages(Own):
    """A user's estimator of advantages."""

    def advantages(self, batch: AdvantageBatch) -> Tensor:
        """Call the function; return the advantages [n] float32. Raises UserError for other results."""
        tokens, responses = len(batch.responses), len(batch.response_lengths)
        lengths = {responses: "one for each response", tokens: "an advantage for each token"}
        advantages = self._numbers(self._called({"batch": batch}), lengths)
        return self._finite(advantages if len(advantages) == tokens else batch.of_tokens(advantages), batch)


@dataclass(frozen=True)
class OwnEstimator(Own):
    """A user's estimator of KL(policy || reference)."""

    def estimate(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """Call the function; return the KL of each token, [n] float32, nats. Raises UserError for other results."""
        result = self._called({"logprobs": logprobs, "ref_logprobs": ref_logprobs})
        return self._finite(self._numbers(result, {len(logprobs): "a KL for each token, in nats"}))


@dataclass(frozen=True)
class OwnPlacement(Own):
    """A user's placement of scores on tokens."""

    def place(self, batch: ScoreBatch) -> Tensor:
        """Call the function; return its rewards before the KL penalty, [n] float32 or float64, as float64.

        Raises UserError for other results.
        """
        lengths = {len(batch.responses): "a reward for each token"}
        rewards = self._numbers(self._called({"batch": batch}), lengths, (torch.float32, torch.float64))
        return self._finite(rewards.to(torch.float64), batch)


OwnT = TypeVar("OwnT", bound=Own)


@dataclass(frozen=True)
class Functions:
    """The user's functions; None if the configuration names a method of the package."""

    objective: OwnObjective | None = None
    advantages: OwnAdvantages | None = None
    estimator: OwnEstimator | None = None
    placement: OwnPlacement | None = None


BUILT_IN = Functions()


def load_functions(own: Mapping[str, CheckedFunction]) -> Functions:
    """Execute the files of the user's functions. Raises UserError, naming field, file and line, for unusable ones."""
    return Functions(
        objective=_loaded(OwnObjective, "ppo.objective", own, ["batch"]),
        advantages=_loaded(OwnAdvantages, "advantages", own, ["batch"]),
        estimator=_loaded(OwnEstimator, "kl.estimator", own, ["logprobs", "ref_logprobs"]),
        placement=_loaded(OwnPlacement, "reward.placement", own, ["batch"]),
    )


def _loaded(kind: type[OwnT], field: str, own: Mapping[str, CheckedFunction], positions: Sequence[str]) -> OwnT | None:
    """Load the function of a field; None if the field names a method of the package."""
    if field not in own:
        return None
    parameters, before = own[field].parameters, settings_of_process()
    function = load_callable(f"{field}.path", own[field].path, positions, parameters)
    require_settings(function, before)
    return kind(function, parameters)
