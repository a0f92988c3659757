"""Random configurations of every family, valid and not: each is refused in one line, or has equal bits in any batch.

The address sanitizer ends the process at a read or write outside of memory. Control: the same configurations without
the check of models.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ppo_repro
from ppo_repro.base.errors import UserError
from ppo_repro.numerics import description, packed_model
from tests.support.models import CONFIGS, MIXTURES, small_model, unequal
from tests.support.sanitizers import RUNTIME, compile_sanitized, run_sanitized

COUNT = 200  # configurations under the sanitizer
# numbers, most of them small; at the edges of tiles, panels and vectors, and some that nothing allows
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 129)
FACTORS = (0.0, -1.0, 0.25, 0.3, 0.5, 1.0, 1.5, 2.0, float("nan"), float("inf"), 1e-3, 1e4, 1e6)
NAMES = {
    "hidden_size": SIZES,
    "intermediate_size": (*SIZES, 200),
    "num_hidden_layers": (1, 1, 2, 3),
    "num_attention_heads": (1, 2, 3, 4, 6, 8),
    "num_key_value_heads": (1, 2, 3, 4, 6, 8, None),
    "head_dim": (*SIZES, 0, -2),
    "vocab_size": (5, 16, 17, 89, 130),
    "sliding_window": (None, 1, 2, 16, 17, 0, -1),
    "num_experts": (1, 2, 3, 5),
    "num_local_experts": (1, 2, 3, 5),
    "num_experts_per_tok": (1, 2, 3, 4, 0),
    "moe_intermediate_size": SIZES,
    "n_inner": (None, *SIZES),
    "n_embd": SIZES,
    "n_head": (1, 2, 3, 4, 8),
    "n_layer": (1, 2, 3),
    "n_positions": (1, 16, 33, 64),
    "rms_norm_eps": (1e-6, 1e-6, 0.0, -1.0, float("nan"), 1e-38, 0.1),
    "layer_norm_epsilon": (1e-5, 1e-5, 0.0, float("inf")),
    "layer_norm_eps": (1e-5, 1e-5, 0.0, float("inf")),
    "tie_word_embeddings": (True, False),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "norm_topk_prob": (True, False),
    "use_parallel_residual": (True, False),
    "mlp_only_layers": ([], [0], [1], [0, 1, 2]),
    "decoder_sparse_step": (1, 2, 0),
    "max_position_embeddings": (1, 16, 33, 64),
    "pad_token_id": (None, 0, 4, -1, 88, 1000),
    "hidden_act": ("silu", "gelu", "gelu_new", "relu"),
    "hidden_activation": ("silu", "gelu_new", "relu"),
    "query_pre_attn_scalar": (1, 24, 0, -3),
    "attn_logit_softcapping": (None, 0.5, 50.0, 0.0, -1.0, float("nan")),
    "final_logit_softcapping": (None, 0.5, 30.0, 0.0, -1.0, float("inf")),
    "scale_attn_by_inverse_layer_idx": (True, False),
    "embedding_multiplier": FACTORS,
    "residual_multiplier": FACTORS,
    "attention_multiplier": FACTORS,
    "logits_scaling": FACTORS,
    "original_max_position_embeddings": (1, 16, 64, 0),
    "no_rope_layers": ([0, 0, 0], [1, 0, 1], [0]),
    "use_sliding_window": (True, False),
}


def drawn(seed: int) -> tuple[str, dict[str, Any]]:
    """A family, and changes of the numbers of its small model."""
    draw = random.Random(seed)
    family = draw.choice([*CONFIGS, *MIXTURES])
    fields = vars((CONFIGS | MIXTURES)[family]())
    known = [name for name in NAMES if name in fields]
    changes = {name: draw.choice(NAMES[name]) for name in draw.sample(known, draw.randint(1, 5))}
    if fields.get("rope_parameters") and draw.random() < 0.3:
        field = draw.choice(("rope_theta", "partial_rotary_factor", "factor", "low_freq_factor"))
        changes["rope_parameters"] = {**fields["rope_parameters"], field: draw.choice(FACTORS)}
    return family, changes


def compute(family: str, changes: dict[str, Any]) -> bool:
    """Whether transformers makes the model; UserError where it is refused here. Equal bits of every batch otherwise."""
    try:
        source = small_model((CONFIGS | MIXTURES)[family](**changes), 0)
    except Exception:  # many kinds
        return False
    model = ppo_repro.deterministic(source)
    vocabulary, longest = source.config.vocab_size, source.config.max_position_embeddings
    rows = [[(7 * i + j) % vocabulary for j in range(min(length, longest))] for i, length in enumerate((17, 1, 33))]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    together = ppo_repro.logprobs(model, ids, mask)
    for row, found in zip(rows, together, strict=True):
        assert unequal(found[: len(row)], ppo_repro.logprobs(model, torch.tensor([row]))[0]) == 0, (family, changes)
    if width > 1:
        model(ids, mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
    if longest > 2:
        sampling = ppo_repro.Sampling(max_response_tokens=2)
        (response,) = ppo_repro.generate(model, [rows[0][: longest - 2]], sampling, stop=[])
        tokens = torch.tensor([[*response.prompt_ids, *response.response_ids]])
        again = ppo_repro.logprobs(model, tokens)[0, len(response.prompt_ids) :]
        assert unequal(again, response.logprobs) == 0, (family, changes)
    return True


def run(seeds: range, ignored: type[Exception] | tuple[()] = ()) -> dict[str, int]:
    """How many configurations were refused, computed, or no model of transformers'.

    `ignored`: errors after which it goes on.
    """
    counts = {"no model": 0, "refused": 0, "computed": 0}
    for seed in seeds:
        family, changes = drawn(seed)
        print(seed, family, changes, file=sys.stderr, flush=True)  # the last one, if a sanitizer ends the process
        try:
            counts["computed" if compute(family, changes) else "no model"] += 1
        except UserError as error:
            assert "\n" not in str(error)
            counts["refused"] += 1
        except ignored:
            pass
    return counts


def unchecked() -> None:
    """Take the checks of models away."""
    packed_model._refuse_fault = lambda model, config: None
    description.check_ranges = lambda fields, where: None


def test_a_few_configurations_are_refused_or_compute_equal_bits() -> None:
    counts = run(range(40))
    assert min(counts["refused"], counts["computed"]) > 5, counts


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(RUNTIME is None, reason="needs GCC's address sanitizer: Debian's libasan8")
def test_no_configuration_leaves_its_memory(tmp_path: Path) -> None:
    library = compile_sanitized(tmp_path)
    child = run_sanitized(library, ["-m", __name__])
    assert child.returncode == 0, child.stderr[-4000:]
    control = run_sanitized(library, ["-m", __name__, "unchecked"])
    assert control.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in control.stderr


if __name__ == "__main__":
    from tests.support.sanitizers import pytest_configure

    pytest_configure()
    if sys.argv[1:]:
        unchecked()
    run(range(1_000_000, 1_000_000 + COUNT), Exception if sys.argv[1:] else ())
