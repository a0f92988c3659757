"""What causes of a mismatch need: rounded weights, layers run one by one, a copy in torch's own dtype. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ppo_repro.plan.models import ModelShape, Saved


@dataclass(frozen=True)
class Rounding:
    """What one side rounds, as far as its memory depends on that."""

    layers: bool = False  # weights of attention, MLPs and experts
    rest: bool = False  # the other weights
    activations: bool = False  # the inputs of linear layers
    renews_head: bool = False  # the head is another module, with operands of its own
    renews_layers: bool = False  # so is every layer; they run one by one

    def marked(self, shape: ModelShape) -> ModelShape:
        """The model with what this side rounds of it, and what its backward pass keeps because of that."""
        linears = tuple(replace(m, rounded=self.rest if m.by_rest else self.layers) for m in shape.linears)
        return replace(shape, linears=linears, head=replace(shape.head, rounded=self.rest), saved=self._saved(shape))

    def _saved(self, shape: ModelShape) -> Saved:
        """Whole kernels keep less than layers one by one; each layer keeps a rounded input of its own."""
        saved = shape.saved
        if not self.renews_layers:
            return saved
        saved = replace(saved, intermediate=4, norms=saved.norms if shape.mixture else 2)
        if self.activations:  # of queries, keys and values, of gate and up, and of the projection behind attention
            saved = replace(saved, hidden=saved.hidden + 2, mlp_hidden=1, queries=saved.queries + 1)
        return saved


NOTHING = Rounding()


@dataclass(frozen=True)
class Causes:
    """Where sampler and trainer differ, as far as memory depends on it."""

    sampler: Rounding = NOTHING
    trainer: Rounding = NOTHING
    sampler_differs: bool = False  # in what it rounds: its modules are others than the policy's, over the same weights
    sampler_stock: int = 0  # bytes of a number in the sampler's copy, which computes as torch does; 0: there is none


NO_CAUSES = Causes()
