"""Files with machine code. It is run without a further look, so it is read only where this user or root wrote it.

Each entry begins with the SHA-256 of its name and content, so that an entry stands for itself: no index has to agree
with it, whatever other processes do or wherever they are killed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import stat
import time
from functools import cache
from pathlib import Path

from ppo_repro.errors import UserError
from ppo_repro.output import say

UNUSED_SECONDS = 30 * 86400.0  # after which machine code of other sources, compilers or processors is removed
_REMOVED = ".removed"
_SUM_BYTES = 32


def read(folder: Path, name: str) -> bytes | None:
    """What `write` kept under a name; None where there is nothing, or a file that was damaged, which stderr names.

    Raises UserError where another user may write to the folder.
    """
    _require_private(folder)
    _mark_used(folder)
    try:
        # a link may lead to another's file, and a pipe would wait for its other end
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            _say_unused(folder / name, "is a link")
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or _others_may_write(status):
            _say_unused(folder / name, "is no file that you alone can write to")
            return None
        stored = file.read()
    content = stored[_SUM_BYTES:]
    if stored[:_SUM_BYTES] != _sum(name, content):
        _say_unused(folder / name, "is damaged")
        return None
    return content


def write(folder: Path, name: str, content: bytes) -> None:
    """Keep content under a name, whole or not at all. Where that fails, stderr says so once, and nothing is kept.

    The entry of another process is replaced: it has the same content. Raises UserError as `read`.
    """
    # the process of a killed one may have the same number, and other machines may share the folder
    temporary = folder / f"{name}.{secrets.token_hex(8)}.tmp"
    try:
        make_folder(folder)
        with open(temporary, "xb", opener=_for_us) as file:
            file.write(_sum(name, content) + content)
        os.replace(temporary, folder / name)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        _say_not_kept(folder, error.strerror or str(error))


def make_folder(folder: Path) -> None:
    """Make the folder where there is none, and then remove those beside it that are unused.

    Raises UserError as `read`, and OSError where it cannot be made.
    """
    os.makedirs(folder.parent.parent, exist_ok=True)
    is_new = False
    for path in (folder.parent, folder):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o755)
            is_new = path == folder
    _require_private(folder)
    if is_new:
        remove_unused(folder)


def remove_unused(folder: Path) -> None:
    """Remove the folders beside `folder` that no process used for UNUSED_SECONDS; what cannot be removed stays.

    Each is renamed first, which succeeds in one process only. One that uses a folder at this instant has its code in
    memory already, or compiles it again.
    """
    oldest = time.time() - UNUSED_SECONDS
    for path in folder.parent.glob("kernels-*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if path == folder or not is_ours or status.st_mtime >= oldest:
                continue
            doomed = path
            if not path.name.endswith(_REMOVED):  # otherwise left by a process that was killed while removing it
                doomed = path.with_name(f"{path.name}.{secrets.token_hex(8)}{_REMOVED}")
                os.rename(path, doomed)
            shutil.rmtree(doomed)


@cache
def _mark_used(folder: Path) -> None:
    """Give the folder the time of now, once in a process: reading alone would leave no trace."""
    with contextlib.suppress(OSError):
        os.utime(folder)


def _sum(name: str, content: bytes) -> bytes:
    """With the name, so that an entry that was copied over another is found."""
    return hashlib.sha256(name.encode() + b"\0" + content).digest()


def _for_us(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o644)


def _others_may_write(status: os.stat_result) -> bool:
    return bool(status.st_mode & 0o022) or status.st_uid not in (0, os.geteuid())


def _require_private(folder: Path) -> None:
    """Raise UserError where another user than root may write to the folder or exchange it. It need not exist."""
    base = _status(folder.parent.parent)
    if base is not None and base.st_mode & stat.S_IWOTH and not base.st_mode & stat.S_ISVTX:
        raise _untrusted(folder.parent.parent, base, "chmod o-w")
    for path in (folder.parent, folder):
        status = _status(path)
        if status is not None and _others_may_write(status):
            raise _untrusted(path, status, f"chown {os.geteuid()} and chmod go-w")


def _untrusted(path: Path, status: os.stat_result, remedy: str) -> UserError:
    mode = f"{stat.filemode(status.st_mode)} ({stat.S_IMODE(status.st_mode):04o})"
    return UserError(
        f"{path}: belongs to user {status.st_uid}, mode {mode}; machine code of kernels lies there, and others could "
        f"exchange what user {os.geteuid()} would run; {remedy} it, or set XDG_CACHE_HOME to a folder of your own"
    )


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:  # then nothing in it can be opened either
        return None


def _say_unused(path: Path, what: str) -> None:
    say(f"kernels: {path} {what}; not used, compiled again")


@cache
def _say_not_kept(folder: Path, reason: str) -> None:
    say(
        f"kernels: cannot be kept in {folder} ({reason}); every process compiles its own, for a minute or more; "
        "set XDG_CACHE_HOME to a folder that can be written to"
    )
