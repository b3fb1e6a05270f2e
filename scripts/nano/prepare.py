"""Prepare the data of the small checkpoint: `python -m scripts.nano.prepare [--out build/nano]`.

Stages whose files are there are skipped; delete a file to make it again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from deepinfer_jax.text.token_map import compressed_token_map
from deepinfer_jax.text.tokenizer import TextTokenizer
from scripts.nano import chat_data, packages, python_docs, wordnet
from scripts.nano.chat_example import Example, ExampleEncoder
from scripts.nano.documents import Document, split
from scripts.nano.sources import SOURCES, Source
from scripts.nano.tokenizer import (
    check_tokenizer,
    encode_documents,
    sample_chats,
    special_tokens,
    train_tokenizer,
    training_texts,
)

PARTS = ("train", "heldout")
SEPARATOR = "\f"
TOKENIZER_FILE = "tokenizer.json"
_BOS, _EOS = 0, 1


def main() -> None:
    """Run the stages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/nano"), help="folder of the data")
    out = parser.parse_args().out
    for part in PARTS:
        (out / part).mkdir(parents=True, exist_ok=True)
    for source in SOURCES:
        write_texts(source, out)
    if not all(file.exists() for file in _chat_files(out)):
        examples = make_chat(out)
        write_chat(examples, make_tokenizer(examples["train"], out), out)
    tokenizer = Tokenizer.from_file(str(out / TOKENIZER_FILE))
    for source in SOURCES:
        write_tokens(source.name, tokenizer, out)
    describe(tokenizer, out)


@contextmanager
def _stage(name: str) -> Iterator[None]:
    print(f"{name} ...", end=" ", flush=True)
    start = time.perf_counter()
    yield
    print(f"{time.perf_counter() - start:.1f} s", flush=True)


def write_texts(source: Source, out: Path) -> None:
    """Write `train/<source>.txt` and `heldout/<source>.txt`: documents with a form feed between them."""
    files = [out / part / f"{source.name}.txt" for part in PARTS]
    names = out / "documents" / f"{source.name}.json"
    if all(file.exists() for file in (*files, names)):
        return
    with _stage(f"{source.name}: documents"):
        parts = split(source.name, source.documents(out / "packages"))
        for file, documents in zip(files, parts, strict=True):
            file.write_text(SEPARATOR.join(document.text for document in documents), encoding="utf-8")
        listed = {part: [d.name for d in documents] for part, documents in zip(PARTS, parts, strict=True)}
        _write_json(names, listed)


def read_documents(source: str, part: str, out: Path) -> list[Document]:
    """The documents of a source that `write_texts` wrote."""
    names = json.loads((out / "documents" / f"{source}.json").read_text(encoding="utf-8"))[part]
    texts = (out / part / f"{source}.txt").read_text(encoding="utf-8").split(SEPARATOR)
    return [Document(name, text) for name, text in zip(names, texts, strict=True)]


def make_tokenizer(conversations: Sequence[Example], out: Path) -> Tokenizer:
    """Train `tokenizer.json` on the training documents and conversations."""
    file = out / TOKENIZER_FILE
    if not file.exists():
        with _stage("tokenizer"):
            documents = {source.name: read_documents(source.name, "train", out) for source in SOURCES}
            documents["chat"] = [chat_data.as_document(each, str(at)) for at, each in enumerate(conversations)]
            tokenizer = train_tokenizer(training_texts(documents, sample_chats()))
            check_tokenizer(tokenizer)
            tokenizer.save(str(file), pretty=False)
    return Tokenizer.from_file(str(file))


def write_tokens(source: str, tokenizer: Tokenizer, out: Path) -> None:
    """Write `train/<source>.npy` and `heldout/<source>.npy`: each document between BOS and EOS, as uint16.

    Raises:
        ValueError: If a document does not come back from its ids, or has a special token.
    """
    for part in PARTS:
        file = out / part / f"{source}.npy"
        if file.exists():
            continue
        with _stage(f"{source}: {part} tokens"):
            documents = read_documents(source, part, out)
            rows = encode_documents(tokenizer, [document.text for document in documents])
            texts = tokenizer.decode_batch(rows, skip_special_tokens=False)
            for document, ids, text in zip(documents, rows, texts, strict=True):
                if text != document.text or min(ids) < len(special_tokens()):
                    raise ValueError(f"{source}, {document.name}: the ids do not give the text back")
            np.save(file, stream(rows))


def _chat_files(out: Path) -> list[Path]:
    files = [out / part / f"chat{ending}.npy" for part in PARTS for ending in ("", "_mask")]
    return [*files, out / TOKENIZER_FILE, out / "heldout" / "chat.jsonl", out / "documents" / "chat.json"]


def make_chat(out: Path) -> dict[str, list[Example]]:
    """The conversations for training and those that are held out."""
    with _stage("chat: conversations"):
        documents = {s.name: [d for part in PARTS for d in read_documents(s.name, part, out)] for s in SOURCES}
        held_out = {s.name: {d.name for d in read_documents(s.name, "heldout", out)} for s in SOURCES}
        parts: dict[str, list[Example]] = {part: [] for part in PARTS}
        for example in chat_data.make_examples(_material(documents, out)):
            parts[PARTS[chat_data.is_held_out(example, held_out)]].append(example)
    return parts


def write_chat(parts: dict[str, list[Example]], tokenizer: Tokenizer, out: Path) -> None:
    """Write `chat.npy` and `chat_mask.npy` of both parts, and the held-out conversations as `heldout/chat.jsonl`."""
    encoder = ExampleEncoder(TextTokenizer(tokenizer.to_str(), bos_token_id=_BOS))
    facts = {}
    for part, examples in parts.items():
        with _stage(f"chat: {part} tokens"):
            ids, mask = chat_data.encode_examples(encoder, examples)
            np.save(out / part / "chat.npy", ids)
            np.save(out / part / "chat_mask.npy", mask)
            facts[part] = {
                "conversations": len(examples),
                "tokens": len(ids),
                "learned_tokens": int(mask.sum()),
                "kinds": chat_data.count_kinds(examples),
            }
    rows = (json.dumps(chat_data.as_row(example), ensure_ascii=False) for example in parts["heldout"])
    (out / "heldout" / "chat.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    _write_json(out / "documents" / "chat.json", facts)


def _material(documents: dict[str, list[Document]], out: Path) -> chat_data.Material:
    unpacked = {name: packages.fetch(name, out / "packages") for s in SOURCES for name in s.packages}
    database = wordnet.folder(unpacked)
    senses = wordnet.read_senses(database, wordnet.read_synsets(database))
    return chat_data.Material(documents, senses, python_docs.pages(unpacked)[1])


def stream(rows: Sequence[Sequence[int]]) -> NDArray[np.uint16]:
    """All documents after each other, each between BOS and EOS."""
    return np.concatenate([np.asarray([_BOS, *ids, _EOS], np.uint16) for ids in rows])


def describe(tokenizer: Tokenizer, out: Path) -> None:
    """Write `sources.json`: where each source is from, and its size."""
    sources: dict[str, Any] = {source.name: _describe_source(source, out) for source in SOURCES}
    tokenizer_facts = {
        "vocab_size": tokenizer.get_vocab_size(with_added_tokens=True),
        "special_tokens": {text: token for token, text in enumerate(special_tokens())},
        "compressed_ids": int(compressed_token_map(tokenizer).max()) + 1,
        "bytes_per_token": {name: facts["bytes_per_token"] for name, facts in sources.items()},
    }
    chat = json.loads((out / "documents" / "chat.json").read_text(encoding="utf-8"))
    _write_json(out / "sources.json", {"sources": sources, "chat": chat, "tokenizer": tokenizer_facts})


def _describe_source(source: Source, out: Path) -> dict[str, Any]:
    versions = {package: packages.version(package, out / "packages") for package in source.packages}
    facts: dict[str, Any] = {"packages": versions, "licence": source.licence}
    size = count = 0
    for part in PARTS:
        documents = read_documents(source.name, part, out)
        part_bytes = sum(len(document.text.encode()) for document in documents)
        tokens = len(np.load(out / part / f"{source.name}.npy", mmap_mode="r"))
        facts[part] = {"documents": len(documents), "bytes": part_bytes, "tokens": tokens}
        size, count = size + part_bytes, count + tokens - 2 * len(documents)
    return facts | {"bytes_per_token": round(size / count, 3)}


def _write_json(file: Path, value: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
