"""Errors that 16-bit rounding explains, with other bits: another order of sums rounds otherwise, but by as much.

`with_other_bits` decides. First it asks whether the errors can be rounding at all, then which 16-bit computation has
rounding errors of that size and pattern (`OtherBits`). The hypotheses follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.causes.cause import Cause, OtherModel, RoundedPart
from ppo_repro.testing.audit.causes.names import EXPERTS
from ppo_repro.testing.audit.measure import Format, correlation, likeness, rms, sizes_apart
from ppo_repro.testing.audit.search.hypothesis import Hypothesis, hypothesis_of
from ppo_repro.testing.audit.search.trial import Trial


def with_other_bits(trial: Trial, alone: Hypothesis) -> list[Hypothesis]:
    """Return the hypotheses that the errors left by `alone` are 16-bit rounding; none if they do not look like it."""
    combination = alone.combination
    like = _other_bits(trial, alone.errors) if _may_be_narrow(trial, alone) else None
    if like is None:
        return []
    similar = Hypothesis(
        combination=combination,
        errors=alone.errors,
        explains=True,
        words=f"{alone.words} and {like.words}" if alone.causes else like.words,
        pattern="like 16-bit rounding",
    )
    if not alone.causes or combination.model is not None:  # one model cannot be two others
        return [similar]
    both = trial.candidate(replace(combination, model=like.computed), trial.many)
    return [similar] if both is None else [hypothesis_of(trial, both), similar]


def _may_be_narrow(trial: Trial, alone: Hypothesis) -> bool:
    """Return whether the errors left by `alone` need a further cause, and 16 bits may be that cause.

    With experts it may not: a small error of any cause may choose other experts, which gives the same pattern.
    """
    is_rounded = any(cause.rounds("computed", "weights") for cause in alone.causes)
    has_experts = any(EXPERTS.recognise(name) for name, _ in trial.predictor.logits.model.named_modules())
    is_far = bool(alone.causes) and alone.left > limits.OF_ERRORS * trial.plain.left
    return not (alone.explains or has_experts or is_rounded or is_far)


@dataclass(frozen=True)
class OtherBits:
    """A 16-bit computation whose rounding errors have the size and the pattern of errors that were found."""

    computed: OtherModel
    form: Format | None  # None: the errors are as near to the rounding of the other format
    size: float  # rms of the rounding errors, nats
    parts: tuple[Cause, ...]  # whose rounding alone has this pattern too

    @property
    def words(self) -> str:
        """Return, for example, "as large as bfloat16 rounding (0.017 nats rms), with other bits"."""
        whole = f"as large as {self.form or '16-bit'} rounding ({self.size:.2g} nats rms)"
        return f"{' or '.join([whole, *(part.words for part in self.parts)])}, with other bits"


def _other_bits(trial: Trial, errors: Tensor) -> OtherBits | None:
    """Return the first 16-bit computation whose rounding is like the errors; None if there is none."""
    for computed in trial.causes:
        if not isinstance(computed, OtherModel) or computed.rounded is None or computed.rounded.what != "computed":
            continue
        to, narrow = computed.rounded.to, trial.narrow_errors(computed, trial.many)
        (weights,) = _of_format(trial.causes, "weights", to)
        if like := likeness(errors, narrow, trial.narrow_errors(weights, trial.many)):
            is_sure = sizes_apart(errors, narrow) <= limits.SURE_OF_FORMAT
            each = _of_format(trial.causes, "part", to)
            parts = (p for p in each if correlation(errors, trial.narrow_errors(p, trial.many)) > limits.ALIKE * like)
            return OtherBits(computed, to if is_sure else None, rms(narrow), tuple(parts))
    return None


def _of_format(causes: Sequence[Cause], what: RoundedPart, to: Format) -> list[Cause]:
    """Return the causes that round `what` to a format."""
    return [c for c in causes if c.rounded is not None and (c.rounded.what, c.rounded.to) == (what, to)]
