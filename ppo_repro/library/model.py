"""`exact`: a copy of a transformers model that is used as before and computes in exact numerics."""

from __future__ import annotations

import copy
import math
from types import MethodType
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.autograd import Function
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from ppo_repro.errors import UserError
from ppo_repro.library.checks import check_count, check_number
from ppo_repro.library.gradients import ExactGradients, with_gradients
from ppo_repro.library.layout import Layout, make_layout
from ppo_repro.numerics import library
from ppo_repro.numerics.families import CAUSAL_MODELS, NAMES, head_of, trunk_of
from ppo_repro.numerics.gradient_bins import GradientBins
from ppo_repro.numerics.kernels.core.fingerprint import fingerprint
from ppo_repro.numerics.layers.lowering import is_exact, lower
from ppo_repro.numerics.products import array
from ppo_repro.numerics.token_statistics import token_statistics
from ppo_repro.numerics.trunk.forward import TrunkForward

IGNORED = -100  # the label of a position that does not count, as in transformers
MOST_THREADS, MOST_CONTEXT = 1024, 32768  # as in a configuration
LONGEST = 4096  # of the context, where none is asked for: attention and tables are made for it


def exact(model: PreTrainedModel, *, max_context: int | None = None, threads: int | None = None) -> PreTrainedModel:
    """A copy of a causal model that is used like `model` and computes in exact numerics: y = model(x), in every layout.

    Log-probs and gradients of a token are the same bits whatever else is in the batch: padding on either side, other
    rows, micro-batches, packing, threads. The copy keeps class, parameter names, `state_dict` and `save_pretrained`.

    Args:
        model: a causal model of transformers in float32: Llama, Qwen2, Qwen3, Mistral, Gemma, GPT-2 or GPT-NeoX.
        max_context: the most tokens in a sequence; by default the model's own number of positions, at most 4096.
        threads: of the kernels; by default as many as torch has. They hold for the whole process, in which torch itself
            keeps one thread. They change the speed and no bit.

    Call it as before: `model(input_ids, attention_mask, position_ids=, labels=, logits_to_keep=)`.

    - `input_ids` int64 [R, L]; `attention_mask` [R, L] of 0 and 1, padding before or after the tokens of a row.
      `position_ids` are not needed: positions count from 0 at the first token of each row, on either side of padding.
      Given, they count from 0 in each sequence, and a row may hold several sequences (packing).
    - `.logits` float32 [R, L, V], zeros at padding.
    - with `labels` int64 [R, L], -100 where nothing counts: `.loss`, the mean of -log p(label) in nats over all labels
      that follow a token of their sequence, or their sum over `num_items_in_batch`. The sum is rounded once.
    - `loss.backward()` adds to `.grad`: exact sums over all passes since the gradients were zeroed, rounded once to
      float32. So the sums over micro-batches are those of the whole batch, if each token's loss has the same weight.

    Raises UserError in one line for a model, a setting or a type that is not supported, and in the forward pass for
    wrong shapes, ids outside the vocabulary, holes in the mask and options without an exact meaning (caches,
    `inputs_embeds`, attention weights). Dropout is off. Generate with `ppo_repro.generate`.

    Source: the numerics are described in ppo_repro/numerics/README.md.

    >>> import torch, ppo_repro
    >>> from ppo_repro.testing.small_models import CONFIGS, small_model
    >>> model = ppo_repro.exact(small_model(CONFIGS["llama"](), seed=0))
    >>> ids, alone = torch.tensor([[7, 8, 9, 0, 0], [1, 2, 3, 4, 5]]), torch.tensor([[7, 8, 9]])
    >>> mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    >>> bool((model(ids, mask).logits[:1, :3] == model(alone).logits).all())
    True
    """
    if type(model) not in CAUSAL_MODELS or is_exact(model):
        raise UserError(f"exact: cannot take {type(model).__name__}; give an unchanged {NAMES} causal model")
    if threads is not None:
        check_count("exact: threads", threads, 1, MOST_THREADS)
    if max_context is not None:
        check_count("exact: max_context", max_context, 1, MOST_CONTEXT)
    context = _context(model) if max_context is None else max_context
    copied: Any = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.grad = None
    lower(copied, context)
    library.use_threads(torch.get_num_threads() if threads is None else threads)
    copied._exact_gradients = ExactGradients(GradientBins(copied.named_parameters()))
    copied._exact_context = context
    copied._exact_tables = tables_of(copied)
    copied.forward = MethodType(_forward, copied)
    copied.generate = MethodType(_no_generate, copied)
    copied.accepts_loss_kwargs = True  # transformers' Trainer gives num_items_in_batch then
    return cast(PreTrainedModel, copied)


def _context(model: PreTrainedModel) -> int:
    return int(min(model.config.max_position_embeddings, LONGEST))


def gradients_of(model: PreTrainedModel) -> ExactGradients:
    """The gradients of an exact model; UserError for another model."""
    found = getattr(model, "_exact_gradients", None)
    if not isinstance(found, ExactGradients):
        raise UserError(f"{type(model).__name__} is not exact; make it so with ppo_repro.exact(model)")
    return found


def layout_of(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
) -> Layout:
    """The layout of a batch for an exact model, checked."""
    begin_pass(model)
    context = cast(int, model._exact_context)
    return make_layout(input_ids, attention_mask, position_ids, model.config.vocab_size, context)


def begin_pass(model: PreTrainedModel) -> None:
    """Before an exact model computes: see the weights as they are. UserError where it cannot compute with them."""
    gradients = gradients_of(model)
    for name, parameter in gradients.bins.parameters.items():
        if parameter.dtype != torch.float32:
            raise UserError(f"model parameter '{name}' is {parameter.dtype}; exact numerics need float32")
    if tables_of(model) != model._exact_tables:
        raise UserError(
            "exact model: its tables of rotary positions were changed, as by a cast to another type and back; make a "
            "new one with ppo_repro.exact"
        )
    backend.check_denormals()
    gradients.look_at_weights(model)


def tables_of(model: PreTrainedModel) -> tuple[tuple[str, torch.dtype, int], ...]:
    """Name, type and fingerprint of each buffer of an exact model; all of them are made when it is."""
    return tuple(
        (name, buffer.dtype, fingerprint(array(buffer)) if buffer.dtype == torch.float32 else 0)
        for name, buffer in model.named_buffers()
    )


def logits_at(model: PreTrainedModel, layout: Layout, rows: Tensor) -> Tensor:
    """Logits [n, V] float32 of an exact model at the flat positions `rows` [n] int64; differentiable as in `exact`."""

    def compute() -> Tensor:
        trunk = TrunkForward(trunk_of(model))
        hidden = trunk.over_batch(layout.input_ids, layout.position_ids, layout.first_key, rows)
        return head_of(model)(hidden)

    return with_gradients(model, gradients_of(model), compute)


class _Sum(Function):
    """sum_t x_t, correctly rounded in float64, then to float32; the gradient of each term is that of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return torch.tensor(math.fsum(x.detach().to(torch.float64).tolist()), dtype=torch.float32, device=x.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.expand(ctx.shape).contiguous()


def _loss(layout: Layout, labels: Tensor, logits: Tensor, rows: Tensor, items: Tensor | int | None) -> Tensor:
    """The sum of -log p(label) over the labels that count, through their number or `items`; nats."""
    whole = isinstance(labels, Tensor) and not (labels.is_floating_point() or labels.dtype == torch.bool)
    if not whole or labels.shape != layout.real.shape:
        raise UserError(f"labels: must be whole numbers {list(layout.real.shape)}, as input_ids")
    if items is not None:
        check_number("num_items_in_batch", items.item() if isinstance(items, Tensor) else items, 1)
    counts = labels != IGNORED
    vocab_size = logits.shape[-1]
    for wrong, rule in (
        (counts & ~layout.real, f"is at padding; must be {IGNORED} there"),
        (counts & ((labels < 0) | (labels >= vocab_size)), f"must be {IGNORED} or in 0..{vocab_size - 1}"),
    ):
        if bool(wrong.any()):
            row, column = torch.nonzero(wrong)[0].tolist()
            raise UserError(f"labels[{row}, {column}] = {int(labels[row, column])}: {rule}")
    predicting = layout.follows()
    predicting[:, :-1] &= counts[:, 1:]
    flat = predicting.reshape(-1)
    targets = torch.roll(labels, -1, 1).reshape(-1)[flat].to(torch.int64)
    picked = flat[rows]
    if not len(targets):
        raise UserError("labels: none of them counts; a label counts where it is not -100 and a token comes before it")
    chosen = logits if bool(picked.all()) else logits[picked]
    logprobs, _ = token_statistics(chosen, targets, 1.0, None, "exact")
    return _Sum.apply(-logprobs) / (len(targets) if items is None else items)


def _forward(
    self: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    labels: Tensor | None = None,
    logits_to_keep: int = 0,
    num_items_in_batch: Tensor | int | None = None,
    past_key_values: None = None,
    inputs_embeds: None = None,
    use_cache: bool | None = None,
    output_attentions: bool | None = None,
    output_hidden_states: bool | None = None,
    return_dict: bool | None = None,
) -> CausalLMOutput:
    """See `exact`."""
    refused = {
        "past_key_values": past_key_values is not None,
        "inputs_embeds": inputs_embeds is not None,
        "use_cache": bool(use_cache),
        "output_attentions": bool(output_attentions),
        "output_hidden_states": bool(output_hidden_states),
        "return_dict = False": return_dict is False,
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise UserError(f"exact model: {name} is not supported; leave it out (ppo_repro.generate samples)")
    if not isinstance(logits_to_keep, int) or logits_to_keep < 0 or (logits_to_keep and labels is not None):
        raise UserError(f"logits_to_keep = {logits_to_keep!r}: must be a count from 0, and 0 with labels")
    layout = layout_of(self, input_ids, attention_mask, position_ids)
    wanted = layout.real.clone()
    width = min(logits_to_keep or wanted.shape[1], wanted.shape[1])
    wanted[:, : wanted.shape[1] - width] = False
    rows = torch.nonzero(wanted.reshape(-1))[:, 0]
    if not len(rows):
        raise UserError("attention_mask: there is no token to compute; every position is padding")
    logits = logits_at(self, layout, rows)
    loss = None if labels is None else _loss(layout, labels, logits, rows, num_items_in_batch)
    return CausalLMOutput(loss=loss, logits=_among_padding(logits, wanted[:, -width:]))  # type: ignore[arg-type]


def _among_padding(logits: Tensor, wanted: Tensor) -> Tensor:
    """Logits [n, V] at the positions `wanted` [R, L], zeros at the others: [R, L, V]."""
    if bool(wanted.all()):
        return logits.view(*wanted.shape, -1)
    places = torch.nonzero(wanted.reshape(-1))[:, 0]
    full = logits.new_zeros(wanted.numel(), logits.shape[-1])
    return full.index_copy(0, places, logits).view(*wanted.shape, -1)


def _no_generate(self: PreTrainedModel, *_: object, max_new_tokens: int = 0) -> NoReturn:
    raise UserError("exact model: sample with ppo_repro.generate(model, prompts, ...), whose log-probs are the model's")
