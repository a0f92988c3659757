"""Logits from a decoder's output, a few at a time and of padded passes, are those of the model's own forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from ppo_repro.models.stock import float64
from ppo_repro.testing.audit import forward
from ppo_repro.testing.audit.forward import Pass, Progress, States, has_decoder_apart, pass_over, slices, states
from tests.support.models import CONFIGS, MIXTURES, VOCAB, small_model

MODELS = {**CONFIGS, **MIXTURES}
PASSES = [
    pass_over((5, 6, 7), (8, 9, 10, 11)),
    pass_over((5, 6), (8, 9, 10)),
    pass_over((1, 2, 3), (4, 5, 6, 7), (1, 2, 3, 5, 6, 7)),
]


@torch.no_grad()
@pytest.mark.parametrize("family", [n if n == "gemma" else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
@pytest.mark.parametrize("is_padded", [False, True])
def test_logits_of_parts_are_those_of_the_whole_forward(family: str, is_padded: bool) -> None:
    model = small_model(MODELS[family](), 3)
    passes = PASSES[: 2 + (family != "gpt2" or not is_padded)]
    with float64(model):
        for i, found in states(model, passes, has_decoder_apart(model), is_padded):
            one = passes[i]
            options = {} if one.positions is None else {"position_ids": torch.tensor([one.positions])}
            expected = model(torch.tensor([one.ids]), **options).logits[0, list(one.at)]
            parts = torch.cat([found.logits(model, k, k + 2) for k in range(0, len(one.at), 2)])
            assert found.output is not None  # the decoder computed once
            assert (parts - expected).abs().max() < 1e-12
            assert not torch.equal(parts[0], expected[1])


@torch.no_grad()
def test_a_long_row_does_not_change_the_rotary_positions_of_a_short_one() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0, 4.0, 8.0, 16.0]}
    fields: dict[str, Any] = {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "pad_token_id": None, "eos_token_id": None, "original_max_position_embeddings": 5},
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **factors},
    }
    torch.manual_seed(3)
    model = Phi3ForCausalLM(Phi3Config(vocab_size=VOCAB, **fields)).eval()
    passes = [pass_over((5, 6), (8, 9)), pass_over((5, 6, 7), (8, 9, 10, 11))]
    with float64(model):
        for i, found in states(model, passes, True, True):
            expected = model(torch.tensor([passes[i].ids])).logits[0, list(passes[i].at)]
            assert (found.logits(model) - expected).abs().max() < 1e-12


@torch.no_grad()
def test_a_model_whose_logits_need_more_than_the_decoder_is_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(CONFIGS["llama"](), 3)
    plain = type(model).forward

    def shifted(self: torch.nn.Module, input_ids: torch.Tensor, **options: object) -> object:
        out = plain(self, input_ids=input_ids, **options)  # type: ignore[arg-type]
        out.logits = out.logits + input_ids[..., None]
        return out

    monkeypatch.setattr(type(model), "forward", shifted)
    assert not has_decoder_apart(model)
    ((_, found),) = states(model, PASSES[:1], False)
    assert found == States(found.values)
    assert torch.allclose(found.values, model(input_ids=torch.tensor([PASSES[0].ids])).logits[0, 2:])


def test_a_pass_for_some_tokens_ends_with_them() -> None:
    one = pass_over((5, 6), (7, 8, 9, 10), (0, 1, 2, 3, 4))
    assert one.within(1, 3) == Pass((5, 6, 7, 8), (1, 2), (2, 3), (8, 9), (0, 1, 2, 3))
    assert one.within(4, 9) is None


def test_chunks_cover_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "CHUNK", 20)
    assert list(slices(5, 10)) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert list(slices(2, 100)) == [slice(0, 1), slice(1, 2)]


def test_progress_says_what_is_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(forward, "EVERY", 0.0)
    progress = Progress("responses", 4)
    progress.step()
    progress.step(3)
    said = capsys.readouterr().err.splitlines()
    assert said == ["audit: responses: 1 of 4, about 0 s left"]
