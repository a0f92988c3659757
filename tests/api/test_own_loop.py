"""What a loop of one's own does with gradients and weights has the effect that it has with stock torch.

Random sequences of such actions change a deterministic model and its stock twin in float64. After each action the
gradients, the weights and the tensors that the loop has kept are the twin's. Gradients that only backward passes made
since they were zeroed are the bits of one pass.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel

import ppo_repro
from tests.support.models import source_model, unequal
from tests.support.trained import collate

ROWS = [[5, 6, 7, 8, 9], [11, 12, 13], [14, 15, 16, 17, 18, 19], [3, 4], [21, 5, 22, 6], [7, 7, 7]]
ITEMS = 20  # the loss is a sum over tokens divided by this
CLOSE = 1e-4  # of the largest number; float32 beside float64


class Loop:
    """One model in a loop of the user's, and the tensors that the loop keeps."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.kept: list[tuple[str, Tensor]] = []  # gradients by parameter
        self.weights: dict[str, Tensor] = model.state_dict()  # shares memory with the weights

    def parameter(self, index: int) -> tuple[str, nn.Parameter]:
        named = list(self.model.named_parameters())
        return named[index % len(named)]

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def backward(self, first: int, count: int) -> None:
        for row in ROWS[first : first + count]:
            ids = torch.tensor([row])
            loss = self.model(ids, labels=ids, num_items_in_batch=ITEMS).loss
            if loss.requires_grad:
                loss.backward()

    def replace(self, model: PreTrainedModel) -> None:
        """Go on with a copy of the model, which has no gradients."""
        self.model, self.kept, self.weights = model, [], model.state_dict()


def of_grad(change: Callable[[nn.Parameter, Tensor], None]) -> Callable[[Loop, int], None]:
    """An action on the gradient of one parameter, or, with index 0, of all."""

    def act(loop: Loop, index: int) -> None:
        for p in loop.model.parameters() if index == 0 else [loop.parameter(index)[1]]:
            if p.grad is not None:
                change(p, p.grad)

    return act


def scale_by_numpy(_: nn.Parameter, grad: Tensor) -> None:
    values = grad.numpy()
    values *= 0.5


def give_memory(p: nn.Parameter, grad: Tensor) -> None:
    """Let `grad` lie in a larger buffer, as loops do that send all gradients at once."""
    buffer = torch.zeros(2 * grad.numel(), dtype=grad.dtype)
    part = buffer[grad.numel() :].view(grad.shape)
    part.copy_(grad)
    p.grad = part


def set_grad(p: nn.Parameter, grad: Tensor | None) -> None:
    p.grad = grad


def set_grad_data(_: nn.Parameter, grad: Tensor) -> None:
    grad.data = grad.detach() * 3.0


def keep(loop: Loop, index: int) -> None:
    loop.kept += list(loop.gradients().items())[index % 3 :: 3]


def restore(loop: Loop, _: int) -> None:
    for name, grad in loop.kept:
        loop.model.get_parameter(name).grad = grad


def step(loop: Loop, index: int) -> None:
    """Three ways to write weights."""
    for name, p in loop.model.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        if index % 3 == 0:
            with torch.no_grad():
                p.sub_(0.05 * grad)
        elif index % 3 == 1:
            p.data.sub_(0.05 * grad)
        else:
            loop.weights[name].sub_(0.05 * grad)


def load_weights(loop: Loop, index: int) -> None:
    changed = {name: 0.9 * value for name, value in loop.model.state_dict().items()}
    loop.model.load_state_dict(changed, assign=bool(index % 2))
    loop.weights = loop.model.state_dict()


def move_weights(loop: Loop, _: int) -> None:
    """Put all weights into one buffer, in another order, as optimizers do that step on one vector."""
    parameters = list(loop.model.parameters())[::-1]
    buffer = torch.cat([p.detach().reshape(-1) for p in parameters])
    for p, part in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
        p.data = part.view(p.shape)
    loop.weights = loop.model.state_dict()


def freeze(loop: Loop, index: int) -> None:
    parameter = loop.parameter(index)[1]
    parameter.requires_grad_(not parameter.requires_grad)


def pickled(loop: Loop, _: int) -> None:
    file = io.BytesIO()
    torch.save(loop.model, file)
    file.seek(0)
    loop.replace(torch.load(file, weights_only=False))


ACTIONS: dict[str, Callable[[Loop, int], None]] = {
    "backward of a row": lambda loop, index: loop.backward(index % len(ROWS), 1),
    "backward of rows": lambda loop, index: loop.backward(index % 3, 3),
    "zero_grad()": lambda loop, _: loop.model.zero_grad(),
    "zero_grad(set_to_none=False)": lambda loop, _: loop.model.zero_grad(set_to_none=False),
    "grad = None": of_grad(lambda p, _: set_grad(p, None)),
    "grad.mul_": of_grad(lambda _, grad: grad.mul_(0.5)),
    "grad.data.zero_": of_grad(lambda _, grad: grad.data.zero_()),
    "grad.data.mul_": of_grad(lambda _, grad: grad.data.mul_(-2.0)),
    "grad by NumPy": of_grad(scale_by_numpy),
    "grad = other": of_grad(lambda p, grad: set_grad(p, grad * 0.5)),
    "grad = strided": of_grad(lambda p, grad: set_grad(p, grad.t().contiguous().t() if grad.dim() == 2 else grad)),
    "grad.data = other": of_grad(set_grad_data),
    "grad in a buffer": of_grad(give_memory),
    "clip": lambda loop, _: nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1) and None,
    "keep": keep,
    "restore": restore,
    "freeze or not": freeze,
    "step": step,
    "load_state_dict": load_weights,
    "weights in a buffer": move_weights,
    "deepcopy": lambda loop, _: loop.replace(copy.deepcopy(loop.model)),
    "save and load": pickled,
}
ZEROING, HARMLESS = {"zero_grad()", "deepcopy", "save and load"}, {"backward of a row", "backward of rows", "keep"}


def require_close(ours: Tensor, twin: Tensor, what: str) -> None:
    apart = float((ours.double() - twin).abs().max()) if twin.numel() else 0.0
    assert apart <= CLOSE * max(float(twin.abs().max()), 1e-2), what


def require_same_as_twin(ours: Loop, twin: Loop, what: str) -> None:
    found, expected = ours.gradients(), twin.gradients()
    assert found.keys() == expected.keys(), what
    for name, grad in expected.items():
        require_close(found[name], grad, f"{what}: gradient of {name}")
    for (name, kept), (_, of_twin) in zip(ours.kept, twin.kept, strict=True):
        require_close(kept, of_twin, f"{what}: a kept gradient of {name}")
    weights = ours.model.state_dict()
    for name, value in twin.model.state_dict().items():
        require_close(weights[name], value, f"{what}: {name}")
        require_close(ours.weights[name], twin.weights[name], f"{what}: {name} as kept")


def require_one_pass(loop: Loop, rows: list[list[int]]) -> None:
    """The gradients are the bits of one backward pass over the rows."""
    once = copy.deepcopy(loop.model)
    once(**collate(rows, "right"), num_items_in_batch=ITEMS).loss.backward()
    expected = Loop(once).gradients()
    for name, grad in loop.gradients().items():
        assert unequal(grad, expected[name]) == 0, name


# tied; untied; tied, and transposed linear layers; experts
SOURCES = {family: source_model(family) for family in ("qwen3", "llama", "gpt2", "mixtral")}
SEQUENCES = st.lists(st.tuples(st.sampled_from(sorted(ACTIONS)), st.integers(0, 11)), min_size=3, max_size=12)


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")  # stock torch's, of speed
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(SOURCES)), SEQUENCES)
@example("qwen3", [("deepcopy", 0), ("backward of rows", 0), ("step", 2)])  # weights kept before the first pass
@example("mixtral", [("deepcopy", 0), ("backward of rows", 0), ("step", 2)])
@example("llama", [("weights in a buffer", 0), ("step", 2)])
@example("mixtral", [("weights in a buffer", 0), ("step", 2)])
@example("llama", [("keep", 0), ("keep", 1), ("keep", 2), ("grad = None", 0)])  # kept gradients stay as they are
@example("gpt2", [("grad = strided", 0)])
def test_whatever_a_loop_does_has_the_effect_that_it_has_with_stock_torch(
    family: str, actions: list[tuple[str, int]]
) -> None:
    ours = Loop(ppo_repro.deterministic(SOURCES[family], threads=1))
    twin = Loop(copy.deepcopy(SOURCES[family]).double())
    since_zero: list[list[int]] | None = []
    for number, (name, index) in enumerate([("backward of rows", 0), *actions, ("backward of rows", 1)]):
        for loop in (ours, twin):
            ACTIONS[name](loop, index)
        require_same_as_twin(ours, twin, f"action {number}, {name} {index}")
        if name in ZEROING:
            since_zero = []
        elif name not in HARMLESS:
            since_zero = None
        elif since_zero is not None and name != "keep":
            first, count = (index % len(ROWS), 1) if name == "backward of a row" else (index % 3, 3)
            since_zero += ROWS[first : first + count]
    if since_zero:
        require_one_pass(ours, since_zero)
