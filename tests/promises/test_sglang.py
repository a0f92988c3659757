"""Deterministic numerics inside the real SGLang, under everything its scheduler does: `make test-sglang`.

The plain server under the same eyes is in test_sglang_server.py.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ppo_repro
from ppo_repro.errors import UserError
from ppo_repro.rollout.engine import Request, Sampling
from ppo_repro.rollout.sglang import command
from ppo_repro.rollout.sglang.client import Call, ask
from ppo_repro.rollout.torch_engine import TorchEngine
from tests.support.models import unequal
from tests.support.sglang import Subject, subject

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
LONG = Sampling(1.0, 0, 1.0, 160)
# prompts in pieces of 16 tokens, in one pass with tokens that are decoded, and room for a part of the requests only
CROWDED = "rollout.engine.arguments=[--enable-mixed-chunk, --max-total-tokens, '2400']", "layout.prefill_chunk=16"


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    with subject(tmp_path_factory.mktemp("crowded"), *CROWDED, "layout.rollout_slots=24") as found:
        yield found


def prompts(vocabulary: int, count: int) -> list[Request]:
    """Prompts of 1 to 100 tokens, of which many begin alike."""
    generator = torch.Generator().manual_seed(0)
    beginning = torch.randint(0, vocabulary, (60,), generator=generator).tolist()
    found = []
    for i in range(count):
        shared, own = torch.randint(0, 60, (1,), generator=generator), torch.randint(1, 41, (1,), generator=generator)
        rest = torch.randint(0, vocabulary, (int(own),), generator=generator).tolist()
        found.append(Request((*beginning[: int(shared)], *rest), 2**61 + i))
    return found


@dataclass(frozen=True)
class Sampled:
    ids: list[int]
    logprobs: Tensor


def on_server(found: Subject, requests: Sequence[Request], sampling: Sampling) -> list[Sampled]:
    """All requests in one batch, none of which ends before the limit."""
    common = {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or -1,
        "top_p": sampling.top_p,
        "max_new_tokens": sampling.max_response_tokens,
        "ignore_eos": True,
    }
    body = {
        "input_ids": [list(r.prompt_ids) for r in requests],
        "sampling_params": [{**common, "sampling_seed": r.seed} for r in requests],
        "return_logprob": True,
    }
    answers = Call(found.engine.servers[0].url, "/generate", 300, body).json()
    tokens = [answer["meta_info"]["output_token_logprobs"] for answer in answers]
    return [Sampled([entry[1] for entry in some], torch.tensor([entry[0] for entry in some])) for some in tokens]


def built_in(found: Subject, requests: Sequence[Request], sampling: Sampling) -> list[Sampled]:
    prepared = found.prepared
    engine = TorchEngine(prepared.state.policy, frozenset(), "deterministic", found.config.numerics.max_context, 24, 0)
    return [Sampled(list(c.response_ids), c.logprobs) for c in engine.generate(requests, sampling)]


def differing(a: Sequence[Sampled], b: Sequence[Sampled]) -> int:
    """Log-probs of other bits; -1 where tokens are not the same."""
    if [x.ids for x in a] != [x.ids for x in b]:
        return -1
    return unequal(torch.cat([x.logprobs for x in a]), torch.cat([x.logprobs for x in b]))


def requests_of(found: Subject, count: int = 24) -> list[Request]:
    return prompts(found.prepared.state.policy.config.vocab_size, count)


def test_batches_chunks_evictions_and_retractions_change_no_bit(crowded: Subject) -> None:
    requests = requests_of(crowded)
    expected = built_in(crowded, requests, LONG)
    for size, count in ((24, 24), (8, 24), (1, 6)):
        found: list[Sampled] = []
        for start in range(0, count, size):
            found += on_server(crowded, requests[start : start + size], LONG)
        assert differing(found, expected[:count]) == 0, size
    log = (crowded.engine.folder / "server-0.log").read_text()
    assert "Retract requests" in log, "the pool had room for all: this shows nothing about retraction"
    assert sum("Prefill batch" in line for line in log.splitlines()) > 100  # so prompts came in pieces
    cached = [int(line.split("#cached-token: ")[1].split(",")[0]) for line in log.splitlines() if "#cached-tok" in line]
    assert max(cached) > 0


def test_a_response_goes_on_from_the_cache_of_its_own_beginning(crowded: Subject) -> None:
    requests = requests_of(crowded, 8)
    expected = built_in(crowded, requests, LONG)
    later = [Request((*r.prompt_ids, *c.ids[:40]), r.seed) for r, c in zip(requests, expected, strict=True)]
    found = on_server(crowded, later, Sampling(1.0, 0, 1.0, 120))
    assert differing(found, [Sampled(c.ids[40:], c.logprobs[40:]) for c in expected]) == 0


@pytest.mark.parametrize("sampling", [Sampling(0.7, 0, 1.0, 80), Sampling(0.8, 12, 0.9, 80)])
def test_temperatures_and_cuts_draw_the_tokens_of_the_built_in_sampler(crowded: Subject, sampling: Sampling) -> None:
    requests = requests_of(crowded, 6)
    found, expected = on_server(crowded, requests, sampling), built_in(crowded, requests, sampling)
    assert [c.ids for c in found] == [c.ids for c in expected]
    if sampling.cuts:  # SGLang does not renormalise over what is kept
        assert differing(found, expected) > 0
    else:
        assert differing(found, expected) == 0


def altered_package(folder: Path, old: str, new: str) -> Path:
    """A copy of the package whose plugin registers something else."""
    package = folder / "ppo_repro"
    shutil.copytree(Path(ppo_repro.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    register = package / "sglang_plugin" / "register.py"
    text = register.read_text()
    assert old in text
    register.write_text(text.replace(old, new))
    return folder


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("common.support_triton", "common.supports_triton", r"Triton in allocation is True; must be False"),
        ("runner.ModelRunner.maybe_enable", "runner.ModelRunner.may_enable", r"No supported accelerator"),
        ('register_sampler_backend("pytorch"', 'register_sampler_backend("torch"', r"the sampler is Sampler; must be"),
        ("choices.add_attention_backend_choices", "choices.no_such_function", r"invalid choice: 'ppo_repro'"),
    ],
)
def test_a_hook_that_does_not_take_keeps_the_server_from_starting(
    old: str, new: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    altered = altered_package(tmp_path / "altered", old, new)
    real = command.server_environment

    def environment(*arguments: object) -> dict[str, str]:
        found = real(*arguments)  # type: ignore[arg-type]
        return {**found, "PYTHONPATH": os.pathsep.join([str(altered), found["PYTHONPATH"]])}

    monkeypatch.setattr("ppo_repro.rollout.sglang.engine.server_environment", environment)
    with pytest.raises(UserError, match="SGLang ended with"), subject(tmp_path / "servers"):
        pass
    said_by_log = (tmp_path / "servers" / "server-0.log").read_text()
    assert said in said_by_log


def test_a_request_the_sampler_does_not_know_is_not_answered_otherwise(tmp_path: Path) -> None:
    with subject(tmp_path) as found:
        url, log = found.engine.servers[0].url, tmp_path / "server-0.log"
        body = {"input_ids": [1, 2], "sampling_params": {"min_p": 0.1, "max_new_tokens": 2}}
        with pytest.raises(UserError):
            ask(url, "/generate", 60, body)
        assert "min_p" in log.read_text()
