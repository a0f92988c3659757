"""Tokenize for tiny models: encode, decode, and find the position of each token in the text of a response."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ppo_repro.base.errors import UserError
from ppo_repro.base.output import shown
from ppo_repro.buffers import Spans

PAD, EOS = "<pad>", "<eos>"
LOOK = 8  # tokens with text, at least twice as many as the bytes of a character


def train_bpe(corpus: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train byte-level BPE over the characters of `corpus`, digits like letters; <pad> = 0 and <eos> = 1 come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, EOS], initial_alphabet=[], show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return _fast(tokenizer)


def character_tokenizer(corpus: Iterable[str]) -> PreTrainedTokenizerFast:
    """Make one token of each character of `corpus`, in order of code points, after <pad> = 0 and <eos> = 1."""
    tokenizer = _without_merges(sorted(set("".join(corpus))))
    tokenizer.decoder = decoders.Fuse()
    return _fast(tokenizer)


def word_tokenizer(corpus: Iterable[str]) -> PreTrainedTokenizerFast:
    """Make one token of each word of `corpus`, including a space before it. Other words are split into bytes.

    Words are split as in byte-level BPE, so numbers and signs are words too. Tokens are <pad> = 0, <eos> = 1, the
    bytes that occur, the words.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = {word for text in corpus for word, _ in byte_level.pre_tokenize_str(text)}
    letters = set("".join(words))
    tokenizer = _without_merges([*sorted(letters), *sorted(words - letters)])
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    return _fast(tokenizer)


def train_tokenizer(kind: str, corpus: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer of `model.tokenizer`. `vocab_size` limits only BPE, which always keeps its whole alphabet."""
    if kind == "characters":
        return character_tokenizer(corpus)
    if kind == "words":
        return word_tokenizer(corpus)
    return train_bpe(corpus, vocab_size)


def _without_merges(tokens: Sequence[str]) -> Tokenizer:
    """Return a tokenizer of known tokens: a word that is a token stays whole, any other word is split into letters."""
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *tokens])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))
    tokenizer.add_special_tokens([PAD, EOS])
    return tokenizer


def _fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
    """Return the token ids of a text. Raises UserError if the tokenizer fails."""
    try:
        return tuple(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:  # a part of the tokenizer's file may be missing, and Rust's panics are no Exception
        raise UserError(
            f"the tokenizer cannot encode '{shown(text)}' ({shown(str(error))}); save the model's own beside it"
        ) from error


def all_token_ids(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], add_special_tokens: bool = True
) -> list[tuple[int, ...]]:
    """Encode texts together. Raises UserError for the first text at which the tokenizer fails."""
    try:
        return [tuple(ids) for ids in tokenizer(list(texts), add_special_tokens=add_special_tokens)["input_ids"]]
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException:
        return [token_ids(tokenizer, text, add_special_tokens) for text in texts]


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], spelled: frozenset[int] = frozenset()) -> str:
    """Decode tokens without a clean-up of spaces. Only the special tokens in `spelled` have a text."""
    if spelled.isdisjoint(ids):
        return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
    hidden = special_ids(tokenizer) - spelled
    return full_text(tokenizer, [token for token in ids if token not in hidden])


def full_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Decode tokens, with every special token spelled out."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def spelled_tokens(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> frozenset[int]:
    """Return the special tokens whose text occurs in `texts`, which the user wants to find in responses."""
    asked = tuple(texts)
    return frozenset(i for token, i in special_tokens(tokenizer).items() if any(token in text for text in asked))


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the id of every special token, by its text."""
    added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {**added, **dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))}


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return every special token, also those that no attribute of the tokenizer names, such as an end of turn."""
    return frozenset(special_tokens(tokenizer).values())


def _char_ends(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], text: str) -> list[int]:
    """Return the number of characters of `text` that are complete after each token.

    A token that ends inside a character ends with the last complete character. A short window is decoded at a time:
    the cost is linear in the length, for bytes of no character too.
    """
    ends: list[int] = []
    special = special_ids(tokenizer)
    window, read, complete = 0, 0, 0
    recent = deque[int](maxlen=LOOK)  # tokens with text since `read`
    for i, token in enumerate(ids):
        if token not in special:
            recent.append(token)
        # a character has at most four bytes, so these few tell as well as all since `read` that none ends here
        if len(recent) == LOOK and decode(tokenizer, list(recent)).endswith("\ufffd"):
            ends.append(min(complete, len(text)))
            continue
        before = decode(tokenizer, ids[window:read])
        now = decode(tokenizer, ids[window : i + 1])
        if len(now) > len(before) and not now.endswith("\ufffd"):
            complete += len(now) - len(before)
            window, read = read, i + 1
            recent.clear()
        ends.append(min(complete, len(text)))
    # an incomplete character at the end belongs to the last token that can have text
    last = max((i for i, token in enumerate(ids) if token not in special), default=len(ids))
    ends[last:] = [len(text)] * (len(ids) - last)
    return ends


def spans(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], text: str) -> Spans:
    """Return the position of each token in the text of a response, in characters, UTF-8 bytes and words.

    A word begins at the first token, at a token whose text begins with white space or follows it, and before and after
    a special token. Tokens that share a character belong to the same word.
    """
    ends = _char_ends(tokenizer, ids, text)
    starts = [0, *ends][:-1]
    byte_offsets = [0]
    for character in text:
        byte_offsets.append(byte_offsets[-1] + len(character.encode("utf-8", "surrogatepass")))
    special = special_ids(tokenizer)
    word_ids: list[int] = []
    sub_idx: list[int] = []
    inside_character = False
    for t, (start, end) in enumerate(zip(starts, ends, strict=True)):
        beside_special = ids[t] in special or (t > 0 and ids[t - 1] in special)
        beside_space = text[start:end][:1].isspace() or (start > 0 and text[start - 1].isspace())
        begins_word = t == 0 or beside_special or (beside_space and not inside_character)
        word_ids.append(word_ids[-1] + begins_word if t else 0)
        sub_idx.append(0 if begins_word else sub_idx[-1] + 1)
        inside_character = start == end and ids[t] not in special
    return Spans(starts, ends, [byte_offsets[s] for s in starts], [byte_offsets[e] for e in ends], word_ids, sub_idx)
