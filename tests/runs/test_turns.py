"""Episodes in which the environment speaks between the model's turns: parity, layouts, resume, replay, bad input."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer

from analysis.tokenization.retokenize import AUDIT_COLUMNS, retokenization
from analysis.tokenization.tokenizer import recorded_tokenizer
from ppo_repro.buffers import Episode
from ppo_repro.config.files import build_config, dump_yaml, load_config
from ppo_repro.config.yaml_text import parse_yaml
from ppo_repro.errors import UserError
from ppo_repro.ranks import ALONE
from ppo_repro.recompute.recompute import STAGES, recompute
from ppo_repro.records import manifest, reader
from ppo_repro.runs import prepare
from ppo_repro.runs.diff import first_difference
from ppo_repro.runs.verify import verify
from ppo_repro.stages.agreement import UnequalBits, require_sampler_agrees
from ppo_repro.stages.forward import score_rollout
from ppo_repro.stages.rollout import choose_prompts, roll_out
from ppo_repro.tasks import user_code
from ppo_repro.watcher import Silent
from tests.support.cli import Cli, one_line
from tests.support.language import rerun, resume
from tests.support.paths import ROOT, TINY
from tests.support.resume import Recorded, record
from tests.support.turns import TASK, turns_config

GAE = ("advantages.gamma=0.9", "advantages.gae_lambda=0.8", "advantages.whiten=none")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("turns")
    return record(turns_config(folder, *GAE, "checkpoints.every=1"), folder)


def sequences_of(run: Recorded) -> pd.DataFrame:
    return reader.read_sequences(run.whole)


def test_parity_holds_over_whole_episodes(recorded: Recorded) -> None:
    tokens, sequences = reader.read_tokens(recorded.whole), sequences_of(recorded)
    bits = [tokens[name].to_numpy().view(np.int32) for name in ("old_logprobs", "rollout_logprobs")]
    assert len(tokens) > 60 and np.array_equal(*bits)
    steps = reader.read_iterations(recorded.whole)
    assert (steps["unequal_first_ratios"] == 0).all() and (steps["unequal_values"] == 0).all()
    # the tokens after the environment's: there have to be some, or nothing was shown
    after = [np.flatnonzero(forced).max() < len(forced) - 1 for forced in sequences["is_forced"] if max(forced)]
    assert len(after) > 5 and all(after)


def test_forced_tokens_have_no_rows_and_are_part_of_the_record(recorded: Recorded) -> None:
    tokens, sequences = reader.read_tokens(recorded.whole), sequences_of(recorded)
    ids = tokens.groupby(["iteration", "sequence"])["token_id"].apply(list).tolist()
    for row, of_rows in zip(sequences.itertuples(), ids, strict=True):
        sampled = [token for token, forced in zip(row.episode_ids, row.is_forced, strict=True) if not forced]
        assert sampled == of_rows == list(row.response_ids)
    updates = reader.read_updates(recorded.whole)
    assert len(updates) == 2 * len(tokens), "two epochs over the sampled tokens"
    evaluations = [t for t in (recorded.whole / "records").rglob("*.parquet") if "evaluations" in str(t)]
    assert evaluations


@pytest.mark.parametrize(
    "layout",
    [
        ("layout.prefix_cache=false", "layout.rollout_slots=2", "layout.padding=none"),
        ("layout.threads=2", "layout.prefill_chunk=1", "layout.padding=left", "layout.update_micro_batch=2"),
    ],
)
def test_another_layout_gives_the_same_run(recorded: Recorded, layout: tuple[str, ...]) -> None:
    """Without the prefix cache each turn is computed from its first token."""
    found = rerun(recorded.whole, Silent(), list(layout))
    assert found.difference is None and found.fingerprint == manifest.load(recorded.whole).fingerprint


@pytest.mark.usefixtures("row_dependent")
def test_another_layout_gives_another_run_in_native_numerics(tmp_path: Path) -> None:
    native = record(turns_config(tmp_path, "numerics.mode=native", "ppo.iterations=1"), tmp_path / "out")
    assert rerun(native.whole, Silent(), ["layout.rollout_slots=2"]).difference is not None


def test_a_resumed_run_is_the_uninterrupted_run(recorded: Recorded, tmp_path: Path) -> None:
    run_dir = recorded.copy(1, tmp_path)
    assert resume(run_dir, Silent(), ["layout.prefix_cache=false"]).start == 1
    recorded.require_same(run_dir)


def test_replay_computes_every_stage_again(recorded: Recorded) -> None:
    replayed = recompute(recorded.whole, STAGES)
    assert replayed.difference is None and all(replayed.compared.values())


def definition(rewards: list[float], values: list[float], forced: list[int]) -> list[Fraction]:
    """A_t = sum over the sampled k >= t of (gamma lambda)^(sampled tokens from t to k) delta_k, exactly.

    Walks over all tokens of the episode. delta_k = r_k + gamma V' - V_k; V' is the value before the next sampled token,
    however many forced ones are between, and 0 after the last.
    """
    gamma, decay = Fraction(9, 10), Fraction(72, 100)
    at = iter(zip(rewards, values, strict=True))
    known = [None if f else tuple(map(Fraction, next(at))) for f in forced]
    advantages = []
    for t, first in enumerate(known):
        if first is None:
            continue
        total, factor = Fraction(0), Fraction(1)
        for k in range(t, len(known)):
            here = known[k]
            if here is None:
                continue  # a forced token is no decision: neither an error nor a discount
            following = next((later for later in known[k + 1 :] if later is not None), None)
            total += factor * (here[0] + gamma * (following[1] if following else 0) - here[1])
            factor *= decay
        advantages.append(total)
    return advantages


def test_advantages_pass_over_forced_tokens(recorded: Recorded) -> None:
    tokens, sequences = reader.read_tokens(recorded.whole), sequences_of(recorded)
    by_sequence = tokens.groupby(["iteration", "sequence"])
    others = 0
    for (_, frame), forced in zip(by_sequence, sequences["is_forced"], strict=True):
        rewards, values = frame["rewards"].tolist(), frame["values"].tolist()
        expected = definition(rewards, values, list(forced))
        # float32 rounds each of at most fourteen steps; values and rewards are of order 1
        assert np.allclose(frame["raw_advantages"], [float(a) for a in expected], rtol=0, atol=1e-5)
        # the control: the same law where each forced token is a decision, with reward 0 and the value before it
        pairs, at = iter(zip(rewards, values, strict=True)), (0.0, values[0])
        filled = []
        for is_forced in forced:
            at = (0.0, at[1]) if is_forced else next(pairs)
            filled.append(at)
        counted = definition([r for r, _ in filled], [v for _, v in filled], [0] * len(filled))
        sampled = [a for a, is_forced in zip(counted, forced, strict=True) if not is_forced]
        others += sampled != expected
    assert others == sum(max(forced) for forced in sequences["is_forced"]) > 5


def test_ids_are_never_made_again_from_text(recorded: Recorded) -> None:
    """Each text in which the environment speaks has another encoding (see TASK), and none of them was taken."""
    tokenizer = AutoTokenizer.from_pretrained(recorded.whole / "checkpoints" / "final")
    differing = 0
    for row in sequences_of(recorded).itertuples():
        again = tokenizer(row.response)["input_ids"]
        ids = [token for token in row.episode_ids if token not in tokenizer.all_special_ids]
        assert tokenizer.decode(again) == tokenizer.decode(ids) == row.response
        assert again != ids or not max(row.is_forced)
        differing += max(row.is_forced)
    assert differing > 5, "nothing was shown"


def test_an_episode_that_was_encoded_again_breaks_parity(tmp_path: Path) -> None:
    """The control of the promise above: the same text and the same sampled tokens, forced tokens encoded otherwise."""
    config = turns_config(tmp_path)
    prepared = prepare.prepare(config, lambda step, total, loss: None)
    rollout = roll_out(config, prepared.task, prepared.engine, choose_prompts(config, prepared.task, 0), ALONE)
    assert rollout.episodes is not None
    tokenizer = prepared.task.tokenizer

    def encoded_again(episode: Episode) -> Episode:
        pairs = []
        for token, forced in zip(episode.ids, episode.is_forced, strict=True):
            letters = tokenizer.decode([token]) if forced else ""
            pairs += [(i, True) for i in tokenizer.convert_tokens_to_ids(list(letters))] if forced else [(token, False)]
        return Episode(tuple(i for i, _ in pairs), tuple(f for _, f in pairs), episode.turns)

    again = replace(rollout, episodes=tuple(map(encoded_again, rollout.episodes)))
    assert [tokenizer.decode(e.ids) for e in again.episodes] == [tokenizer.decode(e.ids) for e in rollout.episodes]
    assert again.episodes != rollout.episodes
    for found in (rollout, again):
        forward = score_rollout(prepared.state, found, config, ALONE)
        if found is rollout:
            require_sampler_agrees(config, 0, found, forward)
        else:
            with pytest.raises(UnequalBits, match="rollout_logprobs"):
                require_sampler_agrees(config, 0, found, forward)


def test_the_next_turn_is_served_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the cache every token is computed once; without it a turn computes all before it again."""
    computed = {}
    for cache in (True, False):
        config = turns_config(
            tmp_path,
            f"layout.prefix_cache={str(cache).lower()}",
            "rollout.samples_per_prompt=1",
            "rollout.prompts_per_iteration=6",
            "ppo.minibatch_size=6",
        )
        prepared = prepare.prepare(config, lambda step, total, loss: None)
        engine, inner = prepared.engine, prepared.engine._forward
        pieces: list[int] = []

        def counting(*arguments: Any, inner: Any = inner, pieces: list[int] = pieces) -> torch.Tensor:
            pieces.extend(map(len, arguments[2]))
            return inner(*arguments)

        monkeypatch.setattr(engine, "_forward", counting)
        rollout = roll_out(config, prepared.task, engine, choose_prompts(config, prepared.task, 0), ALONE)
        assert rollout.episodes is not None and any(any(e.is_forced) for e in rollout.episodes)
        once = sum(
            len(prompt) + len(e.ids) - 1 for prompt, e in zip(rollout.prompts.prompt_ids, rollout.episodes, strict=True)
        )
        computed[cache] = sum(pieces) - once
    assert computed[True] <= 0, "prompts may share a prefix"
    assert computed[False] > 0


BAD = {
    "raises": ("    raise ValueError('no\\nway')", r"task\.py:11: step raised ValueError: no way; prompt key '"),
    "no text": ("    return 7", r"step returned 7 of type int; must be a text or None; prompt key '"),
    "an empty text": ("    return ''", r"step returned an empty text; must be None where the episode is over"),
    "for ever": ("    return '1'", r"task\.max_turns = 3: .*task\.py:10: step wants another turn for prompt key '"),
    "too much": ("    return '1' * 50", r"no room in rollout\.max_response_tokens = 14; return less, or raise it"),
    "chance": ("    import random\n    return str(random.random())", r"step returned '0\.\d+' and then '0\.\d+' for"),
    "hangs": (
        "    while True:\n        pass",
        r"task\.py:10: step gave no answer within 0\.5 s; make it end; prompt key '",
    ),
    "exits": ("    raise SystemExit(0)", r"step raised SystemExit: 0; prompt key '"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_step_that_is_wrong_is_one_line(name: str, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    body, message = BAD[name]
    if name == "hangs":
        monkeypatch.setattr(user_code, "CALL_SECONDS", 0.5)
    before, _, rest = TASK.partition("def step(transcript):\n")
    task = f"{before}def step(transcript):\n{body}\n\n\ndef score{rest.partition('def score')[2]}"
    config = turns_config(
        tmp_path, "model.warm_start_steps=0", "ppo.iterations=1", "rollout.stop=['=', '+', '1']", task=task
    )
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    code, _, err = cli("run", tmp_path / "run.yaml", "--out", tmp_path / "out")
    assert code == 2 and re.search(message, one_line(err)), err


def test_iterations_before_a_step_that_raises_stay(recorded: Recorded, tmp_path: Path, cli: Cli) -> None:
    """A step that raises for one prompt, in whose episode an environment first speaks in the second iteration."""
    rows, held_out = sequences_of(recorded), reader.read_evaluations(recorded.whole, columns=["prompt_key"])
    before = {*rows[rows["iteration"] == 0]["prompt_key"], *held_out["prompt_key"]}
    later = rows[(rows["iteration"] == 1) & rows["is_forced"].map(any)]
    # not the last turn of an episode alone, with which a file is tried before the run
    key = [key for key in later["prompt_key"] if key not in before][-1]
    raising = TASK.replace(
        "def step(transcript):\n",
        f"def step(transcript):\n    if transcript.key == {key!r}:\n        raise OSError('gone')\n",
    )
    config = turns_config(tmp_path, *GAE, "checkpoints.every=1", task=raising)
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    code, _, err = cli("run", tmp_path / "run.yaml", "--out", tmp_path / "out")
    assert code == 2 and f"step raised OSError: gone; prompt key '{key}'" in one_line(err)
    (run_dir,) = (path.parent for path in (tmp_path / "out").rglob("manifest.json"))
    assert manifest.load(run_dir).status == "failed" and verify(run_dir).iterations == 1


@pytest.mark.parametrize(
    ("task", "max_turns", "message"),
    [
        (TASK, 1, "task.max_turns = 1: .*task.py has a function step, which needs at least 2 turns; raise it"),
        (TASK.replace("def step", "def stop"), 2, "task.max_turns = 2: .*task.py has no function step"),
        (TASK.replace("def score", "def rate"), 3, "task.path: .*task.py has no function score"),
        (TASK.replace("def prompts", "def asked"), 3, "task.path: .*task.py has no function prompts"),
        (
            TASK.replace("return [(t", "return [None for t in transcripts] or [(t"),
            3,
            "score returned None; must be a finite number",
        ),
        (TASK.replace("for t in transcripts]", "for t in transcripts[1:]]"), 3, "score returned 3 numbers for 4"),
    ],
)
def test_a_file_that_is_wrong_is_named(task: str, max_turns: int, message: str, tmp_path: Path) -> None:
    config = turns_config(tmp_path, task=task, max_turns=max_turns)
    with pytest.raises(UserError, match=message):
        prepare.prepare(config, lambda step, total, loss: None)


def test_sglang_refuses_turns_and_stop_texts_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"task\.max_turns greater than 1 needs rollout\.engine\.kind = torch"):
        turns_config(tmp_path, "rollout.engine.kind=sglang", "rollout.stop=[]")
    with pytest.raises(UserError, match=r"rollout\.stop needs rollout\.engine\.kind = torch"):
        load_config(TINY, ["rollout.engine.kind=sglang", "rollout.stop=['=']"])


def test_a_turn_that_has_no_room_left_ends_the_episode_as_the_limit_does(tmp_path: Path) -> None:
    """The environment's text is not put in where no token could follow it."""
    config = turns_config(tmp_path, "rollout.max_response_tokens=5", "numerics.max_context=16")
    prepared = prepare.prepare(config, lambda step, total, loss: None)
    rollout = roll_out(config, prepared.task, prepared.engine, choose_prompts(config, prepared.task, 0), ALONE)
    assert rollout.episodes is not None
    assert all(len(e.ids) <= 5 and not e.is_forced[-1] for e in rollout.episodes)
    cut = [e for e, reason in zip(rollout.episodes, rollout.finish_reasons, strict=True) if reason == "length"]
    assert any(len(e.ids) < 5 and prepared.task.tokenizer.decode(e.ids[-1:]) == "1" for e in cut)


def test_a_configuration_with_turns_reads_back_equal(tmp_path: Path) -> None:
    config = turns_config(tmp_path)
    assert build_config(parse_yaml(dump_yaml(config)), "file") == config
    assert '"stop":["1"]' in config.canonical_json() and '"stop"' not in load_config(TINY, []).canonical_json()


def test_runs_with_and_without_turns_are_compared(recorded: Recorded, tmp_path: Path) -> None:
    plain = record(load_config(TINY, ["ppo.iterations=1"]), tmp_path)
    found = first_difference(recorded.whole, plain.whole)
    assert found is not None and found.table in ("evaluations", "sequences", "warm_start_steps")
    assert first_difference(recorded.whole, recorded.whole) is None
    assert reader.read_sequences(plain.whole)["is_forced"].isna().all()
    assert "is_forced" not in pq.read_schema(manifest.table_path(plain.whole, "sequences", 0)).names


def test_dpo_refuses_episodes_of_several_turns(recorded: Recorded, tmp_path: Path, cli: Cli) -> None:
    config = ROOT / "experiments" / "dpo.yaml"
    code, _, err = cli("dpo", config, "--set", f"run={recorded.whole}", "--out", tmp_path)
    assert code == 2 and "its episodes have several turns" in one_line(err)


def test_a_tokenization_audit_refuses_them_too(recorded: Recorded) -> None:
    tokenizer = recorded_tokenizer(recorded.whole)
    with pytest.raises(UserError, match="the audit is for runs of one turn"):
        retokenization(reader.read_sequences(recorded.whole, columns=AUDIT_COLUMNS), tokenizer)
