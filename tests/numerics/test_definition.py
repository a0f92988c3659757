"""The definition against exact fractions, and its networks against autograd of transformers' own classes in float64."""

from __future__ import annotations

import ast
import copy
import re
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from ppo_repro.numerics import description
from ppo_repro.numerics.definition import rows
from ppo_repro.numerics.definition.elementary import fma
from ppo_repro.numerics.definition.gradients import join_slots, slot_of
from ppo_repro.numerics.definition.model import Model, parameters
from ppo_repro.numerics.definition.network import forward, gradients
from ppo_repro.numerics.definition.product import BLOCK, chain, product
from ppo_repro.numerics.definition.row_sums import row_sum
from ppo_repro.numerics.interface import names
from ppo_repro.numerics.rotary import tables
from tests.support.definition import model_from, rotary_of
from tests.support.models import (
    CONFIGS,
    LLAMA3_ROPE,
    MIXTURES,
    VARIANTS,
    VOCAB,
    YARN_ROPE,
    gpt_neox_config,
    llama_config,
    phi3_config,
    small_model,
)
from tests.support.paths import ROOT

F = np.float32
FAMILIES = {**CONFIGS, **MIXTURES, **VARIANTS}
LENGTHS = (3, 41, 1)  # of sequences; the windows of the models are 5 and 6 keys


def rounded(x: Fraction, sign_of_zero: float) -> np.float32:
    """The float32 nearest to x, ties to even; 0 with the sign given."""
    if x == 0:
        return F(np.copysign(0, sign_of_zero))
    exponent = max(abs(x).numerator.bit_length() - abs(x).denominator.bit_length() - 1, -126)
    if abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    step = Fraction(2) ** (max(exponent, -126) - 23)
    magnitude = round(abs(x) / step) * step  # Python rounds ties of fractions to even
    if magnitude >= Fraction(2) ** 128:
        return F(np.copysign(np.inf, float(x > 0) - 0.5))
    return F(np.copysign(float(magnitude), 1.0 if x > 0 else -1.0))


def hard_cases() -> np.ndarray:
    """Triples (a, b, c), float32 [3, n]: any bits, cancellation, ties but for 2^-70, denormal results, zeros."""
    rng, n = np.random.default_rng(0), 2000
    any_bits = rng.integers(0, 2**32, (3, 2 * n), np.uint32).view(F)
    a, b = (rng.standard_normal((2, n)) * 2.0 ** rng.integers(-60, 60, (2, n))).astype(F)
    cancelling = np.stack([a, b, -(a * b)])
    signs, steps = rng.choice([-1.0, 1.0], (2, n)), rng.integers(0, 40, (2, n)) * 2.0**-23
    ties = np.stack([1 + steps[0], signs[0] * 2.0**-24 * (1 - steps[0]), signs[1] * (1 + steps[1])])
    denormal = np.stack([a * F(2.0**-60), F(2.0**-50) / b, F(2.0**-149) * rng.integers(-9, 9, n)])
    zeros = np.stack(np.meshgrid(*[[0.0, -0.0, 1.0, -1.0, 1e-45, -1e-30, 3e38]] * 3)).reshape(3, -1)
    with np.errstate(all="ignore"):
        cases = np.concatenate([any_bits, cancelling, ties, denormal, zeros], 1).astype(F)
    return cases[:, np.isfinite(cases).all(0)]


NUMERICS = ROOT / "ppo_repro" / "numerics"
DEFINED = {
    f"{path.stem}.{node.name}": ast.get_docstring(node) or ""
    for path in (NUMERICS / "definition").glob("*.py")
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef)
}

C_SOURCES = "".join(path.read_text() for path in sorted((NUMERICS / "c").rglob("*.[ch]")))


def c_functions() -> set[str]:
    """The names of all functions in the C sources."""
    return set(re.findall(r"^(?:\w[\w *]*[ *]|ROW\()(\w+)[(,]", C_SOURCES, re.MULTILINE))


def test_every_rule_of_the_readme_names_functions_of_the_definition() -> None:
    rules = re.split(r"^\d\. ", (NUMERICS / "README.md").read_text().partition("## The rules")[2], flags=re.MULTILINE)[
        1:
    ]
    named = [re.findall(r"\[`(\w+)`\]\(definition/(\w+)\.py\)", rule) for rule in rules]
    assert len(named) == 9
    assert all(named)
    assert {f"{file}.{function}" for rule in named for function, file in rule} <= DEFINED.keys()


def test_the_definition_imports_numpy_and_itself_alone() -> None:
    found = set[str]()
    for path in (NUMERICS / "definition").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                found |= {str(node.module)} if isinstance(node, ast.ImportFrom) else {a.name for a in node.names}
    own = {name for name in found if name.startswith("ppo_repro.numerics.definition.")}
    foreign = {name.partition(".")[0] for name in found - own} - {"__future__", *sys.stdlib_module_names}
    assert own
    assert foreign == {"numpy"}


def test_definition_and_kernels_name_each_other_truly() -> None:
    """Docstrings name C functions after "Kernel:"; C comments name functions of the definition after "definition:"."""
    named = {
        name
        for doc in DEFINED.values()
        for part in re.findall(r"Kernels?:([^.]*)\.", doc)
        for name in re.findall(r"`(\w+)`", part)
    }
    assert len(named) > 30
    assert named - c_functions() == set()
    comments = re.sub(r"\n\s*//", "", C_SOURCES)  # a comment of two lines is one text
    assert set(re.findall(r"definition: (\w+\.\w+)", comments)) <= DEFINED.keys()


def test_fma_is_the_exact_sum_rounded_once() -> None:
    a, b, c = hard_cases()
    found = fma(a, b, c)
    with np.errstate(all="ignore"):
        twice = (a.astype(np.float64) * b + c).astype(F)
    for x, y, z, here in zip(a, b, c, found, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        with np.errstate(all="ignore"):
            zero = np.float64(x) * np.float64(y) + np.float64(z)  # IEEE's sign of an exact 0; of no other result
        assert here.tobytes() == rounded(exact, zero if exact == 0 else 1.0).tobytes(), (x, y, z)
    assert (twice != found).any(), "the cases have none that is wrong when rounded twice"


@pytest.mark.parametrize("zeros", [(0, 0), (1, 0), (0, 1), (BLOCK, 0), (0, BLOCK)])
def test_no_product_is_minus_zero(zeros: tuple[int, int]) -> None:
    """A chain that underflows to -0 is added to +0, so terms of zero before or after it change no bit."""
    tiny = np.full((1, 1), 1e-30, F)
    assert np.signbit(chain(tiny, -tiny)).all()
    padded = np.pad(tiny, ((0, 0), zeros))
    assert product(padded, -padded).tobytes() == F(0).tobytes()


def test_orders_of_sums() -> None:
    """Numbers whose sum shows the order: 128 terms of a chain, 16 lanes of a row, slots as a tree."""
    x = np.ones((1, 129), F)
    w = np.full((1, 129), 2.0**-24, F)
    w[0, 0], w[0, 128] = 1, 1
    assert product(x, w)[0, 0] == 2, "each term of the first chain is lost in 1"
    lanes = np.zeros(32)
    lanes[[0, 16, 1]] = 1e16, -1e16, 1
    assert row_sum(lanes) == 1
    lanes[[0, 1, 16]] = 1e16, 1, 1
    assert row_sum(lanes) == 1e16, "1 is lost in 1e16 twice"
    small = F(2.0**-24)
    assert join_slots([F(1), F(0), small, small]) == F(1) + 2 * small != (F(1) + small) + small
    assert [slot_of(i, 3, 8) for i in range(3)] == [2, 5, 7]
    assert [slot_of(i, 16, 8) for i in range(16)] == [i // 2 for i in range(16)]


ROPES: dict[str, Any] = {
    "default": llama_config(rope_parameters=None),
    "theta that float32 rounds": llama_config(rope_parameters={"rope_type": "default", "rope_theta": 10000.0001}),
    "linear": llama_config(rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}),
    "llama3": llama_config(rope_parameters=LLAMA3_ROPE),
    "half of a head": gpt_neox_config(),
    "yarn": llama_config(rope_parameters=YARN_ROPE),
    "longrope": phi3_config(),
}


@pytest.mark.parametrize("rope", ROPES)
def test_rotary_tables_are_the_definition(rope: str) -> None:
    config = ROPES[rope]
    found, expected = tables(config, config.rope_parameters, 999), rotary_of(config, config.rope_parameters, 999)
    assert [x.numpy().tobytes() for x in found] == [expected.cosine.tobytes(), expected.sine.tobytes()]


def test_theta_is_rounded_to_float32() -> None:
    """10,000.0001 gives the tables of 10,000. Control: the next float32 gives other tables."""
    plain, same, other = (
        tables(llama_config(), {"rope_type": "default", "rope_theta": theta}, 999)[1]
        for theta in (1e4, 10000.0001, float(np.nextafter(F(1e4), F(2e4))))
    )
    assert torch.equal(plain, same)
    assert not torch.equal(plain, other)


KINDS = names("ActivationKind", "ACT_")


def activation_errors(kind: str, name: str) -> tuple[float, float]:
    """The largest error of a kind's value and of its derivative, against transformers' function `name` in float64."""
    x = np.concatenate([np.linspace(-12, 12, 4801), np.geomspace(1e-30, 100, 200)]).astype(F)
    wide = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    expected = ACT2FN[name](wide)
    expected.sum().backward()
    assert wide.grad is not None
    value, slope = rows.ACTIVATIONS[kind](x)
    errors = np.abs(value - expected.detach().numpy()) / np.maximum(np.abs(x), 1), np.abs(slope - wide.grad.numpy())
    return float(errors[0].max()), float(errors[1].max())


def test_activations_and_their_derivatives_are_those_of_transformers() -> None:
    """Control: the two forms of GELU, by erf and by tanh, differ by more than the bound."""
    assert {KINDS[number] for number in description.ACTIVATIONS.values()} == {*KINDS} == {*rows.ACTIVATIONS}
    for name, number in description.ACTIVATIONS.items():
        assert max(activation_errors(KINDS[number], name)) < 1e-6, name
    assert min(activation_errors("gelu", "gelu_new")) > 1e-4


def trunk_of(family: str) -> PreTrainedModel:
    return small_model(FAMILIES[family](), 0).base_model


def with_tables(trunk: Any, model: Model) -> Any:
    """The model in float64, with the rotary tables of the definition."""
    wide = copy.deepcopy(trunk).double()
    kinds = getattr(trunk.config, "layer_types", None) or [None] * len(model.layers)
    rotary = {kind: layer.rotary for kind, layer in zip(kinds, model.layers, strict=True) if layer.rotary}

    def forward(x: Any, position_ids: Any, layer_type: str | None = None) -> Any:
        of = rotary[layer_type] if layer_type else next(iter(rotary.values()))
        return [torch.tensor(np.concatenate([t, t], -1)).double()[position_ids] for t in (of.cosine, of.sine)]

    if rotary:
        wide.rotary_emb.forward = forward
    return wide


def gradients_in_float64(trunk: Any, model: Model, ids: list[list[int]], d_hidden: list[np.ndarray]) -> dict[str, Any]:
    """Hidden states of each sequence alone, and gradients by the definition's names."""
    wide = with_tables(trunk, model)
    hidden = [wide(input_ids=torch.tensor([sequence]), use_cache=False).last_hidden_state[0] for sequence in ids]
    sum((h * torch.tensor(d)).sum() for h, d in zip(hidden, d_hidden, strict=True)).backward()
    for parameter in wide.parameters():
        parameter.data = parameter.grad
    return {"hidden": [h.detach().numpy() for h in hidden], **parameters(model_from(wide, 1))}


def error(found: np.ndarray, reference: np.ndarray) -> float:
    """Of the reference's largest number; an expert that no token chose has only zeros."""
    return float(np.abs(found - reference).max() / max(np.abs(reference).max(), 1e-30))


@pytest.mark.parametrize("family", FAMILIES)
def test_networks_are_those_of_transformers(family: str) -> None:
    trunk, rng = trunk_of(family), np.random.default_rng(1)
    model = model_from(trunk, max(LENGTHS))
    ids = [rng.integers(0, VOCAB, length).tolist() for length in LENGTHS]
    d_hidden = [rng.standard_normal((length, model.embedding.shape[1])).astype(F) for length in LENGTHS]
    reference = gradients_in_float64(trunk, model, ids, d_hidden)
    sequences = [forward(model, sequence) for sequence in ids]
    for of, hidden in zip(sequences, reference.pop("hidden"), strict=True):
        assert error(of.hidden, hidden) < 1e-5
    found = gradients(model, sequences, d_hidden)
    assert found.keys() == reference.keys()
    for name, gradient in found.items():
        assert gradient.dtype == F
        assert error(gradient, reference[name]) < 2e-5, name
