"""Errors that 16-bit rounding explains, with other bits: another order of sums rounds otherwise, but by as much.

`with_other_bits` decides. First it asks whether the errors can be rounding at all, then which 16-bit computation has
rounding errors of that size and pattern (`_other_bits`). The hypotheses follow.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.causes.cause import Cause, OtherModel, RoundedPart
from ppo_repro.testing.audit.causes.names import EXPERTS
from ppo_repro.testing.audit.measure import FORMATS, Format, correlation, likeness, rms, sizes_apart
from ppo_repro.testing.audit.search.combination import Combination
from ppo_repro.testing.audit.search.hypothesis import Hypothesis, hypothesis_of
from ppo_repro.testing.audit.search.trial import Trial


def with_other_bits(trial: Trial, alone: Hypothesis) -> list[Hypothesis]:
    """Return the hypotheses that the errors left by `alone` are 16-bit rounding; none if they do not look like it."""
    combination = alone.combination
    narrow = _other_bits(trial, alone.errors) if _may_be_narrow(trial, alone) else None
    if narrow is None:
        return []
    computed, words = narrow
    similar = Hypothesis(
        combination=combination,
        errors=alone.errors,
        explains=True,
        words=f"{alone.words} and {words}" if alone.causes else words,
        pattern="like 16-bit rounding",
    )
    if not alone.causes or combination.get(OtherModel) is not None:  # one model cannot be two others
        return [similar]
    both = trial.candidate(Combination((computed, *combination.causes), combination.value), trial.many)
    return [similar] if both is None else [hypothesis_of(trial, both), similar]


def _may_be_narrow(trial: Trial, alone: Hypothesis) -> bool:
    """Return whether the errors left by `alone` need a further cause, and 16 bits may be that cause.

    With experts it may not: a small error of any cause may choose other experts, which gives the same pattern.
    """
    is_rounded = any(cause.rounds("computed", "weights") for cause in alone.causes)
    has_experts = any(EXPERTS.recognise(name) for name, _ in trial.predictor.logits.model.named_modules())
    is_far = bool(alone.causes) and alone.left > limits.OF_ERRORS * trial.plain.left
    return not (alone.explains or has_experts or is_rounded or is_far)


def _other_bits(trial: Trial, errors: Tensor) -> tuple[Cause, str] | None:
    """Return the first 16-bit computation whose rounding is like the errors, and words; None if there is none.

    The words are, for example, "as large as bfloat16 rounding (0.017 nats rms), with other bits".
    """
    for form in FORMATS:
        computed = _of_format(trial.causes, "computed", form)
        if not computed:  # not every model computes in every format
            continue
        weights = _of_format(trial.causes, "weights", form)
        narrow, rounded = (trial.narrow_errors(cause, trial.many) for cause in (*computed, *weights))
        like = likeness(errors, narrow, rounded)
        if like:
            is_sure = sizes_apart(errors, narrow) <= limits.SURE_OF_FORMAT
            whole = f"as large as {form if is_sure else '16-bit'} rounding ({rms(narrow):.2g} nats rms)"
            parts = (
                part.words
                for part in _of_format(trial.causes, "part", form)
                if correlation(errors, trial.narrow_errors(part, trial.many)) > limits.ALIKE * like
            )
            return computed[0], f"{' or '.join([whole, *parts])}, with other bits"
    return None


def _of_format(causes: Sequence[Cause], what: RoundedPart, to: Format) -> list[Cause]:
    """Return the causes that round `what` to a format."""
    return [c for c in causes if c.rounded is not None and (c.rounded.what, c.rounded.to) == (what, to)]
