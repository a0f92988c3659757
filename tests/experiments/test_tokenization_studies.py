"""The studies are grid files: every cell is a valid configuration, names what it changes, and has a reader."""

from __future__ import annotations

from experiments.tokenization import oracle, topics


def test_the_reward_by_hand() -> None:
    a, b, c, d, e = topics.LEXICON[0][:5]
    other = topics.LEXICON[1][0]
    prompt = f"{a} {b}:"
    assert topics.score(prompt, f" {b} {c} {d} {e}", "") == 1.0
    assert topics.score(prompt, f" {b} {b} {d} {other}", "") == 0.5, "said twice, and of another topic"
    assert topics.score(prompt, f" {b} {c} {d}", "") == topics.score(prompt, f" {b} {c} {d} {e} {a}", "") == 0.0
    assert topics.score(prompt, " qq qq qq qq", "") == 0.0
    assert len(topics.TOPIC_OF) == topics.TOPICS * topics.WORDS, "no word is of two topics"


def test_the_exact_table_holds_and_a_broken_one_is_named() -> None:
    rows = oracle.table()
    assert oracle.broken(rows) == [] and rows["KL cuts"].iloc[-1] > 0.1 and len(rows) == 6
    assert oracle.broken(rows.assign(**{"sum k1": rows["sum k1"] + 1e-8}))[0] == "characters: sum k1 is not the KL"
    assert oracle.broken(rows.assign(**{"sum k2": 5.0})) == ["sum k2 is the same for all tokenizers"]
