"""Write files and folders completely or not at all, and compute their digests."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shlex
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ppo_repro.base.errors import UserError

MANIFEST = "manifest.json"  # of every run folder
SUMS_NAME = "SHA256SUMS"
OWN_DIGEST = "sha256"  # the field of a JSON file that has the digest of the file without it
_RESTORE = "restore it, or remove the sums if you changed the folder yourself"


def check_path(text: str) -> str:
    """Return `text`. Raises ValueError if this machine cannot have a path with this text."""
    if "://" in text or re.search("[\0\ud800-\udfff]", text):
        raise ValueError("must be a path on this machine, in UTF-8")
    return text


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to. When the block ends, the file replaces `path`, complete and durable, or not at all.

    Raises UserError with path and reason if writing fails.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except BaseException as error:  # also Ctrl-C, after which nobody would remove the file
        with contextlib.suppress(OSError):  # the first error is the one to report
            temporary.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); make room there or choose another --out"
        ) from error


def atomic_write(path: Path, data: bytes | memoryview) -> None:
    """Replace a file completely or leave it as it was. Raises UserError with path and reason if writing fails."""
    with whole_file(path) as temporary:
        temporary.write_bytes(data)


def _has_mark(path: Path) -> bool:
    """Return whether the first 300 bytes of a page or a figure say that ppo-repro wrote it."""
    with path.open("rb") as file:
        return b'="ppo-repro' in file.read(300)


def require_ours(path: Path, is_ours: Callable[[Path], bool] = _has_mark) -> None:
    """Raise UserError if `path` has no folder, or is a file that is not ours. `is_ours` may raise OSError."""
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}; make it, or choose another file")
    try:
        has_marker = is_ours(path)
    except FileNotFoundError:
        return
    except OSError:
        has_marker = False
    if not has_marker:
        raise UserError(f"{path}: exists, and was not written by ppo-repro; choose another file, or remove it")


def sync(path: Path) -> None:
    """Make a file, or the renames inside a folder, survive a power cut. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make a folder and everything in it survive a power cut. Raises OSError."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents if they do not exist, so that they survive a power cut. Raises OSError."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in made:
        sync(path.parent)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to fill. When the block ends, this folder replaces `folder`, complete or not at all.

    The old `folder` stays until the new one is on disk. Then two renames follow each other; a kill between them leaves
    the old folder as `.removed`. Raises UserError if writing fails.
    """
    temporary, old = folder.with_name(folder.name + ".tmp"), folder.with_name(folder.name + ".removed")
    try:
        if temporary.exists():  # of a killed process
            shutil.rmtree(temporary)
        make_folder(temporary)
        yield temporary
        sync_tree(temporary)
        if old.exists():
            shutil.rmtree(old)
        if folder.exists():
            os.replace(folder, old)
        os.replace(temporary, folder)
        sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if old.exists() and not folder.exists():
            os.replace(old, folder)
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"{folder}: cannot be written ({reason}); make room there") from error


def remove_folder(folder: Path) -> None:
    """Remove a folder if it exists. Raises OSError.

    The folder is renamed first, so that a kill never leaves half of a folder under this name.
    """
    doomed = folder.with_name(folder.name + ".removed")
    if doomed.exists():  # of a killed process
        shutil.rmtree(doomed)
    if folder.exists():
        os.replace(folder, doomed)
        sync(folder.parent)
        shutil.rmtree(doomed)


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading. Raises OSError if it is a FIFO, a socket or a device, which may have no end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return path.open("rb")


def read_regular(path: Path) -> bytes:
    """Return the content of a file. Raises OSError, also if it is a FIFO, a socket or a device."""
    with open_regular(path) as file:
        return file.read()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, read in chunks. Raises OSError."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path) -> None:
    """Write SHA256SUMS for every file of a folder, in the format of `sha256sum -c`. Raises OSError."""
    files = sorted(path for path in folder.rglob("*") if not path.is_dir())
    lines = [f"{file_digest(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    (folder / SUMS_NAME).write_text("".join(lines), encoding="utf-8")


def check_sums(folder: Path) -> set[str]:
    """Check a folder against its SHA256SUMS, and return the listed names with SHA256SUMS itself.

    Returns an empty set if there is no SHA256SUMS. Raises UserError for the first unlisted, unreadable or changed file.
    """
    path = folder / SUMS_NAME
    if not path.exists():
        return set()
    listed = {SUMS_NAME}
    try:
        content = read_regular(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {_RESTORE}") from error
    for line in content.splitlines():
        digest, _, name = line.decode("utf-8", "replace").partition("  ")
        # a name that leads out of the folder was not written by `write_sums`
        if len(digest) != 64 or not name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise UserError(f"{path}: is not a list of SHA-256; {_RESTORE}")
        try:
            actual = file_digest(folder / name)
        except (OSError, ValueError) as error:
            raise UserError(f"{folder / name}: cannot be read, and {path} lists it; {_RESTORE}") from error
        if actual != digest:
            raise UserError(f"{folder / name}: has another SHA-256 than {path} says; {_RESTORE}")
        listed.add(name)
    # an additional file could change what is loaded, and a truncated SHA256SUMS would list too few
    present = {entry.relative_to(folder).as_posix() for entry in folder.rglob("*") if entry.is_file()}
    for name in sorted(present - listed):
        raise UserError(f"{path}: does not list {name}; {_RESTORE}")
    return listed


def sealed(tree: Mapping[str, Any]) -> str:
    """Return JSON whose last field is the SHA-256 of the JSON without this field. Equal trees give equal bytes."""
    return _json({**tree, OWN_DIGEST: hashlib.sha256(_json(tree).encode()).hexdigest()})


def is_sealed(text: str, tree: Mapping[str, Any]) -> bool:
    """Return whether `text` has exactly the bytes that `sealed` makes of `tree`, which was parsed from `text`."""
    return sealed({name: value for name, value in tree.items() if name != OWN_DIGEST}) == text


def _json(tree: Mapping[str, Any]) -> str:
    return json.dumps(tree, indent=1, ensure_ascii=False) + "\n"


def folders_with(root: Path, name: str) -> Iterator[Path]:
    """Yield every folder with a file `name` in and below `root`, in no particular order.

    Skips symbolic links, folders inside a folder it yields, and leftovers of killed processes.
    """
    for folder, subfolders, files in os.walk(root):
        if name in files:
            subfolders.clear()
            yield Path(folder)
        subfolders[:] = [below for below in subfolders if not below.endswith((".tmp", ".removed"))]


def require_new(run_dir: Path) -> None:
    """Raise UserError if the path of a new run exists already."""
    if run_dir.is_dir() and not (run_dir / MANIFEST).exists():
        raise UserError(
            f"{run_dir}: exists without {MANIFEST}, and nothing in it is removed; restore that file, "
            "or move the folder away"
        )
    if run_dir.is_dir():
        quoted = shlex.quote(str(run_dir))
        raise UserError(
            f"{run_dir}: exists already, with this configuration and these inputs; choose another --out, "
            f"or use `ppo-repro show {quoted}`, `ppo-repro rerun {quoted}` or `ppo-repro resume {quoted}`"
        )
    if os.path.lexists(run_dir):
        raise UserError(f"{run_dir}: a file is in the way; choose another --out")


def check_links(run_dir: Path) -> None:
    """Raise UserError if a run folder contains a symbolic link, because writes could leave the folder through it."""
    for path in sorted(run_dir.rglob("*")):
        if path.is_symlink():
            raise UserError(f"{path}: is a symbolic link; put what it points to in its place")
