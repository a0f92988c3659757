"""Model folders that lack something, hold something else or are damaged: one line says what, before anything trains."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForSequenceClassification

from ppo_repro.base.errors import UserError
from ppo_repro.models.folder_files import ADAPTER, GENERATION, INDEX, MAX_BYTES, WEIGHTS
from ppo_repro.models.folders import load_reward_model
from ppo_repro.models.load import load_folder, stop_ids
from ppo_repro.tasks.tokenizer import character_tokenizer
from tests.support.damage import SECONDS, Damage, changed, device
from tests.support.models import CONFIGS, MIXTURES, VOCAB, llama_config, qwen3_config, small_model, unequal

Q, EMBEDDING = "model.layers.1.self_attn.q_proj.weight", "model.embed_tokens.weight"


def make(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    character_tokenizer("0123456789+=").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model") / "saved", small_model(qwen3_config(), 0))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def config(**changes: object) -> Damage:
    """Changed fields of config.json; a field that becomes `...` is taken out."""
    return lambda folder: [changed("config.json", (field,), value)(folder) for field, value in changes.items()]


def text(name: str, content: str) -> Damage:
    return lambda folder: (folder / name).write_text(content)


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        held = load_file(folder / WEIGHTS)
        change(held)
        save_file(held, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def with_q(change: Callable[[Tensor], Tensor]) -> Damage:
    return tensors(lambda held: held.update({Q: change(held[Q])}))


def one_number(value: float) -> Damage:
    return with_q(lambda q: torch.cat([torch.full((1, q.shape[1]), value), q[1:]]))


def cut(size: int) -> Damage:
    return lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:size])


def index(file: str, absent: bool = False) -> Damage:
    """The weights in a file with an index; the file may be absent."""

    def damage(folder: Path) -> None:
        places = {name: file for name in load_file(folder / WEIGHTS)}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
        (folder / WEIGHTS).unlink() if absent else (folder / WEIGHTS).rename(folder / file)

    return damage


def bad_index(content: str) -> Damage:
    def damage(folder: Path) -> None:
        index("part.safetensors")(folder)
        (folder / INDEX).write_text(content)

    return damage


def larger_tokenizer(folder: Path) -> None:
    """Another model's: tokens of its own, not such as classes of transformers add to any."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary.update({f"more{i}": len(vocabulary) + i for i in range(VOCAB)})
    path.write_text(json.dumps(content))


def no_unknown_token(folder: Path) -> None:
    tree = json.loads((folder / "tokenizer.json").read_text())
    tree["model"] = {"type": "WordLevel", "vocab": tree["model"]["vocab"], "unk_token": "<unk>"}
    (folder / "tokenizer.json").write_text(json.dumps(tree))


def large(name: str) -> Damage:
    return device(name, lambda path: path.touch() or os.truncate(path, MAX_BYTES + 1))  # type: ignore[func-returns-value]


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def rope(**changes: object) -> Damage:
    return changed("config.json", ("rope_parameters",), {"rope_type": "default", "rope_theta": 1e4, **changes})


OF_CONFIG: dict[str, tuple[Damage, str]] = {
    "no object": (text("config.json", "[]"), r"config\.json holds \[\]; must be a JSON object"),
    "no JSON": (text("config.json", '{"a":'), r"config\.json cannot be read as JSON"),
    "nested too deep": (text("config.json", "[" * 100_000), r"config\.json cannot be read as JSON"),
    "no fields": (text("config.json", "{}"), "Unrecognized model"),
    "absent": (lambda folder: (folder / "config.json").unlink(), r"there is no config\.json in it"),
    "no folder": (shutil.rmtree, "there is no such folder; give the folder of a model"),
    "heads of keys": (config(num_key_value_heads=3), "num_key_value_heads = 3: must divide num_attention_heads"),
    "width of heads": (config(hidden_size=50, head_dim=...), "its config.json wants"),
    "positions": (config(rope_parameters=[]), "cannot be loaded .*rope_parameters"),
    "layer types": (config(layer_types=["full_attention"]), "cannot be loaded .*layer_types"),
    "activation": (config(hidden_act="wobble"), "hidden_act = 'wobble' is not known"),
    "family": (config(model_type="mine"), "model type `mine`"),
    "architecture": (config(architectures=["Mine"]), "architecture Mine; must be one of LlamaForCausalLM"),
    "int8": (config(dtype="int8"), r"dtype = torch\.int8 .*must be float32"),
    "float64": (config(dtype="float64"), "dtype = float64 .*would be rounded"),
    "quantized": (config(quantization_config={"quant_method": "fp8"}), "has quantization_config; save the model in"),
    "adapter": (text(ADAPTER, "{}"), "an adapter; merge it into its base model"),
}
OF_FILES: dict[str, tuple[Damage, str]] = {
    "missing tensor": (tensors(lambda held: held.pop(Q)), f"has no tensor {Q}"),
    "missing head": (config(tie_word_embeddings=False), r"has no tensor lm_head\.weight"),
    "layer too many": (
        config(num_hidden_layers=1, layer_types=...),
        r"has a tensor model\.layers\.1\.\S+, which a model",
    ),
    "unexpected tensor": (tensors(lambda held: held.update(more=torch.zeros(2))), "has a tensor more, which a model"),
    "shape": (with_q(lambda q: q[:3].clone()), rf"tensor {Q} has the shape \[3, 48\]; .* wants \[64, 48\]"),
    "another head": (tensors(lambda held: held.update({"lm_head.weight": held[EMBEDDING] + 1})), "a head of its own"),
    "int8 tensor": (with_q(lambda q: q.to(torch.int8)), f"tensor {Q} is I8; must be F32"),
    "float64 tensor": (with_q(lambda q: q.double()), f"tensor {Q} is F64; must be F32"),
    "NaN": (one_number(float("nan")), f"tensor {Q} has numbers that are not finite"),
    "cut weights": (cut(-10), r"model\.safetensors cannot be read"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), r"has neither model\.safetensors nor"),
    "index leads out": (index("../outside.safetensors"), r"names the file '\.\./outside\.safetensors'; must be one of"),
    "index without file": (index("part.safetensors", absent=True), r"names part\.safetensors, which is not in the"),
    "index without map": (bad_index('{"metadata": {}}'), "has no metadata and weight_map"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer"),
    "broken tokenizer": (text("tokenizer.json", "{"), r"tokenizer\.json cannot be read as JSON"),
    "empty tokenizer": (text("tokenizer.json", "{}"), "its tokenizer: cannot be loaded"),
    "larger tokenizer": (larger_tokenizer, f"its tokenizer has the token .*, and the model a vocabulary of {VOCAB}"),
    "code of a tokenizer": (changed("tokenizer_config.json", ("auto_map",), {"T": ["code.T", None]}), "has auto_map"),
    "generation settings": (text("generation_config.json", "{"), r"generation_config\.json cannot be read as JSON"),
}


# what is said of a damaged folder of a family
OF_FAMILIES: dict[str, tuple[str, Damage]] = {
    "head_dim = 15: .* even number": ("llama", config(head_dim=15)),
    "head_dim = 0: must be .* 1 to": ("llama", config(head_dim=0)),
    "num_hidden_layers = 0: must be .* 1 to 1024": ("qwen3", config(num_hidden_layers=0)),
    "num_hidden_layers = 1000000: must be .* 1 to 1024": ("qwen3", config(num_hidden_layers=10**6)),
    "n_layer = 1000000: must be .* 1 to 1024": ("gpt2", config(n_layer=10**6)),
    "hidden_size = -16: must be .* 1 to": ("llama", config(hidden_size=-16)),
    "pad_token_id = 1000000000000: must be .* -89 to 88": ("llama", config(pad_token_id=10**12)),
    "num_experts_per_tok = 9: must be .* number of experts": ("mixtral", config(num_experts_per_tok=9)),
    "rope_theta = nan: must be a number from 1 to": ("gpt_neox", rope(rope_theta=float("nan"))),
    "partial_rotary_factor = 2: must be": ("gpt_neox", rope(partial_rotary_factor=2.0)),
    "rms_norm_eps = inf: must be": ("gemma", config(rms_norm_eps=float("inf"))),
    "num_labels = 1000000000: must be": ("mistral", config(num_labels=10**9)),
    "wants [0-9]+ weights, and its files have": ("gpt2", config(n_positions=10**6)),
    "decoder_sparse_step = 0: must be": ("qwen3_moe", config(decoder_sparse_step=0)),
    "tokenizer: cannot be loaded .*UNK": ("olmoe", no_unknown_token),
    "model.safetensors is a FIFO; must be": ("qwen2", device(WEIGHTS, os.mkfifo)),
    "chat_template.jinja is a device; must be": ("qwen2", device("chat_template.jinja", endless)),
    "config.json has [0-9]+ bytes; must be at most": ("qwen2", large("generation_config.json")),
    "generation_config.json could not be saved .*temperature": ("llama", changed(GENERATION, ("temperature",), 0.5)),
    "cannot be loaded .*Field 'architectures' with value 5": ("llama", config(architectures=5)),
}  # fmt: skip


REFUSED = [("qwen3", *case) for case in (*OF_CONFIG.values(), *OF_FILES.values())]
REFUSED += [(family, damage, message) for message, (family, damage) in OF_FAMILIES.items()]


@pytest.mark.parametrize(("family", "damage", "message"), REFUSED, ids=[*OF_CONFIG, *OF_FILES, *OF_FAMILIES])
def test_a_damaged_folder_is_refused_in_one_line_at_once(
    family: str, damage: Damage, message: str, tmp_path: Path
) -> None:
    folder = make(tmp_path / "model", small_model({**CONFIGS, **MIXTURES}[family](), 0))
    damage(folder)
    start = time.process_time()
    with pytest.raises(UserError, match=rf"^model\.path = \S+: .*{message}") as refused:
        load_folder(folder)
    assert len(str(refused.value)) < 700
    assert "\n" not in str(refused.value)
    assert time.process_time() - start < SECONDS


@pytest.mark.parametrize("end", ["x", VOCAB, -1, [1, None, 2.5]])
def test_an_end_token_that_is_none_of_the_model_is_refused(end: object, folder: Path) -> None:
    text("generation_config.json", json.dumps({"eos_token_id": end}))(folder)
    model, tokenizer = load_folder(folder)
    with pytest.raises(UserError, match="eos_token_id = "):
        stop_ids(model, tokenizer)


WHOLE: dict[str, Damage] = {
    "as saved": lambda folder: None,
    "with an index": index("part.safetensors"),
    "a head that is the embedding": tensors(lambda held: held.update({"lm_head.weight": held[EMBEDDING].clone()})),
    "an unknown field": config(wobble=3),
    "frequencies of an older version": tensors(
        lambda held: held.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    ),
    "through links": lambda folder: (
        (folder / WEIGHTS).rename(folder / "blob") and (folder / WEIGHTS).symlink_to(folder / "blob")
    ),
}


@pytest.mark.parametrize("change", WHOLE.values(), ids=WHOLE)
def test_a_whole_folder_loads_with_its_bits(change: Damage, folder: Path) -> None:
    change(folder)
    model, tokenizer = load_folder(folder)
    expected = small_model(qwen3_config(), 0).state_dict()
    assert {name: unequal(x, expected[name]) for name, x in model.state_dict().items()} == dict.fromkeys(expected, 0)
    assert stop_ids(model, tokenizer) == {1}


def test_a_folder_in_bfloat16_loads_as_its_float32_copy(tmp_path: Path) -> None:
    source = small_model(qwen3_config(), 0).bfloat16()
    model, _ = load_folder(make(tmp_path / "model", source))
    assert (tmp_path / "model" / WEIGHTS).stat().st_size < 2.2 * sum(p.numel() for p in source.parameters())
    assert {name: unequal(x, source.state_dict()[name].float()) for name, x in model.state_dict().items()} == (
        dict.fromkeys(source.state_dict(), 0)
    )


def test_a_reward_model_is_checked_in_the_same_way(tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = make(tmp_path / "reward", LlamaForSequenceClassification(llama_config(num_labels=1)).eval())
    load_reward_model(folder, "native", 16)
    tensors(lambda held: held.update({"score.weight": torch.zeros(2, 48)}))(folder)
    with pytest.raises(UserError, match=r"^reward model .*score\.weight has the shape \[2, 48\]; .* wants \[1, 48\]"):
        load_reward_model(folder, "native", 16)
