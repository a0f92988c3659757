"""Turns PTX back into C: each instruction becomes a line, each register a variable, and threads the emulator's fibers.

So tests see what ships, and not only the source that it was compiled from. `translate` knows the instructions that the
kernels have, and fails on any other one. Its float operations are those of NVIDIA's manual, "Parallel Thread Execution
ISA": IEEE 754, each rounded once, to nearest.
"""

from __future__ import annotations

import re

_HEAD = """#include <math.h>
#include <stdint.h>
#include <string.h>
typedef uint8_t u8; typedef uint16_t u16; typedef uint32_t u32; typedef uint64_t u64;
typedef int8_t s8; typedef int16_t s16; typedef int32_t s32; typedef int64_t s64;
extern float *shared_memory;
extern int emulated_thread, emulated_threads, emulated_thread_block[3], emulated_thread_blocks[3];
void barrier(void);
void meet_lanes(void);
u32 other_lane(u32 x, int mask);
void copy_later(float *to, const float *from, int size, int bytes);
void commit_copies(void);
void wait_copies(int groups);
void load_matrices(const float *line, u32 m[4]);
void multiply_bytes(u32 c[4], const u32 a[4], const u32 b[2]);
int any_of_warp(u32 x);
static inline float f32_of(u32 bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline double f64_of(u64 bits) { double x; memcpy(&x, &bits, 8); return x; }
static inline u32 of_f32(float x) { u32 bits; memcpy(&bits, &x, 4); return bits; }
static inline u64 of_f64(double x) { u64 bits; memcpy(&bits, &x, 8); return bits; }
#define SHARED(offset) ((char *)shared_memory + (offset))
#define GLOBAL(address) ((char *)(address))
#define SHIFT_LEFT(type, x, n) ((n) < 8 * sizeof(type) ? (type)((x) << (n)) : (type)0)
#define SHIFT_RIGHT(type, x, n) ((type)((x) >> ((n) < 8 * sizeof(type) ? (n) : 8 * sizeof(type) - 1)))
#define BYTE(x, y, n) ((u32)(((u64)(y) << 32 | (u32)(x)) >> 8 * ((n) & 7)) & 255)
#define LESS(x, y) ((x) < (y) ? (x) : (y))
#define MORE(x, y) ((x) > (y) ? (x) : (y))
"""
_SPECIAL = {
    "%tid.x": "(u32)emulated_thread",
    "%ntid.x": "(u32)emulated_threads",
    **{f"%ctaid.{axis}": f"(u32)emulated_thread_block[{i}]" for i, axis in enumerate("xyz")},
    **{f"%nctaid.{axis}": f"(u32)emulated_thread_blocks[{i}]" for i, axis in enumerate("xyz")},
}
_DECLARED = {"pred": "int", "b16": "u16", "b32": "u32", "b64": "u64"}
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "rem": "%", "and": "&", "or": "|", "xor": "^"}
_COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
# float operations of one rounding: what PTX says, and what C says where contraction is off
_ROUNDED = {
    "fma.rn.f32": "__builtin_fmaf({0}, {1}, {2})",
    "sqrt.rn.f32": "__builtin_sqrtf({0})",
    "sqrt.rn.f64": "__builtin_sqrt({0})",
    "rcp.rn.f32": "1.0f / {0}",
    "rcp.rn.f64": "1.0 / {0}",
    "cvt.rni.f32.f32": "__builtin_rintf({0})",
    "abs.f32": "__builtin_fabsf({0})",
    "abs.f64": "__builtin_fabs({0})",
    **{
        f"{name}.rn.{kind}": f"{{0}} {_INFIX[name]} {{1}}"
        for name in ("add", "sub", "mul", "div")
        for kind in ("f32", "f64")
    },
}


def _operand(text: str) -> str:
    """The bits of a register, a special register, a number, or an address."""
    if text in _SPECIAL:
        return _SPECIAL[text]
    if text.startswith(("0f", "0d")):
        return f"0x{text[2:]}{'u' if text[1] == 'f' else 'ull'}"
    if text == "shared_memory":
        return "0"
    if parameter := re.fullmatch(r"\w+_(param_\d)", text):
        return f"(u64){parameter[1]}"
    return text.removeprefix("%") if text.startswith("%") else f"({text})"


def _typed(text: str, kind: str) -> str:
    """An operand as a number of a PTX type."""
    if kind in ("f32", "f64"):
        return f"{kind}_of({_operand(text)})"
    return f"({kind.replace('b', 'u')})({_operand(text)})"


def _set(to: str, kind: str, value: str) -> str:
    """Give a register a number of a PTX type, as bits."""
    register = to.removeprefix("%")
    if kind in ("f32", "f64"):
        return f"{register} = of_{kind}({value});"
    return f"{register} = {value};" if kind == "pred" else f"{register} = (u{kind[1:]})({value});"


def _place(text: str, space: str) -> str:
    """The host's address of `[base+offset]`."""
    base, _, offset = text.strip("[]").partition("+")
    return f"{'SHARED' if space == 'shared' else 'GLOBAL'}({_operand(base)} + {offset or 0})"


def _braced(text: str) -> list[str]:
    return [part.strip() for part in text.strip("{}").split(",")]


def _memory(op: str, a: list[str]) -> str:
    """ld and st, of one number or of several that follow one another."""
    name, space, *_, kind = op.split(".")
    registers, memory = (a[0], a[1]) if name == "ld" else (a[1], a[0])
    width, lines = int(kind[1:]) // 8, []
    for i, register in enumerate(_braced(registers)):
        at = f"{_place(memory, space)} + {width * i}"
        own = kind.replace("b", "u")
        if name == "st":
            lines.append(f"{{ {own} x = ({own})({_operand(register)}); memcpy({at}, &x, {width}); }}")
        elif register != "_":
            wide = f"({own[0]}64)x"  # a register may be wider than the number
            lines.append(f"{{ {own} x; memcpy(&x, {at}, {width}); {register.removeprefix('%')} = {wide}; }}")
    return " ".join(lines)


def _move(op: str, a: list[str]) -> str:
    """mov: also the halves of 64 bits, apart or together."""
    if a[0].startswith("{"):
        low, high = _braced(a[0])
        halves = ((low, f"(u32){_operand(a[1])}"), (high, f"(u32)({_operand(a[1])} >> 32)"))
        return " ".join(f"{register.removeprefix('%')} = {value};" for register, value in halves if register != "_")
    if a[1].startswith("{"):
        low, high = map(_operand, _braced(a[1]))
        return f"{a[0].removeprefix('%')} = (u64){low} | (u64){high} << 32;"
    return f"{a[0].removeprefix('%')} = {_operand(a[1])};"


def _convert(parts: list[str], a: list[str]) -> str:
    into, out_of = parts[-2], parts[-1]
    number = {"f32": "(float)", "f64": "(double)"}.get(into, f"({into.replace('b', 'u')})")
    return _set(a[0], into, f"{number}{_typed(a[1], out_of)}")


def _compare(parts: list[str], a: list[str]) -> str:
    """setp: floats that are not ordered compare as false, with a `u` as true."""
    how, kind = parts[0], parts[-1]
    x, y = _typed(a[1], kind), _typed(a[2], kind)
    if how in ("num", "nan"):
        ordered = f"({x} == {x} && {y} == {y})"
        return _set(a[0], "pred", ordered if how == "num" else f"!{ordered}")
    if how in _COMPARED:
        ordered = f" && {x} == {x} && {y} == {y}" if how == "ne" and kind[0] == "f" else ""
        return _set(a[0], "pred", f"{x} {_COMPARED[how]} {y}{ordered}")
    return _set(a[0], "pred", f"{x} != {x} || {y} != {y} || {x} {_COMPARED[how.removesuffix('u')]} {y}")


def _whole(name: str, parts: list[str], a: list[str]) -> str | None:
    """Operations on integers, which wrap."""
    kind = parts[-1]
    unsigned = f"u{kind[1:]}"
    x = [_typed(text, kind) for text in a[1:]]
    wrapping = [_typed(text, unsigned) for text in a[1:]]
    if name in ("mul", "mad") and parts[0] == "wide":
        product = f"({kind[0]}64){x[0]} * ({kind[0]}64){x[1]}"
        return _set(a[0], "b64", product if name == "mul" else f"(u64)({product}) + {_operand(a[3])}")
    if name in ("div", "rem", "min", "max"):
        call = (
            f"{x[0]} {_INFIX[name]} {x[1]}"
            if name in _INFIX
            else f"{'LESS' if name == 'min' else 'MORE'}({x[0]}, {x[1]})"
        )
        return _set(a[0], kind, call)
    if name in _INFIX:
        return _set(a[0], kind, f"{wrapping[0]} {_INFIX[name]} {wrapping[1]}")
    if name == "mad" and parts[0] == "lo":
        return _set(a[0], kind, f"{wrapping[0]} * {wrapping[1]} + {wrapping[2]}")
    if name in ("neg", "not"):
        return _set(a[0], kind, f"{'-' if name == 'neg' else '~'}{wrapping[0]}")
    if name in ("shl", "shr"):
        macro, own = ("SHIFT_LEFT", unsigned) if name == "shl" else ("SHIFT_RIGHT", kind.replace("b", "u"))
        shift = f"{macro}({own}, ({own}){_operand(a[1])}, (u32){_operand(a[2])})"
        if name == "shr" and own[0] == "u":
            shift = f"((u32){_operand(a[2])} < 8 * sizeof({own}) ? {shift} : 0)"
        return _set(a[0], kind, shift)
    if name == "shf" and parts[:2] == ["l", "wrap"]:
        both = f"((u64){_operand(a[2])} << 32 | (u32){_operand(a[1])})"
        return _set(a[0], kind, f"{both} << ((u32){_operand(a[3])} & 31) >> 32")
    if name == "prmt":  # of the form that keeps bytes as they are: each digit of the selector is at most 7
        picked = (f"BYTE({_operand(a[1])}, {_operand(a[2])}, {_operand(a[3])} >> {4 * i}) << {8 * i}" for i in range(4))
        return _set(a[0], kind, " | ".join(picked))
    if name == "bfe":
        position, length = _operand(a[2]), _operand(a[3])
        bits = f"({unsigned}){_operand(a[1])} << (32 - {length} - {position})"
        return _set(a[0], kind, f"(({'s32' if kind[0] == 's' else 'u32'})({bits})) >> (32 - {length})")
    return None


def _line(op: str, a: list[str]) -> str:
    """One instruction as C; ValueError for one that is not known."""
    name, *parts = op.split(".")
    kind = parts[-1] if parts else ""
    if op in _ROUNDED:
        return _set(a[0], kind, _ROUNDED[op].format(*(_typed(text, kind) for text in a[1:])))
    if name in ("ld", "st") and parts[0] in ("global", "shared", "param"):
        return _memory(op, a)
    if name == "cvta" or name == "mov":
        return _move(op, a)
    if name == "cvt" and not (kind[0] == "f" and parts[-2][0] != "f"):
        return _convert(parts, a)
    if name == "setp":
        return _compare(parts, a)
    if name == "selp":
        return f"{a[0].removeprefix('%')} = {_operand(a[3])} ? {_operand(a[1])} : {_operand(a[2])};"
    if kind == "pred" and name in ("and", "or", "xor"):
        return _set(a[0], kind, f"{_operand(a[1])} {_INFIX[name]} {_operand(a[2])}")
    if op == "not.pred":
        return _set(a[0], kind, f"!{_operand(a[1])}")
    if op in ("neg.f32", "neg.f64"):
        return _set(a[0], kind, f"-{_typed(a[1], kind)}")
    if kind and kind[0] in "sub" and kind[1:] in ("16", "32", "64") and (line := _whole(name, parts, a)):
        return line
    if op == "shfl.sync.bfly.b32" and a[3] == "31":
        return f"{a[0].removeprefix('%')} = other_lane({_operand(a[1])}, {a[2]});"
    if op == "bar.warp.sync":
        return "meet_lanes();"
    if op == "bar.sync" and a == ["0"]:
        return "barrier();"
    if op == "cp.async.commit_group":
        return "commit_copies();"
    if op == "cp.async.wait_group":
        return f"wait_copies({a[0]});"
    if op in ("cp.async.ca.shared.global", "cp.async.cg.shared.global"):
        to, from_ = _place(a[0], "shared"), _place(a[1], "global")
        return f"copy_later((float *){to}, (const float *){from_}, {a[2]}, (int){_operand(a[3])});"
    if name == "ldmatrix":
        loaded = " ".join(f"{register.removeprefix('%')} = m[{i}];" for i, register in enumerate(_braced(a[0])))
        return f"{{ u32 m[4]; load_matrices((const float *){_place(a[1], 'shared')}, m); {loaded} }}"
    if op == "vote.sync.any.pred":
        return f"{a[0].removeprefix('%')} = any_of_warp({_operand(a[1])});"
    if op == "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32":
        sums, x, w = (", ".join(map(_operand, _braced(part))) for part in (a[3], a[1], a[2]))
        written = " ".join(f"{register.removeprefix('%')} = c[{i}];" for i, register in enumerate(_braced(a[0])))
        return f"{{ u32 c[4] = {{{sums}}}; multiply_bytes(c, (u32[4]){{{x}}}, (u32[2]){{{w}}}); {written} }}"
    if name == "bra":
        return f"goto {a[0].strip('$')};"
    if op == "ret":
        return "return;"
    raise ValueError(f"{op} {', '.join(a)}")


def _operands(text: str) -> list[str]:
    """Operands are divided by commas, but for those in braces."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|[^,{])+", text)]


def translate(ptx: str) -> str:
    """Return C functions of the kernels' names, of two pointers to their parameters."""
    out = [_HEAD]
    for name, body in re.findall(r"\.entry (\w+)\([^)]*\)[^{]*\{(.*?)^\}", ptx, re.M | re.S):
        out.append(f'__attribute__((visibility("default"))) void {name}(const char *param_0, const char *param_1) {{')
        for line in re.sub(r"//.*", "", body).splitlines():
            text = line.strip().rstrip(";")
            if declared := re.fullmatch(r"\.reg \.(\w+)\s+%(\w+)<(\d+)>", text):
                registers = ", ".join(f"{declared[2]}{i}" for i in range(int(declared[3])))
                out.append(f"{_DECLARED[declared[1]]} {registers};")
            elif text.endswith(":"):
                out.append(f"{text.strip('$:')}: ;")
            elif text and not text.startswith(".pragma"):
                found = re.fullmatch(r"(?:@(!?)%(\w+)\s+)?(\S+)\s*(.*)", text)
                assert found is not None, text
                instruction = _line(found[3], _operands(found[4]))
                out.append(f"if ({found[1]}{found[2]}) {{ {instruction} }}" if found[2] else instruction)
        out.append("}")
    return "\n".join(out)
