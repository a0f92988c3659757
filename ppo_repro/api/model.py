"""Copy a transformers model by `deterministic`. No batch layout changes the copy's results."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from ppo_repro.api.passes import Passes, Watched, new_passes
from ppo_repro.base.errors import UserError
from ppo_repro.base.mode import Precision
from ppo_repro.config.section import MAX_FLOAT, MAX_THREADS
from ppo_repro.numerics import library, network
from ppo_repro.numerics.families import CAUSAL_MODELS, NAMES, positions_of
from ppo_repro.numerics.interface import ints
from ppo_repro.numerics.lowering import Lowered, is_deterministic, lower, lowered_of, set_recompute
from ppo_repro.numerics.matrices import PRECISIONS
from ppo_repro.numerics.network import Network, network_of
from ppo_repro.numerics.sequences import Ragged, ragged
from ppo_repro.numerics.token_statistics import token_statistics

IGNORED = -100  # the label of a position that does not count, as in transformers
MAX_CONTEXT = 32768  # as of `numerics.max_context`


@dataclass(frozen=True)
class Layout:
    """Batch of R rows of L positions, on the CPU. Padding is token 0 at position 0."""

    input_ids: Tensor  # [R, L] int64
    position_ids: Tensor  # [R, L] int64, from 0 in each sequence
    real: Tensor  # [R, L] bool, False for padding

    def sequences(self) -> Ragged:
        """Return the sequences in the order of rows; their gradients are one chain, which the next batch continues."""
        starts = np.flatnonzero(self.position_ids[self.real].numpy() == 0)
        tokens = [part.tolist() for part in np.split(self.input_ids[self.real].numpy(), starts[1:])]
        return ragged(tokens, slots=ints(np.zeros(len(tokens) + 1)))

    def follows(self) -> Tensor:
        """Return a bool [R, L]: whether the next position of the row belongs to the same sequence."""
        next_goes_on = self.real[:, 1:] & self.real[:, :-1] & (self.position_ids[:, 1:] > 0)
        return torch.cat([next_goes_on, torch.zeros_like(self.real[:, :1])], 1)


def is_whole(value: object) -> bool:
    """Return whether a value is a whole number of Python or NumPy."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_number(name: str, value: object, least: float, most: float = MAX_FLOAT, whole: bool = False) -> None:
    """Raise UserError unless an argument is a number in a range.

    Args:
        name: name of the argument, for the error.
        value: value of the argument.
        least: smallest allowed number.
        most: largest allowed number.
        whole: whether the number must be an integer.
    """
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real) or not least <= value <= most:  # type: ignore[operator]
        shown = " ".join(f"{value!r:.60}".split())
        raise UserError(f"{name} = {shown}: must be a {'whole ' if whole else ''}number in {least:g}..{most:g}")


def _described(x: object) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else f"of type {type(x).__name__}"


def _same_shape(name: str, x: Tensor, ids: Tensor) -> Tensor:
    if not isinstance(x, Tensor) or x.shape != ids.shape or x.is_floating_point():
        raise UserError(f"{name}: is {_described(x)}; must be whole numbers {list(ids.shape)}, as input_ids")
    return x.cpu()


def layout_of(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
) -> Layout:
    """Return the layout of padded or packed rows for a deterministic model. Raises UserError for the first mistake.

    Args:
        model: a model of `deterministic`.
        input_ids: [R, L] int64 or int32.
        attention_mask: [R, L], 1 for tokens and 0 for padding, which lies before or after the tokens of a row; None: no
            padding.
        position_ids: [R, L], positions from 0 in each sequence of a packed row; None: one sequence in each row.
    """
    passes_of(model)
    vocab_size, context = model.config.vocab_size, max_context(model)
    whole = isinstance(input_ids, Tensor) and input_ids.dtype in (torch.int64, torch.int32)
    if not whole or input_ids.dim() != 2 or not input_ids.numel():
        raise UserError(
            f"input_ids: is {_described(input_ids)}; must be an int64 tensor [rows, length], neither of them 0"
        )
    ids = input_ids.to("cpu", torch.int64)
    mask = torch.ones_like(ids) if attention_mask is None else _same_shape("attention_mask", attention_mask, ids)
    real = mask != 0
    if bool((real & (mask != 1)).any()):
        raise UserError("attention_mask: must hold 0 and 1 only")
    counts = real.to(torch.int64).cumsum(1)
    columns = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    positions = (counts - 1).masked_fill(~real, 0)
    first = (columns - positions).masked_fill(~real, 0)
    if bool((first != first.amax(1, keepdim=True)).logical_and(real).any()):
        raise UserError("attention_mask: a row has padding between its tokens; it may lie before or after them only")
    if position_ids is not None:
        if isinstance(position_ids, Tensor) and position_ids.shape in (ids.shape[1:], (1, ids.shape[1])):
            position_ids = position_ids.expand_as(ids)
        positions = _positions(_same_shape("position_ids", position_ids, ids), real)
    outside = real & ((ids < 0) | (ids >= vocab_size))
    if bool(outside.any()):
        row, column = torch.nonzero(outside)[0].tolist()
        raise UserError(
            f"input_ids[{row}, {column}] = {int(ids[row, column])}: must be in 0..{vocab_size - 1}; "
            "check that tokenizer and model belong together, and that attention_mask is 0 at padding"
        )
    longest = int(positions.max()) + 1
    if longest > context:
        raise UserError(
            f"input_ids: a sequence has {longest} tokens; deterministic(model, max_context={context}) takes no more"
        )
    return Layout(ids.masked_fill(~real, 0), positions, real)


def _positions(given: Tensor, real: Tensor) -> Tensor:
    """Return positions [R, L], 0 at padding. Raises UserError unless they count from 0 in every sequence."""
    positions = given.to(torch.int64).masked_fill(~real, 0)
    before = torch.cat([torch.full_like(positions[:, :1], -1), positions[:, :-1]], 1)
    goes_on = torch.cat([torch.zeros_like(real[:, :1]), real[:, :-1]], 1) & (positions == before + 1)
    wrong = real & (positions != 0) & ~goes_on
    if bool(wrong.any()):
        row, column = torch.nonzero(wrong)[0].tolist()
        raise UserError(
            f"position_ids[{row}, {column}] = {int(positions[row, column])}: must be one more than the one before it, "
            "or 0 where a sequence begins; leave them out for one sequence in each row"
        )
    return positions


def deterministic(
    model: PreTrainedModel,
    *,
    threads: int | None = None,
    max_context: int | None = None,
    precision: Precision = "highest",
) -> PreTrainedModel:
    """Copy an unmodified float32 causal model of transformers. No batch layout changes a bit of the copy's results.

    Call the copy as before: `model(input_ids, attention_mask, position_ids=, labels=, logits_to_keep=)`, all int64
    [R, L], padding before or after the tokens of a row. `position_ids` are needed for packing only: they count from 0
    in each sequence. `.logits` are float32 [R, L, V], 0 at padding. `.loss` is the mean of -log p(label) in nats over
    the labels that count, or the sum over `num_items_in_batch`. `backward()` adds to `.grad`, sequence after
    sequence. After `.to("cuda")` the copy computes the same bits on a GPU. `threads` (of the whole process) is by
    default torch's number, `max_context` the model's, at most 32768. `precision="high"` computes the products of linear
    layers with exact sums of integers: faster, with larger errors.

    Raises UserError for models, shapes, ids and options that are not supported.

    Source: ppo_repro/numerics/README.md has the order of each sum. The example of `generate` calls this function.
    """
    if type(model) not in CAUSAL_MODELS or is_deterministic(model):
        raise UserError(f"deterministic: cannot take {type(model).__name__}; give an unmodified {NAMES} causal model")
    if threads is not None:
        check_number("deterministic: threads", threads, 1, MAX_THREADS, whole=True)
    if max_context is not None:
        check_number("deterministic: max_context", max_context, 1, MAX_CONTEXT, whole=True)
    if precision not in PRECISIONS:
        raise UserError(f"deterministic: precision = {precision!r}: must be one of {', '.join(PRECISIONS)}")
    for name in ("output_router_logits", "output_attentions", "output_hidden_states"):
        if getattr(model.config, name, False):
            raise UserError(f"deterministic: config.{name} = True is not supported; set it to False")
    if getattr(model.config, "loss_type", None) not in (None, "ForCausalLM"):
        raise UserError(
            f"deterministic: config.loss_type = {model.config.loss_type!r} is not supported; set it to None"
        )
    if "forward" in vars(model):
        raise UserError("deterministic: the model has a forward of its own, which would not be called; remove it")
    if torch.is_inference_mode_enabled():
        raise UserError(
            "deterministic: inference mode makes weights that cannot be trained; copy the model outside of it"
        )
    copied: Any = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.grad = None
    longest = max_context or min(positions_of(model.config), MAX_CONTEXT)
    lower(copied, Lowered(longest, moves_weights=False, precision=precision))
    copied._passes = new_passes(copied)
    copied.forward = partial(_forward, copied)  # unlike a method, it can be saved
    copied.generate = partial(_no_generate, copied)
    copied.accepts_loss_kwargs = True  # transformers' Trainer then passes num_items_in_batch
    begin_pass(copied)
    # the network checks the configuration now, and weights move now, before the caller can keep a view of one
    cast(Network, network_of(copied)).model.fuse()
    library.set_threads(min(torch.get_num_threads(), MAX_THREADS) if threads is None else threads)
    return cast(PreTrainedModel, copied)


def passes_of(model: PreTrainedModel) -> Passes:
    """Return the state of a deterministic model between passes. Raises UserError for another model."""
    passes = getattr(model, "_passes", None)
    if not isinstance(passes, Passes):
        raise UserError(f"{type(model).__name__} is not deterministic; make it so with ppo_repro.deterministic(model)")
    return passes


def max_context(model: PreTrainedModel) -> int:
    """Return the largest number of tokens in a sequence of a deterministic model."""
    return cast(Lowered, lowered_of(model)).max_context


def begin_pass(model: PreTrainedModel) -> None:
    """Prepare a deterministic model for a pass with its present weights.

    Raises UserError if it cannot compute with them.
    """
    passes_of(model).begin(model)
    set_recompute(model, model.is_gradient_checkpointing)


def logits_at(model: PreTrainedModel, layout: Layout, places: Tensor) -> Tensor:
    """Compute differentiable logits [n, V] float32 of a deterministic model at flat positions `places` [n] int64."""
    begin_pass(model)
    passes = passes_of(model)
    edge = passes.edge() if torch.is_grad_enabled() else None
    batch = layout.sequences().with_sums(passes.sums, edge)
    tokens = ints((layout.real.reshape(-1).cumsum(0) - 1)[places])
    hidden, _ = cast(Network, network_of(model)).over_batch(batch, tokens)
    logits = network.logits(model, hidden, batch.rows.select(tokens))
    return logits if edge is None else Watched.apply(logits, model, edge.grad_fn)


class _Sum(Function):
    """Compute sum_t x_t, correctly rounded to float64, then to float32. Each term has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return torch.tensor(math.fsum(x.detach().to(torch.float64).tolist()), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.expand(ctx.shape).contiguous()


def _checked_labels(layout: Layout, labels: Tensor, vocab_size: int) -> Tensor:
    """Return the labels [R, L] on the CPU. Raises UserError for the first label that no token may have."""
    whole = isinstance(labels, Tensor) and not (labels.is_floating_point() or labels.dtype == torch.bool)
    if not whole or labels.shape != layout.real.shape:
        raise UserError(f"labels: must be whole numbers {list(layout.real.shape)}, as input_ids")
    labels = labels.cpu()
    counts = labels != IGNORED
    for wrong, rule in (
        (counts & ~layout.real, f"is at padding; must be {IGNORED} there"),
        (counts & ((labels < 0) | (labels >= vocab_size)), f"must be {IGNORED} or in 0..{vocab_size - 1}"),
    ):
        if bool(wrong.any()):
            row, column = torch.nonzero(wrong)[0].tolist()
            raise UserError(f"labels[{row}, {column}] = {int(labels[row, column])}: {rule}")
    return labels


def _loss(layout: Layout, labels: Tensor, logits: Tensor, rows: Tensor, items: Tensor | int | None) -> Tensor:
    """Return the sum of -log p(label), in nats, over the labels that count, divided by their number or by `items`."""
    labels = _checked_labels(layout, labels, logits.shape[-1])
    divisor = items.item() if isinstance(items, Tensor) else items
    if divisor is not None:
        check_number("num_items_in_batch", divisor, 1)
    predicts = layout.follows()  # [R, L]: whether the token predicts a label that counts
    predicts[:, :-1] &= labels[:, 1:] != IGNORED
    targets = torch.roll(labels, -1, 1)[predicts].to(torch.int64)
    if not len(targets):
        raise UserError("labels: none of them counts; a label counts where it is not -100 and a token comes before it")
    predicting = predicts.reshape(-1)[rows]
    predictions = logits if bool(predicting.all()) else logits[predicting]
    logprobs, _ = token_statistics(predictions, targets, 1.0, None, "deterministic")
    # divided on the CPU: a GPU would multiply by the inverse of a Python number
    return (_Sum.apply(-logprobs) / (len(targets) if divisor is None else divisor)).to(logits.device)


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
    """Compute the logits, and the loss if there are labels; `deterministic` describes the arguments."""
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
            raise UserError(f"deterministic model: {name} is not supported; leave it out (ppo_repro.generate samples)")
    if not isinstance(logits_to_keep, int) or logits_to_keep < 0 or (logits_to_keep and labels is not None):
        raise UserError(f"logits_to_keep = {logits_to_keep!r}: must be a count from 0, and 0 with labels")
    layout = layout_of(self, input_ids, attention_mask, position_ids)
    wanted = layout.real[:, -logits_to_keep:]  # -0 keeps all
    rows = torch.arange(layout.real.numel()).view_as(layout.real)[:, -logits_to_keep:][wanted]
    if not len(rows):
        raise UserError("attention_mask: there is no token to compute; every position is padding")
    logits = logits_at(self, layout, rows)
    loss = None if labels is None else _loss(layout, labels, logits, rows, num_items_in_batch)
    if not bool(wanted.all()):  # zeros at padding
        full = logits.new_zeros(wanted.numel(), logits.shape[-1])
        logits = full.index_copy(0, torch.nonzero(wanted.reshape(-1))[:, 0].to(full.device), logits)
    return CausalLMOutput(loss=loss, logits=logits.view(*wanted.shape, -1))  # type: ignore[arg-type]


def _no_generate(self: PreTrainedModel, *_: object, **__: object) -> NoReturn:
    raise UserError(
        "deterministic model: sample with ppo_repro.generate(model, prompts, ...), whose log-probs are the model's"
    )
