"""A tokenizer for tests that fits a model of 128 ids: one id per ASCII character, and what V4.1 prompts need."""

import json

BOS, EOS, PAD = 0, 1, 2

SPECIAL = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜ref｜>",
    "<｜/ref｜>",
    "<｜box｜>",
    "<｜/box｜>",
    "<｜point｜>",
    "<｜/point｜>",
    "<｜polygon｜>",
    "<｜/polygon｜>",
)
TEXT = "\n" + "".join(map(chr, range(32, 127)))


def chat_tokenizer_json(vocab_size: int = 128, *, without: tuple[str, ...] = ()) -> str:
    """The `tokenizer.json`.

    Ids 0 to 17 are special tokens (0 begins a text, 1 ends it), the next 96 are line feed and printable ASCII, and
    the rest up to `vocab_size - 3` are Chinese characters. The last two ids of the model have no token: the tiny
    models use them for images and drafts. A character outside the vocabulary is encoded as a question mark.

    Args:
        vocab_size: Ids of the model, at least 116.
        without: Special tokens to leave out; the others keep their ids.
    """
    characters = TEXT + "".join(chr(0x4E00 + i) for i in range(vocab_size - 2 - len(SPECIAL) - len(TEXT)))
    special = {text: token for token, text in enumerate(SPECIAL) if text not in without}
    vocab = special | {character: token for token, character in enumerate(characters, len(SPECIAL))}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": token, "content": text, **flags} for text, token in special.items()],
            "normalizer": None,
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": {"type": "Fuse"},
            "model": {"type": "BPE", "unk_token": "?", "fuse_unk": False, "vocab": vocab, "merges": []},
        },
        ensure_ascii=False,
    )
