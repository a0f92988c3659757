"""Compute what a tokenizer can change in a KL divergence (E0), by exact sums over every possible string.

p and q are two distributions over all strings of at most six letters a, b and space. A tokenizer cuts each string in
one way. The probabilities of strings determine the conditionals of every token, including the end token. Then

* P1: over the tokens of a string, sum log p(token | before) / q(token | before) = log p(string) / q(string);
* P2: KL over token sequences = KL over strings + E_p KL(p(cut | string) || q(cut | string)), by the chain rule, and
  the last term is 0 if every string is cut in only one way;
* P3: the expected sums of k1, of k3 and of the divergence per position equal that KL for every tokenizer; those of k2,
  |k1| and clamped k1 depend on the tokenizer, and so does every mean per token.

`python -m experiments.tokenization.oracle` prints the table and exits with 1 where P1 to P3 do not hold to 1e-9.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.base.seeding import words

ALPHABET, LONGEST, END = "ab ", 6, 0
CLAMP = 0.3  # k1 is cut off at this many nats, either side
TOLERANCE = 1e-9
Ids = tuple[int, ...]
Distribution = dict[Ids, float]  # over sequences of token ids, END last
Cut = Callable[[str], list[str]]


def strings() -> list[str]:
    """Return every string of at most LONGEST letters, the empty one first."""
    return ["".join(s) for n in range(LONGEST + 1) for s in itertools.product(ALPHABET, repeat=n)]


def uniform(count: int, *names: str) -> npt.NDArray[np.float64]:
    """Return `count` numbers in [0, 1), a pure function of the names."""
    return (words(count, "oracle", *names) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def random_distribution(name: str) -> dict[str, float]:
    """Return skewed probabilities of all strings, a pure function of the name."""
    weights = ((uniform(len(strings()), name) + 0.01) ** 3).tolist()
    return {s: w / math.fsum(weights) for s, w in zip(strings(), weights, strict=True)}


def apply_merge(cut: Sequence[str], pair: tuple[str, str]) -> list[str]:
    """Return the tokens with every occurrence of the pair, from the left, joined into one."""
    out: list[str] = []
    for token in cut:
        if out and (out[-1], token) == pair:
            out[-1] += token
        else:
            out.append(token)
    return out


def bpe(corpus: Mapping[str, float], merges: int) -> Cut:
    """Return the cut by `merges` BPE merges on weighted strings (Sennrich et al.); ties go to the first pair."""
    cuts, trained = {s: list(s) for s in corpus}, []
    for _ in range(merges):
        counts: Counter[tuple[str, str]] = Counter()
        for s, cut in cuts.items():
            for pair in itertools.pairwise(cut):
                counts[pair] += corpus[s]  # type: ignore[assignment]
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        trained.append(best)
        cuts = {s: apply_merge(cut, best) for s, cut in cuts.items()}

    def cut_of(text: str) -> list[str]:
        tokens = list(text)
        for pair in trained:
            tokens = apply_merge(tokens, pair)
        return tokens

    return cut_of


def word_level(text: str) -> list[str]:
    """Split a text into words, each with the white space before it."""
    tokens: list[str] = []
    for before, letter in itertools.pairwise(["\0", *text]):
        if not tokens or (letter == " " and before != " "):
            tokens.append("")
        tokens[-1] += letter
    return tokens


def vocabulary(cut: Cut) -> dict[str, int]:
    """Return the id of each token that occurs, by length and letters; END is 0 and has no text."""
    tokens = {token for s in strings() for token in cut(s)} | set(ALPHABET)
    return {token: i for i, token in enumerate(sorted(tokens, key=lambda token: (len(token), token)), 1)}


def segmentations(text: str, ids: Mapping[str, int]) -> Iterator[Ids]:
    """Yield every sequence of tokens that spells `text`."""
    if not text:
        yield ()
    for end in range(1, len(text) + 1):
        if text[:end] in ids:
            yield from ((ids[text[:end]], *following) for following in segmentations(text[end:], ids))


def one_cut(p: Mapping[str, float], cut: Cut, ids: Mapping[str, int]) -> Distribution:
    """Return the distribution over token sequences in which each string has one cut."""
    return {(*(ids[token] for token in cut(s)), END): mass for s, mass in p.items()}


def all_cuts(p: Mapping[str, float], ids: Mapping[str, int], name: str) -> Distribution:
    """Spread each string's probability over all its cuts, in random shares."""
    distribution: Distribution = {}
    for s, mass in p.items():
        cuts = list(segmentations(s, ids))
        shares = uniform(len(cuts), name, s) + 0.01
        shares /= shares.sum()
        distribution |= {(*cut, END): mass * share for cut, share in zip(cuts, shares.tolist(), strict=True)}
    return distribution


def conditionals(p: Distribution, size: int) -> dict[Ids, npt.NDArray[np.float64]]:
    """Return the exact conditionals p(next | prefix), float64 [size], of every prefix with a positive probability."""
    masses: dict[Ids, list[list[float]]] = defaultdict(lambda: [[] for _ in range(size)])
    for ids, mass in p.items():
        for t, token in enumerate(ids):
            masses[ids[:t]][token].append(mass)
    totals = {prefix: np.array([math.fsum(column) for column in columns]) for prefix, columns in masses.items()}
    return {prefix: total / math.fsum(total.tolist()) for prefix, total in totals.items()}


def kl(p: Sequence[float], q: Sequence[float]) -> float:
    """Return KL(p || q) in nats, with 0 log 0 = 0."""
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0.0)


def measure(
    p: Distribution, q: Distribution, ids: Mapping[str, int], p_string: Mapping[str, float]
) -> dict[str, float]:
    """Return expectations under p for one tokenizer, by sums over every token sequence; nats per string.

    `missed`: the largest |sum k1 - log p(ids) / q(ids)|.
    """
    of_p, of_q = (conditionals(of, len(ids) + 1) for of in (p, q))
    spelled = {END: "", **{i: token for token, i in ids.items()}}
    text = {sequence: "".join(spelled[i] for i in sequence) for sequence in p}
    q_string: dict[str, float] = defaultdict(float)
    for sequence, mass in q.items():
        q_string[text[sequence]] += mass
    position = {prefix: kl(of_p[prefix].tolist(), of_q[prefix].tolist()) for prefix in of_p}
    sums: dict[str, list[float]] = defaultdict(list)
    missed = 0.0
    for sequence, mass in p.items():
        prefixes = [sequence[:t] for t in range(len(sequence))]
        x = np.array([math.log(of_p[b][i] / of_q[b][i]) for b, i in zip(prefixes, sequence, strict=True)])
        of_string = {
            "tokens": len(sequence),
            "sum k1": math.fsum(x),
            "sum k3": math.fsum(np.expm1(-x) + x),
            "sum exact": math.fsum(position[b] for b in prefixes),
            "sum k2": math.fsum(0.5 * x * x),
            "sum |k1|": math.fsum(np.abs(x)),
            "sum clamped k1": math.fsum(np.clip(x, -CLAMP, CLAMP)),
            "mean of means": math.fsum(x) / len(sequence),
            # how the cut is chosen among those of the string
            "KL cuts": math.log(mass / p_string[text[sequence]]) - math.log(q[sequence] / q_string[text[sequence]]),
        }
        for name, value in of_string.items():
            sums[name].append(mass * value)
        missed = max(missed, abs(of_string["sum k1"] - math.log(mass / q[sequence])))
    row = {name: math.fsum(values) for name, values in sums.items()}
    string_kl = kl([p_string[s] for s in q_string], list(q_string.values()))
    return {"KL strings": string_kl, **row, "sum k1 / tokens": row["sum k1"] / row["tokens"], "missed": missed}


def table() -> pd.DataFrame:
    """Return one row per tokenizer; the last row spreads every string over all its cuts."""
    p, q = random_distribution("p"), random_distribution("q")
    cuts = {"characters": bpe(p, 0), **{f"bpe, {n} merges": bpe(p, n) for n in (2, 4, 8)}, "words": word_level}
    rows = {}
    for name, cut in cuts.items():
        ids = vocabulary(cut)
        rows[name] = measure(one_cut(p, cut, ids), one_cut(q, cut, ids), ids, p)
    ids = vocabulary(cuts["bpe, 2 merges"])
    rows["bpe, 2 merges, all cuts"] = measure(all_cuts(p, ids, "p cuts"), all_cuts(q, ids, "q cuts"), ids, p)
    return pd.DataFrame.from_dict(rows, orient="index")


def broken(rows: pd.DataFrame) -> list[str]:
    """Return messages about the parts of P1 to P3 that do not hold."""
    whole, failures = rows["KL strings"] + rows["KL cuts"], []
    for name in ("sum k1", "sum k3", "sum exact"):
        wrong = (rows[name] - whole).abs() > TOLERANCE
        failures += [f"{row}: {name} is not the KL" for row in rows.index[wrong]]
    failures += [f"{row}: sums of k1 miss log p/q" for row in rows.index[rows["missed"] > TOLERANCE]]
    single = rows.iloc[:-1]
    failures += [f"{row}: a KL between cuts" for row in single.index[single["KL cuts"].abs() > TOLERANCE]]
    if not rows["KL cuts"].iloc[-1] > 1e-3:
        failures.append("spreading over cuts added nothing")
    for name in ("sum k2", "sum |k1|", "sum clamped k1", "sum k1 / tokens", "mean of means"):
        if not np.ptp(single[name]) > 1e-3:
            failures.append(f"{name} is the same for all tokenizers")
    return failures


def main() -> None:
    rows = table()
    print(rows.drop(columns="missed").to_string(float_format="%.5f"))
    failures = broken(rows)
    print("\n".join(failures) or f"P1 to P3 hold to {TOLERANCE:.0e}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
