"""A checkpoint keeps every bit of what decides the rest of a run, and is refused where any bit is another."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ppo_repro.buffers import Coefficients, ReturnStatistics
from ppo_repro.errors import UserError
from ppo_repro.files import only_writer, whole_folder
from ppo_repro.numerics.linear import linear
from ppo_repro.numerics.optimizer import AdamWSettings, Optimizer, OptimizerState
from ppo_repro.numerics.rows import alone, slots_of
from ppo_repro.runs import checkpoint_format
from ppo_repro.runs.checkpoint_format import Checkpoint, Origin
from ppo_repro.runs.checkpoint_index import INDEX_NAME
from tests.support.models import seeded, unequal
from tests.support.synthetic_run import FLOAT32_BITS

EMPTY = torch.empty(0)
SETTINGS = AdamWSettings(1e-2, 0.9, 0.95, 1e-8, 0.1, 1.0)
FILES = ["policy.safetensors", "policy_optimizer.safetensors", "value_model.safetensors", "value_optimizer.safetensors"]

names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=6)
raw = st.lists(st.one_of(st.sampled_from(FLOAT32_BITS), st.integers(0, 2**32 - 1)), max_size=5)


def as_float32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(torch.int32).view(torch.float32)


tensors = st.dictionaries(names, raw.map(as_float32), max_size=3)
counts = st.dictionaries(names, st.integers(-(2**40), 2**40), max_size=3)
numbers = st.floats(allow_nan=False)
coefficients = st.builds(
    Coefficients,
    numbers,
    numbers,
    numbers,
    st.builds(ReturnStatistics, st.integers(0, 2**40), numbers, numbers),
)
states = st.builds(OptimizerState, tensors, tensors, counts, tensors)
checkpoints = st.builds(
    Checkpoint,
    iteration=st.integers(1, 10**9),
    chain=names,
    policy=tensors,
    value_model=tensors,
    policy_optimizer=states,
    value_optimizer=states,
    coefficients=coefficients,
    origin=st.builds(Origin, names, st.dictionaries(names, names, max_size=3)),
)


def bits_of(value: Any) -> Any:
    """Nested values that are equal exactly when their bits are."""
    if isinstance(value, Tensor):
        return str(value.dtype), list(value.shape), value.contiguous().view(torch.uint8).tolist()
    if dataclasses.is_dataclass(value):
        return {f.name: bits_of(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: bits_of(child) for key, child in value.items()}
    return value.hex() if isinstance(value, float) else value


@settings(max_examples=30)
@given(checkpoints)
def test_a_round_trip_keeps_every_bit(tmp_path_factory: pytest.TempPathFactory, saved: Checkpoint) -> None:
    folder = tmp_path_factory.mktemp("c") / "iteration-000001"
    checkpoint_format.save(saved, folder)
    assert bits_of(checkpoint_format.load(folder)) == bits_of(saved)
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name]


def small_checkpoint() -> Checkpoint:
    first, second = {"w": torch.tensor([0.5, -0.0])}, {"w": torch.tensor([[1e-40], [2.0]])}
    state = OptimizerState(first, second, {"w": 3}, {"f": torch.ones(1)})
    moving = Coefficients(0.1, -0.0, 5e-324, ReturnStatistics(7, 1 / 3, 2.0**70))
    weights, value_weights = {"w": torch.ones(2)}, {"v": torch.zeros(3)}
    return Checkpoint(3, "ab", weights, value_weights, state, state, moving, Origin("cd", {"m": "ef"}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoint_format.save(small_checkpoint(), tmp_path / "iteration-000003")
    return tmp_path / "iteration-000003"


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        checkpoint_format.load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", [*FILES, INDEX_NAME])
def test_any_flipped_bit_is_refused_by_name(folder: Path, name: str) -> None:
    path = folder / name
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        assert str(path) in refusal(folder)
    path.write_bytes(whole)
    assert bits_of(checkpoint_format.load(folder)) == bits_of(small_checkpoint())


@pytest.mark.parametrize("name", [*FILES, INDEX_NAME])
def test_a_truncated_or_missing_file_is_refused_by_name(folder: Path, name: str) -> None:
    path = folder / name
    whole = path.read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert str(path) in refusal(folder)
    path.write_bytes(whole + b" ")
    assert str(path) in refusal(folder)
    path.unlink()
    assert f"{path}: cannot be read (No such file or directory)" in refusal(folder)


def reseal(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the index and make its own checksum right again."""
    tree = json.loads((folder / INDEX_NAME).read_text())
    del tree["sha256"]
    change(tree)
    text = json.dumps(tree, indent=1, sort_keys=True) + "\n"
    tree["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / INDEX_NAME).write_text(json.dumps(tree, indent=1, sort_keys=True) + "\n")


EDITS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (
        lambda t: t.update(format=3, ppo_repro="0.2.0"),
        "format = 3 of ppo_repro 0.2.0, this one has 4; use the version that wrote it",
    ),
    (lambda t: t.update(format=5, ppo_repro="9.0"), "format = 5 of ppo_repro 9.0, this one has 4; use the version"),
    (lambda t: t.update(ppo_repro="0.0.1"), "ppo_repro = '0.0.1', this ppo_repro has"),
    (lambda t: t.update(law="known answer 0"), "law = 'known answer 0', this ppo_repro has"),
    (lambda t: t.pop("format"), "format = None of ppo_repro"),
    (lambda t: t.update(iteration=0), "iteration = 0"),
    (lambda t: t.update(more=1), "more: unknown field"),
    (lambda t: t.pop("chain"), "chain: missing"),
    (lambda t: t["files"].pop("policy.safetensors"), "lists policy_optimizer"),
    (lambda t: t["files"].update({"../x": "0"}), "lists ../x"),
    (lambda t: t["policy_optimizer"].update(steps={"w": "one"}), "policy_optimizer.steps.w = 'one'"),
    (lambda t: t.pop("coefficients"), "coefficients: missing"),
    (lambda t: t["coefficients"].pop("kl_coef"), "coefficients.kl_coef: missing"),
    (lambda t: t["coefficients"].update(more="0x0p+0"), "coefficients.more: unknown field"),
    (lambda t: t["coefficients"].update(return_count="7"), "coefficients.return_count = '7'"),
    (lambda t: t["coefficients"].update(clip_range="0x"), "invalid hexadecimal floating-point string"),
]


@pytest.mark.parametrize(("change", "message"), EDITS, ids=[message for _, message in EDITS])
def test_another_index_is_refused(folder: Path, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    reseal(folder, lambda tree: None)
    checkpoint_format.load(folder)
    reseal(folder, change)
    assert message in refusal(folder)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").write_text("")
    for path in (tmp_path / "a", tmp_path / "b", tmp_path / "c"):
        assert "cannot be read" in refusal(path)


def test_a_disk_that_is_full_leaves_nothing_half_written(folder: Path) -> None:
    large = dataclasses.replace(small_checkpoint(), value_model={"v": torch.zeros(100_000)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        with pytest.raises(UserError, match=r"iteration-000004: cannot be written \(File too large\); make room there"):
            checkpoint_format.save(large, folder.with_name("iteration-000004"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert bits_of(checkpoint_format.load(folder)) == bits_of(small_checkpoint())


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    for leftover in ("a.tmp", "a.removed"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "half").write_text("old")
    for content in ("one", "two"):
        with whole_folder(tmp_path / "a") as temporary:
            (temporary / "file").write_text(content)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert [path.read_text() for path in (tmp_path / "a").iterdir()] == ["two"]
    with pytest.raises(ZeroDivisionError), whole_folder(tmp_path / "a") as temporary:
        (temporary / "file").write_text(str(1 / 0))
    assert (tmp_path / "a" / "file").read_text() == "two"


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with only_writer(tmp_path):
        for _ in range(2):  # the first attempt must not have given the lock away
            with pytest.raises(UserError, match="another process is writing this run"), only_writer(tmp_path):
                pass
    with only_writer(tmp_path):
        pass
    with pytest.raises(UserError, match="lock: cannot be written"), only_writer(tmp_path / "nowhere"):
        pass


def trained(mode: str) -> tuple[nn.Module, Optimizer]:
    layer = nn.Linear(6, 4)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=seeded(p.dim())))
    return layer, Optimizer(layer, SETTINGS, mode)


def train(layer: nn.Module, optimizer: Optimizer, mode: str, steps: range) -> None:
    rows = alone(20, slots_of(range(20), 20, 8))
    for step in steps:
        x = torch.randn(20, 6, generator=seeded(step))

        def backward(x: Tensor = x, step: int = step) -> None:
            y = linear(x, layer, rows) if mode == "deterministic" else layer(x)
            torch.autograd.backward(y, torch.tanh(y.detach() + step) / 20)

        optimizer.step(backward)


def difference(a: nn.Module, b: nn.Module) -> int:
    return sum(unequal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def nudged(state: OptimizerState, field: str) -> OptimizerState:
    """The state with other steps, or with one moment changed."""
    value = getattr(state, field)
    if field == "steps":
        return dataclasses.replace(state, steps={name: steps + 1 for name, steps in value.items()})
    name = sorted(value)[0]
    return dataclasses.replace(state, **{field: {**value, name: value[name] * 1.01}})


@pytest.mark.parametrize("mode", ["deterministic", "native"])
def test_an_optimizer_goes_on_from_its_state_and_needs_all_of_it(mode: str, tmp_path: Path) -> None:
    straight, optimizer = trained(mode)
    train(straight, optimizer, mode, range(3))
    weights = {name: p.detach().clone() for name, p in straight.named_parameters()}
    saved = dataclasses.replace(small_checkpoint(), policy=weights, policy_optimizer=optimizer.state())
    checkpoint_format.save(saved, tmp_path / "c")
    train(straight, optimizer, mode, range(3, 6))

    def after(change: Callable[[OptimizerState], OptimizerState]) -> int:
        loaded = checkpoint_format.load(tmp_path / "c")
        module, other = trained(mode)
        with torch.no_grad():
            for name, p in module.named_parameters():
                p.copy_(loaded.policy[name])
        other.load(change(loaded.policy_optimizer))
        train(module, other, mode, range(3, 6))
        return difference(straight, module)

    assert after(lambda state: state) == 0
    for field in ("first", "second", "steps"):
        assert after(lambda state, field=field: nudged(state, field)) > 0, field  # type: ignore[misc]


def test_a_state_that_does_not_fit_is_refused() -> None:
    found = {mode: trained(mode) for mode in ("deterministic", "native")}
    for mode, (layer, optimizer) in found.items():
        train(layer, optimizer, mode, range(2))
    deterministic, good = found["deterministic"][1], found["deterministic"][1].state()
    for optimizer, numerics in ((deterministic, "deterministic"), (found["native"][1], "native")):
        for state in (dataclasses.replace(good, steps={"other": 1}), dataclasses.replace(good, factors={"f": EMPTY})):
            with pytest.raises(ValueError, match=f"not of this module in {numerics} numerics"):
                optimizer.load(state)
    with pytest.raises(ValueError, match="not of this module in deterministic numerics"):
        deterministic.load(dataclasses.replace(good, steps={"weight": 2, "bias": 1}))
    with pytest.raises(ValueError, match="on one side only: bias"):
        deterministic.load(dataclasses.replace(good, first={"weight": good.first["weight"]}))
    with pytest.raises(ValueError, match=r"tensor bias is torch.float32 \[1\], expected torch.float32 \[4\]"):
        deterministic.load(dataclasses.replace(good, second={**good.second, "bias": torch.zeros(1)}))
    with pytest.raises(ValueError, match=r"tensor bias is torch.float64 \[4\]"):
        deterministic.load(
            dataclasses.replace(good, second={**good.second, "bias": torch.zeros(4, dtype=torch.float64)})
        )


def test_saving_changes_nothing(folder: Path) -> None:
    """The live tensors are saved; a copy of the folder is as good as the folder."""
    layer, optimizer = trained("deterministic")
    train(layer, optimizer, "deterministic", range(2))
    before = bits_of(optimizer.state())
    checkpoint_format.save(dataclasses.replace(small_checkpoint(), policy_optimizer=optimizer.state()), folder)
    assert bits_of(optimizer.state()) == before
    shutil.copytree(folder, folder.with_name("copy"))
    assert bits_of(checkpoint_format.load(folder.with_name("copy")).policy_optimizer) == before
