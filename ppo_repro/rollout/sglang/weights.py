"""New weights for a running server: through a folder, inside a request, or over a process group.

A server gets the digest of the weights as their version and returns it with every response. In deterministic numerics
it also computes the digest of its own weights, by the trainer's function. Stock SGLang cannot, and silently skips a
tensor whose name it does not know.
"""

from __future__ import annotations

import base64
import json
import pickle
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from transformers import PreTrainedModel

from ppo_repro.errors import PromiseBroken, UserError
from ppo_repro.files import whole_folder
from ppo_repro.models.write import write_model
from ppo_repro.rollout.sglang.client import Call, get, post
from ppo_repro.sglang_plugin.names import DIGEST

LEAVE_SECONDS = 5.0
BUCKET_BYTES = 256 * 2**20  # weights per request
FILE_BYTES = 5 * 10**9  # weights per file of a folder


def write_folder(policy: PreTrainedModel, stop_ids: frozenset[int], folder: Path, deterministic: bool) -> None:
    """Write the policy as a folder for a server, with the run's end tokens. UserError where that fails.

    Deterministic servers take the names of the policy's parameters, stock ones those of published checkpoints: they
    differ in mixtures, whose experts are one parameter here and many tensors there.
    """
    with whole_folder(folder) as temporary:
        write_model(policy, temporary, FILE_BYTES, original_format=not deterministic)
        path = temporary / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**config, "eos_token_id": sorted(stop_ids)}, indent=1), encoding="utf-8")
        (temporary / "generation_config.json").unlink(missing_ok=True)  # it may have other end tokens


def from_disk(url: str, folder: Path, version: str, timeout: float) -> None:
    """Let the server load a folder, which must have the same path for the server."""
    body = {"model_path": str(folder), "weight_version": version, "flush_cache": True}
    post(url, "/update_weights_from_disk", body, timeout)


def from_tensor(url: str, policy: PreTrainedModel, version: str, timeout: float) -> None:
    """Send the weights in the requests, BUCKET_BYTES at a time.

    They are plain pickles. SGLang's own client sends tensors in shared memory, which need the sender's
    authentication key.
    """
    buckets = list(_buckets(policy))
    with _session(url, timeout):
        for index, bucket in enumerate(buckets):
            payload = base64.b64encode(pickle.dumps(bucket)).decode()
            body: dict[str, object] = {"serialized_named_tensors": [payload], "flush_cache": True}
            if index == len(buckets) - 1:
                body["weight_version"] = version
            post(url, "/update_weights_from_tensor", body, timeout)


def _buckets(policy: PreTrainedModel) -> Iterator[list[tuple[str, Tensor]]]:
    """Copies of the weights as plain tensors, in lists of up to BUCKET_BYTES; a larger tensor alone."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, parameter in policy.named_parameters():
        if bucket and size + parameter.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, parameter.detach().cpu().clone(memory_format=torch.contiguous_format)))
        size += parameter.nbytes
    yield bucket


def join_group(url: str, device: str, timeout: float) -> dist.ProcessGroup:
    """A process group of this process, rank 0, and the server, rank 1; UserError where they cannot connect."""
    backend = "nccl" if device == "cuda" else "gloo"
    address, limit, name = _address_towards(url), timedelta(seconds=timeout), _group_name(url)
    with suppress(UserError):  # left by a killed run; usually there is none, and the server refuses
        post(url, "/destroy_weights_update_group", {"group_name": name}, timeout)
    store = dist.TCPStore(address, 0, 2, is_master=True, wait_for_workers=False, timeout=limit)
    body = {
        "master_address": address,
        "master_port": store.port,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": name,
        "backend": backend,
    }
    call = Call(url, "POST", "/init_weights_update_group", body, timeout)
    try:
        group = _new_group(store, name, backend, limit)
    except RuntimeError as error:
        call.close()
        raise UserError(f"{url}: did not join the process group ({' '.join(str(error).split())[:200]})") from error
    call.json()
    return group


def _address_towards(url: str) -> str:
    """The address of this machine that the server can reach."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect((parts.hostname, parts.port))
        return str(probe.getsockname()[0])


def _group_name(url: str) -> str:
    return "ppo_repro " + url.removeprefix("http://").rstrip("/")


def _new_group(store: dist.Store, name: str, backend: str, limit: timedelta) -> dist.ProcessGroup:
    """The counterpart of SGLang's `init_custom_process_group`; torch has no public function for it."""
    prefixed = dist.PrefixStore(name, store)
    group, _ = distributed_c10d._new_process_group_helper(
        2, 0, [], dist.Backend(backend), prefixed, group_name=distributed_c10d.GroupName(name), timeout=limit
    )
    distributed_c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group


def leave_group(url: str, group: dist.ProcessGroup, timeout: float) -> None:
    """Destroy the group on both sides, on this side alone if the server does not answer soon."""
    with suppress(UserError):
        post(url, "/destroy_weights_update_group", {"group_name": _group_name(url)}, min(timeout, LEAVE_SECONDS))
    dist.destroy_process_group(group)


def from_distributed(url: str, policy: PreTrainedModel, group: dist.ProcessGroup, version: str, timeout: float) -> None:
    """Broadcast the weights to the server. Its answer is read before waiting for the broadcast, as it may refuse."""
    named = [(name, parameter.detach().contiguous()) for name, parameter in policy.named_parameters()]
    body = {
        "names": [name for name, _ in named],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
        "shapes": [list(tensor.shape) for _, tensor in named],
        "group_name": _group_name(url),
        "weight_version": version,
        "flush_cache": True,
    }
    with _session(url, timeout):
        call = Call(url, "POST", "/update_weights_from_distributed", body, timeout)
        try:
            works = [dist.broadcast(tensor, src=0, group=group, async_op=True) for _, tensor in named]
            call.json()
            for work in works:
                work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise UserError(f"{url}: the weights did not arrive ({' '.join(str(error).split())[:200]})") from error
        finally:
            call.close()


@contextmanager
def _session(url: str, timeout: float) -> Iterator[None]:
    """SGLang accepts tensors only between these two requests."""
    post(url, "/begin_weight_update", {}, timeout)
    try:
        yield
    except BaseException:
        with suppress(UserError):  # the first error is reported
            post(url, "/end_weight_update", {}, timeout)
        raise
    post(url, "/end_weight_update", {}, timeout)


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
