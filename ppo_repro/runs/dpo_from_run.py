"""The recorded run from which a DPO run begins: its policy before the first step, its pairs, a KL on its prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ppo_repro.base.errors import PromiseBroken, UserError
from ppo_repro.base.ranks import Ranks
from ppo_repro.base.seeding import sample_seed
from ppo_repro.base.watcher import Watcher
from ppo_repro.buffers import Prompts
from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.files import build_config
from ppo_repro.config.run import RunConfig
from ppo_repro.numerics.sums import mean_of, run_sums
from ppo_repro.numerics.weights import weights_digest
from ppo_repro.preferences.preference_pairs import Preference
from ppo_repro.records import reader
from ppo_repro.records.folder import CONFIG_NAME, REFERENCE
from ppo_repro.records.located import located_tree
from ppo_repro.runs.prepare import Prepared, prepare
from ppo_repro.stages.forward import score_rollout
from ppo_repro.stages.rollout import roll_out


@dataclass(frozen=True)
class RecordedRun:
    """The run whose responses are compared, before its first step, with the numerics and layout of the DPO run."""

    config: RunConfig
    prepared: Prepared


def start_of_run(config: DPOConfig, run_dir: Path, watcher: Watcher, ranks: Ranks) -> RecordedRun:
    """Return the recorded run's policy and reference before its first step, with this run's numerics and layout.

    They are made again or loaded from the run's checkpoints. Raises PromiseBroken if they differ from the manifest.
    """
    recorded = reader.open_manifest(run_dir)
    recorded_config = build_config(located_tree(run_dir, recorded), str(run_dir / CONFIG_NAME))
    run_config = _with_numerics_of_dpo(recorded_config, config, run_dir)
    reference = run_dir / REFERENCE
    prepared = prepare(run_config, watcher, reference if reference.is_dir() else None, ranks=ranks)
    digest = weights_digest(prepared.state.reference.named_parameters())
    expected = recorded.final["initial_policy_digest"]
    if digest != expected:
        recorded_numerics = recorded_config.numerics.model_dump(mode="json")
        if any(recorded_numerics[name] != value for name, value in config.numerics.model_dump(mode="json").items()):
            raise UserError(
                f"run = {run_dir}: keeps no reference, and its warm start was in other numerics; "
                "choose the numerics of the run, or record it with checkpoints.every > 0"
            )
        raise PromiseBroken(f"{run_dir}: the starting policy has digest {digest} here and {expected} in the records")
    return RecordedRun(run_config, prepared)


def _with_numerics_of_dpo(recorded: RunConfig, config: DPOConfig, run_dir: Path) -> RunConfig:
    """Return the configuration of a recorded run with a DPO run's numerics and layout. Raises UserError for turns."""
    tree = recorded.model_dump(mode="json")
    if tree["task"].get("max_turns", 1) > 1:
        raise UserError(f"run = {run_dir}: its episodes have several turns; DPO here compares responses of one turn")
    tree |= {"numerics": config.numerics.model_dump(mode="json"), "layout": config.layout.model_dump(mode="json")}
    # the recorded engine may not work with these numerics, and its mismatch would change the divergence
    tree["rollout"] |= {"engine": {"kind": "torch"}, "mismatch_sigma": None}
    tree.pop("mismatch", None)
    # DPO trains all weights; the adapters of a run change no weight before the first step
    tree["lora"] = None
    tree["ppo"]["replay_routes"] = False  # DPO samples with its own routes
    return build_config(tree, f"{run_dir / CONFIG_NAME} with numerics and layout of DPO")


def pairs_of_run(run_dir: Path) -> list[Preference]:
    """Pair every two responses to one prompt in one iteration whose scores differ. The higher score is preferred.

    Pairs are in the order of the records. Equal pairs of one prompt and iteration count once. Raises UserError if the
    run is damaged, is incomplete or has no such pair.
    """
    columns = ["iteration", "prompt_key", "prompt_ids", "response_ids", "scores"]
    rows = reader.read_sequences(run_dir, columns=columns)
    pairs: dict[tuple[str, Preference], None] = {}  # a dict, so that equal pairs count once and keep their order
    for (iteration, key), group in rows.groupby(["iteration", "prompt_key"], sort=False):
        ids, scores = [tuple(map(int, row)) for row in group["response_ids"]], group["scores"].tolist()
        prompt = tuple(map(int, group["prompt_ids"].iloc[0]))
        for chosen, high in zip(ids, scores, strict=True):
            for rejected, low in zip(ids, scores, strict=True):
                if high > low:
                    pairs[str(iteration), Preference(str(key), prompt, chosen, rejected)] = None
    if not pairs:
        raise UserError(
            f"{run_dir}: has no two responses to one prompt with different scores in one iteration; "
            "record a run with rollout.samples_per_prompt of 2 or more"
        )
    return [pair for _, pair in pairs]


def sequence_kl(run: RecordedRun, seed: int, ranks: Ranks) -> float:
    """Estimate KL(policy || reference) per response, in nats, on one sampled response to every held-out prompt.

    At every position the divergence over the whole sampling distribution is exact. It is summed over each response and
    averaged over the responses, which estimates the divergence between the distributions over responses without bias.
    """
    prepared = run.prepared
    problems, ids = prepared.task.problems.held_out, prepared.task.prompt_ids
    prompts = Prompts(
        prompt_key=tuple(p.key for p in problems),
        sample_index=(0,) * len(problems),
        seed=tuple(sample_seed(seed, 0, p.key, 0) for p in problems),
        prompt=tuple(p.prompt for p in problems),
        answer=tuple(p.answer for p in problems),
        prompt_ids=tuple(ids[p.key] for p in problems),
    )
    rollout = roll_out(run.config, prepared.task, prepared.sampler, prompts, ranks)
    forward = score_rollout(prepared.state, rollout, run.config, ranks)
    return mean_of(run_sums(forward.ref_kl, rollout.lengths))
