"""What a caller of the library gets wrong is one UserError in one line, before anything is computed or written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import ppo_repro
from tests.support.models import CONFIGS, VOCAB, small_model
from tests.support.paths import TINY

IDS, SAMPLING = torch.tensor([[1, 2, 3]]), ppo_repro.Sampling(max_response_tokens=2)
ONES = torch.ones_like(IDS)


def stock() -> PreTrainedModel:
    return small_model(CONFIGS["llama"](), seed=0)


def generate(model: PreTrainedModel, **changes: object) -> object:
    return ppo_repro.generate(model, **{"prompts": [[1]], "sampling": SAMPLING, "stop": [0], **changes})  # type: ignore[arg-type]


# one of each family
CALLS: dict[str, Callable[[PreTrainedModel], object]] = {
    r"deterministic: threads = 1.5: must be a whole number": lambda _: ppo_repro.deterministic(stock(), threads=1.5),  # type: ignore[arg-type]
    r"threads = 257: must be a whole number in 1..256": lambda _: ppo_repro.deterministic(stock(), threads=257),
    "input_ids: is torch.float32 .1, 3.; must be an int64": lambda model: model(IDS.float()),
    "input_ids: is of type list": lambda model: model([[1, 2]]),
    f"input_ids.0, 0. = {VOCAB}: must be in 0..{VOCAB - 1}": lambda model: model(ONES * VOCAB),
    r"attention_mask: .* \[1, 3\]": lambda model: model(IDS, ONES[:, :2]),
    "padding between its tokens": lambda model: model(IDS, torch.tensor([[1, 0, 1]])),
    "every position is padding": lambda model: model(IDS, ONES * 0),
    r"position_ids\[0, 0\] = 3: must be one more": lambda model: model(IDS, position_ids=ONES * 3),
    "has 65 tokens; deterministic.model, max_context=64. takes no more": lambda model: model(torch.ones(1, 65).long()),
    r"labels\[0, 2\] = 3: is at padding; must be -100": lambda model: model(IDS, torch.tensor([[1, 1, 0]]), labels=IDS),
    "none of them counts": lambda model: model(IDS, labels=ONES * -100),
    "use_cache is not supported": lambda model: model(IDS, use_cache=True),
    "logits_to_keep = 1": lambda model: model(IDS, labels=IDS, logits_to_keep=1),
    "num_items_in_batch = nan": lambda model: model(IDS, labels=IDS, num_items_in_batch=float("nan")),
    "logprobs: temperature = 1e-300": lambda model: ppo_repro.logprobs(model, IDS, temperature=1e-300),
    "generate: a prompt = .*: must be a list of token ids": lambda model: generate(model, prompts=[[1.7]]),
    "generate: sampling.top_p = 2": lambda m: generate(m, sampling=ppo_repro.Sampling(top_p=2, max_response_tokens=2)),
    r"generate: seeds = \[1, 2\]: must be 1 whole numbers": lambda model: generate(model, seeds=[1, 2]),
    r"generate: seeds = 1: must be 1 whole": lambda m: generate(m, seeds=1),
    r"generate: seeds\[0\] = -1: must be a whole number in 0": lambda m: generate(m, seeds=[-1]),
    "give their tokenizer": lambda model: generate(model, prompts=["a"]),
    "cannot take LlamaForCausalLM": lambda model: ppo_repro.deterministic(model),
    "sample with ppo_repro.generate": lambda model: model.generate(IDS),
    r"^overrides: model.path = .* is of type PosixPath; ": lambda _: ppo_repro.train(
        TINY, overrides={"model.path": TINY}
    ),
    r"^overrides = 'ppo.epochs=2': must be a dict": lambda _: ppo_repro.train(TINY, overrides="ppo.epochs=2"),
    r"did you mean ppo.epochs\?": lambda _: ppo_repro.train(TINY, overrides={"ppo.epoch": 2}),
    "LlamaForCausalLM is not deterministic": lambda _: ppo_repro.logprobs(stock(), IDS),
}


@pytest.mark.parametrize("message", CALLS)
def test_a_mistake_is_one_line(message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = ppo_repro.deterministic(stock())
    with pytest.raises(ppo_repro.UserError, match=message) as error:
        CALLS[message](model)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300
    assert list(tmp_path.iterdir()) == []
