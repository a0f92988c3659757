"""New weights for a running server, through a folder that both can read.

A server gets the digest of the weights as their version and returns it with every response. In deterministic numerics
it also computes the digest of its own weights, by the trainer's function. Stock SGLang cannot, and silently skips a
tensor whose name it does not know.
"""

from __future__ import annotations

import json
from pathlib import Path

from transformers import PreTrainedModel

from ppo_repro.errors import PromiseBroken, UserError
from ppo_repro.files import whole_folder
from ppo_repro.models.folders import write_model
from ppo_repro.rollout.sglang.client import Call, get, post
from ppo_repro.sglang_plugin.names import DIGEST


def write_folder(policy: PreTrainedModel, stop_ids: frozenset[int], folder: Path, deterministic: bool) -> None:
    """Write the policy as a folder for a server, with the run's end tokens. UserError where that fails.

    Deterministic servers take the names of the policy's parameters, stock ones those of published checkpoints: they
    differ in mixtures, whose experts are one parameter here and many tensors there.
    """
    with whole_folder(folder) as temporary:
        write_model(policy, temporary, original_format=not deterministic)
        path = temporary / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**config, "eos_token_id": sorted(stop_ids)}, indent=1), encoding="utf-8")
        (temporary / "generation_config.json").unlink(missing_ok=True)  # it may have other end tokens


def from_disk(url: str, folder: Path, version: str, timeout: float) -> None:
    """Let the server load a folder, which must have the same path for the server."""
    body = {"model_path": str(folder), "weight_version": version, "flush_cache": True}
    post(url, "/update_weights_from_disk", body, timeout)


def confirm(url: str, digest: str, deterministic: bool, timeout: float) -> None:
    """Raise UserError unless the server has this weight version; in deterministic numerics also compare its own digest.

    PromiseBroken where the server's weights have another digest.
    """
    version = get(url, "/model_info", timeout).get("weight_version")
    if version != digest:
        raise UserError(f"{url}: has weights {version!r} after an update to {digest!r}; somebody else updates it")
    if deterministic:
        server_digest = _server_digest(url, timeout)
        if server_digest != digest:
            raise PromiseBroken(f"{url}: has weights of digest {server_digest} after an update to {digest}")


def _server_digest(url: str, timeout: float) -> str:
    answer = Call(url, "POST", "/get_weights_by_name", {"name": DIGEST}, timeout).json()
    try:
        return bytes(int(code) for code in answer).decode("ascii")
    except (TypeError, ValueError) as error:
        raise UserError(f"{url}: its digest of the weights is {answer!r}; is it a server of this package?") from error
