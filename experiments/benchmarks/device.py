"""Does another device give the same bits, and how fast? The eager code and Triton's kernels on it beside the CPU.

`python -m experiments.benchmarks.device [--device cuda] [--json FILE]`: first bits (digests of every stage, the cases
by which backends prove themselves, a million tokens decoded and in one pass, the fingerprint of a run), then seconds;
exit status 1 if an exact digest differs, 2 if there is no device. `--small` is for Triton's interpreter on a CPU. It
was never run on a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from experiments.benchmarks import device_speed
from ppo_repro.models.batches import TokenBatch, lay_out
from ppo_repro.models.networks import make_policy, policy_logits
from ppo_repro.numerics import backend
from ppo_repro.numerics.arithmetic.elementwise import exp, log
from ppo_repro.numerics.device import device_of, moved
from ppo_repro.numerics.layers.kv_cache import GridCache
from ppo_repro.numerics.logprobs import token_statistics
from ppo_repro.numerics.optim.optimizer import AdamWSettings, make_optimizer
from ppo_repro.numerics.proof import cases
from ppo_repro.numerics.trunk.forward import TrunkForward
from ppo_repro.seeding import bell

CONTEXT, VOCABULARY = 128, 320


@dataclass(frozen=True)
class Work:
    """How much is compared."""

    hidden: int
    layers: int
    steps: int  # of the optimizer
    sequences: int  # of a batch
    elements: int  # of elementary functions
    tokens: int  # decoded and computed in one pass
    iterations: int  # of the quickstart; 0 leaves it out
    speed: device_speed.Scale


WHOLE = Work(128, 3, 4, 9, 1_000_001, 1 << 20, 4, device_speed.WHOLE)
SMALL = Work(16, 1, 1, 2, 1_001, 64, 0, device_speed.SMALL)


def _models(work: Work) -> dict[str, PreTrainedModel]:
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": work.hidden,
        "intermediate_size": 2 * work.hidden,
        "num_hidden_layers": work.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
    }
    models: dict[str, PreTrainedModel] = {
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=work.hidden // 4, tie_word_embeddings=True)),
        "llama": LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False)),
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


def _batch(work: Work, device: torch.device) -> TokenBatch:
    generator = torch.Generator().manual_seed(0)
    longest = 50 if work.sequences > 2 else 6
    lengths = torch.randint(2, longest, (work.sequences, 2), generator=generator).tolist()
    pairs = [[torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in pair] for pair in lengths]
    batch = lay_out([p for p, _ in pairs], [r for _, r in pairs], "right")
    moved = {name: value.to(device) for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return TokenBatch(**moved, real_tokens=batch.real_tokens)


def trained(source: PreTrainedModel, work: Work, device: torch.device, mode: str) -> dict[str, str]:
    """Digests of log-probs and entropies, and of all weights after each of a few optimizer steps."""
    policy = make_policy(source, mode, CONTEXT).to(device)
    optimizer = make_optimizer(policy, AdamWSettings(1e-3, 0.9, 0.95, 1e-8, 0.01, 1.0), mode)
    batch = _batch(work, device)
    digests: dict[str, str] = {}

    def backward() -> None:
        logprobs, entropies = token_statistics(policy_logits(policy, batch), batch.targets, 1.0, None, mode)
        digests.setdefault("log-probs and entropies", digest(logprobs, entropies))
        loss = -logprobs - entropies * 0.01
        torch.autograd.backward(loss, torch.full_like(loss, 1.0 / len(loss)))

    for step in range(work.steps):
        optimizer.step(backward, batch.real_tokens)
        digests[f"weights after step {step + 1}"] = digest(*policy.parameters())
    return digests


def elementwise(work: Work, device: torch.device) -> dict[str, str]:
    """Digests of the elementary functions on many numbers."""
    x = torch.linspace(-90.0, 90.0, work.elements).to(device)
    return {"exp": digest(exp(x)), "log": digest(log(x.double().abs() + 0.5)), "torch.exp": digest(torch.exp(x))}


def proven(work: Work, device: torch.device) -> dict[str, str]:
    """Digests of the cases by which backends prove themselves."""
    chosen = cases.CASES if work is WHOLE else {"optimizer": cases.CASES["optimizer"]}
    return {f"proof: {name}": digest(*compute(device)) for name, compute in chosen.items()}


@torch.no_grad()
def parity(source: PreTrainedModel, work: Work, device: torch.device) -> tuple[int, int]:
    """How many tokens have other hidden states over a cache, in two parts, than in one pass; and of how many."""
    policy = moved(make_policy(source, "exact", CONTEXT), device)
    length = min(CONTEXT, work.tokens // 2)
    rows, cut, unequal = min(256, work.tokens // length), length - length // 4, 0
    cache = GridCache(policy.config, rows, CONTEXT, device)
    trunk = TrunkForward(policy.get_decoder())
    places, slots = torch.arange(length, device=device).expand(rows, -1), torch.arange(rows, device=device)
    generator = torch.Generator().manual_seed(1)
    for _ in range(work.tokens // (rows * length)):
        ids = torch.randint(0, VOCABULARY, (rows, length), generator=generator).to(device)
        flat = torch.arange(rows * length, device=device)
        whole = trunk.over_batch(ids, places, torch.zeros_like(ids), flat).view(rows, length, -1)
        for part in (slice(0, cut), slice(cut, length)):
            cache.aim(slots, places[:, part], torch.ones_like(places[:, part], dtype=torch.bool))
            decoded = trunk.over_cache(ids[:, part], cache).view(rows, -1, whole.shape[-1])
            unequal += int((decoded.view(torch.int32) != whole[:, part].view(torch.int32)).any(-1).sum())
    return unequal, work.tokens // (rows * length) * rows * length


def fingerprint(iterations: int, *layout: str) -> str:
    """The fingerprint of the first iterations of the quickstart with a layout; why there is none where it fails."""
    sets = [f"ppo.iterations={iterations}", *layout]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ppo_repro", "run", "experiments/quickstart.yaml", "--out", folder, "--json"]
        command += [part for field in sets for part in ("--set", field)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=150)
        except subprocess.TimeoutExpired:
            return "not finished in 150 s"
    if done.returncode:
        return f"failed: {done.stderr.splitlines()[-1] if done.stderr else done.returncode}"
    return str(json.loads(done.stdout)["fingerprint"])


def kernels_for(device: torch.device) -> list[str]:
    """What computes exact numerics on a device: the eager code, and Triton's kernels where they run."""
    if importlib.util.find_spec("triton") is None:
        return ["eager"]
    from ppo_repro.numerics.kernels.triton.launch import runs_on

    return ["eager", "triton"] if runs_on(torch.empty(0, device=device)) else ["eager"]


class Report:
    """Prints comparisons as they come, and keeps them."""

    def __init__(self, columns: list[str]) -> None:
        self.columns, self.rows = columns, dict[str, list[str]]()
        self.failed, self._start = False, time.perf_counter()
        print(f"{'stage':<46}{''.join(f'{c:<20}' for c in columns)}")

    def compare(self, stage: str, found: list[str], promised: bool = True) -> None:
        """Say whether all are equal; a difference in what is promised is a failure."""
        equal = len(set(found)) == 1
        self.failed |= promised and not equal
        self.rows[stage] = found
        seconds = f"{time.perf_counter() - self._start:.0f} s"
        verdict = "equal" if equal else "DIFFERENT"
        print(f"{stage:<46}{''.join(f'{d[:18]:<20}' for d in found)}{verdict:<12}{seconds}", flush=True)


def bits(work: Work, device: torch.device, kernels: list[str]) -> Report:
    """Every comparison of bits: the CPU's eager code, then each of `kernels` on the device."""
    cpu = torch.device("cpu")
    sides = [(cpu, "eager"), *((device, name) for name in kernels)]
    report = Report(["cpu eager", *(f"{device.type} {name}" for name in kernels)])

    def each(compute):  # type: ignore[no-untyped-def]
        found = []
        for place, name in sides:
            backend.use(name, 1)
            found.append(compute(place))
        backend.use("eager", 1)
        return found

    def stages(prefix, promised, compute):  # type: ignore[no-untyped-def]
        found = each(compute)
        for stage in found[0]:
            report.compare(f"{prefix}{stage}", [f[stage] for f in found], promised and stage != "torch.exp")

    stages("", True, lambda place: elementwise(work, place))
    stages("", True, lambda place: proven(work, place))
    for family, model in _models(work).items():
        for mode in ("exact", "native"):
            stages(
                f"{family} {mode} ",
                mode == "exact",
                lambda place, mode=mode, model=model: trained(model, work, place, mode),
            )
    model = _models(work)["qwen3"]
    unequal, tokens = each(lambda place: parity(model, work, place) if place == device else (0, 0))[-1]
    report.compare(f"{tokens} tokens, decoded and in one pass", ["0", str(unequal)])
    if work.iterations:
        layouts = [("layout.device=cpu",), *((f"layout.device={device.type}", f"layout.backend={k}") for k in kernels)]
        report.compare("quickstart, first iterations", [fingerprint(work.iterations, *layout) for layout in layouts])
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description="exact numerics on the CPU and on a device: bits, then seconds")
    parser.add_argument("--device", default="cuda", help="torch device to compare with the CPU (default cuda)")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for Triton's interpreter on a CPU")
    parser.add_argument("--json", type=Path, help="write everything to this file as well")
    arguments = parser.parse_args()
    name, work = arguments.device, SMALL if arguments.small else WHOLE
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        print(f"error: --device {name}: not available ({str(error).splitlines()[0]})", file=sys.stderr)
        return 2
    device_of(device.type)  # keeps float32 from TF32
    kernels = kernels_for(device)
    if device.type == "cuda" and "triton" not in kernels:
        print("Triton is not installed: its kernels are left out", file=sys.stderr)
    report = bits(work, device, kernels)
    has_speed = device.type == "cuda" or arguments.small
    speeds = device_speed.speeds(work.speed, device, kernels) if has_speed else []
    if speeds:
        print(f"\n{device_speed.table(speeds)}\n")
    if arguments.json is not None:
        card = torch.cuda.get_device_name() if device.type == "cuda" else device.type
        value = {"device": card, "columns": report.columns, "digests": report.rows, "equal": not report.failed}
        value["seconds"] = [asdict(row) for row in speeds]
        arguments.json.write_text(json.dumps(value, indent=1))
    print("exact numerics: " + ("NOT the same bits" if report.failed else "the same bits"))
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
