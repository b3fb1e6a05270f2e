"""Text to token ids and back, with the `tokenizer.json` of a checkpoint."""

from __future__ import annotations

import json
import operator
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from deepinfer_jax.errors import InputError, TokenizerError
from deepinfer_jax.text.token_map import TOKENIZER_FILE, parse_tokenizer, read_tokenizer_text

CONFIG_FILE = "tokenizer_config.json"

_REPLACEMENT = "\ufffd"
_SURROGATE = re.compile("[\ud800-\udfff]")
# A UTF-8 sequence has at most four bytes and a token has at least one, so the start of a character that is not yet
# complete lies within three tokens of the end; the rest gives decoders that join words the neighbour they look at.
_WINDOW = 8
_MAX_ID = 2**32 - 1
_DEPTH = 100


class TextTokenizer:
    """The tokenizer of a checkpoint.

    Truncation and padding that a `tokenizer.json` may ask for are switched off: both would change a prompt in
    silence.

    Args:
        json_text: What `tokenizer.json` holds.
        bos_token_id: The id that begins a text, of the model's configuration. Needed with `add_bos`.
        add_bos: Whether `encode` puts that id first.
        name: Where the tokenizer comes from, for the message of an error.

    Attributes:
        json_text: The `tokenizer.json` without truncation and padding, for other readers of the format.
        vocab_size: Highest token id plus one. A model may have more rows than that.
        added_tokens: Id of every added token (special tokens among them) by its text.
        bos_token_id: As given.
        add_bos: As given.

    Raises:
        TokenizerError: If the text is no tokenizer, or `add_bos` is set and `bos_token_id` is none of its ids.
    """

    def __init__(
        self,
        json_text: str,
        *,
        bos_token_id: int | None = None,
        add_bos: bool = False,
        name: str = TOKENIZER_FILE,
    ):
        self._tokenizer = parse_tokenizer(json_text, name)
        if self._tokenizer.truncation or self._tokenizer.padding:
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            json_text = self._tokenizer.to_str()
        self.json_text = json_text
        added = self._tokenizer.get_added_tokens_decoder()
        self._ids = frozenset(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        self.added_tokens = {entry.content: token for token, entry in added.items()}
        self.vocab_size = max(self._ids, default=-1) + 1
        if add_bos and bos_token_id not in self._ids:
            raise TokenizerError(
                f"{name}: add_bos_token is set, but bos_token_id is {bos_token_id}, expected one of the tokenizer's "
                f"{len(self._ids)} ids"
            )
        self.bos_token_id = bos_token_id
        self.add_bos = add_bos

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str], *, bos_token_id: int | None = None) -> TextTokenizer:
        """Read the tokenizer of a checkpoint directory.

        `tokenizer.json` is needed. Of `tokenizer_config.json` only `add_bos_token` counts; without the file or the
        entry no id is added.

        Args:
            path: The directory.
            bos_token_id: The id that begins a text, of the model's configuration.

        Raises:
            TokenizerError: If a file is missing or unreadable, or its content is not as expected.
        """
        file = Path(path) / TOKENIZER_FILE
        text = read_tokenizer_text(file)
        add_bos = _reads_add_bos(Path(path) / CONFIG_FILE)
        return cls(text, bos_token_id=bos_token_id, add_bos=add_bos, name=str(file))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, special tokens that it spells out included.

        What `tokenizer.json` adds by itself is kept. With `add_bos` the first id is `bos_token_id`, once.

        Raises:
            InputError: If `text` is not a str, or has half a surrogate pair, which UTF-8 cannot hold.
        """
        if not isinstance(text, str):
            raise InputError(f"text: found {type(text).__name__}, expected a str")
        faults = json_faults(text, "text")
        if faults:
            raise InputError(faults[0])
        ids = self._tokenizer.encode(text).ids
        if self.add_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, without clean-up of spaces.

        An id that the tokenizer does not have adds nothing: models have spare rows. Bytes that are not UTF-8 become
        U+FFFD.

        Args:
            ids: Token ids.
            skip_special_tokens: Leave special tokens out of the text.

        Raises:
            InputError: If an entry of `ids` is not an integer from 0 to 2^32 - 1.
        """
        return self._tokenizer.decode(checked_ids(ids), skip_special_tokens=skip_special_tokens)

    def visible(self, ids: Iterable[int], skip_special_tokens: bool) -> list[int]:
        """The ids that `decode` does not leave out.

        Raises:
            InputError: As `decode`.
        """
        left_out = self._special if skip_special_tokens else frozenset()
        return [token for token in checked_ids(ids) if token in self._ids and token not in left_out]


class IncrementalDecoder:
    """Decodes token ids as they come.

    All texts of `push` and the one of `finish` join to `decode` of all ids, for byte-level vocabularies and for
    those that put a fixed text between tokens. (Decoders that judge a run of tokens as a whole, such as byte fallback,
    may take back what they showed.) The work of a push grows with the ids pushed, not with those before.

    Args:
        tokenizer: The tokenizer.
        skip_special_tokens: Leave special tokens out of the text.
    """

    def __init__(self, tokenizer: TextTokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._shown = 0
        self._finished = False

    def push(self, ids: Iterable[int]) -> str:
        """The text that became final with these ids; a character that is not complete is held back.

        Raises:
            InputError: If an id is invalid, or the decoder is finished.
        """
        if self._finished:
            raise InputError("ids: the decoder is finished, expected no push after that")
        # Ids without text are dropped here: a window full of them would lose the neighbour that words join to.
        new = self._tokenizer.visible(ids, self._skip)
        if not new:
            return ""
        self._window += new
        text = self._tokenizer.decode(self._window, self._skip)
        # An incomplete character at the end decodes to exactly one U+FFFD; those before it are bytes that no later
        # byte can repair.
        final = len(text) - text.endswith(_REPLACEMENT)
        piece = text[self._shown : final]
        held = len(text) - max(final, self._shown)
        self._window = self._window[-_WINDOW:]
        self._shown = len(self._tokenizer.decode(self._window, self._skip)) - held
        return piece

    def finish(self) -> str:
        """The text that was held back; to be called once, after the last push.

        Raises:
            InputError: If the decoder is finished already.
        """
        if self._finished:
            raise InputError("finish: the decoder is finished already, expected one call")
        self._finished = True
        return self._tokenizer.decode(self._window, self._skip)[self._shown :]


def json_faults(value: Any, where: str, depth: int = 0) -> list[str]:
    """Where a value is not what JSON in UTF-8 can hold.

    Args:
        value: A str, or a value nested of mappings, lists and what JSON knows.
        where: Its name; entries are named after it.
        depth: Levels around it.
    """
    if depth > _DEPTH:
        return [f"{where}: nested more than {_DEPTH} levels deep"]
    if isinstance(value, str):
        found = _SURROGATE.search(value)
        if found is None:
            return []
        code = f"U+{ord(found.group()):04X}"
        return [
            f"{where}: found the lone surrogate {code} at position {found.start()}, expected text that UTF-8 can hold"
        ]
    if isinstance(value, Mapping):
        faults = []
        for key, entry in value.items():
            if isinstance(key, str) and not _SURROGATE.search(key):
                faults += json_faults(entry, f"{where}.{key}", depth + 1)
            else:
                faults.append(f"{where}: found the key {key!r}, expected a str that UTF-8 can hold")
        return faults
    if isinstance(value, list | tuple):
        return [f for i, entry in enumerate(value) for f in json_faults(entry, f"{where}[{i}]", depth + 1)]
    if value is None or isinstance(value, bool | int | float):
        return []
    return [f"{where}: found {type(value).__name__}, expected a JSON value"]


def checked_ids(ids: Iterable[int]) -> list[int]:
    """Token ids as plain integers.

    Raises:
        InputError: If an entry is not an integer from 0 to 2^32 - 1, the range of the `tokenizers` package.
    """
    try:
        entries = list(ids)
    except TypeError:
        raise InputError(f"ids: found {type(ids).__name__}, expected a sequence of token ids") from None
    faults = []
    numbers = []
    for at, entry in enumerate(entries):
        try:
            number = operator.index(entry)
        except TypeError:
            faults.append(f"ids[{at}]: found {entry!r}, expected an integer")
            continue
        if not 0 <= number <= _MAX_ID:
            faults.append(f"ids[{at}]: found {number}, expected 0 to {_MAX_ID}")
        numbers.append(number)
    if faults:
        raise InputError("ids: not token ids", faults)
    return numbers


def _reads_add_bos(file: Path) -> bool:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{file}: not a readable JSON file: {error}") from None
    if not isinstance(config, dict):
        raise TokenizerError(f"{file}: found {type(config).__name__}, expected a JSON object")
    add_bos = config.get("add_bos_token", False)
    # Tools write null for an entry that was never set.
    if add_bos is None:
        return False
    if not isinstance(add_bos, bool):
        raise TokenizerError(f"{file}: add_bos_token: found {add_bos!r}, expected true or false")
    return add_bos
