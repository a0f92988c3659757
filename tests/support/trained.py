"""A small model trained by transformers' Trainer and in a loop of one's own, in three layouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import ppo_repro
from ppo_repro.numerics.weights import weights_digest
from tests.support.models import VOCAB, seeded

STEPS, BATCH = 3, 8  # sequences in an optimizer step
LAYOUTS = [(8, "right"), (4, "left"), (1, "right")]  # sequences in a pass, padding


def examples() -> list[list[int]]:
    """Sequences of 3 to 12 tokens; the first two are the prompt."""
    generator = seeded(0)
    lengths = torch.randint(3, 13, (STEPS * BATCH,), generator=generator).tolist()
    return [torch.randint(2, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def collate(rows: Sequence[Sequence[int]], padding: str, extra: int = 0, prompt: int = 1) -> dict[str, Tensor]:
    """Padded ids, mask and labels; labels are -100 at padding and at the first `prompt` tokens of a row."""
    width = max(map(len, rows)) + extra
    ids = torch.full((len(rows), width), VOCAB - 1)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for index, row in enumerate(rows):
        start = 0 if padding == "right" else width - len(row)
        ids[index, start : start + len(row)], mask[index, start : start + len(row)] = torch.tensor(row), 1
        labels[index, start + prompt : start + len(row)] = torch.tensor(row[prompt:])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def positions_in(mask: Tensor) -> Tensor:
    """What a stock model needs if the padding is on the left side."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def trained_by_trainer(model: PreTrainedModel, micro: int, padding: str, folder: Path, use_cpu: bool = True) -> str:
    """The digest of the weights after STEPS steps of transformers' Trainer."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=BATCH // micro,
        num_train_epochs=1,
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        max_grad_norm=1.0,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        use_cpu=use_cpu,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    dataset: Any = examples()

    def collated(rows: list[list[int]]) -> dict[str, Tensor]:
        tensors = collate(rows, padding, prompt=2)
        return {**tensors, "position_ids": positions_in(tensors["attention_mask"])}

    trainer = Trainer(model, arguments, train_dataset=dataset, data_collator=collated)
    trainer.train()
    return weights_digest(model.named_parameters())


def trained_by_hand(model: PreTrainedModel, micro: int, padding: str, optimizer: torch.optim.Optimizer) -> str:
    """The digest after STEPS steps of a policy gradient with weights of its own: -sum w log p over all tokens."""
    rows = examples()
    for start in range(0, len(rows), BATCH):
        step = rows[start : start + BATCH]
        tokens = sum(len(row) - 1 for row in step)
        optimizer.zero_grad()
        for first in range(0, BATCH, micro):
            tensors = {name: x.to(model.device) for name, x in collate(step[first : first + micro], padding).items()}
            logprobs = ppo_repro.logprobs(model, tensors["input_ids"], tensors["attention_mask"])
            advantages = (tensors["input_ids"] % 7 - 3) * tensors["attention_mask"]
            (-(logprobs * advantages).sum() / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return weights_digest(model.named_parameters())
