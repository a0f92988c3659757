"""The kernels of a GPU on a card, in minutes: every bit against the CPU's kernels, then times beside torch.

`python tests/gpu/kernel_check.py prepare FOLDER`, in an environment that has ppo_repro, puts into FOLDER all that a
bare machine lacks: the libraries, the PTX, cffi. There, with torch for CUDA and NumPy alone:
`python3 tests/gpu/kernel_check.py bits FOLDER`, then `times FOLDER`. Each line is printed, and written to
$OUT/kernel_check.jsonl, as soon as it is known; a part that fails does not stop the next one. A path of the stand-in as
last argument runs every line over it, in small sizes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Shape = tuple[int, int, int, int, int]  # hidden, heads, key heads, elements of a head, width of the MLP


def prepare(folder: Path) -> None:
    """Build all that travels to the card's machine."""
    from ppo_repro.numerics import build
    from ppo_repro.numerics.build_ptx import compile_ptx

    folder = folder.resolve()  # the compiler runs in the folder of the sources
    folder.mkdir(parents=True, exist_ok=True)
    environment, here = build.compiler_environment(folder / "zig"), build.this_platform()
    assert here is not None
    compile_ptx(build.SOURCES / "gpu" / "kernels.c", folder / "kernels.ptx", environment)
    for name, source, flags in (("host", "gpu/host.c", ()), ("cpu", "all.c", here.variants[-2].flags)):
        command = [*build.compiler(here.target), *build.LIBRARY_FLAGS, *flags, source, "-o", str(folder / f"{name}.so")]
        subprocess.run([*command, "-ldl"], cwd=build.SOURCES, env=environment, check=True)
    wheels = ("cffi", "pycparser")
    platform = ("--python-version", "3.12", "--platform", "manylinux2014_x86_64", "--only-binary=:all:")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder / "site")]
    shutil.rmtree(folder / "site", ignore_errors=True)
    subprocess.run([*pip, *platform, *wheels], check=True)
    shutil.rmtree(folder / "zig", ignore_errors=True)


class Bench:
    """Times of functions of `c/interface.h`, beside what torch takes for the same numbers in float32."""

    def __init__(self, gpu: Any, small: bool, say: Callable[..., None]) -> None:
        import torch

        self.gpu, self.small, self.say, self.torch = gpu, small, say, torch
        self.device = "cpu" if small else "cuda"
        torch.backends.cuda.matmul.allow_tf32 = False
        self.tensors: list[Any] = []

    def floats(self, *shape: int, scale: float = 1.0) -> Any:
        """Return random numbers of the device."""
        return self.torch.randn(shape, device=self.device).mul_(scale)

    def at(self, tensor: Any, kind: str = "float *") -> Any:
        """Return a tensor's memory for C, which stays until the next part."""
        from twins import ffi

        self.tensors.append(tensor)
        return ffi.NULL if tensor is None else ffi.cast(kind, tensor.data_ptr())

    def struct(self, kind: str, **members: Any) -> Any:
        """Return a pointer to a C struct; tensors become pointers to floats."""
        from twins import ffi

        tensors = {name: self.at(x) for name, x in members.items() if isinstance(x, self.torch.Tensor)}
        struct = ffi.new(f"{kind} *", members | tensors)
        self.tensors.append(struct)
        return struct

    def seconds(self, run: Callable[[], Any]) -> float:
        """Return the median of 5 runs after one that is not counted; of one alone where it takes seconds."""
        torch, spans = self.torch, []
        for _ in range(1 if self.small else 6):
            if self.small:
                begin = time.perf_counter()
                run()
                return time.perf_counter() - begin
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            run()
            events[1].record()
            events[1].synchronize()
            spans.append(events[0].elapsed_time(events[1]) / 1000)
            if spans[0] > 2:
                return spans[0]
        return sorted(spans[1:])[2]

    def line(self, what: str, ours: float, beside: float = 0.0, flops: float = 0.0, size: float = 0.0) -> None:
        """Say one time: seconds, TFLOP/s or GB/s, and the share of torch's speed."""
        rates = {"TFLOP/s": flops / ours / 1e12, "GB/s": size / ours / 1e9, "of torch": beside / ours}
        self.say(what=what, ms=round(ours * 1e3, 4), **{name: round(rate, 3) for name, rate in rates.items() if rate})

    def n(self, size: int, small: int) -> int:
        """Return a size, or the small one of the stand-in."""
        return small if self.small else size

    # -------------------------------------------------------------------------------------------------------- parts

    def products(self) -> None:
        """Products, gradients of inputs and of weights, at 4096 and at the shapes of Qwen3-0.6B."""
        shapes = {"qkv": (1024, 4096), "out": (2048, 1024), "up": (1024, 6144), "down": (3072, 1024)}
        for name, (k, n) in {"square": (4096, 4096), **shapes}.items():
            k, n, rows = self.n(k, 36), self.n(n, 40), self.n(4096 if name == "square" else 8192, 130)
            x, w, y, dy, dx = (self.floats(*s) for s in ((rows, k), (n, k), (rows, n), (rows, n), (rows, k)))
            grads = self.floats(n, k)
            layer = self.struct("Matrix", w=w, n=n, k=k, grad=0, bias_grad=-1)
            none, flops = self.at(None), 2.0 * rows * n * k
            ours = self.seconds(partial(self.gpu.call, "linear", layer, self.at(x), rows, none, self.at(y)))
            beside = self.seconds(lambda x=x, w=w: x @ w.T)
            self.line(f"{name} {rows}x{k}x{n}", ours, beside, flops)
            if name == "square":
                continue
            from twins import ffi

            each = self.n(1024, 65)
            sequence, position = ([i // each for i in range(rows)], [i % each for i in range(rows)])
            own = [ffi.new("int[]", v) for v in (sequence, position, [*range(8), 8])]
            sums = self.struct("Sums", levels=3, last=8)
            sums.level[0] = self.at(grads)
            frozen = self.struct("Matrix", w=w, n=n, k=k, grad=-1, bias_grad=-1)
            arrays = (self.at(dy), self.at(x), rows, *own, sums)
            only_dx = self.seconds(partial(self.gpu.call, "linear_backward", frozen, *arrays, self.at(dx)))
            only_dw = self.seconds(partial(self.gpu.call, "linear_backward", layer, *arrays, none))
            self.line(f"dx {name}", only_dx, self.seconds(lambda dy=dy, w=w: dy @ w), flops)
            self.line(f"dw {name}, 8 slots", only_dw, self.seconds(lambda dy=dy, x=x: dy.T @ x), flops)
        k, n, rows = self.n(1024, 36), self.n(151936, 300), self.n(2048, 70)
        x, w, y = (self.floats(*s) for s in ((rows, k), (n, k), (rows, n)))
        layer = self.struct("Matrix", w=w, n=n, k=k, grad=-1, bias_grad=-1)
        ours = self.seconds(lambda: self.gpu.call("linear", layer, self.at(x), rows, self.at(None), self.at(y)))
        self.line(f"head {rows}x{k}x{n}", ours, self.seconds(lambda: x @ w.T), 2.0 * rows * n * k)

    def few_rows(self) -> None:
        """Products of decoding."""
        for name, (k, n) in {"up": (1024, 6144), "down": (3072, 1024), "head": (1024, 151936)}.items():
            k, n = self.n(k, 36), self.n(n, 140)
            w = self.floats(n, k)
            layer = self.struct("Matrix", w=w, n=n, k=k, grad=-1, bias_grad=-1)
            for rows in (1, 16, 32, 64, 128, 256):
                x, y = self.floats(rows, k), self.floats(rows, n)
                arrays = (layer, self.at(x), rows, self.at(None), self.at(y))
                ours = self.seconds(partial(self.gpu.call, "linear", *arrays))
                beside = self.seconds(lambda x=x, w=w: x @ w.T)
                self.line(f"decode {name} of {rows} rows", ours, beside, 2.0 * rows * n * k, 4.0 * n * k)

    def tokens(self) -> None:
        """Statistics of rows of logits, their gradient, sampling."""
        torch, v = self.torch, self.n(151936, 700)
        for n in (128, 4096):
            n = self.n(n, 20)
            z, gradient, out = self.floats(n, v), self.floats(n, v), self.floats(6, n)
            whole = torch.zeros(3, n, dtype=torch.int64, device=self.device)
            rows = torch.zeros(n, 4, dtype=torch.float64, device=self.device)
            shape = dict(logits=z, ld=v, n=n, v=v, temperature=1.0, rows=self.at(rows, "Softmax *"))
            names = ("logprobs", "entropies", "squares", "d_logprobs", "d_entropies")
            results = dict(zip(names, out, strict=False))
            targets = self.at(whole[0], "int64_t *")
            s = self.struct("Statistics", **shape, **results, targets=targets, gradient=gradient)
            beside = self.seconds(lambda z=z: z.log_softmax(-1))
            ours = self.seconds(partial(self.gpu.call, "token_statistics", s))
            self.line(f"statistics {n}x{v}", ours, beside, size=4.0 * n * v)
            ours = self.seconds(partial(self.gpu.call, "token_statistics_gradient", s))
            self.line(f"gradient of statistics {n}x{v}", ours, size=8.0 * n * v)
            taken = dict(seeds=self.at(whole[1], "int64_t *"), positions=self.at(whole[2], "int64_t *"), tokens=targets)
            sampling = self.struct("Sampling", **shape, **taken, logprobs=out[0])
            self.line(f"sampling {n}x{v}", self.seconds(partial(self.gpu.call, "sample_tokens", sampling)))
            if n == 128 or self.small:
                order = z.argsort(-1, descending=True)
                kept = dict(eligible=self.at(torch.zeros(n, v, dtype=torch.bool, device=self.device), "uint8_t *"))
                kept["rank"] = self.at(torch.zeros(n, v, dtype=torch.int32, device=self.device), "int *")
                numbers = dict(n=n, v=v, top_k=50, top_p=0.9, log_kept=out[0])
                cut = self.struct("Cut", scaled=z, order=self.at(order, "int64_t *"), **numbers, **kept)
                self.line(f"top-k and top-p {n}x{v}", self.seconds(partial(self.gpu.call, "cut_tokens", cut)))

    def optimizer(self) -> None:
        """The norm of gradients, and AdamW."""
        from twins import ffi

        n = self.n(150_000_000, 9000)
        p, g, m, v = (self.floats(n) for _ in range(4))
        v.abs_()
        tensor = ffi.new("Trained[]", [dict(p=self.at(p), g=self.at(g), m=self.at(m), v=self.at(v), n=n)])
        betas = dict(beta1=0.9, rest1=0.1, beta2=0.999, rest2=0.001)
        step = self.struct("Step", clip=1.0, keep=1.0, rate=1e-5, unroot=1.7, eps=1e-8, **betas)
        ours = self.seconds(lambda: self.gpu.call("gradient_squares", tensor, 1))
        self.line(f"norm of {n} gradients", ours, self.seconds(lambda: g.square().sum()), size=4.0 * n)
        self.line(f"AdamW of {n}", self.seconds(lambda: self.gpu.call("adamw", tensor, 1, step)), size=28.0 * n)

    def model(self) -> None:
        """Four layers of Qwen3-0.6B's shape: scoring, training, decoding, beside transformers in float32."""
        torch, layers = self.torch, 4
        count, each = self.n(8, 2), self.n(1024, 40)
        hidden, heads, kv, d, inner = shape = (64, 4, 2, 16, 72) if self.small else (1024, 16, 8, 128, 3072)
        m = _Model(self, layers, shape, vocabulary=self.n(151936, 61), positions=2048)
        rows = count * each
        flops = (
            2.0 * rows * layers * hidden * (2 * (heads + kv) * d + 3 * inner)
            + 2.0 * count * each**2 * heads * d * layers
        )
        beside = {"score": 0.0, "train": 0.0}
        if not self.small:
            beside = _stock(self, layers, shape, count, each)
        batch, out = m.batch(count, 0, each), self.floats(rows, hidden)
        score = self.seconds(lambda: m.forward(batch, out))
        self.line(f"{layers} layers score {count}x{each} tokens", score, beside["score"], flops)
        both = self.seconds(lambda: m.backward(batch, out))
        self.line(f"{layers} layers forward and backward {count}x{each} tokens", both, beside["train"], 3 * flops)
        both = self.seconds(lambda: m.forward(batch, out, keep=True))
        self.line(f"{layers} layers forward, all kept", both, 0.0, flops)
        for count, position in ((128, 300), (128, 1000), (8, 2000)):
            count, position = self.n(count, 3), self.n(position, 30)
            step, out = m.batch(count, position, 1), self.floats(count, hidden)
            ours = self.seconds(lambda step=step, out=out: m.forward(step, out))
            size = 8.0 * count * position * kv * d * layers
            self.line(f"{layers} layers decode {count} sequences at {position}", ours, size=size)
        if not self.small:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(20):
                m.forward(step, out)
            torch.cuda.synchronize()
            self.say(what="host's part: a decode step's wall time", ms=(time.perf_counter() - begin) / 20 * 1e3)


class _Model:
    """A made-up model of Qwen3's kind as C structs."""

    def __init__(self, bench: Bench, layers: int, shape: Shape, vocabulary: int, positions: int) -> None:
        from twins import ffi

        hidden, heads, kv, d, inner = shape
        self.bench, self.ffi, self.grads = bench, ffi, 0

        def trained(*shape: int, scale: float) -> tuple[Any, int]:
            at, x = self.grads, bench.floats(*shape, scale=scale)
            self.grads += x.numel()
            return bench.at(x), at

        def norm(n: int) -> dict[str, Any]:
            w, grad = trained(n, scale=1.0)
            return dict(w=w, grad=grad, b_grad=-1)

        def matrix(n: int, k: int) -> dict[str, Any]:
            w, grad = trained(n, k, scale=k**-0.5)
            return dict(w=w, grad=grad, bias_grad=-1, n=n, k=k)

        def layer() -> dict[str, Any]:
            norms = dict(norm1=norm(hidden), norm2=norm(hidden), q_norm=norm(d), k_norm=norm(d))
            attention = dict(qkv=matrix((heads + 2 * kv) * d, hidden), out=matrix(hidden, heads * d))
            return norms | attention | dict(up=matrix(2 * inner, hidden), down=matrix(hidden, inner), scale=d**-0.5)

        self.layer = ffi.new("Layer[]", [layer() for _ in range(layers)])
        embedding, embedding_grad = trained(vocabulary, hidden, scale=1.0)
        angles = bench.floats(positions, d // 2)
        self.struct = bench.struct(
            "Model", layers=layers, hidden=hidden, heads=heads, kv_heads=kv, head_dim=d, vocabulary=vocabulary,
            norm=0, qk_norm=1, rotary=d, activation=0, gated=1, chosen=1, experts=1, normalised=1, q_step=d,
            k_at=heads * d, k_step=d, v_at=(heads + kv) * d, v_step=d, padding=-1, eps=1e-6, embedding_scale=1.0,
            cosine=angles.cos(), sine=angles.sin(), embedding=embedding, embedding_grad=embedding_grad,
            positions_grad=-1, last_norm=norm(hidden), layer=self.layer,
        )  # fmt: skip
        self.gradient = bench.floats(self.grads)
        self.slots = bench.n(128, 3)
        each = -(-positions // 16) * 16
        self.each, self.capacity = each, self.slots * each
        self.keys, self.values = (bench.floats(layers * kv * self.capacity * d) for _ in range(2))

    def batch(self, count: int, past: int, each: int) -> Any:
        """Return a batch of `count` sequences with `each` tokens from position `past` on."""
        integers = dict(
            ids=[i % 61 for i in range(count * each)],
            position=[past + i % each for i in range(count * each)],
            sequence=[i // each for i in range(count * each)],
            start=[i * each for i in range(count + 1)],
            base=[i * self.each for i in range(count)],
            slots=[((i + 1) * 8 - 1) // count for i in range(count)] + [8],
        )
        arrays = {name: self.ffi.new("int[]", x) for name, x in integers.items()}
        self.bench.tensors.append(arrays)
        memory = dict(keys=self.keys, values=self.values, capacity=self.capacity)
        return self.bench.struct("Batch", tokens=count * each, sequences=count, **arrays, **memory)

    def forward(self, batch: Any, out: Any, keep: bool = False) -> None:
        """Compute hidden states, and keep what a backward pass needs."""
        kept = self.kept(batch) if keep else None
        arrays = (self.bench.at(kept), 2 if keep else 0, self.bench.at(out))
        fault = self.bench.gpu.call("model_forward", self.struct, batch, *arrays)
        assert fault == 0, f"norm {fault} is not finite"

    def kept(self, batch: Any) -> Any:
        """Return memory of a pass, the same for every pass."""
        size = self.bench.gpu.library.kept_floats(self.struct, batch.tokens, 2)
        if not hasattr(self, "memory") or self.memory.numel() < size:
            self.memory = self.bench.torch.empty(size, device=self.bench.device)
        return self.memory

    def backward(self, batch: Any, out: Any) -> None:
        """Compute hidden states, and all gradients of them as if they were those of a loss."""
        self.forward(batch, out, keep=True)
        sums = self.ffi.new("Sums *", dict(levels=3, last=8))
        sums.level[0] = self.bench.at(self.gradient)
        kept, d_out = self.bench.at(self.memory), self.bench.at(out)
        self.bench.gpu.call("model_backward", self.struct, batch, kept, 2, d_out, sums)


def _stock(bench: Bench, layers: int, shape: Shape, count: int, each: int) -> dict[str, float]:
    """Return the times of transformers' Qwen3 in float32."""
    from transformers import Qwen3Config, Qwen3Model

    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    config = Qwen3Config(vocab_size=151936, num_hidden_layers=layers, **dict(zip(names, shape, strict=True)))
    network, ids = Qwen3Model(config).to("cuda"), bench.torch.randint(0, 61, (count, each), device="cuda")

    def score() -> None:
        with bench.torch.no_grad():
            network(ids, use_cache=False)

    def train() -> None:
        network.zero_grad()
        network(ids, use_cache=False).last_hidden_state.sum().backward()

    return {"score": bench.seconds(score), "train": bench.seconds(train)}


class Report:
    """Prints lines, and keeps them in a file if the environment names a folder."""

    def __init__(self) -> None:
        self.begin, out = time.perf_counter(), os.environ.get("OUT")
        self.file = open(Path(out) / "kernel_check.jsonl", "a") if out else None  # noqa: SIM115
        self.bad = 0

    def say(self, **line: Any) -> None:
        """Write one line."""
        line["at"] = round(time.perf_counter() - self.begin, 1)
        print(json.dumps(line), flush=True)
        if self.file:
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()

    def attempt(self, name: str, part: Callable[[], None]) -> None:
        """Run a part; one that fails is counted."""
        try:
            part()
        except Exception:
            self.bad += 1
            self.say(what=f"FAILED: {name}", error=traceback.format_exc()[-600:])


def compare(report: Report, folder: Path, gpu: Any, small: bool) -> None:
    """Compare every bit with the CPU's kernels."""
    import twins

    cpu, size = twins.Side(folder / "cpu.so"), 0
    cpu.call("set_threads", os.cpu_count() or 1)
    for name, side in (("cpu", cpu), ("gpu", gpu)):
        report.say(what=f"known answer, {name}", answer=hex(side.call("known_answer")))
    cases = dict(twins.quick_cases()) if small else dict(twins.all_cases()) | dict(twins.large_cases())
    for name, case in cases.items():

        def both(name: str = name, case: Any = case) -> None:
            nonlocal size
            count, wrong = twins.differences(case, cpu, gpu)
            size += count
            if wrong:
                report.bad += 1
                report.say(what=f"DIFFERS: {name}", wrong=wrong[:5])

        report.attempt(name, both)
    report.say(what="bits", cases=len(cases), numbers=size, cases_that_differ=report.bad)


def run(command: str, folder: Path, stand_in: Path | None) -> int:
    """Compare all bits, or take the times; return how much differed or failed."""
    sys.path[:0] = [str(HERE)] if stand_in else [str(HERE), str(folder.resolve() / "site")]
    import torch
    import twins

    report = Report()
    if stand_in is None:
        torch.zeros(1, device="cuda")
    gpu = twins.GpuSide(folder / "host.so", stand_in or "libcuda.so.1", (folder / "kernels.ptx").read_text())
    report.say(what="opened", card=gpu.name, driver=gpu.facts.driver, torch=torch.__version__)
    if command == "bits":
        compare(report, folder, gpu, stand_in is not None)
    else:
        bench = Bench(gpu, stand_in is not None, report.say)
        for part in (bench.model, bench.tokens, bench.products, bench.few_rows, bench.optimizer):
            report.attempt(part.__name__, part)
            bench.tensors.clear()
            if stand_in is None:
                torch.cuda.empty_cache()
    report.say(what="done")
    return report.bad


if __name__ == "__main__":
    command, folder, *more = sys.argv[1:]
    if command == "prepare":
        prepare(Path(folder))
    else:
        sys.exit(bool(run(command, Path(folder), Path(more[0]) if more else None)))
