"""Load any causal model of transformers from a folder, in float32, without running its code or using the network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ppo_repro.base.errors import UserError
from ppo_repro.base.output import say, shown
from ppo_repro.models.folder_files import NOT_WEIGHTS, check_size, check_weights, has_tokenizer
from ppo_repro.models.reading import reading
from ppo_repro.models.stock import float64
from ppo_repro.testing.audit.causes.fields import FieldChange, with_fields
from ppo_repro.testing.audit.causes.names import WINDOW
from ppo_repro.testing.audit.ignored_options import not_computed
from ppo_repro.testing.audit.patches import copied
from ppo_repro.testing.audit.stack import positions, vocabulary

PROBE = 2, 16  # tokens on which two implementations of attention are compared
PROBE_WINDOW = 5  # tokens of a sliding window in this comparison: the model's own is longer than the probe
SAME = 1e-12  # of the largest logit, in float64: another order of sums
FROM_DISK = {"local_files_only": True, "trust_remote_code": False}


def load_model(option: str, folder: Path, device: str) -> PreTrainedModel:
    """Load the model of a folder after `check_folder`, in evaluation mode. Raises UserError if that fails."""
    where = f"{option} {folder}"
    found = check_weights(folder, where)
    loaded: Any = AutoModelForCausalLM
    with reading(where):
        with torch.device("meta"):
            empty = loaded.from_config(AutoConfig.from_pretrained(folder, **FROM_DISK))
        check_size(sum(parameter.numel() for parameter in empty.parameters()), found, where)
        model, report = loaded.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",  # the family's own; others may leave out soft caps or sinks
            experts_implementation="eager",  # grouped products refuse rows of no multiple of 16 bytes
            use_safetensors=True,
            output_loading_info=True,
            **FROM_DISK,
        )
    _check_tensors(model, report, where)
    model.config.pad_token_id = None  # a prompt may hold it, of which transformers would warn
    with reading(where):  # a value may be wrong only where it is used
        _check_computed(model.eval(), where)
        _take_fused_attention(model)
    return model.to(device)


def _check_tensors(model: PreTrainedModel, report: Mapping[str, Any], where: str) -> None:
    """Raise UserError for tensors that the folder lacks, or that the model does not use, or that are not finite."""
    missing = sorted(report["missing_keys"])  # transformers fills them with random numbers
    if missing:
        raise UserError(f"{where}: has no tensor {missing[0]}; save the model again")
    unused = sorted(name for name in report["unexpected_keys"] if not NOT_WEIGHTS.search(name))
    if unused:
        raise UserError(
            f"{where}: has the tensor {unused[0]}, which {type(model).__name__} of transformers does not use, so there "
            "is no verdict; take the class that the weights were trained with, or remove the tensor"
        )
    broken = [name for name, parameter in model.named_parameters() if not bool(torch.isfinite(parameter).all())]
    if broken:
        raise UserError(f"{where}: tensor {broken[0]} has numbers that are not finite; restore it")


def _check_computed(model: PreTrainedModel, where: str) -> None:
    """Raise UserError for options of config.json that the model's code ignores."""
    ignored = not_computed(model)
    if ignored:
        field, value = next(iter(ignored.items()))
        raise UserError(
            f"{where}: config.json has {field} = {value}, which {type(model).__name__} of transformers does not "
            "compute, so there is no verdict; take the class that the weights were trained with"
        )
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    is_tied = model.config.get_text_config().tie_word_embeddings and head is not None
    if is_tied and not torch.equal(head.weight, embedding.weight):
        raise UserError(
            f"{where}: config.json has tie_word_embeddings = true, and an output matrix that is not the embedding, so "
            "there is no verdict; set it to false, or remove the output matrix"
        )


@torch.no_grad()
def _take_fused_attention(model: PreTrainedModel) -> None:
    """Switch to torch's fused attention, which needs less memory, if its results agree with the model's attention."""
    size, tried = vocabulary(model), cast(Any, _with_short_windows(model))
    lengths = {int(min(length, positions(model))) for length in PROBE}

    def probed() -> list[Tensor]:
        return [tried(torch.arange(length)[None] % size, use_cache=False).logits for length in lengths]

    with float64(tried):
        eager = probed()
        try:
            tried.set_attn_implementation("sdpa")
            pairs = zip(probed(), eager, strict=True)
            is_same = all(torch.allclose(x, y, rtol=0.0, atol=SAME * float(y.abs().max())) for x, y in pairs)
        except (ValueError, RuntimeError, TypeError):  # a class may have no other than its own
            is_same = False
    if is_same:
        model.set_attn_implementation("sdpa")


def _with_short_windows(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with windows shorter than the longest probe; a field that `WINDOW` does not name stays."""
    fields = model.config.get_text_config().to_dict().items()
    windows = [(field, value) for field, value in fields if WINDOW.recognise(field) and type(value) is int]
    return with_fields(model, [FieldChange((field,), value, min(value, PROBE_WINDOW)) for field, value in windows])


def last_matrices(model: PreTrainedModel, others: Mapping[str, PreTrainedModel]) -> dict[str, PreTrainedModel]:
    """Return models with the output matrix of each of `others` that has the same shape; other weights are shared."""
    found, last = {}, model.get_output_embeddings()
    for name, other in others.items():
        head = other.get_output_embeddings()
        if last is not None and head is not None and head.weight.shape == last.weight.shape:
            found[name] = copied(model)
            found[name].set_output_embeddings(head)
    return found


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a folder; None if there is none, or, with a line on stderr, if it does not load."""
    if not has_tokenizer(folder):  # transformers may make an empty one
        return None
    try:
        with reading("its tokenizer"):
            return AutoTokenizer.from_pretrained(folder, **FROM_DISK)
    except UserError as error:
        say(f"--model {folder}: {shown(str(error))}; causes that need it are left out")
        return None
