"""ppo_repro refuses C kernels that compute another result than the definition.

Controls: libraries with one mistake each, which must give another answer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ppo_repro.base.errors import UserError
from ppo_repro.base.mode import Precision
from ppo_repro.numerics import build, library
from tests.numerics.known_answer import known_answer
from tests.support.broken import broken_library
from tests.support.variants import ABLE, opened

ARM_LIBC = Path("/usr/aarch64-linux-gnu")


ANSWERS = {"highest": library.KNOWN_ANSWER, "high": library.KNOWN_ANSWER_HIGH}


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_the_known_answer_is_the_definitions(precision: Precision) -> None:
    assert known_answer(precision) == ANSWERS[precision]


@pytest.mark.parametrize("variant", ABLE, ids=[variant.name for variant in ABLE])
def test_every_variant_that_this_cpu_runs_gives_the_known_answer(variant: build.Variant) -> None:
    kernels = opened(variant)
    assert [kernels.known_answer(i) for i in range(2)] == list(ANSWERS.values())


LAST_EXPERT_FIRST = "    const int choice = a->chosen - 1 - j;\n"
# a file, and texts of the file with what stands there instead
MISTAKES: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "rule 1: blocks of 64 terms": ("interface.h", (("BLOCK = 128", "BLOCK = 64"),)),
    "rule 1: terms of a block fall": (
        "tiles.c",
        (
            ("w_panel + k * w_step);", "w_panel + (terms - 1 - k) * w_step);"),
            ("k * x_step;", "(terms - 1 - k) * x_step;"),
        ),
    ),
    "rule 1: a term is rounded twice": (
        "kernels.h",
        (("return __builtin_elementwise_fma(a, b, c);", "return a * b + c;"),),
    ),
    "rule 1: the bias is added to the residual": (
        "linear.c",
        (
            ("y[n] = y[n] + bias[n];", "y[n] = a->residual ? y[n] : y[n] + bias[n];"),
            ("residual[n] + y[n]", "(bias ? residual[n] + bias[n] : residual[n]) + y[n]"),
        ),
    ),
    "rule 2: blocks are rows, not positions": (
        "blocks.c",
        (("position[t] / BLOCK == position[t - 1] / BLOCK", "position && t / BLOCK == (t - 1) / BLOCK"),),
    ),
    "rule 2: slots are joined in pairs from the last": (
        "optimizer.c",
        (("level = 0; level < sums->levels; level++", "level = sums->levels - 1; level >= 0; level--"),),
    ),
    "rule 2: an open slot begins again": (
        "gradients.c",
        (("part_waits(part, s->first, s->open)", "part_waits(part, s->first, 0)"),),
    ),
    "rule 2: a norm's terms are rounded to float32": (
        "gradients.c",
        (("acc[j] += (double)dy[j] * (", "acc[j] += dy[j] * ("),),
    ),
    "rule 2: an embedding's rows fall": ("gradients.c", (("a->sorted[i];", "a->sorted[begin + end - 1 - i];"),)),
    "rule 2: padding is trained": ("gradients.c", (("id == a->skipped ? begin : ", ""),)),
    "rule 3: 8 lanes": ("arithmetic.h", (("LANES = 16", "LANES = 8"),)),
    "rule 3: neighbouring lanes are joined first": (
        "lanes.h",
        (
            (
                "for (int width = LANES / 2; width; width /= 2)\n    for (int l = 0; l < width; l++)",
                "for (int width = 1; width < LANES; width *= 2)\n    for (int l = 0; l < LANES; l += 2 * width)",
            ),
        ),
    ),
    "rule 3: stretches of 8,192 gradients": ("interface.h", (("STRETCH = 4096", "STRETCH = 8192"),)),
    "rule 4: p is summed in float32": (
        "attention.c",
        (
            (
                "*total = (float)sum_row(score_to_p + keys.begin, keys.to - keys.begin);",
                "*total = 0.0f;\n  for (int j = keys.from; j < keys.to; j++) *total += score_to_p[j];",
            ),
        ),
    ),
    "rule 4: mixed values times 1 / sum": (
        "attention.c",
        (("mixed[i * head_dim + d] / h->total[at[i]]", "mixed[i * head_dim + d] * (1.0f / h->total[at[i]])"),),
    ),
    "rule 4: heads of a group fall": (
        "attention.c",
        (
            (
                "int head = kv * group; head < (kv + 1) * group; head++",
                "int head = (kv + 1) * group - 1; head >= kv * group; head--",
            ),
        ),
    ),
    "rule 4: a window of one key more": ("shapes.h", (("position - window + 1", "position - window"),)),
    "rule 4: no soft cap": ("attention.c", (("if (!h->score_cap) return;", "return;"),)),
    "rule 4: a soft cap before the scale": (
        "attention.c",
        (
            ("scores[j] = scores[j] * h->scale;", "scores[j] = h->score_cap ? scores[j] : scores[j] * h->scale;"),
            ("soft_cap(scores[j], h->score_cap);", "soft_cap(scores[j], h->score_cap) * h->scale;"),
        ),
    ),
    "rule 4: a soft cap without its slope": (
        "attention.c",
        (("if (capped) dp_to_ds[j] = dp_to_ds[j] *", "if (capped) (void)"),),
    ),
    "a residual scale on the wrong side": (
        "steps.c",
        (
            (".scale = m->residual_scale, .x = y, .y = y});", ".scale = 1.0f, .x = y, .y = y});"),
            (
                "for_rows(rows, add_row, &(Addition){.n = n, .x = x, .change = y, .y = y});",
                "for_rows(rows, add_row, &(Addition){.n = n, .x = x, .change = y, .y = y});\n"
                "  for_rows(rows, scale_row, &(Scaling){.n = n, .scale = m->residual_scale, .x = y, .y = y});",
            ),
        ),
    ),
    "a gradient without the residual scale": (
        "model.c",
        (("if (scale != 1.0f) {\n    for_rows(blocks->rows", "if (0) {\n    for_rows(blocks->rows"),),
    ),
    "experts without the residual scale": ("experts.c", (("if (a->scale != 1.0f) {", "if (0) {"),)),
    "rule 5: logits without their divisor": ("tokens.c", (("z[i] = z[i] / a->divisor;", "(void)z;"),)),
    "rule 5: logits without their cap": ("tokens.c", (("  if (!a->cap) return;", "  return;"),)),
    "rule 5: the last step of exp is rounded twice": (
        "elementary.h",
        (("y = fma32(y, r * r, r) + 1.0f;\n  int32_t", "y = (y * (r * r) + r) + 1.0f;\n  int32_t"),),
    ),
    "rule 5: a norm's root in float32": (
        "rows.c",
        (("(float)(1.0 / sqrt64(squares / n + eps))", "1.0f / sqrt32((float)(squares / n + eps))"),),
    ),
    "rule 5: a rotation is contracted": ("rows.c", (("y[d] = a * c - b * s;", "y[d] = fma32(a, c, -(b * s));"),)),
    "rule 5: the rotary positions of another layer": (
        "heads.c",
        ((".rotary = l->rotary,\n      .q_norm", ".rotary = m->layer[m->layers - 1].rotary,\n      .q_norm"),),
    ),
    "rule 5: slope of SiLU without fma": ("rows.c", (("s * fma32(x, 1.0f - s, 1.0f)", "s * (1.0f + x * (1.0f - s))"),)),
    "rule 6: another product in AdamW": ("optimizer.c", (("s.rest2 * c * c", "s.rest2 * (c * c)"),)),
    "rule 6: moments without fma": (
        "optimizer.c",
        (("fma32(s.beta1, m[i], s.rest1 * c)", "s.beta1 * m[i] + s.rest1 * c"),),
    ),
    "rule 7: experts are added by falling index": (
        "experts.c",
        (
            (
                "    const float weight = a->weights[(long)row * a->chosen + j];\n"
                "    const float *y = a->y + (long)a->row_of[(long)row * a->chosen + j] * n;",
                LAST_EXPERT_FIRST + "    const float weight = a->weights[(long)row * a->chosen + choice];\n"
                "    const float *y = a->y + (long)a->row_of[(long)row * a->chosen + choice] * n;",
            ),
        ),
    ),
    "rule 7: given experts are not heeded": ("experts.c", (("if (a->given) {", "if (0) {"),)),
    "rule 8: top-p without the last token": (
        "tokens.c",
        (("before <= a->of.top_p * total", "before + e[order[i]] <= a->of.top_p * total"),),
    ),
    "rule 8: a bound above every score": ("tokens.c", (("#define BOUND_SLACK 1e-3f", "#define BOUND_SLACK -30.0f"),)),
    "rule 8: the sine of an angle": ("tokens.c", (("* -2.0) * cosine", "* -2.0) * sine"),)),
    "a divergence in float32": (
        "tokens.c",
        (("(float)(((double)p_shifted - (double)q_shifted) - mean)", "((p_shifted - q_shifted) - (float)mean)"),),
    ),
    "int8 is cut, not rounded": ("rounding.c", (("__builtin_rintf(x)", "(float)(int)x"),)),
    "a norm after attention of the sum with the residual": (
        "model.c",
        (
            (
                "  norm_step(pass, w, result, factors, y, number, not_finite);\n"
                "  add_step(m, x, pass->b->tokens, m->hidden, y);\n",
                "  for_rows(pass->b->tokens, add_row, &(Addition){.n = m->hidden, .x = x, .change = result, .y = y});\n"
                "  norm_step(pass, w, y, factors, y, number, not_finite);\n",
            ),
        ),
    ),
    "a scaled gradient passes by the norms after": (
        "model.c",
        (("if (!l->norms_after) return dy;", "if (!l->norms_after || scale != 1.0f) return dy;"),),
    ),
    "gate and up change places": (
        "rows.c",
        (
            (
                "activation(kind, fixed_at(x, i)) * fixed_at(x, n + i);",
                "activation(kind, fixed_at(x, n + i)) * fixed_at(x, i);",
            ),
        ),
    ),
    "a norm of each query where all have one": (
        "heads.c",
        (
            ("QK_NORM_HEAD ? m->head_dim", "QK_NORM_HEAD || m->qk_norm ? m->head_dim"),
            ("QK_NORM_HEAD ? heads", "QK_NORM_HEAD || m->qk_norm ? heads"),
        ),
    ),
    "norms of queries and keys without their offset": (
        "heads.c",
        (("    norm(m->head_norm, m->eps, w", "    norm(NORM_RMS, m->eps, w"),),
    ),
    "high: ties away from zero": (
        "integers.c",
        (
            ("(Ints)(x * up + whole)", "__builtin_convertvector(x * up + (x > 0 ? (Wide)0.5f : (Wide)-0.5f), Ints)"),
            (" - (Ints)whole;", " + 0 * (Ints)whole;"),
        ),
    ),
    "high: a clip at 4,096": ("integers.c", (("LARGEST_INTEGER = 4095", "LARGEST_INTEGER = 4096"),)),
    "high: integers of 12 bits": (
        "integers.c",
        (("(exponent - 11)", "(exponent - 10)"), ("127 + 127 + 11 - exp", "127 + 127 + 10 - exp")),
    ),
    "high: an integer without its sign": ("integers.c", (("(X & 0xffff)", "(X & 0x7fff)"),)),
    "high: sums of a block in float32": (
        "integers.c",
        (
            ("? (Wide)add_pairs((Ints)sum,", "? sum + __builtin_convertvector(add_pairs((Ints)0,"),
            ("(Ints)w) : fma_wide", "(Ints)w), Wide) : fma_wide"),
            ("__builtin_convertvector((Ints)sum, Wide) * (", "sum * ("),
        ),
    ),
    "high: one scale for both factors": ("integers.c", (("(x_scale * w_scale)", "(w_scale * w_scale + 0 * x_scale)"),)),
    "high: an odd term is lost": ("integers.c", (("t < terms ? some_of", "t + i < terms ? some_of"),)),
    "high: no remainders": (
        "tiles.c",
        (("if (needs_remainders(a, w, PANELS))", "if (0)"), ("if (needs_remainders(a, w, 1))", "if (0)")),
    ),
    "high: remainders of x alone": (
        "tiles.c",
        (("acc[i][p] = chain_step(at, rest[p],", "(void)chain_step(at, rest[p],"),),
    ),
    "high: remainders of 10 bits": ("integers.c", (("REMAINDER_SCALE 0x1p11f", "REMAINDER_SCALE 0x1p10f"),)),
    "high: remainders are added to the sum before": (
        "tiles.c",
        (
            ("a->rest) sum = sum + ", "a->rest) *out = (first ? (Wide)0.0f : *out) + "),
            ("(first ? (Wide)0.0f : *out) + sum", "(first && !a->rest ? (Wide)0.0f : *out) + sum"),
        ),
    ),
    "high: half of a block is mostly small": ("integers.c", (("(2 * small > n)", "(2 * small >= n)"),)),
    "high: a gradient is asked too": (
        "linear.c",
        (("a->terms, a->asked,", "a->terms, 1,"),),
    ),
    "high: gradients of weights as in highest": (
        "steps.c",
        (("weight_gradient(w->precision, dy", "weight_gradient(PRECISION_HIGHEST, dy"),),
    ),
    "a prefix without its values": ("rows.c", (("values[a->to + i] = values[a->from + i]", "(void)values"),)),
}


@pytest.mark.parametrize(
    "mistake",
    ["rule 1: blocks of 64 terms", *(pytest.param(name, marks=pytest.mark.slow) for name in list(MISTAKES)[1:])],
)
def test_control_a_library_with_a_mistake_is_refused(mistake: str, tmp_path: Path) -> None:
    file, changes = MISTAKES[mistake]
    path = broken_library(tmp_path, file, *changes)
    with pytest.raises(UserError) as error:
        library.open_library(path)
    right = ANSWERS["high" if mistake.startswith("high") else "highest"]
    assert f"where {right:#x} is right, so results would differ; PPO_REPRO_KERNELS" in str(error.value)
    assert path.name in str(error.value)


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("qemu-aarch64") and ARM_LIBC.exists()), reason="needs Debian's qemu-user and libc6-arm64-cross"
)
def test_an_emulated_arm_processor_gives_the_known_answer(tmp_path: Path) -> None:
    where = build.PLATFORMS["Linux", "aarch64"]
    kernels = build.compile_variants(where, tmp_path)[0]
    (tmp_path / "main.c").write_text(
        "#include <stdio.h>\nunsigned long long known_answer(int);\n"
        'int main(void) { printf("%llx %llx\\n", known_answer(0), known_answer(1)); return 0; }\n'
    )
    command = [*build.compiler(where.target), "main.c", kernels.name, "-o", "main"]
    subprocess.run(command, cwd=tmp_path, env=build.compiler_environment(tmp_path / "zig"), check=True)
    environment = {**os.environ, "QEMU_LD_PREFIX": str(ARM_LIBC), "QEMU_SET_ENV": f"LD_LIBRARY_PATH={tmp_path}"}
    said = subprocess.run(["qemu-aarch64", tmp_path / "main"], env=environment, capture_output=True, text=True)
    assert (said.stderr, [int(answer, 16) for answer in said.stdout.split()]) == ("", list(ANSWERS.values()))
