"""Backends are compared with the specification before `auto` takes them."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ppo_repro.errors import UserError
from ppo_repro.numerics import backend
from ppo_repro.numerics.kernels import decoder_trunk, gumbel, layer_norm, optimizer, outliers, row_program
from ppo_repro.numerics.kernels.attention import backward as attention_backward
from ppo_repro.numerics.kernels.attention import forward as attention
from ppo_repro.numerics.kernels.float64 import digits, product
from ppo_repro.numerics.layers import fused_attention
from ppo_repro.numerics.proof import ahead, proof
from ppo_repro.numerics.proof.cases import CASES, CPU
from ppo_repro.numerics.proof.largest import compile_largest
from ppo_repro.numerics.trunk import whole
from ppo_repro.rollout.engine import Sampling
from ppo_repro.rollout.sampler import sample

KERNELS = [name for name in backend.BACKENDS if name != "eager" and (name != "amx" or backend.has_amx())]


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "cache" / "ppo_repro" / "kernels"
    folder.mkdir(parents=True, mode=0o755)  # else a second process would compile what is compiled already
    monkeypatch.setattr(proof, "cache_folder", lambda: folder)
    return folder


@pytest.mark.parametrize("name", KERNELS)
def test_every_backend_of_this_machine_passes(name: str) -> None:
    assert proof.first_difference(name) == proof.PASSED


def one_bit_off(x: np.ndarray) -> None:
    """Every number moves to its neighbour."""
    x[...] = np.nextafter(x, np.float32(np.inf))


def wrong_products(monkeypatch: pytest.MonkeyPatch) -> None:
    contract = product.contract

    def wrong(*arguments: object) -> bool:
        finite = contract(*arguments)  # type: ignore[arg-type]
        one_bit_off(arguments[-1])  # type: ignore[arg-type]
        return finite

    monkeypatch.setattr(product, "contract", wrong)


def without_outliers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outliers, "add_products", lambda *arguments: None)


def wrong_layer_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = layer_norm.layer_norm_backward

    def wrong(grad: np.ndarray, x: np.ndarray, *rest: object) -> tuple[int, int]:
        return backward(grad, np.nextafter(x, np.float32(9)), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(layer_norm, "layer_norm_backward", wrong)


def wrong_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    cached = attention.forward_cached

    def wrong(*arguments: object) -> int:
        worst = cached(*arguments)
        one_bit_off(arguments[-1])  # type: ignore[arg-type]
        return int(worst)

    monkeypatch.setattr(fused_attention.forward_kernels, "forward_cached", wrong)


def wrong_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    squares = optimizer.sum_of_squares
    monkeypatch.setattr(optimizer, "sum_of_squares", lambda x, shift: squares(x, shift) + (1 << 44))


def wrong_kept_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    digits_of = whole.weight_digits

    def wrong(*arguments: Any) -> tuple[np.ndarray, Any]:
        found, rest = digits_of(*arguments)
        found[:] = 0
        return found, rest

    monkeypatch.setattr(whole, "weight_digits", wrong)


WRONG = {
    "products": wrong_products,
    "products ": without_outliers,
    "gradients": wrong_layer_norm,
    "decoding": wrong_attention,
    "optimizer": wrong_optimizer,
    **({"decoding ": wrong_kept_digits} if digits.IN_USE else {}),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_kernel_is_found_and_auto_does_not_take_it(
    case: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(backend, "has_amx", lambda: False)
    WRONG[case](monkeypatch)
    assert proof.use("auto", 1) == "eager"
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"numerics: {case.strip()} of backend float64 differ from the specification on this machine; not used"
    ]
    with pytest.raises(UserError, match=f"layout.backend = float64: its {case.strip()} differ"):
        proof.use("float64", 1)


def test_a_kernel_that_fails_has_not_proved_itself(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "has_amx", lambda: False)
    monkeypatch.setattr(product, "contract", lambda *arguments: 1 / 0)
    assert proof.failure("float64") == "products"


def test_too_little_memory_says_nothing_about_a_kernel(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(product, "contract", fails)
    with pytest.raises(MemoryError):
        proof.failure("float64")
    assert not own_cache.exists() or not list(own_cache.iterdir())


@pytest.mark.parametrize("name", proof.CAPS)
def test_a_proof_under_capped_instructions_is_another_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = proof.machine()
    monkeypatch.setenv(name, "something else")
    proof.machine.cache_clear()
    try:
        assert proof.machine() != before
    finally:
        monkeypatch.undo()
        proof.machine.cache_clear()


def test_a_proof_is_kept_until_something_changes(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[str] = []
    monkeypatch.setattr(proof, "first_difference", lambda name, _: computed.append(name) or proof.PASSED)
    assert proof.failure("float64") == proof.failure("float64") == proof.PASSED
    assert computed == ["float64"] and len(list(own_cache.iterdir())) == 1
    monkeypatch.setattr(proof, "machine", lambda: "another torch")
    proof.failure("float64")
    assert computed == ["float64"] * 2 and len(list(own_cache.iterdir())) == 2


def test_the_first_use_says_how_far_it_is(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []

    class Process:
        """In place of a process that would compile for seconds."""

        def __init__(self, arguments: list[str], **_: object) -> None:
            started.append(arguments[1:])

        def terminate(self) -> None: ...

        def wait(self) -> None: ...

    monkeypatch.setattr(ahead.subprocess, "Popen", Process)
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda _: {0, 1})
    proof.failure("float64")
    assert capsys.readouterr().err == "" and started == []
    for entry in own_cache.iterdir():
        entry.unlink()
    own_cache.rmdir()
    proof.failure("float64")
    lines = capsys.readouterr().err.splitlines()
    assert [f"({i + 1} of {len(CASES)})" in line for i, line in enumerate(lines)] == [True] * len(CASES)
    assert started == [["-m", "ppo_repro.numerics.proof.ahead", "float64"]]


def test_what_is_compiled_ahead_is_the_last_case() -> None:
    assert list(CASES)[-1] == ahead.CASE


def test_the_largest_kernels_are_compiled_ahead_for_the_types_that_the_cases_have() -> None:
    before = backend.active()
    kernels = attention_backward.backward, attention.forward, row_program._run, decoder_trunk._trunk, gumbel._sample
    try:
        backend.use("float64", 1)
        for case in ("decoding", "training"):
            CASES[case](CPU)
        numbers = torch.arange(3)
        sample(torch.zeros(3, 4), numbers, numbers, Sampling(1.0, 0, 1.0, 1), "exact")
        signatures = [list(kernel.signatures) for kernel in kernels]
        compile_largest("float64")
        assert [list(kernel.signatures) for kernel in kernels] == signatures
        assert all(signatures)
    finally:
        backend.use(before, 1)


@pytest.mark.parametrize("executable", ["", None, "/nowhere/python"])
def test_where_no_second_process_can_start_this_one_compiles_all(
    executable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", executable)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with ahead.beside("float64", first_use=True):
        done = True
    assert done and ahead._start("float64") is None


def test_compile_time_is_not_spent_on_garbage_and_collections_come_back() -> None:
    with ahead.beside("float64", first_use=False):
        assert gc.isenabled()
    gc.unfreeze()
    with ahead._without_collections():
        assert not gc.isenabled() and gc.get_freeze_count() == 0
    assert gc.isenabled() and gc.get_freeze_count() > 0, "nor is it looked through at the end of the process"


def test_a_damaged_proof_is_none(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(proof, "first_difference", lambda *_: "products")
    assert proof.failure("float64") == "products"
    (entry,) = own_cache.iterdir()
    entry.write_bytes(entry.read_bytes()[: -len("products")])  # it would say that nothing differs
    assert proof.failure("float64") == "products"
    assert f"{entry} is damaged" in capsys.readouterr().err


def test_a_cache_that_others_may_write_to_is_an_error_and_no_failed_proof(own_cache: Path) -> None:
    own_cache.chmod(0o777)
    with pytest.raises(UserError, match="others could exchange"):
        proof.use("auto", 1)


def test_a_proof_leaves_backend_and_threads_as_they_were() -> None:
    before = backend.active(), torch.get_num_threads()
    proof.first_difference("float64")
    assert (backend.active(), torch.get_num_threads()) == before


def test_cases_have_numbers_in_all_their_results() -> None:
    for name, compute in CASES.items():
        for x in compute(CPU):
            assert x.numel() and bool((x != 0).any()), name
