"""The engine against small servers on real sockets: weights in step, requests shared out, faults in one line."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from ppo_repro.base.errors import PromiseBroken, UserError
from ppo_repro.base.mode import Precision
from ppo_repro.numerics.weights import weights_digest
from ppo_repro.sampler import Request, Sampling
from ppo_repro.sampling.sglang.plugin.names import ARCHITECTURES
from ppo_repro.sampling.sglang.sampler import SGLangSampler
from tests.sampling.sglang.fake_sglang import FakeServer, serving, token_of
from tests.support.models import VOCAB, source_model
from tests.support.runs import small_config

STOPS = frozenset({3, 17, 40})
PLAIN = Sampling(1.0, 0, 1.0, 6)
REQUESTS = [Request((2, 4, index), 1000 + index) for index in range(7)]


@pytest.fixture()
def policy() -> PreTrainedModel:
    return source_model("qwen3")


@contextmanager
def engine_on(servers: list[FakeServer], policy: PreTrainedModel, folder: Path, *more: str) -> Iterator[SGLangSampler]:
    urls = "rollout.engine.urls=[" + ",".join(server.url for server in servers) + "]"
    numerics = "deterministic" if servers[0].deterministic else "stock"
    sets = "rollout.engine.kind=sglang", urls, f"rollout.engine.numerics={numerics}", *more
    config = small_config(*sets, "rollout.engine.timeout_s=1")
    with SGLangSampler(config, policy, STOPS, folder).running(lambda seconds: None) as opened:
        yield opened


def digest(policy: PreTrainedModel) -> str:
    return weights_digest(policy.named_parameters())


def paths(server: FakeServer) -> list[str]:
    return [path for path, _ in server.asked]


def last(server: FakeServer, path: str) -> Any:
    return [body for asked, body in server.asked if asked == path][-1]


def test_responses_come_in_the_order_of_the_requests(policy: PreTrainedModel, tmp_path: Path) -> None:
    with serving() as server, engine_on([server], policy, tmp_path) as engine:
        found = engine.generate(REQUESTS, PLAIN)
        for request, completion in zip(REQUESTS, found, strict=True):
            expected = [token_of(request.seed, 3 + t, VOCAB) for t in range(6)]
            ends = [t for t, token in enumerate(expected) if token in STOPS]
            assert list(completion.response_ids) == expected[: ends[0] + 1 if ends else 6]
            assert completion.finish_reason == ("stop" if ends else "length")
        assert engine.generate([], PLAIN) == []


@pytest.mark.parametrize("count", [2, 3, 9])
def test_the_number_of_servers_changes_nothing(count: int, policy: PreTrainedModel, tmp_path: Path) -> None:
    with serving() as server, engine_on([server], policy, tmp_path / "one") as engine:
        alone = engine.generate(REQUESTS, PLAIN)
    with ExitStack() as stack:
        servers = [stack.enter_context(serving()) for _ in range(count)]
        engine = stack.enter_context(engine_on(servers, policy, tmp_path / "many"))
        shared = engine.generate(REQUESTS, PLAIN)
        sent = [len(last(s, "/generate")["input_ids"]) if "/generate" in paths(s) else 0 for s in servers]
    assert [c.response_ids for c in shared] == [c.response_ids for c in alone]
    assert sum(sent) == len(REQUESTS)
    assert max(sent) - min(sent) <= 1


def test_new_weights_are_brought_once_and_before_the_next_response(policy: PreTrainedModel, tmp_path: Path) -> None:
    path = "/update_weights_from_disk"
    seen: dict[str, torch.Tensor] = {}

    def look(server: FakeServer, _: str, answer: Any) -> Any:
        body = server.asked[-1][1]
        seen.update(load_file(Path(body["model_path"]) / "model.safetensors"))
        assert json.loads((Path(body["model_path"]) / "config.json").read_text())["eos_token_id"] == [3, 17, 40]
        return answer

    with serving() as server, engine_on([server], policy, tmp_path) as engine:
        server.faults[path] = look
        engine.generate(REQUESTS, PLAIN)
        engine.generate(REQUESTS, PLAIN)
        assert paths(server).count(path) == 1, "nothing had changed"
        with torch.no_grad():
            next(iter(policy.parameters()))[0, 0] += 1.0
        engine.generate(REQUESTS, PLAIN)
        assert paths(server).count(path) == 2
        assert server.version == digest(policy)
        assert {n: p.tolist() for n, p in policy.named_parameters()} == {n: t.tolist() for n, t in seen.items()}
    assert not (tmp_path / "model").exists(), "the weights are not left behind"


def test_deterministic_servers_prove_what_they_hold(policy: PreTrainedModel, tmp_path: Path) -> None:
    with serving(deterministic=True) as server, engine_on([server], policy, tmp_path) as engine:
        assert len(engine.generate(REQUESTS, PLAIN)) == 7
    other = PromiseBroken, "has weights of digest 0123456789abcdef after an update"
    none = UserError, "is it a server of this package"
    for answer, (error, message) in ((list(b"0123456789abcdef"), other), ({"error": "unknown"}, none)):
        with serving(deterministic=True) as server, engine_on([server], policy, tmp_path) as engine:
            server.faults["/get_weights_by_name"] = lambda *_, answer=answer: answer
            with pytest.raises(error, match=message):
                engine.generate(REQUESTS, PLAIN)


FAULTS = {
    "restarted with other weights": ("/generate", lambda s, p, a: with_version(a, "default"), "weights 'default'"),
    "somebody else updates it": ("/model_info", lambda s, p, a: {**a, "weight_version": "x"}, "has weights 'x'"),
    "refuses the folder": ("/update_weights_from_disk", lambda *_: (400, {"message": "no such folder"}), "no such"),
    "is no SGLang": ("/generate", lambda *_: "<html>", "the answer is not JSON"),
    "answers too little": ("/generate", lambda s, p, a: a[:-1], "6 entries to 7 requests"),
    "fails": ("/generate", lambda *_: (500, "Internal\nServer Error"), "status 500: Internal Server Error"),
}


def with_version(answer: Any, version: str) -> Any:
    for item in answer:
        item["meta_info"]["weight_version"] = version
    return answer


@pytest.mark.parametrize("name", FAULTS)
def test_a_server_that_misbehaves_ends_the_rollout(name: str, policy: PreTrainedModel, tmp_path: Path) -> None:
    path, fault, message = FAULTS[name]
    with serving() as server, engine_on([server], policy, tmp_path) as engine:
        server.faults[path] = fault
        with pytest.raises(UserError, match=message) as caught:
            engine.generate(REQUESTS, PLAIN)
        assert str(caught.value).startswith(server.url)
        assert "\n" not in str(caught.value)


def test_a_server_that_goes_and_one_that_hangs(policy: PreTrainedModel, tmp_path: Path) -> None:
    with serving() as server, engine_on([server], policy, tmp_path) as engine:
        server.faults["/generate"] = lambda *_: None
        with pytest.raises(UserError, match="/generate: no SGLang server answers there"):
            engine.generate(REQUESTS, PLAIN)
    with serving() as server, engine_on([server], policy, tmp_path) as engine:
        server.faults["/generate"] = lambda s, p, answer: time.sleep(1.5) or answer
        with pytest.raises(UserError, match=r"no answer within rollout.engine.timeout_s = 1"):
            engine.generate(REQUESTS, PLAIN)


WRONG = {
    "enable_deterministic_inference": (False, "so SGLang ignores every seed"),
    "sampling_backend": ("flashinfer", "has sampling_backend = 'flashinfer'; must be 'pytorch'"),
    "speculative_algorithm": ("EAGLE", "has speculative_algorithm"),
    "attention_backend": ("triton", "has attention_backend = 'triton'; must be 'ppo_repro'"),
    "dtype": ("bfloat16", "has dtype = 'bfloat16'"),
    "context_length": (24, "must be at least numerics.max_context [+] 8 = 32"),
}


@pytest.mark.parametrize("field", WRONG)
def test_a_server_with_other_settings_is_refused(field: str, policy: PreTrainedModel, tmp_path: Path) -> None:
    value, message = WRONG[field]
    with serving(deterministic=True) as server:
        server.info[field] = value
        with pytest.raises(UserError, match=message), engine_on([server], policy, tmp_path):
            pass
    with serving() as plain:
        config = "rollout.engine.numerics=deterministic"
        plain.info |= {"attention_backend": "ppo_repro"}
        with pytest.raises(UserError, match="needs the plugin"), engine_on([plain], policy, tmp_path, config):
            pass


@pytest.mark.parametrize("wanted", ARCHITECTURES)
@pytest.mark.parametrize("has", ARCHITECTURES)
def test_another_precision_is_refused(wanted: str, has: Precision, policy: PreTrainedModel, tmp_path: Path) -> None:
    with serving(deterministic=True) as server, ExitStack() as stack:
        server.architecture = ARCHITECTURES[has]
        if has != wanted:
            message = rf"serves \['{server.architecture}'\]; .* for numerics.precision = {wanted}$"
            stack.enter_context(pytest.raises(UserError, match=message))
        stack.enter_context(engine_on([server], policy, tmp_path, f"numerics.precision={wanted}"))
