"""Count the bits in which sampler and trainer differ, family by family.

`python -m experiments.benchmarks.agreement` runs PPO on a small random model of each family, in deterministic numerics
and, as the control, in native numerics. It counts the differences in the records. The exit code is 1 if deterministic
numerics have a difference.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import ppo_repro
from experiments.benchmarks.workload import PROMPT, RESPONSE, set_random_weights
from ppo_repro.analysis.agreement import run_agreement
from ppo_repro.base.mode import MODES, Mode

CONFIG = Path(__file__).with_name("ppo_step.yaml")
PROMPTS = 256
END, VOCABULARY = "<end>", 257  # a token for each byte, and one more
LLAMA: dict[str, float] = {
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, float]] = {
    "llama": LLAMA,
    "qwen2": LLAMA,
    "smollm3": {**LLAMA, "no_rope_layer_interval": 2},
    "granite": {**LLAMA, "residual_multiplier": 0.22, "logits_scaling": 2},
    "seed_oss": {**LLAMA, "head_dim": 16},
    "qwen3": {**LLAMA, "head_dim": 16},
    "mistral": {**LLAMA, "sliding_window": 24},
    "ministral": {**LLAMA, "head_dim": 16, "sliding_window": 24},
    "gemma": {**LLAMA, "head_dim": 16},
    "gemma2": {**LLAMA, "head_dim": 16, "sliding_window": 24},
    "gemma3_text": {**LLAMA, "head_dim": 16, "sliding_window": 24},
    "phi3": LLAMA,
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gpt_neox": {"intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
    "olmo2": LLAMA,
    "olmo3": {**LLAMA, "sliding_window": 24},
    "qwen3_moe": {**EXPERTS, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 96, "intermediate_size": 192},
    "mixtral": {**EXPERTS, "num_local_experts": 4, "intermediate_size": 96},
    "olmoe": {**EXPERTS, "num_experts": 4, "intermediate_size": 96},
}


def write_folder(family: str, folder: Path) -> None:
    """Write a random model of a family, a byte tokenizer and the prompts into a folder."""
    size = {} if family == "gpt2" else {"hidden_size": 64, "max_position_embeddings": 128}
    config = AutoConfig.for_model(
        family, vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        **size, **FAMILIES[family],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    set_random_weights(model)
    model.save_pretrained(folder)
    bare = Tokenizer(BPE({token: i for i, token in enumerate([*sorted(ByteLevel.alphabet()), END])}, []))
    bare.pre_tokenizer, bare.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=bare, eos_token=END).save_pretrained(folder)
    lines = [json.dumps({"prompt": f"{row:>{PROMPT}}", "answer": "1"}) for row in range(PROMPTS + 1)]  # one is held out
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def overrides(folder: Path, mode: Mode, tokens: int) -> list[str]:
    """Return the overrides for a run of two iterations that samples at least `tokens` tokens."""
    return [
        f"experiment={folder.name}-{mode}",
        f"numerics.mode={mode}",
        f"model.path={folder}",
        f"task.path={folder / 'prompts.jsonl'}",
        f"rollout.prompts_per_iteration={PROMPTS}",
        f"rollout.samples_per_prompt={-(-tokens // (2 * PROMPTS * RESPONSE // 2))}",  # some responses stop early
        f"rollout.max_response_tokens={RESPONSE}",
        f"numerics.max_context={PROMPT + RESPONSE}",
        "ppo.iterations=2",
        "ppo.learning_rate=1e-4",
        "value.learning_rate=1e-3",
        "ppo.minibatch_size=64",
        "evaluation.every=2",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Do sampler and trainer agree on every bit, family by family?")
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--tokens", type=int, default=100_000, help="sampled tokens of a family (default 100,000)")
    arguments = parser.parse_args()
    print("| family | numerics | tokens | log-probs that differ | ratios that are not 1 | values that differ |")
    print("|" + "---|" * 6)
    failed = False
    for family in arguments.families:
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text) / family
            write_folder(family, folder)
            for mode in MODES:
                tokens = arguments.tokens if mode == MODES[0] else 1
                run = ppo_repro.train(str(CONFIG), overrides=overrides(folder, mode, tokens), out=Path(text))
                found = run_agreement(run.path)
                unequal = (found.unequal_old_rollout_logprobs, found.unequal_first_ratios, found.unequal_values)
                print(f"| {family} | {mode} | {found.tokens:,} | " + " | ".join(f"{n:,}" for n in unequal) + " |")
                sys.stdout.flush()
                failed |= mode == MODES[0] and any(unequal)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
