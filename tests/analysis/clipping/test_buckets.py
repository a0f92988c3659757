"""Which tokens are clipped more than others: buckets, enrichment and vocabulary, by hand and by their sums."""

import numpy as np
import pytest
from hypothesis import given, settings

from analysis.clipping.bucket import clip_bucket, eligible, step_needed
from analysis.clipping.enrichment import auroc, clip_enrichment, clip_vocab, jaccard, merged_vocab
from analysis.clipping.flags import token_flags
from analysis.clipping.update_rows import IterationRows
from tests.support.cases.clip_rows import RULE, items, make_item
from tests.support.runs import small_config

CONFIG = small_config()


def test_who_can_be_clipped_upwards() -> None:
    up, down = eligible(np.array([0.9, 0.8, 0.8]), np.array([1.0, 1.0, -1.0]), RULE)
    assert up.tolist() == [False, True, False] and down.tolist() == [False, False, True]
    needed = step_needed(np.array([0.5, 0.5, 0.5]), np.array([0.5, 0.5, 0.5]), np.array([1.0, -2.0, 0.0]), RULE)
    assert needed == pytest.approx([np.log(1.2) / 0.5, -np.log(0.8) / 1.0, np.inf])


@settings(max_examples=10)  # each example builds data frames
@given(items())
def test_buckets_hold_every_row_and_their_lifts_average_to_one(item: IterationRows) -> None:
    table = clip_bucket(item, CONFIG)
    total = token_flags(item.rows, item.rule)["grad_zero"].sum()
    for _, part in table[table["adv_sign"] == "all"].groupby("kind"):
        assert part["n"].sum() == len(item.rows) and part["n_grad_zero"].sum() == total
        if total:
            used = part[part["n"] > 0]
            assert (used["lift"] * used["n"]).sum() / len(item.rows) == pytest.approx(1.0)
    pos_neg = table[(table["kind"] == "epoch") & (table["adv_sign"] != "all")]
    assert pos_neg["n"].sum() == (item.rows["advantages"] != 0).sum()


def test_bucket_limits_hold_their_tokens() -> None:
    generator = np.random.default_rng(0)
    old = -generator.exponential(1.0, 60)
    item = make_item([20] * 3, generator.normal(0, 0.3, (2, 60)), generator.normal(size=60), old_logprobs=old)
    table = clip_bucket(item, CONFIG)
    for kind, values in {
        "p_anchor": np.exp(old),
        "position": np.tile(np.arange(20), 3),
        "entropy_decile": -old,
    }.items():
        part = table[(table["kind"] == kind) & (table["adv_sign"] == "all")]
        counts = [((values >= lo) & (values < hi)).sum() * 2 for lo, hi in zip(part["lo"], part["hi"], strict=True)]
        last = (values == part["hi"].iloc[-1]).sum() * 2
        assert part["n"].tolist() == [*counts[:-1], counts[-1] + last]


def test_the_eligible_null_removes_what_is_true_by_definition() -> None:
    # probable tokens cannot be clipped upwards: the lift says so, the eligible lift says nothing is left to explain
    old = np.log([0.95, 0.95, 0.2, 0.2])
    item = make_item([4], np.array([[0.0, 0.0, 1.0, 1.0]]), np.ones(4), old_logprobs=old)
    table = clip_bucket(item, CONFIG)
    part = table[(table["kind"] == "p_anchor") & (table["adv_sign"] == "all") & (table["n"] > 0)]
    assert part["lift"].tolist() == [2.0, 0.0]
    assert part["lift_eligible"].iloc[0] == 1.0 and np.isnan(part["lift_eligible"].iloc[1])


def test_enrichment_by_hand() -> None:
    assert auroc(np.array([1.0, 2.0, 2.0, 3.0]), np.array([False, True, False, True])) == pytest.approx(3.5 / 4)
    assert np.isnan(auroc(np.ones(2), np.ones(2, dtype=bool)))
    assert jaccard(np.array([True, True, False]), np.array([False, True, True])) == pytest.approx(1 / 3)
    log_ratios = np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    item = make_item([3], log_ratios, np.ones(3), old_logprobs=np.log([0.1, 0.3, 0.5]))
    table = clip_enrichment(item)
    assert table["n_clip_high"].tolist() == [2, 2]
    assert table["mean_p_clip_high"].tolist() == pytest.approx([0.2, 0.3])
    assert table["stays_clipped"].iloc[0] == 0.5 and np.isnan(table["stays_clipped"].iloc[1])


def test_vocabulary_by_hand_and_merged() -> None:
    item = make_item([3, 3], np.array([[1.0, 0.0, 0.0, 0.0, 0.0, 1.0]]), np.array([1, 1, 1, 1, 1, -1.0]))
    counted = clip_vocab(item).set_index("token_id")  # ids 0 1 2 3 4 0
    assert counted.loc[0, "n"] == 2 and counted.loc[0, "n_clip_high"] == 1 and counted.loc[0, "text"] == "a"
    merged = merged_vocab([clip_vocab(item), clip_vocab(item)])
    assert merged["n"].sum() == 12 and merged["token_id"].iloc[0] == 0
    assert merged["lift"].iloc[0] == pytest.approx((2 / 4) / (2 / 12))
