"""Training on pairs: one digest under every layout, gradients of the losses, and something learnt."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from ppo_repro.config.reward import RewardModelTraining
from ppo_repro.config.run import LayoutConfig, NumericsConfig, TinyModel
from ppo_repro.errors import UserError
from ppo_repro.models.networks import make_policy
from ppo_repro.models.reward_model import make_reward_model
from ppo_repro.models.tiny import make_model, make_tokenizer
from ppo_repro.numerics import library
from ppo_repro.numerics.optimizer import AdamWSettings, Optimizer, weights_digest
from ppo_repro.ppo.preferences import preference_accuracy
from ppo_repro.preferences.pairs import Preference, pairs_by_rule
from ppo_repro.preferences.training import (
    PreferenceStep,
    RewardTraining,
    Schedule,
    dpo_steps,
    margins_of,
    pair_logprobs,
    pairs_at_once,
    reward_margins,
    train_reward_model,
)
from ppo_repro.tasks.problems import arithmetic, split
from tests.support.models import CONTEXT, ragged, source_model, unequal
from tests.support.row_dependent import row_dependent_linear

MODEL = TinyModel(
    kind="tiny",
    hidden_size=32,
    num_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=64,
    vocab_size=20,
    warm_start_steps=0,
    warm_start_batch_size=1,
    warm_start_learning_rate=1e-3,
)
PROBLEMS = split(arithmetic(6), 12, 0)
TOKENIZER = make_tokenizer(PROBLEMS.train, 20)
IDS = {p.key: tuple(TOKENIZER(p.prompt)["input_ids"]) for p in (*PROBLEMS.train, *PROBLEMS.held_out)}
SETTINGS = RewardModelTraining(num_pairs=60, epochs=2, minibatch_size=16, learning_rate=3e-3)
PAIRS = pairs_by_rule(PROBLEMS.train, IDS, TOKENIZER, 60, 0.1, 0)
EVAL_PAIRS = pairs_by_rule(PROBLEMS.held_out, IDS, TOKENIZER, 40, 0.0, 0)
NUMERICS = {
    mode: NumericsConfig.model_validate({"mode": mode, "max_context": 24}) for mode in ("deterministic", "native")
}
LAYOUTS = (  # forward and update micro-batches in sequences, padding, threads
    (0, 0, "right", 1),
    (7, 10, "left", 2),
    (3, 2, "none", 1),
    (0, 12, "none", 1),
)


Layout = tuple[int, int, str, int]


def layout(row: Layout) -> LayoutConfig:
    forward, update, padding, _ = row
    fields = {"forward_micro_batch": forward, "update_micro_batch": update, "padding": padding}
    return LayoutConfig.model_validate(fields)


def tiny(vocab_size: int = len(TOKENIZER)) -> PreTrainedModel:
    return make_model(MODEL, vocab_size, 24, TOKENIZER.eos_token_id, 1)


def train(mode: str, row: Layout, settings: RewardModelTraining = SETTINGS) -> RewardTraining:
    library.use_threads(row[3])
    model = make_reward_model(tiny(), mode, 24, 0)
    shown: list[tuple[int, int, float]] = []
    found = train_reward_model(
        model, PAIRS, EVAL_PAIRS, settings, NUMERICS[mode], layout(row), 5, lambda *step: shown.append(step)
    )
    assert shown == [(i + 1, len(found.steps), s.loss) for i, s in enumerate(found.steps)]
    return found


def test_a_trained_reward_model_does_not_depend_on_the_layout() -> None:
    found = [train("deterministic", row) for row in LAYOUTS]
    assert all(other == found[0] for other in found)
    assert len(found[0].steps) == 8 and len({s.digest for s in found[0].steps}) == 8
    assert [s.pairs for s in found[0].steps] == [16, 16, 16, 12] * 2


@pytest.mark.usefixtures("row_dependent")
def test_a_native_one_does() -> None:
    assert len({train("native", row).steps[-1].digest for row in LAYOUTS}) == 4


def test_the_seed_orders_the_pairs() -> None:
    one, other = (Schedule(2, 16, 0, seed).minibatches(60, 0) for seed in (5, 6))
    assert sorted(i for part in one for i in part) == list(range(60)) and one != other
    assert one != Schedule(2, 16, 0, 5).minibatches(60, 1)


def test_a_reward_model_learns_the_rule() -> None:
    problems = split(arithmetic(12), 40, 0)
    tokenizer = make_tokenizer(problems.train, 20)
    ids = {p.key: tuple(tokenizer(p.prompt)["input_ids"]) for p in (*problems.train, *problems.held_out)}
    pairs = pairs_by_rule(problems.train, ids, tokenizer, 3000, 0.1, 0)
    eval_pairs = pairs_by_rule(problems.held_out, ids, tokenizer, 200, 0.0, 0)
    settings = RewardModelTraining(num_pairs=3000, epochs=2, minibatch_size=64, learning_rate=1e-2)
    model = make_reward_model(tiny(len(tokenizer)), "deterministic", 24, 0)
    found = train_reward_model(
        model, pairs, eval_pairs, settings, NUMERICS["deterministic"], LayoutConfig(), 5, lambda *_: None
    )
    assert found.accuracy_after == preference_accuracy(reward_margins(model, eval_pairs, LayoutConfig()))
    # a guess has 0.5 with a standard deviation of 0.035
    assert found.accuracy_after > 0.75 and abs(found.accuracy_before - 0.5) < 0.2
    # with label noise of 0.1 no model's expected loss is below the entropy of the noise, 0.325 nats
    assert 0.3 < sum(s.loss for s in found.steps[-10:]) / 10 < 0.6 < found.steps[0].loss


def test_pairs_too_long_for_the_model_are_refused() -> None:
    model = make_reward_model(tiny(), "deterministic", 24, 0)
    with pytest.raises(UserError, match=r"numerics\.max_context = 5"):
        numerics = NumericsConfig(max_context=5)
        train_reward_model(model, PAIRS, EVAL_PAIRS, SETTINGS, numerics, LayoutConfig(), 5, lambda *_: None)


def test_a_micro_batch_never_parts_a_pair() -> None:
    assert [pairs_at_once(n) for n in (0, 1, 2, 3, 4, 9)] == [0, 1, 1, 1, 2, 4]


def ragged_pairs(count: int) -> list[Preference]:
    prompts, chosen = ragged(count, 0)
    _, rejected = ragged(count, 1)
    return [
        Preference(str(i), tuple(p), tuple(c), tuple(r))
        for i, (p, c, r) in enumerate(zip(prompts, chosen, rejected, strict=True))
    ]


def dpo(mode: str, row: Layout) -> tuple[list[PreferenceStep], PreTrainedModel]:
    library.use_threads(row[3])
    policy = make_policy(source_model("qwen3"), mode, CONTEXT)
    optimizer = Optimizer(policy, AdamWSettings(1e-3, 0.9, 0.95, 1e-8, 0.0, 1.0), mode)
    pairs = ragged_pairs(13)
    reference = pair_logprobs(policy, pairs, 0.9, mode, layout(row))
    schedule = Schedule(2, 5, pairs_at_once(row[1]), 3)
    return list(dpo_steps(policy, optimizer, pairs, reference, 0.2, 0.9, schedule, mode, row[2])), policy


@pytest.mark.usefixtures("row_dependent")
def test_dpo_steps_do_not_depend_on_the_layout_and_native_ones_do() -> None:
    found = [dpo("deterministic", row)[0] for row in LAYOUTS]
    assert all(other == found[0] for other in found) and len(found[0]) == 6
    assert found[0][0].margin == 0.0 and found[0][0].accuracy == 0.5, "policy and reference are one at the start"
    assert found[0][0].loss == pytest.approx(0.6931471805599453, rel=1e-15)
    assert len({dpo("native", row)[0][-1].digest for row in LAYOUTS}) == 4


def test_pair_log_probs_have_the_same_bits_under_every_layout() -> None:
    policy, pairs = make_policy(source_model("gpt2"), "deterministic", CONTEXT), ragged_pairs(9)
    found = [pair_logprobs(policy, pairs, 0.9, "deterministic", layout(row)) for row in LAYOUTS]
    assert all(unequal(f.chosen, found[0].chosen) == 0 == unequal(f.rejected, found[0].rejected) for f in found)
    native = make_policy(source_model("gpt2"), "native", CONTEXT)
    with row_dependent_linear():
        controls = [pair_logprobs(native, pairs, 0.9, "native", layout(row)) for row in LAYOUTS]
    assert all(unequal(c.chosen, controls[0].chosen) for c in controls[1:])
    stock = source_model("gpt2").double()
    for pair, chosen in zip(pairs, found[0].chosen.tolist(), strict=True):
        with torch.no_grad():
            logits = stock(input_ids=torch.tensor([pair.prompt_ids + pair.chosen_ids])).logits[0] / 0.9
        rows = logits[len(pair.prompt_ids) - 1 : -1].log_softmax(-1)
        expected = rows.gather(-1, torch.tensor(pair.chosen_ids)[:, None]).sum().item()
        # a sum of up to 7 log-probs, each good to about 1e-5
        assert chosen == pytest.approx(expected, abs=1e-4)


def test_dpo_widens_the_margins_of_the_pairs_it_sees() -> None:
    steps, policy = dpo("deterministic", LAYOUTS[0])
    pairs = ragged_pairs(13)
    reference = pair_logprobs(
        make_policy(source_model("qwen3"), "deterministic", CONTEXT), pairs, 0.9, "deterministic", LayoutConfig()
    )
    margins = margins_of(pair_logprobs(policy, pairs, 0.9, "deterministic", LayoutConfig()), reference, 0.2)
    assert preference_accuracy(margins) > 0.9 and steps[-1].loss < steps[0].loss
    assert weights_digest(policy.named_parameters()) == steps[-1].digest


def stock_losses(policy: PreTrainedModel, pairs: list[Preference], beta: float) -> torch.Tensor:
    """DPO on the unmodified model in float64, by autograd; the reference is uniform over nothing: log-probs 0."""
    sums = []
    for ids in (lambda p: p.chosen_ids, lambda p: p.rejected_ids):
        rows = []
        for pair in pairs:
            response = ids(pair)
            logits = policy(input_ids=torch.tensor([pair.prompt_ids + response]), use_cache=False).logits[0]
            logprobs = logits[len(pair.prompt_ids) - 1 : -1].log_softmax(-1)
            rows.append(logprobs.gather(-1, torch.tensor(response)[:, None]).sum())
        sums.append(torch.stack(rows))
    return -torch.nn.functional.logsigmoid(beta * (sums[0] - sums[1]))


def test_the_gradient_norm_is_that_of_autograd_in_float64() -> None:
    from ppo_repro.preferences.training import PairLogprobs

    pairs = ragged_pairs(6)
    wide = source_model("qwen3").double()
    stock_losses(wide, pairs, 0.1).mean().backward()
    expected = torch.stack([p.grad.norm() for p in wide.parameters() if p.grad is not None]).norm().item()
    policy = make_policy(source_model("qwen3"), "deterministic", CONTEXT)
    optimizer = Optimizer(policy, AdamWSettings(1e-3, 0.9, 0.95, 1e-8, 0.0, 1.0), "deterministic")
    nothing = PairLogprobs(*torch.zeros(2, 6, dtype=torch.float64))
    step = next(dpo_steps(policy, optimizer, pairs, nothing, 0.1, 1.0, Schedule(1, 6, 2, 0), "deterministic", "right"))
    assert step.grad_norm == pytest.approx(expected, rel=1e-6)
    assert step.loss == pytest.approx(stock_losses(wide, pairs, 0.1).mean().item(), rel=1e-5)
