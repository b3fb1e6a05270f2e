import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from deepinfer_jax.errors import InputError, TokenizerError
from deepinfer_jax.text.tokenizer import IncrementalDecoder, TextTokenizer
from tests.text.chat_tokenizer import SPECIAL, TEXT, chat_tokenizer_json

TINY = Path(__file__).parents[1] / "data" / "v41_tiny"
CHAT = chat_tokenizer_json()


def byte_level():
    """Every byte is a token, "he" is one too, and id 257 is a special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: token for token, character in enumerate(alphabet)} | {"he": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", normalized=False)])
    return tokenizer


BYTES = TextTokenizer(byte_level().to_str())
WORDS = TextTokenizer.from_directory(TINY)


def streamed(tokenizer, ids, sizes, skip=True):
    decoder = IncrementalDecoder(tokenizer, skip)
    pieces, at = [], 0
    for size in sizes:
        pieces.append(decoder.push(ids[at : at + size]))
        at += size
    return "".join([*pieces, decoder.push(ids[at:]), decoder.finish()])


@given(st.text())
def test_byte_level_text_round_trips(text):
    assert BYTES.decode(BYTES.encode(text)) == text


@given(st.text(TEXT))
def test_ascii_round_trips_through_the_chat_tokenizer(text):
    tokenizer = TextTokenizer(CHAT)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    if not any(special in text for special in SPECIAL):
        assert len(ids) == len(text)


def test_every_id_of_the_chat_tokenizer_is_some_text_and_the_last_two_are_none():
    tokenizer = TextTokenizer(CHAT)
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in range(128)]
    assert all(texts[:126]) and len(set(texts[:126])) == 126
    assert texts[126:] == ["", ""]
    assert tokenizer.vocab_size == 126
    assert (tokenizer.encode("é"), tokenizer.encode("?")) == ([50], [50])


def test_special_tokens_are_left_out_unless_asked_for():
    tokenizer = TextTokenizer(CHAT)
    ids = [0, *tokenizer.encode("a </think>b")]
    assert tokenizer.decode(ids) == "a b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<｜begin▁of▁sentence｜>a </think>b"


def test_spaces_before_punctuation_stay():
    assert BYTES.decode(BYTES.encode("a , b . do n't  x")) == "a , b . do n't  x"


def test_words_are_joined_and_numpy_ids_are_read():
    assert WORDS.encode("w0 W1 w3") == [0, 3, 6]
    assert WORDS.decode(np.array([0, 3, 6], np.int32)) == "w0 W1 w3"
    assert WORDS.vocab_size == 128


def write(folder, config=None, tokenizer=CHAT):
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")
    return folder


@pytest.mark.parametrize("config", [None, "{}", '{"add_bos_token": false}', '{"add_bos_token": null}'])
def test_no_bos_unless_the_checkpoint_says_so(tmp_path, config):
    tokenizer = TextTokenizer.from_directory(write(tmp_path, config), bos_token_id=0)
    assert tokenizer.encode("") == []
    assert tokenizer.encode("A") == [52]


def test_bos_is_first_and_not_doubled(tmp_path):
    folder = write(tmp_path, '{"add_bos_token": true}')
    tokenizer = TextTokenizer.from_directory(folder, bos_token_id=0)
    assert tokenizer.encode("A") == [0, 52]
    assert tokenizer.encode("") == [0]
    raw = Tokenizer.from_str(CHAT)
    raw.post_processor = processors.TemplateProcessing(single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], 0)])
    write(folder, tokenizer=raw.to_str())
    assert TextTokenizer.from_directory(folder, bos_token_id=0).encode("A") == [0, 52]


def test_a_post_processor_works_without_add_bos():
    raw = Tokenizer.from_str(CHAT)
    raw.post_processor = processors.TemplateProcessing(single=f"$A {SPECIAL[1]}", special_tokens=[(SPECIAL[1], 1)])
    assert TextTokenizer(raw.to_str()).encode("A") == [52, 1]


def test_truncation_and_padding_of_the_file_do_not_touch_the_text():
    raw = Tokenizer.from_str(CHAT)
    raw.enable_truncation(3)
    raw.enable_padding(length=8)
    assert len(raw.encode("A" * 20).ids) == 8  # the control: the file alone would cut the text
    tokenizer = TextTokenizer(raw.to_str())
    assert tokenizer.encode("A" * 20) == [52] * 20
    read = json.loads(tokenizer.json_text)
    assert (read["truncation"], read["padding"]) == (None, None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", r"tokenizer_config.json: not a readable JSON file: "),
        ("[]", r"tokenizer_config.json: found list, expected a JSON object"),
        ('{"add_bos_token": 1}', r"add_bos_token: found 1, expected true or false"),
        ('{"add_bos_token": true}', r"bos_token_id is 126, expected one of the tokenizer's 126 ids"),
    ],
)
def test_a_bad_tokenizer_config_is_named(tmp_path, config, message):
    with pytest.raises(TokenizerError, match=message):
        TextTokenizer.from_directory(write(tmp_path, config), bos_token_id=126)


def test_a_bad_tokenizer_file_is_named(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: there is no such file"):
        TextTokenizer.from_directory(tmp_path)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a tokenizer of the `tokenizers` package"):
        TextTokenizer.from_directory(write(tmp_path, tokenizer="{}"))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a readable JSON file"):
        TextTokenizer.from_directory(write(tmp_path, tokenizer="{"))


def test_text_that_cannot_be_encoded_is_named():
    with pytest.raises(InputError, match=r"text: found the lone surrogate U\+DC80 at position 2, expected text"):
        BYTES.encode("ab\udc80")
    with pytest.raises(InputError, match="text: found bytes, expected a str"):
        BYTES.encode(b"ab")


def test_ids_that_are_none_are_all_named():
    with pytest.raises(InputError) as caught:
        BYTES.decode([1, -1, "x", 2**32])
    assert caught.value.faults == (
        "ids[1]: found -1, expected 0 to 4294967295",
        "ids[2]: found 'x', expected an integer",
        "ids[3]: found 4294967296, expected 0 to 4294967295",
    )
    with pytest.raises(InputError, match="ids: found int, expected a sequence of token ids"):
        BYTES.decode(3)


@given(st.lists(st.integers(0, 260)), st.lists(st.integers(0, 3)), st.booleans())
def test_byte_level_pieces_join_to_the_whole(ids, sizes, skip):
    assert streamed(BYTES, ids, sizes, skip) == BYTES.decode(ids, skip)


@given(st.text("aé毕🎉\ufffd"), st.lists(st.integers(0, 3)))
def test_split_characters_join_to_the_whole(text, sizes):
    assert streamed(BYTES, BYTES.encode(text), sizes) == text


@given(st.lists(st.integers(0, 130)), st.lists(st.integers(0, 3)))
def test_word_level_pieces_join_to_the_whole(ids, sizes):
    assert streamed(WORDS, ids, sizes) == WORDS.decode(ids)


def test_an_emoji_appears_with_its_last_byte():
    decoder = IncrementalDecoder(BYTES)
    ids = BYTES.encode("a🎉he")
    assert len(ids) == 6
    assert [BYTES.decode([token]) for token in ids[1:5]] == ["\ufffd"] * 4  # the control
    assert [decoder.push([token]) for token in ids] == ["a", "", "", "", "🎉", "he"]
    assert decoder.finish() == ""


def test_a_cut_off_emoji_is_shown_at_the_end():
    decoder = IncrementalDecoder(BYTES)
    assert decoder.push(BYTES.encode("a🎉")[:-1]) == "a"
    assert decoder.finish() == "\ufffd"
    with pytest.raises(InputError, match="the decoder is finished"):
        decoder.push([1])
    with pytest.raises(InputError, match="the decoder is finished already"):
        decoder.finish()


def test_a_special_token_between_words_keeps_their_space():
    raw = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    raw.add_special_tokens(["<x>"])
    tokenizer = TextTokenizer(raw.to_str())
    ids = [0, *[128] * 20, 2]
    assert tokenizer.decode(ids) == "w0 w1"
    assert streamed(tokenizer, ids, [1] * 22) == "w0 w1"


def test_a_push_costs_the_same_late_in_a_long_text():
    # Bytes that never complete a character are the worst case for what is held back.
    token = BYTES.encode("🎉")[0]
    decoder = IncrementalDecoder(BYTES)

    def seconds(count):
        start = time.perf_counter()
        for _ in range(count):
            decoder.push([token])
        return time.perf_counter() - start

    early = min(seconds(500) for _ in range(3))
    decoder.push([token] * 100_000)
    assert min(seconds(500) for _ in range(3)) < 20 * early
