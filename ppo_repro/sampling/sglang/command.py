"""Build the command line and the environment of a server, and inspect its interpreter.

`look_into` runs the interpreter and `numerics_digest` reads files. The other functions have no effects.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ppo_repro
from ppo_repro.base.errors import UserError
from ppo_repro.config.layout import LayoutConfig
from ppo_repro.config.numerics import NumericsConfig
from ppo_repro.config.rollout import SGLangServers
from ppo_repro.sampling.sglang.plugin.names import ARCHITECTURES, ATTENTION_BACKEND

RETURN_ROUTES = "--enable-return-routed-experts"
# environment variables that a server must not inherit: the run's import path, and its rank among processes
DROPPED = {"PYTHONPATH", "MASTER_ADDR", "MASTER_PORT"} | {
    level + name for level in ("", "LOCAL_", "GROUP_", "ROLE_") for name in ("RANK", "WORLD_SIZE", "NAME")
}
TORCHRUN = "TORCHELASTIC_"
PLUGINS = "sglang.srt.plugins"
# SGLang ends a response this many tokens before the end of its context (measured: 2), and refuses prompts earlier (6)
SPARE_CONTEXT = 8
_PACKAGE = Path(ppo_repro.__file__).parent
_CPU_SHIM = Path(__file__).parent / "plugin" / "cpu_shim"
_QUESTION = f"""
import importlib.metadata as m, importlib.util, json, sys
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
spec = importlib.util.find_spec("ppo_repro")
print(json.dumps({{
    "python": sys.version.split()[0],
    "packages": {{name: version(name) for name in ("sglang", "torch", "transformers", "ppo_repro")}},
    "plugins": sorted({{entry.value for entry in m.entry_points(group={PLUGINS!r})}}),
    "ppo_repro": list(spec.submodule_search_locations) if spec else [],
}}))
"""


@dataclass(frozen=True)
class Needs:
    """What a run needs of each of its servers."""

    engine: SGLangServers
    layout: LayoutConfig
    numerics: NumericsConfig
    routes: bool  # the experts of each token; SGLang refuses this for a dense model


@dataclass(frozen=True)
class Interpreter:
    """Python interpreter of the servers, and its packages."""

    python: str
    packages: Mapping[str, str | None]
    plugins: tuple[str, ...]
    numerics_digest: str  # digest of its deterministic numerics; empty without ppo_repro


def numerics_digest(package: Path) -> str:
    """Return the SHA-256 over the files that decide the bits of a forward pass and the tokens sampled from it.

    No run imports `numerics/definition`, with which tests compare the kernels.
    """
    definition = package / "numerics/definition"
    ours = (path for folder in ("numerics", "sampling/sglang/plugin") for path in (package / folder).rglob("*"))
    files = [path for path in ours if path.suffix in {".py", ".c", ".h"} and definition not in path.parents]
    files = sorted([*files, *(package / "sampling").glob("draw.py")])  # another installation may not have it
    sums = [f"{path.relative_to(package).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]
    return hashlib.sha256("\n".join(sums).encode()).hexdigest()


def look_into(engine: SGLangServers) -> Interpreter:
    """Return the servers' interpreter with its packages. Raises UserError if no server can run with these packages."""
    python = engine.python or sys.executable
    wrong = f"rollout.engine.python = {python}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            [python, "-c", _QUESTION], capture_output=True, text=True, timeout=60, check=False, env=environment
        )
        installed = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{wrong}: cannot be run ({error}); give the interpreter of an environment") from error
    except ValueError as error:
        raise UserError(f"{wrong}: does not answer as a Python interpreter; give that of an environment") from error
    if installed["packages"]["sglang"] is None:
        raise UserError(f"{wrong}: has no sglang; give the interpreter of an environment made by .ci/server.sh")
    ours = [entry for entry in installed["plugins"] if entry.startswith("ppo_repro.")]
    if not ours:
        raise UserError(f"{wrong}: has sglang but not ppo_repro's plugin; pip install --no-deps ppo_repro there")
    digest = numerics_digest(Path(installed["ppo_repro"][0])) if installed["ppo_repro"] else ""
    if engine.numerics == "deterministic" and digest != numerics_digest(_PACKAGE):
        raise UserError(f"{wrong}: its ppo_repro has other numerics than this one; install this one there")
    return Interpreter(installed["python"], installed["packages"], tuple(installed["plugins"]), digest)


def server_arguments(needs: Needs, model: Path, port: int, version: str) -> list[str]:
    """Return the arguments of sglang.launch_server; the configuration's arguments come last."""
    engine, layout, numerics = needs.engine, needs.layout, needs.numerics
    configured = {argument.partition("=")[0] for argument in engine.arguments}
    pairs: list[tuple[str, str]] = [
        ("--model-path", str(model)),
        ("--host", "127.0.0.1"),
        ("--port", str(port)),
        ("--device", "cpu"),
        ("--context-length", str(numerics.max_context + SPARE_CONTEXT)),
        ("--max-running-requests", str(layout.rollout_slots)),
        ("--weight-version", version),
    ]
    if layout.prefill_chunk:
        pairs.append(("--chunked-prefill-size", str(layout.prefill_chunk)))
    if "--max-total-tokens" not in configured:
        # the default is a share of all memory, which SGLang fills with zeros before the first request
        pairs.append(("--max-total-tokens", str(layout.rollout_slots * (numerics.max_context + SPARE_CONTEXT))))
    if engine.numerics == "deterministic":
        architectures = json.dumps({"architectures": [ARCHITECTURES[numerics.precision]]})
        pairs += [("--attention-backend", ATTENTION_BACKEND), ("--dtype", "float32")]
        pairs += [("--json-model-override-args", architectures)]
    else:
        defaults = [("--dtype", "float32"), ("--attention-backend", "torch_native")]
        pairs += [(name, value) for name, value in defaults if name not in configured]
    flags = ["--enable-deterministic-inference", "--skip-tokenizer-init", "--sleep-on-idle"]
    if not layout.prefix_cache:
        flags.append("--disable-radix-cache")
    if needs.routes:
        flags.append(RETURN_ROUTES)
    return [*(word for pair in pairs for word in pair), *flags, *engine.arguments]


def server_environment(outside: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return the run's environment variables without the ones that would change a server's numbers or imports."""
    ours = {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "PYTHONSAFEPATH": "1",  # no import from the current folder
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-probs at the sampling temperature
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for SPARE_CONTEXT, which no request uses
        "PYTHONPATH": str(_CPU_SHIM),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # saves a minute of compilation at the first seeded sample
    }
    kept = {name: value for name, value in outside.items() if name not in DROPPED and not name.startswith(TORCHRUN)}
    return {**kept, **ours}
