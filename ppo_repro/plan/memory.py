"""How much memory the parts of a run need, by arithmetic alone: no torch, no weights. `plan.shapes` reads the shapes.

Everything is in bytes. Weights, moments, gradient sums and operands are counted exactly; `plan.phases` says which of
them are there at the same time. What else a phase needs is an estimate for prompts and responses of the longest
allowed length; the allocator may keep more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from ppo_repro.plan import mixtures
from ppo_repro.plan.mixtures import Mixture
from ppo_repro.plan.models import Linear, ModelShape
from ppo_repro.plan.work import Work

# copies of constants of the kernels and of stages.forward, which import torch; a test compares them
KEY_PANEL, VALUE_LANES, TILE = 32, 8, 1024
LOGITS_AT_ONCE = 1 << 24
# weights and inputs as the exact kernels keep them, in bytes per number; a weight that is multiplied across its rows,
# as in a backward pass, is packed block by block while it is used: only the grids are kept
FLOAT64_WEIGHT, FLOAT64_INPUT, FLOAT64_COLUMNS, FLOAT64_SQUARES = 4, 8, 24, 8
GRID, OUTLIERS = 8, 1  # of each output: exponent or scale of its grid, and whether it has outliers
AMX_MAX_TERMS, AMX_WEIGHT, AMX_INPUT = 1 << 14, 3, 4
# of products and of statistics whose sums several processes divide, which have no kernels: a weight as integers in
# float64 and which of them are outliers; a logit, and a number of a result, with the copies that are made on the way
DIVIDED_WEIGHT, DIVIDED_LOGIT, DIVIDED_RESULT = 8 + 1, 64, 40
# sums of gradients: a lower limb, and an upper one in long steps
SUM, UPPER_SUM = 8, 4
# the interpreter with torch and transformers, and compiled kernels; 0.2 GB of it are files that the system takes back
# when memory is short
PROCESS = 700_000_000

# what mixed-precision Adam keeps for each parameter: weight and gradient in 16 bits, and a master weight and two
# moments in 32 bits; a frozen model has its weight in 16 bits. Rajbhandari et al., 2020, section 3.1
MIXED_PRECISION_TRAINED, MIXED_PRECISION_FROZEN = 2 + 2 + 4 + 4 + 4, 2


@dataclass(frozen=True)
class Resident:
    """One model: what stays from the first step to the end of the run, and what it needs while it works."""

    name: str
    weights: int
    moments: int
    gradient_sums: int  # in the update: integers, in exact numerics only
    gradients: int  # in the update: float32; in exact numerics they take the place of their sums
    operands: int  # while the model is at work: its own weights prepared for the exact kernels
    trained_parameters: int
    frozen_parameters: int

    @property
    def total(self) -> int:
        """What stays."""
        return self.weights + self.moments

    @property
    def mixed_precision(self) -> int:
        return mixed_precision_bytes(self.trained_parameters, self.frozen_parameters)


COUNTED = ("older policies", "operands", "gradient sums", "gradients")  # purposes of a phase that are no estimates


@dataclass(frozen=True)
class Plan:
    """Memory of a run. `phases` is what each phase needs in addition to the resident models, by purpose."""

    work: Work
    residents: tuple[Resident, ...]
    phases: dict[str, dict[str, int]]

    @property
    def resident(self) -> int:
        """What stays from the first step to the end of the run."""
        return sum(r.total for r in self.residents)

    @property
    def certain(self) -> int:
        """What is needed at once in any case: all of the largest phase that is no estimate."""
        return self.resident + max(sum(amounts.get(name, 0) for name in COUNTED) for amounts in self.phases.values())

    @property
    def peak(self) -> int:
        return PROCESS + self.resident + max(sum(amounts.values()) for amounts in self.phases.values())


def mixed_precision_bytes(trained: int, frozen: int) -> int:
    """Weights, gradients and optimizer state of mixed-precision Adam, without activations and caches."""
    return MIXED_PRECISION_TRAINED * trained + MIXED_PRECISION_FROZEN * frozen


def prepared_bytes(matrix: Linear, transposed: bool, work: Work) -> int:
    """A weight prepared for exact products over its inputs, or with `transposed` over its outputs."""
    if not work.exact:
        return 0
    terms, columns = (matrix.outputs, matrix.inputs) if transposed else (matrix.inputs, matrix.outputs)
    if matrix.divided == ("outputs" if transposed else "inputs"):
        return DIVIDED_WEIGHT * matrix.size + GRID * columns
    if work.kernels == "amx" and terms <= AMX_MAX_TERMS:
        blocks = ceil(columns / 16)
        return blocks * ceil(terms / 64) * AMX_WEIGHT * TILE + blocks * 16 * GRID + columns * OUTLIERS
    panels = ceil(columns / FLOAT64_COLUMNS) if transposed == matrix.across else 0
    return panels * (FLOAT64_WEIGHT * FLOAT64_COLUMNS * terms + FLOAT64_SQUARES) + columns * (GRID + OUTLIERS)


def cache_bytes(shape: ModelShape, work: Work) -> int:
    """Keys and values of the rollout slots."""
    rows = shape.layers * work.slots * shape.key_heads
    number = work.causes.sampler_stock or (0 if work.exact else 4)
    if number:
        return number * rows * work.max_context * 2 * shape.head_dim
    keys = ceil(work.max_context / KEY_PANEL) * KEY_PANEL * shape.head_dim
    values = work.max_context * (ceil(shape.head_dim / VALUE_LANES) * VALUE_LANES + 1)
    return 4 * rows * (keys + values)


def saved_bytes_per_layer(shape: ModelShape, tokens: int, row: int, mixture: Mixture | None = None) -> int:
    """What one layer saves in the forward pass for its backward pass, for `tokens` in rows of length `row`.

    `mixture`: that of a layer which has one in place of an MLP.
    """
    s = shape.saved
    queries, keys = shape.head_dim * shape.heads, shape.head_dim * shape.key_heads
    floats = s.hidden * shape.hidden + s.queries * queries + s.keys * keys
    floats += 0 if mixture else s.mlp_hidden * shape.hidden + s.intermediate * shape.intermediate
    norms = s.norms + s.head_norms * (shape.heads + shape.key_heads)
    of_experts = 0 if mixture is None else mixtures.saved_bytes(mixture, shape.hidden, tokens, s.number)
    if s.number == 0:
        # norms are float64, exponents int64; attention keeps a float32 maximum and a float64 sum per head
        return of_experts + tokens * (4 * floats + 8 * norms + 12 * shape.heads)
    upcast = s.upcast_hidden * shape.hidden + s.upcast_heads * (queries + keys)
    floats += s.mask * row
    of_norms = (4 if upcast else s.number) * norms
    return of_experts + tokens * (s.number * (floats - upcast) + 4 * (upcast + shape.heads) + of_norms)


def activation_bytes(shape: ModelShape, tokens: int, row: int, work: Work) -> int:
    """What all layers save for a backward pass over `tokens`; with recomputation, their inputs and one layer."""
    kinds = [(count, saved_bytes_per_layer(shape, tokens, row, kind)) for count, kind in shape.layer_kinds]
    if work.recompute:
        layers = 4 * tokens * shape.hidden * shape.layers + max(saved for _, saved in kinds)
    else:
        layers = sum(count * saved for count, saved in kinds)
    # the last layer's output, and tables of the rotary positions
    return layers + 4 * tokens * (shape.hidden + 2 * shape.head_dim)


def _input_bytes(work: Work) -> int:
    """The inputs of a product on their grids, bytes per number."""
    return {"float64": FLOAT64_INPUT, "amx": AMX_INPUT, "native": 0}[work.kernels]


def layer_workspace_bytes(shape: ModelShape, tokens: int, work: Work) -> int:
    """What the largest layer needs while it computes: gradients of its widest activations, and a rounded operand."""
    operand = _input_bytes(work)
    results = DIVIDED_RESULT * shape.hidden if work.tensor > 1 else 0
    dense = tokens * (
        results + 4 * (3 * shape.intermediate + 2 * shape.hidden) + operand * (shape.intermediate + shape.hidden)
    )
    if shape.mixture is None:
        return dense
    return max(dense, mixtures.workspace_bytes(shape.mixture, shape.hidden, tokens, operand))


def logits_bytes(shape: ModelShape, rows: int, work: Work) -> int:
    """Logits, their gradient and the operands of their products, for `rows` tokens; native also keeps log-softmax."""
    operand = _input_bytes(work) if work.exact else 12
    return rows * shape.head.outputs * (8 + operand if work.has_kernels or not work.exact else DIVIDED_LOGIT)


def adapted_size(shape: ModelShape) -> int:
    """Numbers of all matrices with an adapter."""
    return sum(m.size for m in shape.linears if m.adapted)


def operand_bytes(matrices: Iterable[Linear], work: Work, trained: bool) -> int:
    """Prepared matrices, and rounded ones: for forward passes, and where the pass is `trained` for backward passes too.

    Where processes hold pieces, the largest one, whole, while a product is computed.
    """
    if work.in_pieces:
        return max((4 * m.size + max(prepared_bytes(m, t, work) for t in (False, True)) for m in matrices), default=0)
    passes = (False, True) if trained else (False,)
    return sum(4 * m.size * m.rounded + sum(prepared_bytes(m, t, work) for t in passes) for m in matrices)


def trained_model(name: str, shape: ModelShape, head: Linear, bias: int, work: Work, lora_rank: int) -> Resident:
    """A model in training whose last matrix is `head`, with `bias` additional numbers.

    With adapters its base, and what is not adapted, are those of a frozen model; a head of its own is trained whole.
    """
    body = shape.parameters - shape.head_parameters
    parameters = body + (shape.head_parameters if head == shape.head else head.size) + bias
    per_sum = SUM + (UPPER_SUM if work.long_steps else 0)
    if not lora_rank:
        sums, gradients = (per_sum * parameters, 0) if work.exact else (0, 4 * parameters)
        operands = operand_bytes([*shape.linears, head], work, True)
        own_matrices = shape.matrices + (shape.head_parameters if head == shape.head else 0)
        weights = work.weights(parameters, own_matrices)
        return Resident(name, weights, work.moments(parameters), sums, gradients, operands, parameters, 0)
    own_head = 0 if head == shape.head else head.size + bias
    merged = adapted_size(shape)
    factors = lora_rank * sum(m.outputs + m.inputs for m in shape.linears if m.adapted)
    # gradients are those of the merged weights; in native numerics the factors have some too
    collected = merged + own_head
    sums, gradients = (per_sum * collected, 0) if work.exact else (0, 4 * (collected + factors))
    alone = work.causes.trainer.renews_layers  # what others have in common is rounded for each
    matrices = [*(m for m in shape.linears if m.adapted or alone), *([head] if own_head or alone else [])]
    trained = factors + own_head
    weights, operands = 4 * (merged + trained), operand_bytes(matrices, work, True)
    return Resident(name, weights, work.moments(trained), sums, gradients, operands, trained, parameters - own_head)


def stock_model(name: str, shape: ModelShape, number: int) -> Resident:
    """A copy that computes as torch does, its numbers of so many bytes."""
    return Resident(name, number * shape.parameters, 0, 0, 0, 0, 0, 0)


def frozen_model(name: str, shape: ModelShape, work: Work) -> Resident:
    """A model without training."""
    operands = operand_bytes((*shape.linears, shape.head), work, False)
    weights = work.weights(shape.parameters, shape.matrices + shape.head_parameters)
    return Resident(name, weights, 0, 0, 0, operands, 0, shape.parameters)
