"""An emulated GPU refuses what a GPU refuses, so a step over it finds a tensor that is on the wrong device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Event
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from ppo_repro.models import state
from ppo_repro.models.state import TrainState
from ppo_repro.numerics.weights import weights_digest
from tests.gpu.emulator.device import CARD, Devices, Places, catch_backward
from tests.support.models import source_model


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    catch_backward(monkeypatch.setattr)
    with Devices(), Places():
        yield


MADE: dict[str, Callable[[], Tensor]] = {
    "factory": lambda: torch.zeros(3, device="cuda"),
    "context": lambda: _in_context(),
    "to": lambda: torch.zeros(3).to("cuda"),
    "to another": lambda: torch.zeros(3).to(torch.zeros(1, device="cuda")),
    "cuda": lambda: torch.zeros(3).cuda(),
    "view": lambda: torch.zeros(3, device="cuda")[1:],
    "result": lambda: torch.zeros(3, device="cuda") + 1,
    "with a number of the CPU": lambda: torch.zeros(3, device="cuda") * torch.tensor(2.0),
    "like": lambda: torch.empty_like(torch.zeros(3, device="cuda")),
    "copied into": lambda: torch.zeros(3, device="cuda").copy_(torch.ones(3)),
    "module": lambda: torch.nn.Linear(2, 2).to("cuda").weight,
}
REFUSED: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum of both": lambda card, cpu: card + cpu,
    "product of both": lambda card, cpu: card @ cpu,
    "gather by the CPU": lambda card, cpu: card.gather(0, torch.tensor([0])),
    "index of the GPU into the CPU": lambda card, cpu: cpu[torch.tensor([0], device="cuda")],
    "NumPy": lambda card, cpu: card.numpy(),
    "array": lambda card, cpu: np.asarray(card),
    "gradient of the other": lambda card, cpu: setattr(card, "grad", cpu),
}


def _in_context() -> Tensor:
    with torch.device(CARD):
        return torch.ones(3)


@pytest.mark.parametrize("case", MADE)
def test_what_is_made_on_the_card_lies_there(case: str) -> None:
    made = MADE[case]()
    assert made.device == CARD
    assert made.cpu().device.type == "cpu"


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_card_refuses_is_refused(case: str) -> None:
    with pytest.raises((RuntimeError, TypeError), match=r"same device|cuda:0|another device"):
        REFUSED[case](torch.zeros(3, device="cuda"), torch.zeros(3))


def test_gradients_lie_where_their_tensors_lie() -> None:
    leaf = torch.ones(3, requires_grad=True)
    moved = leaf.to("cuda") * 2
    moved.retain_grad()
    moved.sum().backward()
    assert moved.grad is not None
    assert leaf.grad is not None
    assert moved.grad.device == CARD
    assert leaf.grad.device.type == "cpu"


def test_a_digest_is_of_the_weights_after_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of a GPU change in the next step while threads still digest their copies."""
    changed, policy, none = Event(), torch.nn.Module.to(source_model("qwen3"), CARD), cast(Any, None)

    def late(weights: Any) -> str:
        assert changed.wait(60)
        return weights_digest(weights)

    monkeypatch.setattr(state, "weights_digest", late)
    after_step = weights_digest(policy.named_parameters())
    digests = TrainState(policy, none, none, none, none, none).digests()
    with torch.no_grad():
        next(policy.parameters()).add_(1.0)
    changed.set()
    assert digests.result().policy_digest == after_step
    assert digests.result().policy_digest != weights_digest(policy.named_parameters())
