"""The short labels by which lists and pages tell runs apart."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.records.settings import WORDS, settings_of

FIELDS = ("ppo.learning_rate", "value.learning_rate", "kl.kl_coef", "rollout.stop.0", "model.path", "task.path")
VALUES = st.sampled_from([1e-3, 3e-3, None, "a", "inputs/a.py:score", "a name that is much too long for a label"])
SETUPS = st.lists(st.dictionaries(st.sampled_from([*FIELDS, "experiment", "seed"]), VALUES), min_size=1, max_size=6)


@given(SETUPS)
def test_a_label_has_three_words_and_one_setting(setups: list[dict[str, Any]]) -> None:
    found = settings_of(setups)
    assert all(setting.short.count(", ") < WORDS for setting in found)
    assert all(len(word) < 60 for setting in found for word in setting.short.split(", "))
    unseeded = [{name: value for name, value in setup.items() if name != "seed"} for setup in setups]
    for a, x in zip(found, unseeded, strict=True):
        for b, y in zip(found, unseeded, strict=True):
            if x == y:
                assert a == b
            assert (a.short == b.short) == (a.whole == b.whole)


def test_labels_by_hand() -> None:
    base = {"experiment": "e", "seed": 0, "ppo.learning_rate": 1e-3, "value.learning_rate": 1e-3, "ppo.epochs": 2}

    def shorts(*changes: dict[str, Any]) -> list[str]:
        return [setting.short for setting in settings_of([base | change for change in changes])]

    assert shorts({}, {"seed": 1}, {"records.level": "lean"}, {"checkpoints.every": 3}) == [""] * 4
    exact = {"numerics.mode": "deterministic"}
    assert shorts(exact, exact | {"layout.threads": 2}) == ["", ""]
    for stock in ({"mismatch.sampler.stock": "bfloat16"}, {"rollout.engine.numerics": "stock"}):
        assert shorts(exact | stock | {"layout.threads": 1}, exact | stock | {"layout.threads": 2})[1] == "threads=2"
    assert shorts({}, {"ppo.learning_rate": 3e-3}) == ["learning_rate=0.001", "learning_rate=0.003"]
    both = shorts({}, {"ppo.learning_rate": 3e-3, "value.learning_rate": 3e-3})
    assert both[1] == "ppo.learning_rate=0.003, value.learning_rate=0.003"
    assert shorts({}, {"experiment": "f", "ppo.epochs": 9}, {"ppo.epochs": 4}) == ["e, epochs=2", "f", "e, epochs=4"]
    assert shorts({}, {"ppo.learning_rate": 1.0000001e-3}) == ["learning_rate=0.001", "learning_rate=0.001 (2)"]
    many = {"ppo.learning_rate": 3e-3, "value.learning_rate": 3e-3, "ppo.epochs": 4, "kl.kl_coef": 0.5}
    whole = settings_of([base | {"kl.kl_coef": 0.1}, base | many])[1]
    assert whole.short.endswith(" …")
    assert whole.whole.count("=") == 4
    assert "ppo.epochs=4" in whole.whole


def test_the_origin_of_a_fork_is_not_cut_within_a_digest() -> None:
    setups = [{"ppo.epochs": 1}, {"ppo.epochs": 1, "origin": "iteration 40 (seed0-3e298ac2d448)"}]
    found = settings_of(setups)[1]
    assert found.short == "origin=iteration 40…"
    assert "seed0-3e298ac2d448" in found.whole


def test_another_file_of_the_same_name_is_another_setting() -> None:
    setup = {"reward.terms.0.path": "inputs/r.py:score"}
    found = settings_of([{**setup, "inputs/r.py": "a" * 64}, {**setup, "inputs/r.py": "b" * 64}])
    assert [setting.short for setting in found] == ["r.py=aaaaaaaaaaaa...", "r.py=bbbbbbbbbbbb..."]
    other = settings_of([{**setup, "inputs/r.py": "a" * 64}, {"reward.terms.0.path": "s.py:score"}])
    assert other[0].short == "path=r.py:score", "the field says it already"


def test_a_layout_counts_where_it_may_change_bits() -> None:
    for mode, differs in (("deterministic", False), ("native", True)):
        found = settings_of([{"numerics.mode": mode, "layout.threads": threads} for threads in (1, 2)])
        assert (found[0] != found[1]) is differs
    both = settings_of([{"numerics.mode": mode, "layout.threads": 2} for mode in ("deterministic", "native")])
    assert [setting.short for setting in both] == ["mode=deterministic", "mode=native"]
