import json
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from deepinfer_jax.errors import TokenizerError
from deepinfer_jax.text.token_map import compressed_token_map, load_token_map

TINY = Path(__file__).parents[1] / "data" / "v41_tiny"


def raw(text):
    """A text as byte-level vocabularies spell it."""
    tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in tokenizer.pre_tokenize_str(text))


def byte_level(strings):
    tokenizer = Tokenizer(models.WordLevel({s: i for i, s in enumerate(strings)}, unk_token=strings[0]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def groups(texts):
    return compressed_token_map(byte_level([raw(t) for t in texts])).tolist()


def test_the_tiny_checkpoint_halves_its_ids():
    token_map = load_token_map(TINY, vocab_size=128, compressed_vocab_size=64)
    assert token_map.dtype == np.int32
    assert token_map.tolist() == [i // 2 for i in range(128)]


def test_the_file_itself_can_be_named():
    token_map = load_token_map(str(TINY / "tokenizer.json"), vocab_size=128, compressed_vocab_size=64)
    assert token_map[-1] == 63


def test_case_leading_space_accents_and_compatibility_forms_collapse():
    assert groups(["the", "The", " the", "THE ", "then"]) == [0, 0, 0, 0, 1]
    assert groups(["résumé", "resume", "RÉSUMÉ", "re\u0301sume\u0301"]) == [0, 0, 0, 0]
    assert groups(["fi", "\ufb01", "\uff26\uff29", "1", "\u00b9"]) == [0, 0, 0, 1, 1]


def test_every_run_of_white_space_is_one_lone_space():
    assert groups(["a", " ", "\n", "\t \r\n", "  ", "\u00a0", "b"]) == [0, 1, 1, 1, 1, 1, 2]
    assert groups(["a b", "a \n\n b", "ab"]) == [0, 0, 1]
    assert groups(["a b", "a\ue000b", " ", "\ue000"]) == [0, 0, 1, 1]  # the rule's stand-in for a space


def test_a_text_that_normalises_to_nothing_is_its_own_key():
    assert groups(["\u0301", "\u0300", "\u2028", " ", "\u0301a"]) == [0, 1, 2, 3, 4]


def test_numbers_follow_first_appearance():
    assert groups(["b", "a", "B", "c", "A"]) == [0, 1, 0, 2, 1]


def test_pieces_of_a_character_keep_their_raw_strings():
    whole = raw("é")
    assert len(whole) == 2
    assert compressed_token_map(byte_level([whole[0], whole[1], whole, "e", raw("\ufffd")])).tolist() == [0, 1, 2, 2, 3]


def test_special_tokens_take_part():
    tokenizer = byte_level(["a", "b"])
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|End|>", "<|end|>", "<|start|>")])
    assert compressed_token_map(tokenizer).tolist() == [0, 1, 2, 2, 3]


def test_each_token_is_decoded_alone():
    tokenizer = Tokenizer(models.WordLevel({"\u2581a": 0, "a": 1, "\u2581b": 2}, unk_token="a"))
    tokenizer.decoder = decoders.Metaspace()
    assert compressed_token_map(tokenizer).tolist() == [0, 0, 1]


def test_a_vocabulary_of_released_size_takes_seconds():
    tokenizer = byte_level([raw(f" Tök{i}") for i in range(129_280)])
    start = time.perf_counter()
    token_map = compressed_token_map(tokenizer)
    assert time.perf_counter() - start < 10
    assert token_map.tolist() == list(range(129_280))


def test_ids_beyond_the_tokenizer_get_a_valid_compressed_id():
    token_map = load_token_map(TINY, vocab_size=200, compressed_vocab_size=64)
    assert token_map.shape == (200,)
    assert token_map[:128].tolist() == [i // 2 for i in range(128)]
    assert (token_map[128:] == 0).all()


def test_a_wrong_count_names_both_numbers():
    with pytest.raises(
        TokenizerError, match=r"found 64 compressed token ids, expected .* 65; this is not the tokenizer"
    ):
        load_token_map(TINY, vocab_size=128, compressed_vocab_size=65)


def test_more_ids_than_the_model_has_are_refused():
    with pytest.raises(TokenizerError, match="has 128 token ids, expected at most vocab_size 127"):
        load_token_map(TINY, vocab_size=127, compressed_vocab_size=64)


def test_an_id_above_a_gap_counts(tmp_path):
    data = json.loads((TINY / "tokenizer.json").read_text())
    data["model"]["vocab"]["W63"] = 500
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(TokenizerError, match="has 501 token ids, expected at most vocab_size 128"):
        load_token_map(tmp_path, vocab_size=128, compressed_vocab_size=64)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: there is no such file$"):
        load_token_map(tmp_path, vocab_size=128, compressed_vocab_size=64)
    with pytest.raises(TokenizerError, match=r"nowhere: there is no such file$"):
        load_token_map(tmp_path / "nowhere", vocab_size=128, compressed_vocab_size=64)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a readable JSON file: Expecting value"),
        (b'{"model": ', "not a readable JSON file: Expecting value"),
        (b"\xff\xfe{}", "not a readable JSON file: 'utf-8' codec can't decode"),
        (b"[" * 100_000, "not a readable JSON file: "),
        (b"{}", "not a tokenizer of the `tokenizers` package: Model missing"),
        (b"[1, 2]", "not a tokenizer of the `tokenizers` package: "),
        (b'{"version": "1.0", "model": {"type": "Unheard"}}', "not a tokenizer of the `tokenizers` package: "),
    ],
)
def test_a_damaged_file_is_one_clear_error(tmp_path, content, message):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        load_token_map(tmp_path, vocab_size=128, compressed_vocab_size=64)
    assert str(caught.value).startswith(f"{tmp_path / 'tokenizer.json'}: {message}")


def test_an_empty_vocabulary_is_not_the_tokenizer_of_the_model(tmp_path):
    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match=r"found 0 compressed token ids, expected .* 64"):
        load_token_map(tmp_path, vocab_size=128, compressed_vocab_size=64)
