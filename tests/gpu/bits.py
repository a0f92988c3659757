"""Steps of `device_check` that compare the GPU with the CPU: `differ` is to be 0."""

from __future__ import annotations

import itertools
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

import ppo_repro
from ppo_repro.base.mode import Precision
from ppo_repro.base.processes import SLOTS
from ppo_repro.base.watcher import Silent
from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.files import load_config, read_tree, validated
from ppo_repro.config.inputs import run_folder
from ppo_repro.models.batches import TokenBatch, lay_out
from ppo_repro.models.networks import make_policy, policy_logits
from ppo_repro.numerics import devices, library
from ppo_repro.numerics.adamw import AdamWSettings
from ppo_repro.numerics.optimizer import Optimizer
from ppo_repro.numerics.sequences import slots_of
from ppo_repro.numerics.token_statistics import token_statistics
from ppo_repro.records import manifest
from ppo_repro.runs import run as runner
from ppo_repro.runs.dpo import DPOKind
from ppo_repro.runs.rerun import rerun as run_again
from ppo_repro.runs.summary import summarise
from ppo_repro.sampler import Request, Sampling
from ppo_repro.sampling.built_in import BuiltInSampler
from tests.gpu import twins
from tests.gpu.check import DEVICES, Check, Results, unequal
from tests.support import language
from tests.support.models import CONFIGS, CONTEXT, MIXTURES, source_model
from tests.support.paths import ROOT, SMALL, TINY
from tests.support.recipes import OTHER_LAYOUT, RECIPES
from tests.support.runs import DPO
from tests.support.trained import LAYOUTS, trained_by_hand, trained_by_trainer

QUICKSTART: dict[Precision, str] = {
    "highest": "0a94da79b05cd9625a9fac8e08e01d0de74b56125610591205c9cd70ba93cadf",
    "high": "9ba9c30bf9befd73e6fa948ae86c4e23ffa5c3289d968a2d5bb2b9c9dbba3bf2",
}
KERNEL_SECONDS = 25.0


def card(check: Check) -> Results:
    """Open the GPU; it gives the known answer."""
    facts = dict(name=check.card.name, capability=check.card.capability, driver=check.card.driver)
    versions = dict(torch=torch.__version__, python=sys.version.split()[0])
    return {**facts, **versions, "opened_seconds": check.opened, "free_bytes": check.card.free_bytes()}


def kernels(check: Check) -> Results:
    """Compare every function of the kernels in hard shapes and in large ones, until the time of the step is over."""
    cpu, card = twins.Side(library.load()), twins.GpuSide(check.card, devices.DRIVER)
    cases = dict(twins.quick_cases()) if check.emulated else dict(twins.large_cases()) | dict(twins.all_cases())
    begin, compared, numbers, wrong = time.perf_counter(), 0, 0, list[str]()
    for name, case in cases.items():
        if time.perf_counter() - begin > KERNEL_SECONDS:
            break
        count, found = twins.differences(case, cpu, card)
        compared, numbers, wrong = compared + 1, numbers + count, [*wrong, *(f"{name}: {x}" for x in found)]
    return {"cases": compared, "of": len(cases), "numbers": numbers, "differ": len(wrong), "wrong": wrong[:20]}


def _fingerprint(run_dir: Path) -> str:
    return manifest.load(run_dir).fingerprint


def quickstart(check: Check) -> Results:
    """Run the quickstart on the GPU in both precisions: its fingerprints are the CPU's, the README's among them."""
    results: Results = {"differ": 0}
    for precision, right in QUICKSTART.items():
        run_dir = check.run(ROOT / "experiments" / "quickstart.yaml", "card", f"numerics.precision={precision}")
        figures, found = summarise(run_dir).figures, _fingerprint(run_dir)
        results[precision] = {"fingerprint": found, "phases": figures["seconds"], "card": figures["card"]}
        results["differ"] += int(found != right)
    return results


class _Stop(Silent):
    """Keeps a copy of a run as it is after one iteration."""

    def __init__(self, run_dir: Path, copy_to: Path) -> None:
        self.run_dir, self.copy_to = run_dir, copy_to

    def iteration(self, done: int, total: int, figures: str, seconds: float) -> None:
        if done == 1:
            shutil.copytree(self.run_dir, self.copy_to)


def runs_go_on(check: Check) -> Results:
    """Begin a run on one device; resume it, fork it and compute an iteration again on the other."""
    settings = ("checkpoints.every=1", "checkpoints.keep=2", "ppo.iterations=2")
    results: Results = {"differ": 0}
    for begun, other in (("cpu", "card"), ("card", "cpu")):
        part, elsewhere = check.folder / f"begun on {begun}", f"layout.device={DEVICES[other]}"
        config, out = load_config(TINY, [*settings, f"layout.device={DEVICES[begun]}"]), check.next_folder()
        whole, _ = language.run(config, out, _Stop(run_folder(config, out), part))
        language.resume(part, [elsewhere])
        again = language.rerun(whole, [elsewhere], only=range(1, 2))
        changed = "kl.kl_coef=0.5"
        here, there = (
            language.fork(whole, check.folder / f"{begun} {i}", 1, changed, f"layout.device={DEVICES[place]}")
            for i, place in enumerate((begun, other))
        )
        found = {
            "resumed": _fingerprint(part) != _fingerprint(whole),
            "rerun": again.difference is not None,
            "fork": _fingerprint(here) != _fingerprint(there),
            "control: a changed fork": _fingerprint(there) == _fingerprint(whole),
        }
        results[f"{begun}, then {other}"] = found
        results["differ"] += sum(found.values())
    return results


def recipes(check: Check) -> Results:
    """Compare runs of PPO, GRPO, GSPO, a value head, a reward model; on the GPU in another layout."""
    results: Results = {"differ": 0}
    few = ("model.warm_start_steps=4",) if check.emulated else ()
    for name, overrides in RECIPES.items():
        cpu = _fingerprint(check.run(TINY, "cpu", *few, *overrides))
        card = _fingerprint(check.run(TINY, "card", *few, *overrides, *OTHER_LAYOUT))
        results[name] = {"cpu": cpu, "card": card}
        results["differ"] += cpu != card
    return results


def dpo(check: Check) -> Results:
    """Compare a DPO run on the pairs of a run, in another layout; compute the CPU's again on the GPU."""
    source = check.run(TINY, "cpu", "rollout.samples_per_prompt=4", "ppo.minibatch_size=4", "checkpoints.every=2")
    path = check.folder / "dpo.yaml"
    path.write_text(DPO.format(run=f"'{source}'"))
    few = ("numerics.max_context=12", "dpo.epochs=1")

    def trained(place: str, *overrides: str) -> Path:
        tree = read_tree(path, [*few, f"layout.device={DEVICES[place]}", *overrides])
        return runner.run(DPOKind(Silent()), validated(DPOConfig, tree, "dpo"), check.next_folder())[0]

    cpu, card = trained("cpu"), trained("card", "layout.update_micro_batch=4", "layout.forward_micro_batch=5")
    again = run_again(DPOKind(Silent()), cpu, ["layout.device=cuda"])
    differ = (_fingerprint(cpu) != _fingerprint(card)) + (again.difference is not None)
    return {"cpu": _fingerprint(cpu), "card": _fingerprint(card), "differ": differ}


def _sequences(count: int, length: int) -> tuple[list[list[int]], list[list[int]]]:
    tokens = torch.randint(0, 80, (count, length), generator=torch.Generator().manual_seed(3)).tolist()
    return [row[: 1 + i % 7] for i, row in enumerate(tokens)], [row[1 + i % 7 :] for i, row in enumerate(tokens)]


def _step(policy: PreTrainedModel, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Take one optimizer step on -log p + 0.01 entropy; return log-probs and entropies before it."""
    settings = AdamWSettings(learning_rate=1e-3, beta1=0.9, beta2=0.98, eps=1e-8, weight_decay=0.01, max_grad_norm=1.0)
    optimizer = Optimizer(policy, settings, "deterministic")
    found: list[tuple[Tensor, Tensor]] = []

    def backward() -> None:
        logits = policy_logits(policy, batch.with_sums(optimizer.sink))
        statistics = token_statistics(logits, batch.targets, 0.9, None, "deterministic")
        found.append(statistics)
        loss = statistics[1] * 0.01 - statistics[0]
        torch.autograd.backward(loss, torch.full_like(loss, 1.0 / len(loss)))

    optimizer.step(backward)
    return found[0][0].detach(), found[0][1].detach()


def _sampled(policy: PreTrainedModel, prompts: list[list[int]], sampling: Sampling) -> tuple[Tensor, Tensor]:
    engine = BuiltInSampler(policy, frozenset(), "deterministic", CONTEXT, 64, 5)
    completions = engine.generate([Request(tuple(prompt), seed) for seed, prompt in enumerate(prompts)], sampling)
    tokens = torch.tensor([token for c in completions for token in c.response_ids])
    return tokens, torch.cat([c.logprobs for c in completions])


def families(check: Check) -> Results:
    """Compare log-probs, entropies, weights after a step, and sampled tokens of every family with the CPU's.

    Each family computes in both precisions.
    """
    count, length, new = (4, 40, 3) if check.emulated else (320, CONTEXT, 16)
    prompts, responses = _sequences(count, length)
    batch = lay_out(prompts, responses, slots=slots_of(range(count), count, SLOTS))
    results: Results = {"tokens": 0, "differ": 0}

    def compute(name: str, precision: Precision, place: str) -> list[Tensor]:
        source = torch.nn.Module.to(source_model(name), check.device(place))
        policy = make_policy(source, "deterministic", CONTEXT, precision)
        whole, cut = Sampling(0.8, 0, 1.0, new, greedy=False), Sampling(0.8, 20, 0.9, new, greedy=False)
        samples = [tensor for kind in (whole, cut) for tensor in _sampled(policy, prompts[: count // 2], kind)]
        return [*samples, *_step(policy, batch), *policy.parameters()]

    for name, precision in itertools.product([*CONFIGS, *MIXTURES], QUICKSTART):
        found = unequal(compute(name, precision, "cpu"), compute(name, precision, "card"))
        results[f"{name}, {precision}"] = found
        results["differ"] += found
        results["tokens"] += len(batch.targets)
    return results


def library_calls(check: Check) -> Results:
    """Compare `deterministic(model)`: logits, loss and gradients of a padded batch, `logprobs`, `generate`."""
    ids = torch.tensor(_sequences(3, 9)[1][0]).repeat(3, 1)
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    labels = ids.masked_fill(mask == 0, -100)

    def compute(place: str) -> list[Tensor]:
        device = check.device(place)
        model = torch.nn.Module.to(ppo_repro.deterministic(source_model("qwen3")), device)
        out = model(ids.to(device), mask.to(device), labels=labels.to(device))
        assert out.loss is not None
        out.loss.backward()
        scored = ppo_repro.logprobs(model, ids.to(device), mask.to(device), temperature=0.7)
        answers = ppo_repro.generate(model, [[5, 6, 7], [8, 9]], Sampling(0.7, 0, 1.0, 5, greedy=False), stop=[0])
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [out.logits, out.loss, scored, *(answer.logprobs for answer in answers), *gradients]

    return {"differ": unequal(compute("cpu"), compute("card"))}


def loops(check: Check) -> Results:
    """Train `deterministic(model)` on the GPU in a loop of one's own and in transformers' Trainer, in three layouts.

    The layout may not change a bit. Stock torch takes the optimizer steps, so the weights need not be the CPU's: `as on
    the CPU` tells whether they are.
    """

    def model(place: str) -> PreTrainedModel:
        return torch.nn.Module.to(ppo_repro.deterministic(source_model("llama")), check.device(place))

    def by_hand(place: str, micro: int, padding: str) -> str:
        trained = model(place)
        return trained_by_hand(trained, micro, padding, torch.optim.AdamW(trained.parameters(), lr=1e-2))

    def by_trainer(place: str, micro: int, padding: str) -> str:
        trained = model(place)
        digest = trained_by_trainer(trained, micro, padding, check.next_folder(), use_cpu=place == "cpu")
        assert trained.device.type == check.device(place).type
        return digest

    kinds: dict[str, Callable[[str, int, str], str]] = {"own loop": by_hand, "Trainer": by_trainer}
    results: Results = {"differ": 0}
    for name, train in kinds.items():
        found = {train("card", *layout) for layout in LAYOUTS}
        results[name] = {"digests": sorted(found), "as on the CPU": found == {train("cpu", *LAYOUTS[0])}}
        results["differ"] += len(found) - 1
    return results


def native(check: Check) -> Results:
    """Run native numerics on the GPU: they work; no bit is promised."""
    return {"fingerprint": _fingerprint(check.run(SMALL, "card", "numerics.mode=native", "ppo.iterations=1"))}
