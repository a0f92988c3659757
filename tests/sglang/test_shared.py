"""Servers of the first process of a run that sample for all: small servers on real sockets, processes as threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_repro.models.networks import make_policy
from ppo_repro.ranks import Ranks
from ppo_repro.rollout.engine import Completion, Request, Sampling
from ppo_repro.rollout.sglang.engine import SharedEngine, sglang_engine
from tests.sglang.fake_sglang import FakeServer, serving
from tests.support.models import source_model
from tests.support.runs import small_config
from tests.support.thread_ranks import in_threads

STOPS, PLAIN = frozenset({3, 17, 40}), Sampling(1.0, 0, 1.0, 6)
REQUESTS = [Request((2, 4, index), 1000 + index) for index in range(7)]


def sampled(server: FakeServer, ranks: Ranks, folder: Path) -> list[list[Completion]]:
    """What a process gets before and after a change of the weights."""
    urls = "rollout.engine.kind=sglang", f"rollout.engine.urls=[{server.url}]"
    config = small_config(*urls)
    settings, policy = config.rollout.engine, make_policy(source_model("qwen3"), "deterministic", 24)
    assert settings.kind == "sglang"
    mine = [REQUESTS[i] for i in ranks.mine(len(REQUESTS))]

    def rollouts(engine: Any) -> list[list[Completion]]:
        shared = SharedEngine(ranks, engine) if ranks.size > 1 else engine
        before = shared.generate(mine, PLAIN)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(2.0)
        return [before, shared.generate(mine, PLAIN)]

    if not ranks.is_first:
        return rollouts(None)
    with sglang_engine(config, settings, policy, STOPS, folder, lambda seconds: None) as opened:
        return rollouts(opened)


def facts(completions: list[Completion]) -> list[Any]:
    return [(c.response_ids, c.logprobs.tolist(), c.finish_reason) for c in completions]


@pytest.mark.parametrize("size", [2, 8])
def test_servers_get_the_requests_of_one_process_and_each_process_its_own_answers(size: int, tmp_path: Path) -> None:
    with serving(deterministic=True) as server:
        alone = sampled(server, Ranks(0, 1), tmp_path)
        once = list(server.asked)
        server.asked.clear()
        found = in_threads(size, lambda ranks: sampled(server, ranks, tmp_path))
        shown = [[(path, body) for path, body in some if "info" not in path] for some in (once, server.asked)]
    assert shown[0] == shown[1] and sum(path == "/generate" for path, _ in shown[0]) == 2
    for after in range(2):
        parts = [facts(of_rank[after]) for of_rank in found]
        assert [each for part in parts for each in part] == facts(alone[after])
        assert max(len(part) for part in parts) < len(REQUESTS), "the control: no process gets all answers"
