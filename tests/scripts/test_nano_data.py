"""Sources, split, tokenizer and conversations of the small checkpoint, on inputs made by hand."""

import gzip
import random
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest

from deepinfer_jax.text.tokenizer import TextTokenizer
from scripts.nano import (
    books,
    chat_data,
    chat_facts,
    chat_json,
    chat_talk,
    chat_tools,
    chat_words,
    dictionaries,
    wordnet,
)
from scripts.nano.chat_example import Example, ExampleEncoder, Reply, ask, reply_text, user
from scripts.nano.documents import Document, blocks, clean, held_out_names, join_lines, split
from scripts.nano.prepare import stream
from scripts.nano.prompts import LENGTH, prompts_of
from scripts.nano.python_docs import read_page
from scripts.nano.tokenizer import (
    VOCAB_SIZE,
    byte_tokenizer,
    check_tokenizer,
    encode_documents,
    sample_chats,
    special_tokens,
    train_tokenizer,
    training_texts,
)

TOKENIZER = byte_tokenizer()
ENCODER = ExampleEncoder(TextTokenizer(TOKENIZER.to_str(), bos_token_id=0))
ZEBRA_ROW = (
    "02391049 05 n 01 zebra 0 002 @ 02374451 n 0000 ~ 02391234 n 0000 | any of several fleet black-and-white striped "
    'African equines; "the zebra ran"; "two `zebras\'"'
)
PAGE = """<html><body><div class="body" role="main"><section><h1>shelve — Python object persistence<a
class="headerlink" href="#x">¶</a></h1><p>A <em>shelf</em> is a
dictionary.</p><dl><dt class="sig sig-object py" id="shelve.open"><span>shelve.</span>open(<em>filename</em>,
<em>flag='c'</em>)<a class="headerlink" href="#y">¶</a></dt><dd><p>Open a dictionary, e.g. a new one. It may grow.</p>
<div><pre>with open('a') as f:
    f.read()
</pre></div><ul><li><p>one</p></li><li><p>two</p></li></ul></dd></dl>
<table><tr><td><p>a</p></td><td><p>b</p></td></tr></table></section></div>
<div class="sphinxsidebar">no</div></body></html>"""


def test_lines_of_a_paragraph_are_joined_as_they_were_before_the_wrap():
    assert join_lines(["a cannon-", "shot was", "heard"]) == "a cannon-shot was heard"
    assert join_lines(["of whom --", "and of whom"]) == "of whom -- and of whom"
    assert join_lines(["convention (", "Worldcon", ") is"]) == "convention (Worldcon) is"


def test_clean_text_has_no_stray_spaces_or_control_characters():
    assert clean("a \r\n\x07b\u00a0c\n\n\n\nd\n") == "a\nb c\n\nd"
    assert blocks("a\nb\n\n\nc") == [["a", "b"], ["c"]]


def test_the_split_depends_on_names_alone_and_takes_whole_documents():
    documents = [Document(f"d{n}", "x" * 1000) for n in range(400)]
    train, held_out = split("source", documents)
    assert len(held_out) == 20  # 60 kB would be 60 documents; 5 % is the most
    assert {d.name for d in train}.isdisjoint(d.name for d in held_out)
    shuffled = random.Random(0).sample(documents, len(documents))
    assert held_out_names("source", shuffled) == {d.name for d in held_out}
    assert held_out_names("other", documents) != {d.name for d in held_out}


def test_bible_verses_become_chapters():
    (first, second) = books.bible_chapters("Ge1:1 In the beginning\nGe1:2 And the earth\n1Sm2:1 And Hannah\n")
    assert (first.name, first.text) == ("Genesis 1", "Genesis 1\n\n1:1 In the beginning\n1:2 And the earth")
    assert second.name == "1 Samuel 2"
    with pytest.raises(ValueError, match="expected a verse"):
        books.bible_chapters("no verse")
    verses = chat_facts.verses([first])
    assert verses["Genesis 1:2"] == ("And the earth", "Genesis 1")


def test_an_r_database_gives_its_character_vectors():
    lines = ["EMMA", "", "CHAPTER I", "One", "line."]
    content = b"X\n" + struct.pack(">IIII", 3, 0, 0, 5) + b"UTF-8" + struct.pack(">II", 16, len(lines))
    for line in lines:
        content += struct.pack(">II", 0x40009, len(line)) + line.encode()
    number = b"X\n" + struct.pack(">IIII", 3, 0, 0, 5) + b"UTF-8" + struct.pack(">II", 13, 0)
    data = b"".join(struct.pack(">I", len(c)) + zlib.compress(c) for c in (number, content))
    assert list(books.read_rdb(data)) == [lines]
    (chapter,) = books.novel_chapters("Emma", lines[1:])
    assert (chapter.name, chapter.text) == ("Emma, Chapter I", "Emma, Chapter I\n\nOne line.")


def test_dictd_entries_come_in_the_order_of_the_text_and_once(tmp_path):
    text = b"00 about this\nfoo\n /foo/\n\n    See {bit\n    bucket}.\nbar\n n.\n\n    A bar.\n"
    (tmp_path / "j.dict.dz").write_bytes(gzip.compress(text))
    # Base 64: O is 14, m is 38, 0 is 52, U is 20.
    (tmp_path / "j.index").write_text("00databaseinfo\tA\tO\nbar\t0\tU\nfoo\tO\tm\nfooo\tO\tm\n")
    foo, bar = dictionaries.read_dictd(tmp_path, "j")
    assert foo == text[14:52].decode() and bar == text[52:].decode()
    assert dictionaries.jargon_entry(foo) == Document("foo", "foo: /foo/\n\nSee bit bucket.")


def test_a_page_of_the_python_documentation_keeps_code_and_loses_markup():
    text, symbols = read_page(PAGE, "library/shelve")
    assert text == (
        "shelve — Python object persistence\n\nA shelf is a dictionary.\n\nshelve.open(filename, flag='c')\n\n"
        "Open a dictionary, e.g. a new one. It may grow.\n\n    with open('a') as f:\n        f.read()\n"
        "- one\n- two\n\na | b"
    )
    (symbol,) = symbols
    assert (symbol.name, symbol.signature) == ("shelve.open", "shelve.open(filename, flag='c')")
    assert symbol.summary == "Open a dictionary, e.g. a new one."


def test_a_synset_is_read_and_written_as_prose():
    synset = wordnet.parse_synset(ZEBRA_ROW, "noun", "noun-0001")
    assert synset.words == ("zebra",) and synset.topic == 5 and not synset.instance
    assert synset.definition == "any of several fleet black-and-white striped African equines"
    assert wordnet.line(synset) == f'zebra (noun): {synset.definition}. "the zebra ran" "two \'zebras\'"'


def test_entries_with_slurs_are_left_out(tmp_path):
    bad = ZEBRA_ROW.replace("any of", "(ethnic slur) any of").replace("02391049", "00000001")
    for suffix in wordnet.PARTS:
        (tmp_path / f"data.{suffix}").write_text("  1 licence\n")
        (tmp_path / f"index.{suffix}").write_text("  1 licence\n")
    (tmp_path / "data.noun").write_text(f"  1 licence\n{bad}\n{ZEBRA_ROW}\n")
    (tmp_path / "index.noun").write_text("zebra n 2 1 @ 2 0 00000001 02391049\n")
    (tmp_path / "cntlist.rev").write_text("zebra%1:05:00:: 2 7\n")
    (kept,) = wordnet.read_synsets(tmp_path)
    assert kept.key == "noun-02391049"
    assert wordnet.read_senses(tmp_path, [kept]) == [wordnet.Sense("zebra", kept, 2, 7)]


def sense(row=ZEBRA_ROW, part="noun", word="zebra", **more):
    return wordnet.Sense(word, replace(wordnet.parse_synset(row, part, f"{part}-0001"), **more), 1, 9)


def test_definitions_are_sentences_with_the_right_article():
    rng = random.Random(1)
    first = chat_words.answer(sense(), rng)
    assert first.startswith("A zebra is any of several fleet black-and-white striped African equines.")
    run = sense("01926311 38 v 01 run 0 000 01 + 02 00 | move fast", "verb", "run")
    assert chat_words.answer(run, rng) == "To run means to move fast."
    frugal = sense("1 00 a 01 frugal 0 000 | avoiding waste", "adjective", "frugal")
    assert chat_words.answer(frugal, rng) == "Frugal means avoiding waste."
    phrases = {"hour": "an hour", "unicorn": "a unicorn", "user": "a user", "umbrella": "an umbrella", "dog": "a dog"}
    assert {word: chat_words.with_article(word) for word in phrases} == phrases


def test_sentences_are_cut_at_their_ends():
    assert chat_words.first_sentences("Mr. Fox ran. He was fast. Very.", 25) == "Mr. Fox ran. He was fast."
    assert chat_words.first_sentences("Mr. Fox ran. He was fast.", most=1) == "Mr. Fox ran."
    assert chat_words.first_sentences("Much too long a sentence.", 10) == ""


def test_special_tokens_have_the_ids_of_their_places():
    assert [TOKENIZER.token_to_id(text) for text in special_tokens()] == list(range(len(special_tokens())))
    assert special_tokens()[:3] == ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
    check_tokenizer(TOKENIZER)
    swapped = TOKENIZER.to_str().replace("<｜▁pad▁｜>", "<｜▁dap▁｜>")
    with pytest.raises(ValueError, match="pad"):
        check_tokenizer(TOKENIZER.from_str(swapped))


def test_a_trained_tokenizer_gives_every_text_back():
    texts = [
        "the cat's 12345 naïve “quotes” <think> ｜DSML｜ \t x\n\n  def f(x):\r\n\x00 日本 😀",
        "the cat and the dog " * 9,
    ]
    tokenizer = train_tokenizer(texts, len(special_tokens()) + 256 + 10)
    rows = encode_documents(tokenizer, texts)
    assert tokenizer.decode_batch(rows, skip_special_tokens=False) == texts
    assert min(min(row) for row in rows) >= len(special_tokens())
    assert len(rows[1]) < len(texts[1]) / 2
    with pytest.raises(ValueError, match=str(VOCAB_SIZE)):
        train_tokenizer(texts)


def test_words_keep_their_space_and_numbers_are_cut_in_threes():
    pieces = TOKENIZER.pre_tokenizer.pre_tokenize_str("I can't see 12345 dogs.\n\n  x")
    found = [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in pieces]
    assert found == ["I", " can", "'t", " see", " ", "123", "45", " dogs", ".\n\n", " ", " x"]


def test_the_sample_for_training_has_no_special_tokens():
    texts = list(training_texts({"a": [Document("x", "a</think>b")]}, sample_chats()))
    assert texts[:2] == ["a", "b"]
    assert len(texts) > 1000
    assert not any(special in text for text in texts for special in special_tokens())


def test_streams_hold_documents_between_bos_and_eos():
    np.testing.assert_array_equal(stream([[30, 31], [32]]), np.array([0, 30, 31, 1, 0, 32, 1], np.uint16))


def learned(encoded):
    """The learned runs of an example as texts."""
    edges = np.flatnonzero(np.diff([0, *encoded.mask, 0]))
    runs = [encoded.ids[start:end] for start, end in edges.reshape(-1, 2)]
    return [TOKENIZER.decode(run, skip_special_tokens=False) for run in runs]


def test_every_structured_conversation_is_read_back_as_meant():
    data_tool = chat_data._define_tool([sense()])
    talk = [ask("definition", "What is a zebra?", "An animal.", origins=("wordnet/noun-0001",))] * 2
    sums = chat_talk.sum_examples(4)
    examples = [
        *chat_json.json_examples(60),
        *chat_json.json_words([sense()], 1),
        *chat_tools.tool_examples(80, [data_tool]),
        *chat_tools.idle_tool_examples(talk),
        *chat_talk.thinking_examples(talk, sums),
        *chat_talk.two_turn_examples(talk, 6),
        *chat_talk.talk_examples()[:20],
    ]
    assert {"json", "tool", "tool not needed", "thinking", "two turns", "talk"} == set(chat_data.count_kinds(examples))
    for example in examples:
        encoded = ENCODER.encode(example)
        replies = [turn for turn in example.turns if isinstance(turn, Reply)]
        assert learned(encoded) == [reply_text(reply) + special_tokens()[1] for reply in replies]
        assert encoded.ids[0] == 0 and encoded.ids[-1] == 1 and encoded.ids.count(0) == 1


def test_a_reply_that_would_be_read_as_another_one_is_refused():
    with pytest.raises(ValueError, match="expected Reply"):
        ENCODER.encode(ask("talk", "Hi", "I think</think> so"))
    with pytest.raises(ValueError, match="expected Reply"):
        ENCODER.encode(Example("tool", (user("Hi"), Reply(calls=(("none", {}),)))))


def test_examples_are_held_out_with_their_documents_or_facts():
    held_out = {"wordnet": {"noun-0001"}, "bible": {"Genesis 1"}}
    assert chat_data.is_held_out(ask("a", "q", "a", origins=("bible/Exodus 1", "wordnet/noun-0001")), held_out)
    assert not chat_data.is_held_out(ask("a", "q", "a", origins=("bible/Exodus 1",)), held_out)
    facts = [chat_data.is_held_out(ask("a", "q", "a", fact=f"fact {n}"), held_out) for n in range(2000)]
    assert 20 < sum(facts) < 60
    assert facts == [chat_data.is_held_out(ask("b", "?", "!", fact=f"fact {n}"), held_out) for n in range(2000)]


def test_conversations_are_the_same_each_time():
    def examples():
        return [*chat_json.json_examples(20), *chat_tools.tool_examples(20, [])]

    assert examples() == examples()


def test_prompts_are_beginnings_of_documents_and_stop_before_the_next(tmp_path):
    documents = [[10 + i, *range(100, 100 + 30 * (i % 3))] for i in range(12)]
    np.save(tmp_path / "words.npy", stream(documents))
    prompts = prompts_of(tmp_path, "words", 4)
    assert [p[:2] for p in prompts] == [[0, 10], [0, 13], [0, 16], [0, 19]]
    assert all(p.count(0) == 1 and len(p) <= LENGTH + 1 for p in prompts)
    # Few documents: pieces of equal length from anywhere, each after the token that begins a text.
    np.save(tmp_path / "book.npy", stream([list(range(10, 500))]))
    pieces = prompts_of(tmp_path, "book", 4)
    assert all(p[0] == 0 and p.count(0) == 1 and len(p) == LENGTH + 1 for p in pieces[1:])
    assert len({tuple(p) for p in pieces}) == 4
    # A conversation up to what the model is to say.
    np.save(tmp_path / "talk.npy", np.array([0, 5, 6, 7, 8, 1, 0, 9, 9, 1], np.uint16))
    np.save(tmp_path / "talk_mask.npy", np.array([0, 0, 0, 1, 1, 1, 0, 0, 1, 1], np.uint8))
    assert prompts_of(tmp_path, "talk", 2) == [[0, 5, 6], [0, 9]]
