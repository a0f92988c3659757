"""`make test-gpu`: what deterministic numerics promise of a CUDA card, then how fast the card is.

    python -m tests.gpu.device_check [--out FOLDER] [--seconds N] [STEP ..]

Each step prints a line, and OUT/device_check.json has its results as soon as it is over; a step that fails does not end
the others. A step that compares has a number `differ`, which is to be 0. No compiler and no network are needed: the
libraries and the PTX that an installation built lie beside their sources. With `--stand-in LIBRARY` a library in place
of the driver runs the kernels here, on small sizes: the way in which the steps themselves are tested.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import ppo_repro
from ppo_repro.base.ranks import ALONE
from ppo_repro.base.watcher import Silent
from ppo_repro.config.files import load_config
from ppo_repro.config.inputs import run_folder
from ppo_repro.models.batches import TokenBatch, lay_out
from ppo_repro.models.networks import make_policy, policy_logits
from ppo_repro.numerics import devices, library
from ppo_repro.numerics.lowering import is_deterministic
from ppo_repro.numerics.optimizer import SLOTS, AdamWSettings, Optimizer, weights_digest
from ppo_repro.numerics.rows import slots_of
from ppo_repro.numerics.token_statistics import sample_tokens, token_statistics
from ppo_repro.records import manifest
from ppo_repro.rollout.engine import Request, Sampling
from ppo_repro.rollout.torch_engine import TorchEngine
from ppo_repro.runs import run as runner
from ppo_repro.runs.language import LanguageKind
from ppo_repro.runs.resume import rerun, resume
from ppo_repro.runs.summary import summarise
from tests.gpu.emulator.device import use_card
from tests.support.models import CONFIGS, CONTEXT, MIXTURES, source_model, unequal

ROOT = Path(__file__).parents[2]
QUICKSTART = "0a94da79b05cd9625a9fac8e08e01d0de74b56125610591205c9cd70ba93cadf"
SMALL = ROOT / "tests" / "support" / "small.yaml"
Results = dict[str, Any]


class Check:
    """What the steps share: the card, sizes, and a folder for runs."""

    def __init__(self, stand_in: Path | None, folder: Path) -> None:
        self.emulated, self.folder = stand_in is not None, folder
        begin = time.perf_counter()
        self.card = devices.card() if stand_in is None else use_card(stand_in)
        self.opened = time.perf_counter() - begin
        self.device = devices.torch_device("cuda")

    @contextmanager
    def on(self, place: str) -> Iterator[torch.device]:
        """Yield the device of models that compute on the `card` or on the `cpu`."""
        yield self.device if place == "card" else devices.CPU

    def timed(self, compute: Callable[[], Any], repeats: int = 3) -> float:
        """Return the seconds of a call, the least of some, after one that is not counted."""
        seconds = []
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            compute()
            self.wait()
            seconds.append(time.perf_counter() - begin)
        return min(seconds[1:])

    def wait(self) -> None:
        if not self.emulated:
            torch.cuda.synchronize()

    def free(self) -> None:
        """Free what the last step left on the card."""
        gc.collect()
        self.card.free_scratch()
        if not self.emulated:
            torch.cuda.empty_cache()


# ---------------------------------------------------------------------------------------------------------------- bits


def card(check: Check) -> Results:
    """Open the card; it gives the known answer."""
    facts = dict(name=check.card.name, capability=check.card.capability, driver=check.card.driver)
    versions = dict(torch=torch.__version__, python=sys.version.split()[0])
    return {**facts, **versions, "opened_seconds": check.opened, "free_bytes": check.card.free_bytes()}


def _sequences(count: int, length: int) -> tuple[list[list[int]], list[list[int]]]:
    tokens = torch.randint(0, 80, (count, length), generator=torch.Generator().manual_seed(3)).tolist()
    return [row[: 1 + i % 7] for i, row in enumerate(tokens)], [row[1 + i % 7 :] for i, row in enumerate(tokens)]


def _step(policy: PreTrainedModel, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Take one optimizer step on -log p + 0.01 entropy; return log-probs and entropies before it."""
    optimizer = Optimizer(
        policy,
        AdamWSettings(learning_rate=1e-3, beta1=0.9, beta2=0.98, eps=1e-8, weight_decay=0.01, max_grad_norm=1.0),
        "deterministic",
    )
    found: list[tuple[Tensor, Tensor]] = []

    def backward() -> None:
        statistics = token_statistics(policy_logits(policy, batch), batch.targets, 0.9, None, "deterministic")
        found.append(statistics)
        loss = statistics[1] * 0.01 - statistics[0]
        torch.autograd.backward(loss, torch.full_like(loss, 1.0 / len(loss)))

    optimizer.step(backward)
    return found[0][0].detach(), found[0][1].detach()


def _sampled(policy: PreTrainedModel, prompts: list[list[int]], sampling: Sampling) -> tuple[Tensor, Tensor]:
    engine = TorchEngine(policy, frozenset(), "deterministic", CONTEXT, 64, 5)
    completions = engine.generate([Request(tuple(prompt), seed) for seed, prompt in enumerate(prompts)], sampling)
    tokens = torch.tensor([token for c in completions for token in c.response_ids])
    return tokens, torch.cat([c.logprobs for c in completions])


def families(check: Check) -> Results:
    """Compare log-probs, entropies, weights after a step, and sampled tokens of every family with the CPU's."""
    count, length, new = (4, 40, 3) if check.emulated else (320, CONTEXT, 16)
    prompts, responses = _sequences(count, length)
    batch = lay_out(prompts, responses, slots=slots_of(range(count), count, SLOTS))
    results: Results = {"tokens": 0, "differ": 0}
    for name in [*CONFIGS, *MIXTURES]:
        found = []
        for place in ("cpu", "card"):
            with check.on(place) as device:
                source = source_model(name)
                policy = make_policy(torch.nn.Module.to(source, device), "deterministic", CONTEXT)
                samples = [
                    _sampled(policy, prompts[: count // 2], Sampling(0.8, top_k, top_p, new, greedy=False))
                    for top_k, top_p in ((0, 1.0), (20, 0.9))
                ]
                logprobs, entropies = _step(policy, batch)
                weights = torch.cat([p.detach().cpu().reshape(-1) for p in policy.parameters()])
            found.append([logprobs, entropies, weights, *(tensor for sample in samples for tensor in sample)])
        results[name] = [unequal(a, b) for a, b in zip(*found, strict=True)]
        results["differ"] += sum(results[name])
        results["tokens"] += len(batch.targets)
    return results


def _run(check: Check, place: str, path: Path, folder: str, *overrides: str) -> ppo_repro.Run:
    device = "cpu" if place == "cpu" else "cuda"
    with check.on(place):
        run = ppo_repro.train(path, overrides=[*overrides, f"layout.device={device}"], out=check.folder / folder)
    return run


VARIANTS = {
    "as it is": (),
    "micro-batches, prefill chunks, recomputation": (
        *("layout.update_micro_batch=3", "layout.forward_micro_batch=5", "layout.prefill_chunk=2"),
        *("layout.gradient_checkpointing=true", "layout.rollout_slots=7"),
    ),
    "adapters, top-p, group advantages": (
        *("lora={rank: 2, alpha: 4}", "rollout.top_p=0.9", "value={kind: none}", "advantages={kind: group}"),
        "kl={placement: none}",
    ),
    "value head, exact KL in the loss": (
        *("value={kind: head, value_coef: 0.1}", "kl={placement: loss, kl_coef: 0.02, estimator: exact}"),
    ),
}


def runs(check: Check) -> Results:
    """Compare fingerprints of small runs on the card with those on the CPU."""
    results: Results = {"differ": 0}
    few = ("model.warm_start_steps=12", "ppo.iterations=1", "rollout.prompts_per_iteration=8") if check.emulated else ()
    for name, overrides in VARIANTS.items():
        cpu, card = (
            _run(check, place, SMALL, f"{place} {name}", *few, *overrides).fingerprint for place in ("cpu", "card")
        )
        results[name] = {"cpu": cpu, "card": card}
        results["differ"] += cpu != card
    return results


class _Stop(Silent):
    """Keeps a copy of a run as it is after one iteration."""

    def __init__(self, run_dir: Path, copy_to: Path) -> None:
        self.run_dir, self.copy_to = run_dir, copy_to

    def iteration(self, done: int, total: int, figures: str, seconds: float) -> None:
        if done == 1:
            shutil.copytree(self.run_dir, self.copy_to)


def resumed(check: Check) -> Results:
    """Begin a run on one device; go on with it on the other, and compute its second iteration again there."""
    few = ("model.warm_start_steps=12", "rollout.prompts_per_iteration=8") if check.emulated else ()
    results: Results = {"differ": 0}
    for begun, other in (("cpu", "card"), ("card", "cpu")):
        names = {"cpu": "cpu", "card": "cuda"}
        settings = [*few, "checkpoints.every=1", "ppo.iterations=2", f"layout.device={names[begun]}"]
        config, part = load_config(SMALL, settings), check.folder / f"begun on {begun}"
        with check.on(begun):
            run_dir = run_folder(config, check.folder / f"whole on {begun}")
            runner.run(LanguageKind(_Stop(run_dir, part), ALONE), config, check.folder / f"whole on {begun}")
        with check.on(other):
            elsewhere = [f"layout.device={names[other]}"]
            resume(LanguageKind(Silent(), ALONE), part, elsewhere)
            difference = rerun(LanguageKind(Silent(), ALONE), run_dir, elsewhere, only=range(1, 2)).difference
        whole, again = manifest.load(run_dir).fingerprint, manifest.load(part).fingerprint
        results[f"{begun}, then {other}"] = {"whole": whole, "resumed": again}
        results["differ"] += (whole != again) + (difference is not None)
    return results


def library_calls(check: Check) -> Results:
    """Compare `deterministic(model)` in a loop of one's own, `generate` and `logprobs` with the CPU's."""
    ids = torch.tensor(_sequences(3, 9)[1][0]).repeat(3, 1)
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    found = []
    for place in ("cpu", "card"):
        with check.on(place) as device:
            model = torch.nn.Module.to(ppo_repro.deterministic(source_model("qwen3")), device)
            out = model(ids.to(device), mask.to(device), labels=labels.to(device))
            assert out.loss is not None
            out.loss.backward()
            gradients = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
            scored = ppo_repro.logprobs(model, ids.to(device), mask.to(device), temperature=0.7)
            sampling = Sampling(0.7, 0, 1.0, 5, greedy=False)
            answers = ppo_repro.generate(model, [[5, 6, 7], [8, 9]], sampling, stop=[0])
            sampled = torch.cat([answer.logprobs for answer in answers])
            found.append([x.detach().cpu() for x in (out.logits, out.loss, gradients, scored, sampled)])
    return {"differ": sum(unequal(a, b) for a, b in zip(*found, strict=True))}


def quickstart(check: Check) -> Results:
    """Run the quickstart on the card: its fingerprint is the README's."""
    run = _run(check, "card", ROOT / "experiments" / "quickstart.yaml", "quickstart")
    figures = summarise(run.path).figures
    differ = int(run.fingerprint != QUICKSTART)
    return {"fingerprint": run.fingerprint, "differ": differ, "phases": figures["seconds"], "card": figures["card"]}


def native(check: Check) -> Results:
    """Run native numerics on the card: they work; no bit is promised."""
    run = _run(check, "card", SMALL, "native", "numerics.mode=native", "ppo.iterations=1")
    return {"fingerprint": run.fingerprint}


# --------------------------------------------------------------------------------------------------------------- speed


def _large(check: Check) -> PreTrainedModel:
    """Return an unmodified model of Qwen3-0.6B's shape with random weights, on the card."""
    shape = dict(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    if check.emulated:
        shape |= dict(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=1, head_dim=16)
    torch.manual_seed(0)
    with torch.device(check.device):
        return Qwen3ForCausalLM(Qwen3Config(**shape, dtype="float32")).eval()


def _tokens(check: Check, sequences: int, length: int) -> list[list[int]]:
    vocabulary = 300 if check.emulated else 151936
    return torch.randint(0, vocabulary, (sequences, length), generator=torch.Generator().manual_seed(1)).tolist()


def large(check: Check) -> Results:
    """Compare 256 tokens of a model of Qwen3-0.6B's shape with the CPU's; then time it beside stock torch."""
    source = _large(check)
    policy = make_policy(source, "deterministic", 4096)
    sequences = _tokens(check, 2, 24 if check.emulated else 129)
    batch = lay_out([s[:1] for s in sequences], [s[1:] for s in sequences])
    found = []
    for place in ("cpu", "card"):
        with check.on(place) as device, torch.no_grad():
            model = policy if place == "card" else copy.deepcopy(policy).to(device)
            if place == "cpu":
                library.use_threads(1 if check.emulated else 16)
            found.append(token_statistics(policy_logits(model, batch), batch.targets, 1.0, None, "deterministic")[0])
            del model
    results: Results = {"tokens": len(batch.targets), "differ": unequal(*found)}
    check.wait()
    return results | _times(check, source, policy)


def _times(check: Check, source: PreTrainedModel, policy: PreTrainedModel) -> Results:
    sequences = _tokens(check, 2 if check.emulated else 8, 20 if check.emulated else 1024)
    batch = lay_out([s[:1] for s in sequences], [s[1:] for s in sequences], slots=slots_of(range(8), 8, SLOTS))
    ids = torch.tensor(sequences, device=check.device)
    results: Results = {}

    def ours_scores() -> None:
        with torch.no_grad():
            token_statistics(policy_logits(policy, batch), batch.targets, 1.0, None, "deterministic")

    def stock_scores(model: PreTrainedModel) -> Callable[[], None]:
        def compute() -> None:
            with torch.no_grad():
                logits = model(input_ids=ids[:, :-1]).logits
                logits.log_softmax(-1).gather(-1, ids[:, 1:, None])

        return compute

    def stock_step(model: PreTrainedModel) -> Callable[[], None]:
        def compute() -> None:
            model.zero_grad(set_to_none=True)
            logits = model(input_ids=ids[:, :-1]).logits
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].reshape(-1)).backward()

        return compute

    torch.backends.cuda.matmul.allow_tf32 = False
    stock = copy.deepcopy(source)
    assert not is_deterministic(stock)
    narrow = copy.deepcopy(source).to(torch.bfloat16)
    results["scoring"] = {
        "tokens": len(batch.targets),
        "deterministic": check.timed(ours_scores),
        "stock float32": check.timed(stock_scores(stock)),
        "stock bfloat16": check.timed(stock_scores(narrow)),
    }
    del narrow
    results["forward and backward, stock float32"] = check.timed(stock_step(stock), 1)
    del stock
    if not check.emulated:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    optimizer = Optimizer(
        policy,
        AdamWSettings(learning_rate=1e-6, beta1=0.9, beta2=0.98, eps=1e-8, weight_decay=0.01, max_grad_norm=1.0),
        "deterministic",
    )

    def ours_step() -> None:
        def backward() -> None:
            logprobs, _ = token_statistics(policy_logits(policy, batch), batch.targets, 1.0, None, "deterministic")
            torch.autograd.backward(-logprobs, torch.full_like(logprobs, 1.0 / len(logprobs)))

        optimizer.step(backward)

    results["forward, backward and AdamW, deterministic"] = check.timed(ours_step, 1)
    results["digest of the weights"] = check.timed(lambda: weights_digest(policy.named_parameters()), 1)
    if not check.emulated:
        results["peak bytes of torch in a step"] = torch.cuda.max_memory_allocated()
        free_bytes, all_bytes = check.card.free_bytes()
        results["bytes in use on the card"] = all_bytes - free_bytes
    optimizer.rest()
    check.free()
    return results | _sampling_times(check, source, policy)


def _sampling_times(check: Check, source: PreTrainedModel, policy: PreTrainedModel) -> Results:
    count, new = (2, 3) if check.emulated else (128, 256)
    requests = [Request(tuple(ids), seed) for seed, ids in enumerate(_tokens(check, count, 16))]
    prompt = torch.tensor([request.prompt_ids for request in requests], device=check.device)
    engine = TorchEngine(policy, frozenset(), "deterministic", 512, count, 0)
    drawn = torch.randn(count, policy.config.vocab_size, device=check.device)
    seeds = torch.arange(count)

    def ours(tokens: int) -> None:
        engine.generate(requests, Sampling(1.0, 0, 1.0, tokens, greedy=False))
        check.wait()

    def stock(tokens: int) -> None:
        options = dict(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, top_k=0, pad_token_id=0)
        source.generate(prompt, **options)
        check.wait()

    seconds: dict[str, float] = {}
    for name, sample in (("deterministic", ours), ("generate, float32", stock)):
        sample(2)
        begin = time.perf_counter()
        sample(new)
        seconds[name] = time.perf_counter() - begin
    draw = check.timed(lambda: sample_tokens(drawn, seeds, seeds, 1.0, None))
    return {"sampling": {"tokens": count * new, **seconds, "drawing one token each": draw}}


STEPS = {step.__name__: step for step in (card, quickstart, resumed, families, library_calls, runs, large, native)}
NOT_EMULATED = ("quickstart", "native")


def _out_of_time(*_: object) -> None:
    raise TimeoutError("no time was left")


def main() -> int:
    """Run the steps; exit 1 if one failed or found a difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(STEPS)}; all by default")
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--seconds", type=float, default=480.0, help="of all steps: a step that would go on is ended")
    parser.add_argument("--stand-in", type=Path)
    options = parser.parse_args()
    if unknown := sorted(set(options.steps) - STEPS.keys()):
        parser.error(f"there is no step {unknown[0]}")
    options.out.mkdir(parents=True, exist_ok=True)
    begin, wrong, results = time.perf_counter(), 0, dict[str, Results]()
    signal.signal(signal.SIGALRM, _out_of_time)
    with tempfile.TemporaryDirectory() as folder:
        check = Check(options.stand_in, Path(folder))
        library.use_threads(1 if check.emulated else 8)
        steps = options.steps or [name for name in STEPS if not check.emulated or name not in NOT_EMULATED]
        for name in steps:
            started = time.perf_counter()
            signal.setitimer(signal.ITIMER_REAL, max(0.01, begin + options.seconds - started))
            try:
                results[name] = STEPS[name](check)
            except Exception as error:  # the others still run: a card is rare
                results[name] = {"failed": f"{type(error).__name__}: {error}", "at": traceback.format_exc()[-3000:]}
            signal.setitimer(signal.ITIMER_REAL, 0)
            check.free()
            results[name]["seconds"] = time.perf_counter() - started
            wrong += "failed" in results[name] or results[name].get("differ", 0) > 0
            (options.out / "device_check.json").write_text(json.dumps(results, indent=1))
            print(f"{name}: {json.dumps(results[name])[:1500]}", flush=True)
    print(f"{len(results)} steps in {time.perf_counter() - begin:.0f} s, {wrong} wrong", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
