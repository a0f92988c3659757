"""Does another device give the same bits? Runs the eager specification on the CPU and on CUDA, side by side.

`python -m experiments.benchmarks.device [--device cuda]` prints digests of every stage on the CPU and on the device,
for exact and for native numerics; exit status 1 if an exact digest differs, 2 if there is no device. It was never run
on a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import sys

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from ppo_repro.models.batches import TokenBatch, lay_out
from ppo_repro.models.networks import make_policy, policy_logits
from ppo_repro.numerics import backend
from ppo_repro.numerics.arithmetic.elementwise import exp, log
from ppo_repro.numerics.logprobs import token_statistics
from ppo_repro.numerics.optim.optimizer import AdamWSettings, make_optimizer
from ppo_repro.seeding import bell

CONTEXT, VOCABULARY, STEPS = 128, 320, 4
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}


def _models() -> dict[str, PreTrainedModel]:
    models: dict[str, PreTrainedModel] = {
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True)),
        "llama": LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)),
    }
    for family, model in models.items():
        with torch.no_grad():
            for name, p in model.named_parameters():
                noise = torch.from_numpy(bell(p.numel(), "device check", 0, f"{family}.{name}")).view(p.shape)
                p.copy_(noise * 0.1 + (1.0 if p.dim() == 1 else 0.0))
    return models


def digest(*tensors: Tensor) -> str:
    """First 16 hex digits of the SHA-256 of the raw bits."""
    h = hashlib.sha256()
    for t in tensors:
        h.update(t.detach().cpu().contiguous().numpy().tobytes())
    return h.hexdigest()[:16]


def _batch(device: torch.device) -> TokenBatch:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 50, (9, 2), generator=generator).tolist()
    pairs = [[torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in pair] for pair in lengths]
    batch = lay_out([p for p, _ in pairs], [r for _, r in pairs], "right")
    moved = {name: value.to(device) for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return TokenBatch(**moved, real_tokens=batch.real_tokens)


def trained(source: PreTrainedModel, device: torch.device, mode: str) -> dict[str, str]:
    """Digests of log-probs and entropies, and of all weights after each of a few optimizer steps."""
    policy = make_policy(source, mode, CONTEXT).to(device)
    optimizer = make_optimizer(policy, AdamWSettings(1e-3, 0.9, 0.95, 1e-8, 0.01, 1.0), mode)
    batch = _batch(device)
    digests: dict[str, str] = {}

    def backward() -> None:
        logprobs, entropies = token_statistics(policy_logits(policy, batch), batch.targets, 1.0, None, mode)
        digests.setdefault("log-probs and entropies", digest(logprobs, entropies))
        loss = -logprobs - entropies * 0.01
        torch.autograd.backward(loss, torch.full_like(loss, 1.0 / len(loss)))

    for step in range(STEPS):
        optimizer.step(backward, batch.real_tokens)
        digests[f"weights after step {step + 1}"] = digest(*policy.parameters())
    return digests


def elementwise(device: torch.device) -> dict[str, str]:
    """Digests of the elementary functions on a million numbers."""
    x = torch.linspace(-90.0, 90.0, 1_000_001).to(device)
    return {"exp": digest(exp(x)), "log": digest(log(x.double().abs() + 0.5)), "torch.exp": digest(torch.exp(x))}


def _row(stage: str, digests: list[str]) -> str:
    verdict = "equal" if len(set(digests)) == 1 else "DIFFERENT"
    return f"{stage:<40}{''.join(f'{d:<20}' for d in digests)}{verdict}"


def main() -> int:
    parser = argparse.ArgumentParser(description="exact numerics on the CPU and on a device, digest by digest")
    parser.add_argument("--device", default="cuda", help="torch device to compare with the CPU (default cuda)")
    name = parser.parse_args().device
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        print(f"error: --device {name}: not available ({str(error).splitlines()[0]})", file=sys.stderr)
        return 2
    backend.use("eager", 1)
    cpu = torch.device("cpu")
    print(f"{'stage':<40}{'cpu':<20}{name:<20}")
    failed = False
    exact = [elementwise(cpu), elementwise(device)]
    for stage in exact[0]:
        digests = [stages[stage] for stages in exact]
        failed |= stage != "torch.exp" and len(set(digests)) > 1
        print(_row(stage, digests))
    for family, model in _models().items():
        for mode in ("exact", "native"):
            both = [trained(model, cpu, mode), trained(model, device, mode)]
            for stage in both[0]:
                digests = [stages[stage] for stages in both]
                failed |= mode == "exact" and len(set(digests)) > 1
                print(_row(f"{family} {mode} {stage}", digests))
    print("exact numerics: " + ("NOT the same bits" if failed else "the same bits"))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
