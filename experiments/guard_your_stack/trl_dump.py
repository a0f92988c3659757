"""Dump the samples and log-probs of one step of TRL's GRPOTrainer.

The script needs TRL and imports nothing of ppo_repro.

    python trl_dump.py MODEL_FOLDER OUT.jsonl --prompts FILE --dtype bfloat16 --temperature 0.8 [--raw]

The sampler is `generate` of transformers in TRL's `rollout_func`. The trainer's log-probs are the ones that TRL
computes before its first update. With --raw the sampler returns log-probs at temperature 1, as some servers do.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

COLUMNS = (
    ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"),
    ("sampling_per_token_logps", "old_per_token_logps"),
)


class Dumped(Exception):
    """Exception that ends TRL's training when the dump is on disk."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="one prompt a line")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--raw", action="store_true")
    parser.add_argument(
        "--checkpointing", action="store_true", help="what the sampler of transformers does not survive"
    )
    return parser.parse_args()


def main() -> None:
    given = options()
    tokenizer = AutoTokenizer.from_pretrained(given.model, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        given.model, dtype=getattr(torch, given.dtype), trust_remote_code=False, use_safetensors=True
    )

    def rollout(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for prompt in prompts:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            with torch.no_grad():
                out = trainer.model.generate(
                    ids,
                    max_new_tokens=given.tokens,
                    do_sample=True,
                    temperature=given.temperature,
                    top_k=0,
                    top_p=1.0,
                    return_dict_in_generate=True,
                    output_logits=True,
                )
            completion = out.sequences[0, ids.shape[1] :]
            logits = torch.stack(out.logits)[:, 0].float() / (1.0 if given.raw else given.temperature)
            logprobs = logits.log_softmax(-1).gather(-1, completion[:, None])[:, 0]
            found["prompt_ids"].append(ids[0].tolist())
            found["completion_ids"].append(completion.tolist())
            found["logprobs"].append(logprobs.tolist())
        return found

    class Dumping(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            outputs = super()._generate_and_score_completions(inputs)
            with given.out.open("w") as file:
                for row in range(len(outputs["completion_ids"])):
                    ids, logprobs = ({name: outputs[name][row].tolist() for name in names} for names in COLUMNS)
                    file.write(json.dumps({**ids, **logprobs}) + "\n")
            raise Dumped

    prompts = given.prompts.read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=len(prompts),
            num_generations=2,
            steps_per_generation=2,  # so that TRL computes the log-probs of before the first of two steps
            max_completion_length=given.tokens,
            temperature=given.temperature,
            use_cpu=True,
            gradient_checkpointing=given.checkpointing,
            bf16=False,
            report_to=[],
            seed=3,
        )
        trainer = Dumping(
            model=model,
            reward_funcs=lambda completions, **_: [float(len(c)) for c in completions],
            args=config,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            rollout_func=rollout,
        )
        try:
            trainer.train()
        except Dumped:
            print(given.out)


if __name__ == "__main__":
    main()
