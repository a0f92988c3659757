"""Making a tokenizer, and finding where each token's text lies in a response."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ppo_repro.buffers import Spans

PAD, EOS = "<pad>", "<eos>"


def train_bpe(corpus: Iterable[str], vocab_size: int, digits: str = "merged") -> PreTrainedTokenizerFast:
    """Byte-level BPE over the characters of `corpus`; tokens <pad> = 0 and <eos> = 1 come first.

    digits: `merged` like letters; `single`, each a token of its own; `three`, no token over the border of a
    group of three counted from the left, as in the tokenizers of GPT-4 and Llama 3.
    """
    tokenizer = Tokenizer(models.BPE())
    apart = {"merged": [], "single": [_isolated(r"\p{N}")], "three": [_isolated(r"\p{N}{1,3}")]}[digits]
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*apart, pieces]) if apart else pieces
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, EOS], initial_alphabet=[], show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return _fast(tokenizer)


def character_tokenizer(corpus: Iterable[str]) -> PreTrainedTokenizerFast:
    """One token for each character of `corpus`, in order of code points, after <pad> = 0 and <eos> = 1."""
    tokenizer = _without_merges(sorted(set("".join(corpus))))
    tokenizer.decoder = decoders.Fuse()
    return _fast(tokenizer)


def word_tokenizer(corpus: Iterable[str]) -> PreTrainedTokenizerFast:
    """One token for each word of `corpus`, a space before it included; other words fall apart into bytes.

    Words are cut as byte-level BPE cuts them, so numbers and signs are words too. Tokens are <pad> = 0,
    <eos> = 1, the bytes that occur, the words.
    """
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = {word for text in corpus for word, _ in cut.pre_tokenize_str(text)}
    letters = set("".join(words))
    tokenizer = _without_merges([*sorted(letters), *sorted(words - letters)])
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    return _fast(tokenizer)


def train_tokenizer(kind: str, corpus: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """The tokenizer that `model.tokenizer` names; only BPE stops at `vocab_size`, and never below its alphabet."""
    if kind == "characters":
        return character_tokenizer(corpus)
    if kind == "words":
        return word_tokenizer(corpus)
    digits = {"bpe": "merged", "bpe_single_digits": "single", "bpe_three_digits": "three"}[kind]
    return train_bpe(corpus, vocab_size, digits)


def _isolated(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _without_merges(tokens: Sequence[str]) -> Tokenizer:
    """A tokenizer of given tokens: a piece that is a token stays whole, every other one falls apart."""
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *tokens])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))
    tokenizer.add_special_tokens([PAD, EOS])
    return tokenizer


def _fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Text of a response without special tokens, exactly as the tokens spell it."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _char_ends(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], text: str) -> list[int]:
    """Characters of `text` complete after each token.

    A token that ends inside a character ends where the last complete character does. Decoding a short
    window at a time keeps this linear in the length.
    """
    ends: list[int] = []
    window, read, done = 0, 0, 0
    for i in range(len(ids)):
        before = decode(tokenizer, ids[window:read])
        now = decode(tokenizer, ids[window : i + 1])
        if len(now) > len(before) and not now.endswith("\ufffd"):
            done += len(now) - len(before)
            window, read = read, i + 1
        ends.append(min(done, len(text)))
    # what is left, an incomplete character, belongs to the last token that can have text
    special = set(tokenizer.all_special_ids)
    last = max((i for i, token in enumerate(ids) if token not in special), default=len(ids))
    ends[last:] = [len(text)] * (len(ids) - last)
    return ends


def spans(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], text: str) -> Spans:
    """Where each token of a response lies in its text, in characters, UTF-8 bytes and words.

    A word begins at the first token, at a token whose text begins with white space or follows white space,
    and before and after a special token. Tokens that share a character share its word.
    """
    ends = _char_ends(tokenizer, ids, text)
    starts = [0, *ends][:-1]
    byte_offsets = [0]
    for character in text:
        byte_offsets.append(byte_offsets[-1] + len(character.encode("utf-8", "surrogatepass")))
    special = set(tokenizer.all_special_ids)
    word_ids: list[int] = []
    sub_idx: list[int] = []
    inside_character = False
    for t, (start, end) in enumerate(zip(starts, ends, strict=True)):
        apart = ids[t] in special or (t > 0 and ids[t - 1] in special)
        spaced = text[start:end][:1].isspace() or (start > 0 and text[start - 1].isspace())
        begins = t == 0 or apart or (spaced and not inside_character)
        word_ids.append(word_ids[-1] + begins if t else 0)
        sub_idx.append(0 if begins else sub_idx[-1] + 1)
        inside_character = start == end and ids[t] not in special
    return Spans(starts, ends, [byte_offsets[s] for s in starts], [byte_offsets[e] for e in ends], word_ids, sub_idx)
