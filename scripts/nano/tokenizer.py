"""A byte-level BPE of 8192 ids with the special tokens of DeepSeek-V4.1."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import deepseek_recipe as recipe
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from deepinfer_jax.text.chat import ChatEncoder
from deepinfer_jax.text.tokenizer import TextTokenizer
from scripts.nano.config import NOISE
from scripts.nano.documents import Document, rank

VOCAB_SIZE = 8192
PAD = "<｜▁pad▁｜>"
# DeepSeek's three come first, so that their ids are 0, 1 and 2; then what prompts and replies use, then what replies
# about images use, and the token that the draft model puts where a token is to be guessed.
_RECIPE_TOKENS = (
    *("System", "User", "Assistant", "ThinkingStart", "ThinkingEnd", "Dsml", "LatestReminder", "Image"),
    *("Ref", "RefEnd", "Box", "BoxEnd", "Point", "PointEnd", "Polygon", "PolygonEnd"),
)

# Words with the space or sign before them, contractions, up to three digits, runs of signs with the line ends after
# them, line ends, and runs of spaces without the one that belongs to the next word.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)(?!\p{L})"
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
_SAMPLE_BYTES = 3_000_000
_CHAT_REPEATS = 300


def special_tokens() -> list[str]:
    """The special tokens, in the order of their ids from 0 on."""
    spelling = {name: getattr(recipe.SpecialToken, name).default_str() for name in ("Bos", "Eos", *_RECIPE_TOKENS)}
    return [spelling["Bos"], spelling["Eos"], PAD, *(spelling[name] for name in _RECIPE_TOKENS), NOISE]


_SPECIAL = re.compile("|".join(map(re.escape, special_tokens())))


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train the vocabulary; the same texts give the same tokenizer.

    Args:
        texts: What to train on, without special tokens.
        vocab_size: Number of ids, special tokens included.

    Raises:
        ValueError: If the texts are too few for so many ids.
    """
    tokenizer = _untrained()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in special_tokens()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size(with_added_tokens=True)
    if found != vocab_size:
        raise ValueError(f"texts: they give {found} ids, expected enough text for {vocab_size}")
    return tokenizer


def _untrained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """One id per byte, and the special tokens: enough to see how a conversation is written."""
    return train_tokenizer([], len(special_tokens()) + 256)


def training_texts(documents: Mapping[str, Sequence[Document]], chats: Iterable[str] = ()) -> Iterator[str]:
    """A sample in which no source outweighs the others: at most 3 MB of each, and the frame of prompts with tools.

    Args:
        documents: Training documents by source; special tokens in them are left out.
        chats: Prompts as text, each of which stands for many.
    """
    for source, entries in documents.items():
        count = 0
        for document in sorted(entries, key=lambda d: rank(f"sample/{source}/{d.name}")):
            if count >= _SAMPLE_BYTES:
                break
            count += len(document.text.encode())
            yield from _without_special(document.text)
    for chat in chats:
        for _ in range(_CHAT_REPEATS):
            yield from _without_special(chat)


def _without_special(text: str) -> list[str]:
    """The pieces between special tokens."""
    return [piece for piece in _SPECIAL.split(text) if piece]


def sample_chats() -> list[str]:
    """Prompts with tools, calls, results and a response format, as the recipe writes them."""
    encoder = ChatEncoder(TextTokenizer(byte_tokenizer().to_str(), bos_token_id=0))
    values = {"city": {"type": "string"}, "count": {"type": "integer"}, "exact": {"type": "boolean"}}
    schema = {"type": "object", "properties": values, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get", "description": "Get it.", "parameters": schema}}
    function = {"name": "get", "arguments": '{"city": "Rome", "count": 3}'}
    call = {"id": "1", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "Which?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": '{"result": "text"}'},
    ]
    question = [{"role": "user", "content": "Answer in JSON."}]
    return [
        encoder.prepare(messages, tools=[tool], thinking=False).text,
        encoder.prepare(question, thinking=False, response_format={"type": "json_object"}).text,
        encoder.prepare(question, thinking=True).text,
    ]


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Ids of texts; what spells a special token stays text."""
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.encode_special_tokens = True
    return [encoding.ids for encoding in plain.encode_batch(list(texts), add_special_tokens=False)]


def check_tokenizer(tokenizer: Tokenizer) -> ChatEncoder:
    """A chat encoder for the tokenizer, after the checks that a checkpoint needs.

    Raises:
        ValueError: If an id of a special token is another one than its place in the list.
        TokenizerError: If the tokenizer does not fit the chat encoding.
    """
    for token, text in enumerate(special_tokens()):
        if tokenizer.token_to_id(text) != token:
            raise ValueError(f"{text}: found id {tokenizer.token_to_id(text)}, expected {token}")
    return ChatEncoder(TextTokenizer(tokenizer.to_str(), bos_token_id=0))
