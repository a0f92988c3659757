"""The engine on the real SGLang server, on the CPU: `make test-sglang`, or PPO_REPRO_SGLANG_PYTHON and `-m sglang`.

Two deterministic servers and a stock one are started once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from ppo_repro.config.run import RunConfig
from ppo_repro.records import manifest, reader
from ppo_repro.rollout.engine import Completion, Request, Sampling
from ppo_repro.runs.prepare import Prepared
from ppo_repro.watcher import Silent
from tests.support.language import rerun, run
from tests.support.models import unequal
from tests.support.paths import SMALL
from tests.support.ranks import cli_ranks
from tests.support.row_dependent import NOISE, row_dependent_linear
from tests.support.runs import small_config
from tests.support.sglang import PYTHON, WARM, Subject, subject

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def deterministic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    with subject(tmp_path_factory.mktemp("deterministic"), "rollout.engine.servers=2") as found:
        yield found


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    sets = "rollout.engine.numerics=stock", "numerics.mode=native"
    with subject(tmp_path_factory.mktemp("stock"), *sets) as found:
        yield found


def requests_of(config: RunConfig, prepared: Prepared, count: int) -> list[Request]:
    prompts = sorted(prepared.task.prompt_ids.values())
    return [Request(prompts[i % len(prompts)], 2**62 + i) for i in range(count)]


def same(a: Sequence[Completion], b: Sequence[Completion]) -> bool:
    return [c.response_ids for c in a] == [c.response_ids for c in b] and not differing(a, b)


def differing(a: Sequence[Completion], b: Sequence[Completion]) -> int:
    return unequal(torch.cat([c.logprobs for c in a]), torch.cat([c.logprobs for c in b]))


def test_stock_servers_do_not_and_repeat_their_tokens_by_seed(stock: Subject) -> None:
    requests = requests_of(stock.config, stock.prepared, 24)
    first, again = (stock.engine.generate(requests, Sampling(0.9, 0, 1.0, 40)) for _ in range(2))
    assert [c.response_ids for c in first] == [c.response_ids for c in again]
    with row_dependent_linear(NOISE):  # layers that differ from the servers' by construction
        built_in = stock.prepared.engine.generate(requests, Sampling(0.9, 0, 1.0, 40))
    equal = [(a, b) for a, b in zip(first, built_in, strict=True) if a.response_ids == b.response_ids]
    assert len(equal) > 12 and differing(*zip(*equal, strict=True)) > 0
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
    there, _ = run(small_config(*sets), tmp_path, Silent())
    deterministic.forget()
    here, _ = run(small_config(*WARM), tmp_path, Silent())
    assert manifest.load(there).fingerprint == manifest.load(here).fingerprint
    assert rerun(there, Silent(), ["rollout.engine.kind=torch"]).difference is None
    tokens = reader.read_tokens(there, columns=["rollout_logprobs", "old_logprobs"])
    assert len(tokens) > 300 and (tokens.rollout_logprobs == tokens.old_logprobs).all()


@pytest.mark.parametrize(
    "sampling", [Sampling(0.8, 12, 0.9, 40), Sampling(0.7, 0, 0.95, 40), Sampling(1.0, 3, 1.0, 40)]
)
def test_deterministic_servers_return_what_a_cut_kept(deterministic: Subject, sampling: Sampling) -> None:
    requests = requests_of(deterministic.config, deterministic.prepared, 24)
    expected = deterministic.prepared.engine.generate(requests, sampling)
    found = deterministic.engine.generate(requests, sampling)
    assert same(found, expected) and same(deterministic.engine.generate(requests[::-1], sampling), expected[::-1])
    for name in ("log_kept_mass", "kept_tokens"):
        columns = (torch.cat([getattr(c, name) for c in some]) for some in (found, expected))
        assert torch.equal(*columns), name
    whole = deterministic.engine.generate(requests, Sampling(sampling.temperature, 0, 1.0, 40))
    assert not same(found, whole), "the control: the same seeds without a cut"


def test_two_processes_on_servers_are_one_process_on_the_built_in_engine(
    deterministic: Subject, tmp_path: Path
) -> None:
    sets = *WARM, "rollout.top_p=0.9"
    words = [word for each in (*sets, "rollout.engine.kind=sglang", deterministic.urls) for word in ("--set", each)]
    ended = cli_ranks(2, "run", SMALL, "--out", tmp_path / "two", *words)
    deterministic.forget()
    assert [each.code for each in ended] == [0, 0], ended
    (there,) = [path.parent for path in (tmp_path / "two").rglob("manifest.json")]
    here, _ = run(small_config(*sets), tmp_path, Silent())
    assert manifest.load(there).fingerprint == manifest.load(here).fingerprint


def test_a_run_of_a_mixture_that_is_behind_is_the_run_of_the_built_in_engine(tmp_path: Path) -> None:
    """The server is started with the first weights of all and gets others within each rollout."""
    behind = "mismatch.sampler.lag=2"
    experts = "model.experts={family: qwen3_moe, count: 5, per_token: 2}", "model.intermediate_size=12"
    common = (*WARM, *experts, behind, "records.level=deep", "ppo.replay_routes=true")
    sets = "rollout.engine.kind=sglang", f"rollout.engine.python={PYTHON}", *common
    there, _ = run(small_config(*sets), tmp_path, Silent())
    here, _ = run(small_config(*common), tmp_path, Silent())
    chosen, _ = run(small_config(*common, "ppo.replay_routes=false"), tmp_path, Silent())
    found = [manifest.load(folder).fingerprint for folder in (there, here, chosen)]
    assert found[0] == found[1] != found[2], "the trainer's own choice differs where the sampler is behind"
    columns = [reader.read_tokens(folder)[["rollout_routes", "policy_routes"]] for folder in (there, here, chosen)]
    routes, same, own = ([np.stack(column.to_list()) for _, column in pair.items()] for pair in columns)
    assert routes[0].shape == (len(columns[0]), 2 * 2) and len(np.unique(routes[0], axis=0)) > 5
    assert np.array_equal(routes[0], same[0]), "the servers' routes are those of the built-in engine"
    assert np.array_equal(routes[0], routes[1]) and not np.array_equal(own[0], own[1]), "replayed, or chosen anew"


@pytest.mark.usefixtures("row_noise")
@pytest.mark.parametrize("mode", ["native", "deterministic"])
def test_a_run_on_a_stock_server_shows_its_mismatch(stock: Subject, mode: str, tmp_path: Path) -> None:
    sets = "rollout.engine.kind=sglang", "rollout.engine.numerics=stock", stock.urls, f"numerics.mode={mode}", *WARM
    folder, _ = run(small_config(*sets), tmp_path, Silent())
    stock.forget()
    tokens = reader.read_tokens(folder, columns=["rollout_logprobs", "old_logprobs"])
    differ = (tokens.rollout_logprobs != tokens.old_logprobs).sum()
    assert len(tokens) > 300 and differ > 0
    assert (tokens.rollout_logprobs - tokens.old_logprobs).abs().max() < 1e-4  # float32 in another order
