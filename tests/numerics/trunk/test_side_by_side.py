"""Steps of policy and value model at the same time: the weights of steps in turn, in every family of models."""

from __future__ import annotations

import threading

import pytest
import torch

from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import make_policy, make_value_model, policy_logits, value_predictions
from ppo_repro.numerics import backend
from ppo_repro.numerics.logprobs import token_statistics
from ppo_repro.numerics.optim.adamw import AdamWSettings
from ppo_repro.numerics.optim.optimizer import make_optimizer, weights_digest
from tests.support.models import CONTEXT, FAMILIES, ragged, source_model

SETTINGS = AdamWSettings(1e-2, 0.9, 0.99, 1e-8, 0.01, 1.0)


def digests(architecture: str, kind: str, threads: int) -> tuple[list[str], int]:
    """Of both models after each of three steps, and how many threads took them."""
    backend.use(kind, threads)
    source, batch = source_model(architecture), lay_out(*ragged(5, 0), "right")
    policy, value_model = make_policy(source, "exact", CONTEXT), make_value_model(source, "exact", CONTEXT, 0)
    optimizers = [make_optimizer(model, SETTINGS, "exact") for model in (policy, value_model)]
    seen: set[int] = set()

    def of_policy() -> None:
        seen.add(threading.get_ident())
        token_statistics(policy_logits(policy, batch), batch.targets, 1.0, None, "exact")[0].sum().backward()

    def of_value() -> None:
        seen.add(threading.get_ident())
        value_predictions(value_model, batch).sum().backward()

    found = []
    for _ in range(3):
        backend.side_by_side(
            lambda: optimizers[0].step(of_policy, batch.real_tokens),
            lambda: optimizers[1].step(of_value, batch.real_tokens),
        )
        found += [weights_digest(model.named_parameters()) for model in (policy, value_model)]
    assert len(set(found)) == len(found), "every step changed its model"
    return found, len(seen)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_steps_side_by_side_are_steps_in_turn(architecture: str) -> None:
    expected, threads = digests(architecture, "float64", 1)
    assert threads == 1
    for kind, count in (("float64", 2), *([("amx", 3)] if backend.has_amx() else [])):
        found, threads = digests(architecture, kind, count)
        assert found == expected and threads > 1, kind


def test_the_specification_takes_them_in_turn() -> None:
    """torch's own threads are busy with one model; two that use them would each wait for the other's."""
    order: list[int] = []
    backend.use("eager", 2)
    backend.side_by_side(lambda: order.append(threading.get_ident()), lambda: order.append(threading.get_ident()))
    assert order == [threading.get_ident()] * 2
    assert torch.get_num_threads() == 2
