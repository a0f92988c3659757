"""What a caller of the library gets wrong is one UserError in one line, before anything is computed or written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import ppo_repro
from tests.support.models import CONFIGS, small_model
from tests.support.paths import TINY

IDS = torch.tensor([[1, 2, 3]])
SAMPLING = ppo_repro.Sampling(max_response_tokens=2)


def stock() -> PreTrainedModel:
    return small_model(CONFIGS["llama"](), seed=0)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return ppo_repro.deterministic(stock())


def generate(**changes: object) -> Callable[[PreTrainedModel], object]:
    arguments = {"prompts": [[1]], "sampling": SAMPLING, "stop": [0], **changes}
    return lambda model: ppo_repro.generate(arguments.pop("model", model), **arguments)  # type: ignore[arg-type]


def sampling(**changes: object) -> Callable[[PreTrainedModel], object]:
    return generate(sampling=ppo_repro.Sampling(**{"max_response_tokens": 2, **changes}))  # type: ignore[arg-type]


def logprobs(**changes: object) -> Callable[[PreTrainedModel], object]:
    return lambda model: ppo_repro.logprobs(changes.pop("model", model), IDS, **changes)  # type: ignore[arg-type]


def deterministic(**changes: object) -> Callable[[PreTrainedModel], object]:
    return lambda _: ppo_repro.deterministic(stock(), **changes)  # type: ignore[arg-type]


def loss(**changes: object) -> Callable[[PreTrainedModel], object]:
    return lambda model: model(IDS, **{"labels": IDS, **changes})


def train(config: object = TINY, **changes: object) -> Callable[[PreTrainedModel], object]:
    return lambda _: ppo_repro.train(config, **changes)  # type: ignore[arg-type]


CALLS: list[tuple[Callable[[PreTrainedModel], object], str]] = [
    *((deterministic(threads=t), rf"deterministic: threads = {t}: must be a whole number in") for t in (0, 1.5, True)),
    *((deterministic(max_context=c), "deterministic: max_context = .*: must be a") for c in (0, 2.5, True, "12")),
    *((loss(num_items_in_batch=n), "num_items_in_batch = ") for n in (0, -1, float("nan"), float("inf"), "x")),
    (loss(labels=IDS > 0), "labels: must be whole numbers"),
    (logprobs(model=3), "logprobs: model is of type int"),
    (logprobs(position_ids=[[0, 1, 2]]), "position_ids: is of type list; must be whole numbers"),
    *((logprobs(temperature=t), "logprobs: temperature = ") for t in (0, 1e300, 1e-300, 10**400, "1", True, IDS)),
    (generate(model=3), "generate: model is of type int"),
    (generate(tokenizer="x"), "generate: tokenizer is of type str"),
    *((generate(sampling=s), "generate: sampling is of type") for s in (None, {"top_k": 1})),
    *((generate(prompts=[p]), "generate: a prompt = .*: must be a list of token ids") for p in ([1.7], [1, "x"], 3)),
    *((generate(prompts=[p]), "generate: a prompt = .*: must be a list of token ids in 0..") for p in ([-1], [10**9])),
    *((generate(stop=s), "generate: stop = .*: must be a list of token ids") for s in ([10**9], "abc", [None], 3)),
    *((generate(seed=s), "generate: seed = ") for s in ("x", 1.5, None, -1)),
    *((generate(slots=s), "generate: slots = ") for s in (0, 1.5, None)),
    *((sampling(temperature=t), "generate: sampling.temperature = ") for t in (0, 1e300, float("nan"), "x")),
    *((sampling(top_k=k), "generate: sampling.top_k = ") for k in (-1, 1.5)),
    *((sampling(top_p=p), "generate: sampling.top_p = ") for p in (0, 2, None)),
    (sampling(greedy="no"), "generate: sampling.greedy = 'no': must be True or False"),
    *((train(overrides=o), "overrides = .*: must be a dict, as .*, or a list") for o in ([3], "seed=3", None, {1: 2})),
    (train(overrides={"ppo.epoch": 2}), r"ppo.epoch: unknown field; .*; did you mean ppo.epochs\?"),
    (lambda model: model.generate(input_ids=IDS, max_new_tokens=2), "sample with ppo_repro.generate"),
    (lambda model: model.generate(IDS), "sample with ppo_repro.generate"),
    (lambda _: ppo_repro.deterministic(torch.nn.Linear(2, 2)), "cannot take Linear"),  # type: ignore[arg-type]
    (lambda model: ppo_repro.deterministic(model), "cannot take LlamaForCausalLM"),
    (lambda _: ppo_repro.deterministic(stock().half()), "torch.float16; deterministic numerics need float32"),
    (lambda _: ppo_repro.AdamW(stock(), 1e-3), "is not deterministic; make it so"),
    (lambda model: ppo_repro.AdamW(model, -1), "lr = -1: out of range"),
    (generate(prompts=["a"]), "give their tokenizer"),
    (generate(prompts=[[]]), "empty prompt"),
    (generate(prompts="a"), "must be a list of texts"),
    (train(None), "config is of type NoneType; must be a YAML file, or a dict"),
    *((train(out=o), "out = .*: must be a") for o in ("a\0b", 3, "x" * 5000)),
    (lambda _: ppo_repro.rerun("x", overrides=[3]), "overrides = "),  # type: ignore[list-item]
    (lambda _: ppo_repro.open_run("x" * 5000), "run = .*: must be a shorter path"),
]


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_a_mistake_is_one_line(
    number: int, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    call, message = CALLS[number]
    with pytest.raises(ppo_repro.UserError, match=message) as error:
        call(model)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300
    assert list(tmp_path.iterdir()) == [] and torch.get_num_threads() == before
