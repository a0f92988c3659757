"""Exchanges between the processes of a run by torch.distributed, each wait short enough to hear of a lost process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

HEAD_BYTES = 4096  # a message this short takes one collective, a longer one two
BUCKET_ELEMENTS = 1 << 22  # tensors are summed together until they are this large
LOOK_SECONDS = 1.0

Group = dist.ProcessGroup | None  # None: all processes of the run
Waiting = Callable[[float], None]  # called with the seconds waited so far; raises to give up


def wait(work: dist.Work, waiting: Waiting) -> None:
    """Wait for a collective on the CPU; RuntimeError where it fails. Between looks, signals are handled."""
    waited = 0.0  # not by the clock: it goes on while this process is stopped
    while True:
        try:
            work.wait(timedelta(seconds=LOOK_SECONDS))
            return
        except RuntimeError:
            if work.is_completed():
                raise
        waited += LOOK_SECONDS
        waiting(waited)


def all_gather(value: Any, size: int, waiting: Waiting, group: Group = None) -> list[Any]:
    """The values of all `size` ranks of a group, in rank order; any picklable value."""
    data = pickle.dumps(value)
    payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    head = torch.zeros(8 + HEAD_BYTES, dtype=torch.uint8)
    head[:8] = torch.tensor([len(data)]).view(torch.uint8)
    head[8 : 8 + len(data)] = payload[:HEAD_BYTES]
    heads = [torch.empty_like(head) for _ in range(size)]
    wait(dist.all_gather(heads, head, group, async_op=True), waiting)
    lengths = [int(h[:8].view(torch.int64)) for h in heads]
    longest = max(lengths)
    bodies = [h[8:] for h in heads]
    if longest > HEAD_BYTES:
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = payload
        bodies = [torch.empty_like(padded) for _ in range(size)]
        wait(dist.all_gather(bodies, padded, group, async_op=True), waiting)
    return [pickle.loads(body[:n].numpy().tobytes()) for body, n in zip(bodies, lengths, strict=True)]


def all_reduce(tensors: Sequence[Tensor], waiting: Waiting, group: Group = None) -> None:
    """Replace each tensor by its sum over all ranks of a group."""
    for bucket in _buckets(tensors):
        flat = bucket[0] if len(bucket) == 1 else torch.cat([t.reshape(-1) for t in bucket])
        if flat.is_cuda:
            dist.all_reduce(flat, group=group)  # queued on the device; NCCL has a watchdog of its own
        else:
            wait(dist.all_reduce(flat, group=group, async_op=True), waiting)
        if len(bucket) > 1:
            for tensor, total in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(total.view_as(tensor))


def all_to_all(parts: Sequence[Tensor], lengths: Sequence[int], waiting: Waiting) -> list[Tensor]:
    """What every rank has for this one, in rank order; `parts[r]` goes to rank r. uint8, `lengths` numbers of each.

    gloo's reduce-scatter sends as much as its all-reduce, this half of that: sums are added up where they arrive.
    """
    received = torch.empty(sum(lengths), dtype=torch.uint8)
    sent = [len(part) for part in parts]
    wait(dist.all_to_all_single(received, torch.cat(list(parts)), list(lengths), sent, async_op=True), waiting)
    return list(received.split(list(lengths)))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one dtype and device, up to BUCKET_ELEMENTS together; a larger tensor alone."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        fits = sum(t.numel() for t in bucket) + tensor.numel() <= BUCKET_ELEMENTS
        if bucket and not (fits and (tensor.dtype, tensor.device) == (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
