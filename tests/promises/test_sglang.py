"""Deterministic numerics inside the real SGLang, under everything its scheduler does: `make test-sglang`.

Without make: PPO_REPRO_SGLANG_PYTHON and `-m sglang`. Control: stock servers.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import ppo_repro
from ppo_repro.base.errors import UserError
from ppo_repro.models.networks import make_policy
from ppo_repro.records import manifest, reader
from ppo_repro.sampler import Completion, Request, Sampling
from ppo_repro.sampling.built_in import BuiltInSampler
from ppo_repro.sampling.sglang import command
from ppo_repro.sampling.sglang.client import Call, ask
from ppo_repro.sampling.sglang.plugin.names import ARCHITECTURES
from ppo_repro.sampling.sglang.sampler import SGLangSampler
from ppo_repro.stages.equal_bits import UnequalBits
from tests.support.cli import sets
from tests.support.language import rerun, small_run
from tests.support.models import CONTEXT, ragged, source_model, unequal
from tests.support.paths import SMALL
from tests.support.ranks import cli_ranks
from tests.support.row_dependent import NOISE, row_dependent_linear
from tests.support.runs import run_below
from tests.support.sampler import STOPS
from tests.support.sglang import PYTHON, WARM, Subject, config_of, subject

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
    """Of a completion what is compared."""

    response_ids: tuple[int, ...]
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
    return [Sampled(tuple(e[1] for e in some), torch.tensor([e[0] for e in some])) for some in tokens]


def built_in(found: Subject, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
    prepared = found.prepared
    engine = BuiltInSampler(
        prepared.state.policy, frozenset(), "deterministic", found.config.numerics.max_context, 24, 0
    )
    return engine.generate(requests, sampling)


def differing(a: Sequence[Sampled | Completion], b: Sequence[Sampled | Completion]) -> int:
    """Log-probs of other bits; -1 where tokens are not the same."""
    if [x.response_ids for x in a] != [x.response_ids for x in b]:
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
    later = [Request((*r.prompt_ids, *c.response_ids[:40]), r.seed) for r, c in zip(requests, expected, strict=True)]
    found = on_server(crowded, later, Sampling(1.0, 0, 1.0, 120))
    assert differing(found, [Sampled(c.response_ids[40:], c.logprobs[40:]) for c in expected]) == 0


def test_sglang_scores_a_response_with_the_bits_it_was_sampled_with(crowded: Subject) -> None:
    requests = requests_of(crowded, 8)
    sampled = on_server(crowded, requests, LONG)
    body = {
        "input_ids": [[*r.prompt_ids, *c.response_ids] for r, c in zip(requests, sampled, strict=True)],
        "sampling_params": [{"max_new_tokens": 0, "temperature": 1.0}] * len(requests),
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answers = Call(crowded.engine.servers[0].url, "/generate", 300, body).json()
    scores = [answer["meta_info"]["input_token_logprobs"] for answer in answers]
    scored = [
        Sampled(c.response_ids, torch.tensor([entry[0] for entry in some[len(r.prompt_ids) :]]))
        for r, c, some in zip(requests, sampled, scores, strict=True)
    ]
    assert differing(scored, sampled) == 0


def altered_package(folder: Path, old: str, new: str) -> Path:
    """A copy of the package whose plugin registers something else."""
    package = folder / "ppo_repro"
    shutil.copytree(Path(ppo_repro.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    register = package / "sampling" / "sglang" / "plugin" / "register.py"
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

    monkeypatch.setattr("ppo_repro.sampling.sglang.sampler.server_environment", environment)
    with pytest.raises(UserError, match="SGLang ended with"), subject(tmp_path / "servers"):
        pass
    said_by_log = (tmp_path / "servers" / "server-0.log").read_text()
    assert said in said_by_log


def test_a_request_the_plugin_does_not_know_is_not_answered_otherwise(tmp_path: Path) -> None:
    sampling = {"max_new_tokens": 2, "min_p": 0.1}
    with subject(tmp_path) as found:
        with pytest.raises(UserError):
            ask(found.engine.servers[0].url, "/generate", 60, {"input_ids": [1, 2], "sampling_params": sampling})
        assert "a request with min_p is not supported" in (tmp_path / "server-0.log").read_text()


@pytest.fixture(scope="module")
def deterministic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    with subject(tmp_path_factory.mktemp("deterministic"), "rollout.engine.servers=2") as found:
        yield found


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    sets = "rollout.engine.numerics=stock", "numerics.mode=native"
    with subject(tmp_path_factory.mktemp("stock"), *sets) as found:
        yield found


def task_requests(found: Subject, count: int = 24) -> list[Request]:
    prompts = sorted(found.prepared.task.prompt_ids.values())
    return [Request(prompts[i % len(prompts)], 2**62 + i) for i in range(count)]


def test_stock_servers_do_not_and_repeat_their_tokens_by_seed(stock: Subject) -> None:
    requests = task_requests(stock)
    first, again = (stock.engine.generate(requests, Sampling(0.9, 0, 1.0, 40)) for _ in range(2))
    assert [c.response_ids for c in first] == [c.response_ids for c in again]
    with row_dependent_linear(NOISE):  # layers that differ from the servers' by construction
        built_in = stock.prepared.sampler.generate(requests, Sampling(0.9, 0, 1.0, 40))
    equal = [(a, b) for a, b in zip(first, built_in, strict=True) if a.response_ids == b.response_ids]
    assert len(equal) > 12
    assert differing(*zip(*equal, strict=True)) > 0
    # float32 sums in another order, over forty tokens of a small model
    torch.testing.assert_close(
        *(torch.cat([c.logprobs for c in some]) for some in zip(*equal, strict=True)), atol=1e-4, rtol=0
    )
    alike = [Request(requests[0].prompt_ids, seed) for seed in range(8)]
    assert len({c.response_ids for c in stock.engine.generate(alike, Sampling(1.0, 0, 1.0, 40))}) > 4


def test_a_run_on_two_deterministic_servers_is_the_run_of_the_built_in_engine(
    deterministic: Subject, tmp_path: Path
) -> None:
    sets = "rollout.engine.kind=sglang", deterministic.urls, *WARM
    there = small_run(tmp_path, *sets)
    deterministic.forget()
    here = small_run(tmp_path, *WARM)
    assert manifest.load(there).fingerprint == manifest.load(here).fingerprint
    assert rerun(there, ["rollout.engine={kind: torch}"]).difference is None
    tokens = reader.read_tokens(there, columns=["rollout_logprobs", "old_logprobs"])
    assert len(tokens) > 300
    assert (tokens.rollout_logprobs == tokens.old_logprobs).all()


@pytest.mark.parametrize(
    "sampling", [Sampling(0.8, 12, 0.9, 40), Sampling(0.7, 0, 0.95, 40), Sampling(1.0, 3, 1.0, 40)]
)
def test_deterministic_servers_return_what_a_cut_kept(deterministic: Subject, sampling: Sampling) -> None:
    requests = task_requests(deterministic)
    expected = deterministic.prepared.sampler.generate(requests, sampling)
    found = deterministic.engine.generate(requests, sampling)
    assert differing(found, expected) == 0
    assert differing(deterministic.engine.generate(requests[::-1], sampling), expected[::-1]) == 0
    for name in ("log_kept_mass", "kept_tokens"):
        columns = (torch.cat([getattr(c, name) for c in some]) for some in (found, expected))
        assert torch.equal(*columns), name
    whole = deterministic.engine.generate(requests, Sampling(sampling.temperature, 0, 1.0, 40))
    assert differing(found, whole) != 0, "the control: the same seeds without a cut"


def test_two_processes_on_servers_are_one_process_on_the_built_in_engine(
    deterministic: Subject, tmp_path: Path
) -> None:
    fields = *WARM, "rollout.top_p=0.9"
    words = sets(*fields, "rollout.engine.kind=sglang", deterministic.urls)
    ended = cli_ranks(2, "run", SMALL, "--out", tmp_path / "two", *words)
    deterministic.forget()
    assert [each.code for each in ended] == [0, 0], ended
    there = run_below(tmp_path / "two")
    here = small_run(tmp_path, *fields)
    assert manifest.load(there).fingerprint == manifest.load(here).fingerprint


def test_a_run_in_high_is_the_run_of_the_built_in_engine_and_needs_servers_in_high(
    deterministic: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = *WARM, "numerics.precision=high", "rollout.top_p=0.9"
    there = small_run(tmp_path, *common, "rollout.engine.kind=sglang", f"rollout.engine.python={PYTHON}")
    here = small_run(tmp_path, *common)
    assert manifest.load(there).fingerprint == manifest.load(here).fingerprint
    in_highest = *common, "rollout.engine.kind=sglang", deterministic.urls
    with pytest.raises(UserError, match=rf"serves \['{ARCHITECTURES['highest']}'\]; .*numerics.precision = high$"):
        small_run(tmp_path, *in_highest)
    monkeypatch.setattr("ppo_repro.sampling.sglang.sampler.check_server", lambda *_: {})
    with pytest.raises(UnequalBits, match="rollout_logprobs"):
        small_run(tmp_path, *in_highest)
    deterministic.forget()


def test_a_run_of_a_mixture_that_is_behind_is_the_run_of_the_built_in_engine(tmp_path: Path) -> None:
    """The server is started with the first weights of all and gets others within each rollout."""
    behind = "mismatch.sampler.lag=2"
    experts = "model.experts={family: qwen3_moe, count: 5, per_token: 2}", "model.intermediate_size=12"
    common = (*WARM, *experts, behind, "records.level=deep", "ppo.replay_routes=true")
    sets = "rollout.engine.kind=sglang", f"rollout.engine.python={PYTHON}", *common
    there = small_run(tmp_path, *sets)
    here = small_run(tmp_path, *common)
    chosen = small_run(tmp_path, *common, "ppo.replay_routes=false")
    found = [manifest.load(folder).fingerprint for folder in (there, here, chosen)]
    assert found[0] == found[1] != found[2], "the trainer's own choice differs where the sampler is behind"
    columns = [reader.read_tokens(folder)[["rollout_routes", "policy_routes"]] for folder in (there, here, chosen)]
    routes, same, own = ([np.stack(column.to_list()) for _, column in pair.items()] for pair in columns)
    assert routes[0].shape == (len(columns[0]), 2 * 2)
    assert len(np.unique(routes[0], axis=0)) > 5
    assert np.array_equal(routes[0], same[0]), "the servers' routes are those of the built-in engine"
    assert np.array_equal(routes[0], routes[1]), "replayed, or chosen anew"
    assert not np.array_equal(own[0], own[1]), "replayed, or chosen anew"


@pytest.mark.parametrize("family", ["gemma3_text", "phi3"])
def test_a_server_of_another_family_samples_the_bits_of_the_built_in_engine(family: str, tmp_path: Path) -> None:
    """Rotary positions and windows by type of layer, and joined matrices and longrope."""
    policy = make_policy(source_model(family), "deterministic", CONTEXT)
    config = config_of("layout.prefill_chunk=16", f"numerics.max_context={CONTEXT}")
    here = BuiltInSampler(policy, STOPS, "deterministic", CONTEXT, 24, 0)
    requests = [Request(tuple(prompt), 2**61 + i) for i, prompt in enumerate(ragged(24, 11, prompt=30)[0])]
    samplings = Sampling(1.0, 0, 1.0, 30), Sampling(1.0, 12, 0.9, 30)
    with SGLangSampler(config, policy, STOPS, tmp_path).running(lambda seconds: None) as engine:
        whole, cut = (engine.generate(requests, sampling) for sampling in samplings)
    for found, sampling in zip((whole, cut), samplings, strict=True):
        assert differing(found, here.generate(requests, sampling)) == 0
    assert differing(whole, cut) != 0, "the control: the same seeds without a cut"


@pytest.mark.usefixtures("row_noise")
@pytest.mark.parametrize("mode", ["native", "deterministic"])
def test_a_run_on_a_stock_server_shows_its_mismatch(stock: Subject, mode: str, tmp_path: Path) -> None:
    sets = "rollout.engine.kind=sglang", "rollout.engine.numerics=stock", stock.urls, f"numerics.mode={mode}", *WARM
    folder = small_run(tmp_path, *sets)
    stock.forget()
    tokens = reader.read_tokens(folder, columns=["rollout_logprobs", "old_logprobs"])
    differ = (tokens.rollout_logprobs != tokens.old_logprobs).sum()
    assert len(tokens) > 300
    assert differ > 0
    assert (tokens.rollout_logprobs - tokens.old_logprobs).abs().max() < 1e-4  # float32 in another order
