"""E0: what can a tokenizer change in a KL divergence? Computed by exact sums over every possible string.

p and q are two distributions over all strings of at most six letters a, b and space. A tokenizer cuts each string in
one way; the probabilities of strings determine the conditionals of every token, including the end token. Then

* P1: over the tokens of a string, sum log p(token | before) / q(token | before) = log p(string) / q(string);
* P2: KL over token sequences = KL over strings + E_p KL(p(cut | string) || q(cut | string)), by the chain rule, and
  the last term is 0 where every string is cut in only one way;
* P3: the expected sums of k1, of k3 and of the divergence per position equal that KL for every tokenizer; those of k2,
  |k1| and clamped k1 depend on the tokenizer, and so does every mean per token.

`python -m experiments.tokenization.oracle` prints the table and exits with 1 where P1 to P3 do not hold to 1e-9.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from analysis.tokenization.marginal import exact_marginal, segmentation_logprob, segmentations
from ppo_repro.seeding import words

ALPHABET, LONGEST, END = "ab ", 6, 0
CLAMP = 0.3  # k1 is cut off at this many nats, either side
TOLERANCE = 1e-9
Ids = tuple[int, ...]
Distribution = dict[Ids, float]  # over sequences of token ids, END last
Tokenizer = dict[int, str]  # the text of each token; END has none


@dataclass(frozen=True)
class Row:
    """Expectations under p for one tokenizer, in nats per string unless named per token."""

    tokenizer: str
    tokens: int  # in the vocabulary, END included
    length: float  # E[tokens of a string]
    string_kl: float
    cut_kl: float  # E_p KL(p(cut | string) || q(cut | string))
    sum_k1: float
    sum_k3: float
    sum_exact: float
    sum_k2: float
    sum_abs_k1: float
    sum_clamped_k1: float
    token_mean: float  # E[sum k1] / E[tokens]
    mean_of_means: float  # E[sum k1 / tokens]
    telescoping: float  # largest |sum k1 - log p(string)/q(string)| where each string has one cut


def strings() -> list[str]:
    """Every string of at most LONGEST letters, the empty one first."""
    return ["".join(s) for n in range(LONGEST + 1) for s in itertools.product(ALPHABET, repeat=n)]


def random_distribution(name: str) -> dict[str, float]:
    """Probabilities of all strings, skewed, a pure function of the name."""
    raw = (words(len(strings()), "oracle", name) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    weights = ((raw + 0.01) ** 3).tolist()
    return {s: w / math.fsum(weights) for s, w in zip(strings(), weights, strict=True)}


def train_bpe(corpus: Mapping[str, float], merges: int) -> list[tuple[str, str]]:
    """The first `merges` merges of BPE on weighted strings; ties go to the first pair. Sennrich et al., 2016."""
    pieces = {s: list(s) for s in corpus}
    trained: list[tuple[str, str]] = []
    for _ in range(merges):
        counts: Counter[tuple[str, str]] = Counter()
        for s, cut in pieces.items():
            for pair in itertools.pairwise(cut):
                counts[pair] += corpus[s]  # type: ignore[assignment]
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        trained.append(best)
        pieces = {s: apply_merge(cut, best) for s, cut in pieces.items()}
    return trained


def apply_merge(cut: Sequence[str], pair: tuple[str, str]) -> list[str]:
    """The pieces with every occurrence of the pair, from the left, joined into one."""
    out: list[str] = []
    for piece in cut:
        if out and (out[-1], piece) == pair:
            out[-1] += piece
        else:
            out.append(piece)
    return out


def bpe(merges: Sequence[tuple[str, str]]) -> Callable[[str], list[str]]:
    """The cut of a string by merges in their order."""

    def cut(text: str) -> list[str]:
        pieces = list(text)
        for pair in merges:
            pieces = apply_merge(pieces, pair)
        return pieces

    return cut


def word_level(text: str) -> list[str]:
    """Words with the white space before them."""
    pieces: list[str] = []
    for before, letter in itertools.pairwise(["\0", *text]):
        if not pieces or (letter == " " and before != " "):
            pieces.append("")
        pieces[-1] += letter
    return pieces


def canonical(p: Mapping[str, float], cut: Callable[[str], list[str]], ids: Mapping[str, int]) -> Distribution:
    """The distribution over token sequences where each string has one cut."""
    return {(*(ids[piece] for piece in cut(s)), END): mass for s, mass in p.items()}


def spread(p: Mapping[str, float], tokenizer: Tokenizer, name: str) -> Distribution:
    """The same strings over all their cuts, in random shares for each string."""
    spelled = {i: piece.encode() for i, piece in tokenizer.items()}
    distribution: Distribution = {}
    for s, mass in p.items():
        cuts = list(segmentations(s.encode(), spelled))
        shares = (words(len(cuts), "oracle", name, s) >> np.uint64(11)).astype(np.float64) * 2.0**-53 + 0.01
        distribution |= {
            (*c, END): mass * share for c, share in zip(cuts, (shares / shares.sum()).tolist(), strict=True)
        }
    return distribution


def conditionals(p: Distribution, size: int) -> dict[Ids, npt.NDArray[np.float64]]:
    """Exact autoregressive conditionals: p(next | prefix), [size], for every prefix with any mass."""
    masses: dict[Ids, list[list[float]]] = defaultdict(lambda: [[] for _ in range(size)])
    for ids, mass in p.items():
        for t, token in enumerate(ids):
            masses[ids[:t]][token].append(mass)
    by_prefix = {}
    for prefix, columns in masses.items():
        total = np.array([math.fsum(column) for column in columns])
        by_prefix[prefix] = total / math.fsum(total.tolist())
    return by_prefix


def next_logprobs(of: Mapping[Ids, npt.NDArray[np.float64]]) -> Callable[[Ids], npt.NDArray[np.float64]]:
    """The conditionals as a model: log-probs of the next token, -inf for impossible ones."""

    def ask(prefix: Ids) -> npt.NDArray[np.float64]:
        with np.errstate(divide="ignore"):
            return np.log(of[prefix])

    return ask


def kl(p: Sequence[float], q: Sequence[float]) -> float:
    """KL(p || q), nats; 0 log 0 = 0."""
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0.0)


def measure(name: str, p: Distribution, q: Distribution, tokenizer: Tokenizer, p_string: Mapping[str, float]) -> Row:
    """All expectations for one tokenizer, by summing over every token sequence."""
    size = len(tokenizer)
    of_p, of_q = conditionals(p, size), conditionals(q, size)
    text = {ids: "".join(tokenizer[i] for i in ids) for ids in p}
    q_string: dict[str, float] = defaultdict(float)
    for ids, mass in q.items():
        q_string[text[ids]] += mass
    position = {prefix: kl(of_p[prefix].tolist(), of_q[prefix].tolist()) for prefix in of_p}
    sums: dict[str, list[float]] = defaultdict(list)
    telescoping = 0.0
    for ids, mass in p.items():
        prefixes = [ids[:t] for t in range(len(ids))]
        x = np.array([math.log(of_p[b][i] / of_q[b][i]) for b, i in zip(prefixes, ids, strict=True)])
        sums["length"].append(mass * len(ids))
        sums["k1"].append(mass * math.fsum(x))
        sums["k3"].append(mass * math.fsum(np.expm1(-x) + x))
        sums["exact"].append(mass * math.fsum(position[b] for b in prefixes))
        sums["k2"].append(mass * math.fsum(0.5 * x * x))
        sums["abs"].append(mass * math.fsum(np.abs(x)))
        sums["clamped"].append(mass * math.fsum(np.clip(x, -CLAMP, CLAMP)))
        sums["mean"].append(mass * math.fsum(x) / len(ids))
        telescoping = max(telescoping, abs(math.fsum(x) - math.log(mass / q[ids])))
    total = {key: math.fsum(values) for key, values in sums.items()}
    cuts = [mass * math.log((mass / p_string[text[ids]]) / (q[ids] / q_string[text[ids]])) for ids, mass in p.items()]
    return Row(
        tokenizer=name,
        tokens=size,
        length=total["length"],
        string_kl=kl([p_string[s] for s in q_string], list(q_string.values())),
        cut_kl=math.fsum(cuts),
        sum_k1=total["k1"],
        sum_k3=total["k3"],
        sum_exact=total["exact"],
        sum_k2=total["k2"],
        sum_abs_k1=total["abs"],
        sum_clamped_k1=total["clamped"],
        token_mean=total["k1"] / total["length"],
        mean_of_means=total["mean"],
        telescoping=telescoping,
    )


def vocabulary(cut: Callable[[str], list[str]]) -> Tokenizer:
    """The tokens that occur, END first, then by length and letters."""
    pieces = {piece for s in strings() for piece in cut(s)} | set(ALPHABET)
    return {END: "", **dict(enumerate(sorted(pieces, key=lambda piece: (len(piece), piece)), 1))}


def cutters(p: Mapping[str, float]) -> dict[str, Callable[[str], list[str]]]:
    """The tokenizers of the table, each a way to cut a string."""
    sizes = {f"bpe, {n} merges": bpe(train_bpe(p, n)) for n in (2, 4, 8)}
    return {"characters": bpe([]), **sizes, "words": word_level}


def table() -> list[Row]:
    """A row per tokenizer; the last one spreads every string over all its cuts."""
    p, q = random_distribution("p"), random_distribution("q")
    rows = []
    for name, cut in cutters(p).items():
        tokenizer = vocabulary(cut)
        ids = {piece: i for i, piece in tokenizer.items()}
        rows.append(measure(name, canonical(p, cut, ids), canonical(q, cut, ids), tokenizer, p))
    tokenizer = vocabulary(cutters(p)["bpe, 2 merges"])
    spread_p, spread_q = spread(p, tokenizer, "p cuts"), spread(q, tokenizer, "q cuts")
    return [*rows, measure("bpe, 2 merges, all cuts", spread_p, spread_q, tokenizer, p)]


def marginal_gap() -> tuple[float, float]:
    """Largest |log p(text) by enumeration - log p(string)|, and smallest log p(text) - log p(canonical cut)."""
    p = random_distribution("p")
    cut = cutters(p)["bpe, 2 merges"]
    tokenizer = vocabulary(cut)
    ids = {piece: i for i, piece in tokenizer.items()}
    ask = next_logprobs(conditionals(spread(p, tokenizer, "p cuts"), len(tokenizer)))
    spelled = {i: piece.encode() for i, piece in tokenizer.items()}
    worst, gap = 0.0, math.inf
    for s in strings():
        logprob = exact_marginal(s.encode(), spelled, ask, end_id=END, max_segmentations=100).logprob
        alone = segmentation_logprob([ids[piece] for piece in cut(s)], ask, end_id=END)
        worst, gap = max(worst, abs(logprob - math.log(p[s]))), min(gap, logprob - alone)
    return worst, gap


def broken(rows: Sequence[Row]) -> list[str]:
    """Messages about parts of P1 to P3 that do not hold."""
    failures = []
    *one_cut, all_cuts = rows
    for row in rows:
        whole = row.string_kl + row.cut_kl
        for name, value in (("sum k1", row.sum_k1), ("sum k3", row.sum_k3), ("sum exact", row.sum_exact)):
            if not abs(value - whole) <= TOLERANCE:
                failures.append(f"{row.tokenizer}: {name} = {value!r} is not the KL {whole!r}")
        if not row.telescoping <= TOLERANCE:
            failures.append(f"{row.tokenizer}: sums of k1 miss log p/q by {row.telescoping!r}")
    if any(not abs(row.cut_kl) <= TOLERANCE for row in one_cut):
        failures.append("a tokenizer with one cut per string has a KL between cuts")
    if not all_cuts.cut_kl > 1e-3:
        failures.append("spreading over cuts added nothing")
    for name in ("sum_k2", "sum_abs_k1", "sum_clamped_k1", "token_mean", "mean_of_means"):
        values = [getattr(row, name) for row in one_cut]
        if not max(values) - min(values) > 1e-3:
            failures.append(f"{name} is the same for all tokenizers, which is not expected")
    return failures


def main() -> None:
    rows = table()
    print("tokenizer                tokens  E[T]   KL strings  + KL cuts  sum k1    sum k3    sum exact", end="")
    print("  sum k2   sum |k1|  clamped  /token   mean of means")
    for r in rows:
        print(
            f"{r.tokenizer:<24} {r.tokens:>6} {r.length:>6.3f} {r.string_kl:>11.6f} {r.cut_kl:>10.6f} {r.sum_k1:>9.6f}"
            f" {r.sum_k3:>9.6f} {r.sum_exact:>10.6f} {r.sum_k2:>8.5f} {r.sum_abs_k1:>9.5f} {r.sum_clamped_k1:>8.5f}"
            f" {r.token_mean:>8.5f} {r.mean_of_means:>8.5f}"
        )
    worst, gap = marginal_gap()
    print(f"log p(text) over all cuts is log p(string) to {worst:.0e}, above the canonical cut's by {gap:.4f} at least")
    failures = broken(rows)
    if not worst <= TOLERANCE or gap < 0.0:
        failures.append("summing over all cuts does not give the probability of the string")
    print("\n".join(failures) or f"P1 to P3 hold to {TOLERANCE:.0e}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
