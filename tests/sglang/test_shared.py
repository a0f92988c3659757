"""Servers of the first process of a run that sample for all: small servers on real sockets, processes as threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from ppo_repro.models.networks import make_policy
from ppo_repro.numerics.optimizer import weights_digest
from ppo_repro.ranks import ALONE, Ranks
from ppo_repro.rollout.engine import Completion, Request, Sampling
from ppo_repro.rollout.sglang.engine import sglang_engine
from ppo_repro.rollout.sglang.shared import SharedEngine
from tests.support.models import source_model
from tests.support.processes.fake_sglang import FakeServer, serving
from tests.support.runs import small_config
from tests.support.thread_ranks import ThreadRanks, in_threads

STOPS, PLAIN = frozenset({3, 17, 40}), Sampling(1.0, 0, 1.0, 6)
REQUESTS = [Request((2, 4, index), 1000 + index) for index in range(7)]


def policy() -> PreTrainedModel:
    return make_policy(source_model("qwen3"), "exact", 24)


def sampled(server: FakeServer, ranks: Ranks, folder: Path, changes: int = 0) -> list[Completion]:
    """What the processes get together, after as many changes of the weights; the last rollout counts."""
    urls = "rollout.engine.kind=sglang", f"rollout.engine.urls=[{server.url}]"
    config = small_config(*urls, f"rollout.engine.numerics={'exact' if server.exact else 'stock'}")
    settings = config.rollout.engine
    assert settings.kind == "sglang"
    model = policy()

    def rollouts(engine: Any) -> list[Completion]:
        shared = SharedEngine(ranks, engine) if ranks.size > 1 else engine
        mine = [REQUESTS[i] for i in ranks.mine(len(REQUESTS))]
        found = shared.generate(mine, PLAIN)
        for _ in range(changes):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2.0)
            found = shared.generate(mine, PLAIN)
        return ranks.gather(found)

    if not ranks.is_first:
        return rollouts(None)
    with sglang_engine(config, settings, model, STOPS, folder, lambda seconds: None) as opened:
        return rollouts(opened)


def facts(completions: list[Completion]) -> list[Any]:
    return [(c.response_ids, c.logprobs.tolist(), c.finish_reason) for c in completions]


@pytest.mark.parametrize("size", [2, 8])
def test_servers_get_the_requests_and_weights_of_one_process(size: int, tmp_path: Path) -> None:
    held: list[str] = []

    def look(server: FakeServer, _: str, answer: Any) -> Any:
        body = server.asked[-1][1]
        read = load_file(Path(body["model_path"]) / "model.safetensors")
        held.append(weights_digest((n, read[n]) for n, _ in policy().named_parameters()))
        return answer

    with serving(exact=True) as server:
        server.faults["/update_weights_from_disk"] = look
        alone = sampled(server, ALONE, tmp_path / "alone", changes=1)
        asked, known = [body for path, body in server.asked if path == "/generate"], list(held)
        server.asked.clear(), held.clear()
        found = in_threads(size, lambda world: sampled(server, world, tmp_path / "m", changes=1))
        assert [body for path, body in server.asked if path == "/generate"] == asked
    assert all(facts(each) == facts(alone) for each in found)
    assert held == known and len(set(held)) == 2, "the whole weights, before and after a change"


def test_each_process_gets_its_own_answers(tmp_path: Path) -> None:
    """The control: the answers of a process are not those of another."""
    with serving() as server:
        shared = in_threads(2, lambda world: _own(server, world, tmp_path))
    assert len(shared[0]) == 3 and len(shared[1]) == 4 and not set(shared[0]) & set(shared[1])


def _own(server: FakeServer, world: ThreadRanks, folder: Path) -> list[tuple[int, ...]]:
    config = small_config(
        "rollout.engine.kind=sglang", f"rollout.engine.urls=[{server.url}]", "rollout.engine.numerics=stock"
    )
    settings, model = config.rollout.engine, policy()
    assert settings.kind == "sglang"
    mine = [REQUESTS[i] for i in world.mine(len(REQUESTS))]
    if not world.is_first:
        return [c.response_ids for c in SharedEngine(world, None).generate(mine, PLAIN)]
    with sglang_engine(config, settings, model, STOPS, folder, lambda seconds: None) as opened:
        return [c.response_ids for c in SharedEngine(world, opened).generate(mine, PLAIN)]
