"""Model folders that processes write tensor by tensor: the bytes that transformers writes for one process."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from ppo_repro.models.networks import make_policy
from ppo_repro.numerics.device import state_on_cpu
from ppo_repro.numerics.pieces import Divided
from ppo_repro.numerics.sharding.model_folder import lend_model, write_model
from ppo_repro.numerics.sharding.parts import hold
from ppo_repro.ranks import Ranks
from ppo_repro.testing.small_models import CONTEXT, gpt2_config, qwen3_config, small_model
from tests.support.thread_ranks import ThreadRanks, in_threads, thread_mesh, thread_shards

FILE_BYTES = 20_000
Mesh = Callable[[ThreadRanks], Ranks]


def tensor(ranks: ThreadRanks) -> Ranks:
    return thread_mesh(ranks, 2)


def pipeline(ranks: ThreadRanks) -> Ranks:
    return thread_mesh(ranks, 2, by_layers=True)


def write_together(config: PretrainedConfig, mesh: Mesh, folder: Path, file_bytes: int, size: int = 2) -> None:
    """The first process writes the model that all hold together."""

    def work(world: ThreadRanks) -> None:
        model = hold(make_policy(small_model(config, 3), "exact", CONTEXT), mesh(world))
        if world.rank == 0:
            write_model(model, folder, file_bytes)
        else:
            lend_model(model, file_bytes)

    folder.mkdir()
    in_threads(size, work)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def by_transformers(config: PretrainedConfig, folder: Path, file_bytes: int) -> dict[str, bytes]:
    model = make_policy(small_model(config, 3), "exact", CONTEXT)
    model.save_pretrained(folder, state_dict=state_on_cpu(model), max_shard_size=file_bytes)
    return files(folder)


@pytest.mark.parametrize("file_bytes", [FILE_BYTES, 10**9], ids=["several files", "one file"])
@pytest.mark.parametrize(
    ("config", "mesh"),
    [
        (qwen3_config(), tensor),
        (qwen3_config(), pipeline),
        (qwen3_config(), thread_shards),
        (qwen3_config(tie_word_embeddings=False), tensor),
        (gpt2_config(), thread_shards),
    ],
    ids=["tensor", "pipeline", "zero 3", "tensor, a head of its own", "zero 3, GPT-2"],
)
def test_a_divided_model_becomes_the_folder_of_a_whole_one(
    config: PretrainedConfig, mesh: Mesh, file_bytes: int, tmp_path: Path
) -> None:
    expected = by_transformers(config, tmp_path / "whole", file_bytes)
    write_together(config, mesh, tmp_path / "divided", file_bytes)
    assert files(tmp_path / "divided") == expected
    assert ("model.safetensors.index.json" in expected) == (file_bytes == FILE_BYTES)


def test_transformers_reads_the_files_by_their_index(tmp_path: Path) -> None:
    write_together(qwen3_config(), tensor, tmp_path / "m", FILE_BYTES)
    places = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())["weight_map"]
    sizes = [path.stat().st_size for path in (tmp_path / "m").glob("*.safetensors")]
    assert len(sizes) == len(set(places.values())) > 2 and sorted(sizes)[-2] < FILE_BYTES + 4096  # a header beside
    read, source = AutoModelForCausalLM.from_pretrained(tmp_path / "m"), small_model(qwen3_config(), 3)
    assert all(torch.equal(read.state_dict()[name], x) for name, x in source.state_dict().items())


def test_a_process_has_one_whole_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control keeps what it asked for."""
    whole, kept = Divided.whole, list[Tensor]()
    alive: dict[int, list[weakref.ref[Tensor]]] = {}

    def most_alive(keep: bool) -> int:
        most = 0

        def counted(divided: Divided) -> Tensor:
            nonlocal most
            mine = alive.setdefault(threading.get_ident(), [])
            tensor = whole(divided)
            mine.append(weakref.ref(tensor))
            kept.extend([tensor] * keep)
            most = max(most, sum(each() is not None for each in mine))
            return tensor

        monkeypatch.setattr(Divided, "whole", counted)
        write_together(qwen3_config(), thread_shards, tmp_path / str(keep), FILE_BYTES)
        return most

    assert most_alive(False) == 1
    assert most_alive(True) > 10
