"""Run TRL's PPOTrainer one step at a time: read `step THREADS` lines, and answer each with a line of JSON.

The script runs in an environment of its own and imports nothing of ppo_repro. Arguments: the folder of model, tokenizer
and prompts, then prompt length, response length, sequences, epochs, minibatches.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl.experimental.ppo import PPOConfig, PPOTrainer


class NoReward(nn.Module):
    """Reward model that takes no time and always gives 0. The other side's verifier takes no time either."""

    base_model_prefix = "trunk"

    class Trunk(nn.Module):
        def forward(self, input_ids: torch.Tensor, **ignored: Any) -> Any:
            hidden = torch.zeros(*input_ids.shape, 1)
            return type("Output", (), {"hidden_states": (hidden,)})()

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.score = NoReward.Trunk(), nn.Identity()


class OnRequest(TrainerCallback):
    """Callback that stops the trainer between steps until the next request. The pause is not measured."""

    def __init__(self, answers: Any) -> None:
        self.answers, self.wall, self.cpu = answers, 0.0, 0.0

    def wait(self) -> None:
        line = sys.stdin.readline().split()
        if not line:
            sys.exit(0)
        torch.set_num_threads(int(line[1]))
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.wait()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        cost = {"wall": time.perf_counter() - self.wall, "cpu": time.process_time() - self.cpu}
        print(json.dumps(cost), file=self.answers, flush=True)
        self.wait()


def main() -> None:
    folder, numbers = Path(sys.argv[1]), [int(x) for x in sys.argv[2:7]]
    prompt, response, sequences, epochs, minibatches = numbers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of the trainer must not mix with the answers
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    policy = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    )
    value = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    )
    # an id outside the vocabulary, so that no sampled token is taken for padding
    tokenizer.add_special_tokens({"pad_token": "[pad]"})
    assert tokenizer.pad_token_id == policy.config.vocab_size
    rows = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    ids = [tokenizer(text)["input_ids"] for text in rows]
    assert {len(row) for row in ids} == {prompt}
    settings = PPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=sequences,
        gradient_accumulation_steps=1,
        num_mini_batches=minibatches,
        num_ppo_epochs=epochs,
        total_episodes=sequences * 1_000_000,
        response_length=response,
        stop_token=None,
        missing_eos_penalty=None,
        temperature=1.0,
        kl_coef=0.05,
        whiten_rewards=False,
        learning_rate=1e-6,
        num_sample_generations=0,
        local_rollout_forward_batch_size=sequences,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    trainer = PPOTrainer(
        args=settings,
        processing_class=tokenizer,
        model=policy,
        ref_model=copy.deepcopy(policy),
        reward_model=NoReward(),
        value_model=value,
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        eval_dataset=Dataset.from_dict({"input_ids": ids[:1]}),
        callbacks=[OnRequest(answers)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
