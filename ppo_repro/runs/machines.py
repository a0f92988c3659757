"""Bring the files of a run from the machine of the first process to the other machines, which share no disk with it.

The first process alone reads what the user names. Each other machine gets copies of the files below a temporary folder,
at the paths that they have on the first machine.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from ppo_repro.base.beside import modules_beside
from ppo_repro.base.errors import PromiseBroken, UserError
from ppo_repro.base.files import MANIFEST
from ppo_repro.base.ranks import Ranks
from ppo_repro.config.inputs import decisive, file_of
from ppo_repro.config.kinds import AnyConfig
from ppo_repro.config.tree import path_fields
from ppo_repro.records import manifest
from ppo_repro.records.folder import CHECKPOINTS_NAME, REFERENCE
from ppo_repro.records.located import located_tree

Config = TypeVar("Config", bound=AnyConfig)
PathHere = Callable[[Path], Path]  # from a path on the first machine to the path on this one
CHUNK = 1 << 26  # bytes that are sent together
NO_BYTES = torch.empty(0, dtype=torch.uint8)


def files_of(tree: object) -> list[Path]:
    """Return every file that a run of a parsed configuration reads. Raises UserError if a recorded run lacks inputs."""
    files: list[Path] = []
    for _, section, name in path_fields(tree):
        path, _ = file_of(section[name])
        if path.is_file():
            files += [path, *(modules_beside(path) if path.suffix == ".py" else ())]
        elif (path / MANIFEST).is_file():
            files += _files_of_run(path)
        else:
            files += decisive(path)
    return list(dict.fromkeys(files))


def _files_of_run(run_dir: Path) -> list[Path]:
    """Return the files of a recorded run without its checkpoints and trained models, and the inputs outside it."""
    kept = run_dir / REFERENCE
    inside = [path for path in run_dir.rglob("*") if path.is_file()]
    inside = [p for p in inside if p.is_relative_to(kept) or not p.is_relative_to(run_dir / CHECKPOINTS_NAME)]
    return [*inside, *files_of(located_tree(run_dir, manifest.load(run_dir), None, not kept.is_dir()))]


@contextmanager
def on_every_machine(
    ranks: Ranks, config: Config, files: Callable[[], Sequence[Path]]
) -> Iterator[tuple[Config, PathHere]]:
    """Copy files of the first process's machine to the others. The copies are removed at the end of the block.

    Args:
        files: lists the files, with absolute paths; the first process calls it.

    Yields:
        The configuration with the paths of its files on this machine, and the function that gives the path of a file.

    Raises:
        UserError: a file cannot be read or written.
        PromiseBroken: a copy has another SHA-256.
    """
    machines = ranks.everyone(os.environ.get("GROUP_RANK", "0"))  # torchrun numbers its machines
    receivers = [machines.index(machine) for machine in dict.fromkeys(machines)][1:]
    with ExitStack() as stack:
        root: Path | None = None
        if receivers:
            named = ranks.first(_with_sizes, files)
            if ranks.rank in receivers:
                root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ppo-repro-")))
            _copy(ranks, receivers, named, root)
        mine = ranks.everyone(root)[machines.index(machines[ranks.rank])]
        here: PathHere = partial(_below, mine)
        yield _with_paths(config, here), here


def _with_paths(config: Config, here: PathHere) -> Config:
    tree = config.model_dump(mode="json")
    for _, section, name in path_fields(tree):
        path, function = file_of(section[name])
        section[name] = f"{here(path)}{function}"
    changed: Config = type(config).model_validate(tree)  # type: ignore[assignment]
    return changed


def _below(root: Path | None, path: Path) -> Path:
    """Return the path of a copy below `root`; None is the machine of the first process, whose files stay."""
    if root is None:
        return path
    path = Path(os.path.abspath(path))
    return root / path.relative_to(path.anchor)


def _with_sizes(files: Callable[[], Sequence[Path]]) -> list[tuple[Path, int]]:
    return [(path.absolute(), path.stat().st_size) for path in files()]


def _copy(ranks: Ranks, receivers: Sequence[int], files: Sequence[tuple[Path, int]], root: Path | None) -> None:
    """Send the files to each receiver, which writes them below `root`. Other ranks wait. Compare the SHA-256."""
    total = hashlib.sha256()
    if ranks.is_first:
        for chunk in _read(files):
            total.update(chunk.numpy().data)
            for receiver in receivers:
                ranks.swap(chunk, NO_BYTES, receiver)
    elif root is not None:
        for path, size in files:
            target = _below(root, path)
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as file:
                    for start in range(0, size, CHUNK):
                        chunk = torch.empty(min(CHUNK, size - start), dtype=torch.uint8)
                        ranks.swap(NO_BYTES, chunk, 0)
                        total.update(chunk.numpy().data)
                        file.write(chunk.numpy().data)
            except OSError as error:
                raise UserError(f"{target}: cannot be written ({error.strerror}); TMPDIR names another disk") from error
    sums = ranks.everyone(total.hexdigest())
    for receiver in receivers:
        if sums[receiver] != sums[0]:
            raise PromiseBroken(f"files of the run: rank {receiver} received other bytes than rank 0 sent")


def _read(files: Sequence[tuple[Path, int]]) -> Iterator[Tensor]:
    """Yield the files in chunks. Raises UserError if a file has changed its size."""
    for path, size in files:
        try:
            with path.open("rb") as file:
                for start in range(0, size, CHUNK):
                    data = bytearray(file.read(min(CHUNK, size - start)))
                    if len(data) < min(CHUNK, size - start):
                        raise UserError(f"{path}: has become shorter while it was read")
                    yield torch.frombuffer(data, dtype=torch.uint8)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error
