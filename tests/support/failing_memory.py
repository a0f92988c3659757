"""Kernels whose allocations fail when a test says so, and work for which they allocate.

As a program (`python -m tests.support.failing_memory LIBRARY`) this module fails each allocation of a library that has
`counting_sources`, and prints a line for each kind of work.
"""

from __future__ import annotations

import copy
import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import ppo_repro
from ppo_repro.base.errors import OutOfMemory
from ppo_repro.base.processes import SLOTS
from ppo_repro.numerics import build, library
from ppo_repro.numerics.adamw import AdamWSettings
from ppo_repro.numerics.interface import ints
from ppo_repro.numerics.lowering import Lowered, lower
from ppo_repro.numerics.network import logits, network_of
from ppo_repro.numerics.optimizer import Optimizer
from ppo_repro.numerics.sequences import ragged, slots_of
from ppo_repro.numerics.token_statistics import token_statistics
from tests.support.broken import broken_library, broken_sources
from tests.support.models import CONFIGS, CONTEXT, MIXTURES, VOCAB, small_model

CHECKED = "static void *checked(void *memory, size_t bytes) {\n"
# allocations number first .. last - 1 fail; `free` is counted in the files that follow
COUNTING = (
    "#include <stdatomic.h>\n"
    '#define SEEN __attribute__((visibility("default")))\n'
    "SEEN atomic_long allocations, alive;\n"
    "SEEN long first, last;\n"
    f"{CHECKED}"
    "  const long number = atomic_fetch_add(&allocations, 1);\n"
    "  if (first <= number && number < last) {\n"
    "    free(memory);\n"
    "    memory = NULL;\n"
    "  }\n"
    "  if (memory) atomic_fetch_add(&alive, 1);\n"
)
FREE = (
    "static void counted_free(void *memory) {\n"
    "  if (memory) atomic_fetch_sub(&alive, 1);\n"
    "  free(memory);\n"
    "}\n"
    "#define free counted_free\n\n"
)
ZEROS = "static void *allocate_zeros(size_t count, size_t size) {\n"


class Library:
    """Kernels whose allocations can fail."""

    def __init__(self, path: Path) -> None:
        self.kernels = library.open_library(path)
        variables = ctypes.CDLL(str(path))
        names = ("allocations", "alive", "first", "last")
        self._variables = SimpleNamespace(**{name: ctypes.c_long.in_dll(variables, name) for name in names})

    @property
    def alive(self) -> int:
        """Allocations that were not freed."""
        return int(self._variables.alive.value)

    @property
    def count(self) -> int:
        """Allocations since `rest`, also the failed ones."""
        return int(self._variables.allocations.value)

    def rest(self, threads: int) -> None:
        """Free all scratch memory, also of the threads, and count from 0."""
        self.kernels.set_threads(1)
        self.kernels.set_threads(threads)
        self.kernels.free_scratch()
        self._variables.allocations.value = 0

    @contextmanager
    def failing(self, first: int, last: int) -> Iterator[None]:
        """Let allocations number `first` to `last` - 1 since `rest` fail."""
        self._variables.first.value, self._variables.last.value = first, last
        try:
            yield
        finally:
            self._variables.first.value = self._variables.last.value = 0


def counting_sources(folder: Path) -> Path:
    return broken_sources(folder, "memory.c", [(CHECKED, COUNTING), (ZEROS, FREE + ZEROS)])


def made(folder: Path, file: str = "all.c", *changes: tuple[str, str]) -> Library:
    """Compile the kernels with counted allocations, and changes of one more file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SOURCES", counting_sources(folder / "counting"))
        return Library(broken_library(folder / "changed", file, *changes))


@contextmanager
def using(found: Library) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "load", lambda: found.kernels)
        yield
        found.rest(1)


IDS = torch.arange(1, 1 + 3 * 21).view(3, 21) % VOCAB
SETTINGS = AdamWSettings(learning_rate=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, max_grad_norm=1.0)
Work = Callable[[], list[Tensor]]


def own_model(family: str, device: str) -> Any:
    return ppo_repro.deterministic(small_model({**CONFIGS, **MIXTURES}[family](), 1), threads=1).to(device)


def forward(family: str, device: str = "cpu") -> Work:
    model = own_model(family, device)

    def work() -> list[Tensor]:
        with torch.no_grad():
            return [model(IDS).logits.cpu()]

    return work


def backward(family: str, device: str = "cpu") -> Work:
    model = own_model(family, device)

    def work() -> list[Tensor]:
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        return [p.grad.cpu() for p in model.parameters()]

    return work


def checkpointed(family: str, device: str = "cpu") -> Work:
    model = own_model(family, device)
    model.gradient_checkpointing_enable()

    def work() -> list[Tensor]:
        model.zero_grad(set_to_none=False)
        model(IDS, labels=IDS).loss.backward()
        return [p.grad.cpu() for p in model.parameters()]

    return work


def sampling(family: str, device: str = "cpu") -> Work:
    model = own_model(family, device)

    def work() -> list[Tensor]:
        cut = ppo_repro.Sampling(temperature=0.8, top_k=20, top_p=0.9, max_response_tokens=6)
        responses = ppo_repro.generate(model, IDS.tolist(), cut)
        return [torch.tensor(r.response_ids) for r in responses] + [r.logprobs for r in responses]

    return work


def step(family: str) -> Work:
    """A step of the trainer over two micro-batches, from the weights and moments of the beginning."""
    model = lower(small_model({**CONFIGS, **MIXTURES}[family](), 1), Lowered(CONTEXT))
    optimizer = Optimizer(model, SETTINGS, "deterministic")
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state())

    def passes() -> None:
        for sequences in ([0, 1], [2]):
            ids = [IDS[i].tolist() for i in sequences]
            batch = ragged(ids, slots=slots_of(sequences, len(IDS), SLOTS)).with_sums(optimizer.sink)
            wanted = ints(range(len(batch.ids)))
            hidden, _ = network_of(model).over_batch(batch, wanted)
            rows = logits(model, hidden, batch.rows.select(wanted))
            logprobs, entropies = token_statistics(rows, torch.from_numpy(batch.ids).long(), 1.0, None, "deterministic")
            (logprobs.sum() + 0.1 * entropies.sum()).backward()

    def work() -> list[Tensor]:
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, weights[name])
        norm = optimizer.step(passes)
        after = [torch.tensor(norm), *(p.detach().clone() for p in model.parameters())]
        model.load_state_dict(weights)
        optimizer.load(state)
        return after

    return work


WORKS = {work.__name__: work for work in (forward, backward, checkpointed, sampling, step)}


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def failures(found: Library, work: Work, threads: int) -> tuple[int, list[str]]:
    """Fail each allocation of `work`: alone, and with all that follow. Return their number, and what went wrong."""
    expected, wrong = work(), []
    found.rest(threads)
    alive = found.alive
    work()
    count = found.count
    for case in [(first, last) for first in range(count) for last in (first + 1, 1 << 60)]:
        found.rest(threads)
        try:
            with found.failing(*case):
                work()
            if found.count > case[0]:  # several threads do not always allocate equally often
                wrong.append(f"{case}: no error")
        except OutOfMemory as error:
            if not str(error).startswith("out of memory: the kernels asked for 0.000 GB; "):
                wrong.append(f"{case}: {error}")
        if not same(work(), expected):
            wrong.append(f"{case}: other bits after the failure")
        found.rest(threads)
        if found.alive != alive:
            wrong.append(f"{case}: {found.alive - alive} allocations were not freed")
    return count, wrong


if __name__ == "__main__":
    sanitized = Library(Path(sys.argv[1]))
    with using(sanitized):
        for threads in (1, 3):
            for name, work in WORKS.items():
                print(name, threads, failures(sanitized, work("qwen3_moe"), threads))
