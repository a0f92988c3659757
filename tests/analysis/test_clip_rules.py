"""Each objective has a clip range, or a reason why it has none."""

import numpy as np
import pytest

from ppo_repro.analysis.clip_rules import ClipRule, clip_rule, counted_rule, token_rule
from ppo_repro.base.errors import UserError
from ppo_repro.config.algorithm import PPOConfig
from ppo_repro.config.section import Section
from tests.support.runs import small_config


@pytest.mark.parametrize("kind", ["unclipped", "policy_gradient", "kl_penalty"])
def test_an_objective_without_a_clip_is_refused_by_name(kind: str) -> None:
    config = small_config(f"ppo.objective={{kind: {kind}}}")
    assert clip_rule(config.ppo, np.nan) is None
    with pytest.raises(UserError, match=f"ppo.objective.kind = {kind} clips nothing"):
        counted_rule(config.ppo, np.nan)
    assumed = counted_rule(config.ppo, np.nan, (0.1, 0.3))
    assert (assumed.low, assumed.high, assumed.dual) == (0.1, 0.3, None)
    for band in ((0.0, 0.2), (1.0, 0.2), (0.2, np.inf), (np.nan, 0.2)):
        with pytest.raises(UserError, match="clip range"):
            counted_rule(config.ppo, np.nan, band)


def test_an_objective_that_no_rule_knows_does_not_clip_nothing() -> None:
    with pytest.raises(AssertionError, match="unreachable"):
        clip_rule(PPOConfig.model_construct(objective=Section()), np.nan)


def test_the_rule_says_whether_it_bounds_tokens_or_responses() -> None:
    by_response = small_config("ppo.objective={kind: sequence_clip, clip_range: 0.1, clip_range_high: 0.3}").ppo
    adaptive = small_config("ppo.objective={kind: adaptive_clip, target_kl: 0.01}").ppo
    assert clip_rule(by_response, np.nan) == ClipRule("response", by_response.ratio_anchor, 0.1, 0.3)
    assert token_rule(by_response, np.nan) is None
    with pytest.raises(UserError, match="sequence_clip clips whole responses"):
        counted_rule(by_response, np.nan)
    assert token_rule(adaptive, 0.05) == ClipRule("token", adaptive.ratio_anchor, 0.05, 0.05)
