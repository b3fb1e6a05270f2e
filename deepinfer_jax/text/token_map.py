"""The compressed token map of Engram: token ids that normalise to the same text share one compressed id.

The rule is `build_compressed_token_map` of DeepSeek's `inference/engram.py`. The hash multipliers depend on the
number of compressed ids, so a map that differs by one entry makes every table lookup meaningless.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, normalizers

from deepinfer_jax.errors import TokenizerError

TOKENIZER_FILE = "tokenizer.json"

_REPLACEMENT = "\ufffd"
# A private-use character stands in for a token that is one space while the others are stripped.
_LONE_SPACE = "\ue000"


def compressed_token_map(tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Number the tokens of a vocabulary by their normalised text, in order of first appearance.

    The key of a token is its decoded text after NFKC, NFD, removal of accents, lower case, and collapsing and
    stripping of white space. A text that normalises to nothing is its own key. A token that is not valid UTF-8 by
    itself is keyed by its raw string.

    Args:
        tokenizer: The raw tokenizer of the `tokenizers` package, which decodes without clean-up of spaces.

    Returns:
        (ids,) compressed id of every token id below `tokenizer.get_vocab_size()`; the compressed ids are 0 to
        `max()` without gaps.
    """
    normalizer = _normalizer()
    numbers: dict[str, int] = {}
    count = tokenizer.get_vocab_size(with_added_tokens=True)
    token_map = np.empty(count, np.int32)
    for token in range(count):
        # One id per call: decoders join or trim neighbours, and a batch call is not faster for single ids.
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = tokenizer.id_to_token(token) if _REPLACEMENT in text else normalizer.normalize_str(text)
        token_map[token] = numbers.setdefault(key or text, len(numbers))
    return token_map


def load_token_map(path: str | os.PathLike[str], *, vocab_size: int, compressed_vocab_size: int) -> NDArray[np.int32]:
    """Read the compressed token map of a checkpoint.

    The model has more embedding rows than the tokenizer has ids. The ids in between cannot come out of text and the
    rule does not number them; they get compressed id 0, a valid one, so that a lookup never leaves a table.

    Args:
        path: A checkpoint directory with `tokenizer.json`, or that file.
        vocab_size: Embedding rows of the model.
        compressed_vocab_size: `engram_compressed_vocab_size`, the number of different compressed ids.

    Returns:
        (vocab_size,) compressed id of every token id of the model.

    Raises:
        TokenizerError: If the file is missing or not a tokenizer, has ids of `vocab_size` or more, or does not have
            exactly `compressed_vocab_size` compressed ids.
    """
    file = Path(path)
    file = file / TOKENIZER_FILE if file.is_dir() else file
    tokenizer = parse_tokenizer(read_tokenizer_text(file), str(file))
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    count = max(highest + 1, tokenizer.get_vocab_size(with_added_tokens=True))
    if count > vocab_size:
        raise TokenizerError(f"{file}: the tokenizer has {count} token ids, expected at most vocab_size {vocab_size}")
    known = compressed_token_map(tokenizer)
    found = int(known.max(initial=-1)) + 1
    if found != compressed_vocab_size:
        raise TokenizerError(
            f"{file}: found {found} compressed token ids, expected engram_compressed_vocab_size "
            f"{compressed_vocab_size}; this is not the tokenizer of the model"
        )
    token_map = np.zeros(vocab_size, np.int32)
    token_map[: len(known)] = known
    return token_map


def _normalizer() -> normalizers.Sequence:
    steps = [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex("[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"\A \z"), _LONE_SPACE),
        normalizers.Strip(),
        normalizers.Replace(_LONE_SPACE, " "),
    ]
    return normalizers.Sequence(steps)


def read_tokenizer_text(file: Path) -> str:
    """Read a `tokenizer.json`.

    Raises:
        TokenizerError: If there is no such file, or it is not readable JSON.
    """
    try:
        text = file.read_text(encoding="utf-8")
        json.loads(text)
    except FileNotFoundError:
        raise TokenizerError(f"{file}: there is no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{file}: not a readable JSON file: {error}") from None
    return text


def parse_tokenizer(text: str, name: str) -> Tokenizer:
    """The tokenizer that a `tokenizer.json` describes.

    Args:
        text: What the file holds.
        name: Where it comes from, for the message of an error.

    Raises:
        TokenizerError: If the text is no tokenizer of the `tokenizers` package.
    """
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the binding raises plain Exception for every fault
        raise TokenizerError(f"{name}: not a tokenizer of the `tokenizers` package: {error}") from None
