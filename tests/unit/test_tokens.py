"""Windows of real text: what they hold, from memory and from files, through tokenizers and Hugging Face's datasets."""

from __future__ import annotations

import json
import pickle
import pydoc_data.topics
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xffl.errors import ConfigError
from xffl.extras import install_command
from xffl.topology import DataPlace, Topology
from xffl.training.data.huggingface import encoded_column, open_dataset, token_dataset
from xffl.training.data.loaders import CellLoader
from xffl.training.data.tokens import (
    ByteTokenizer,
    CharacterTokenizer,
    TokenDataset,
    encoded,
    find_tokenizer,
    open_tokens,
    write_tokens,
)

TOPICS = sorted(pydoc_data.topics.topics.values(), key=len)[:40]
"""English text that comes with Python, as documents."""
TEXT = "".join(TOPICS)
END = 256


def windows_of(tokens: list[int], length: int, stride: int) -> list[tuple[list[int], list[int]]]:
    """By hand: each window and the tokens that follow."""
    found = []
    start = 0
    while start + length + 1 <= len(tokens):
        found.append((tokens[start : start + length], tokens[start + 1 : start + length + 1]))
        start += stride
    return found


def as_lists(dataset: TokenDataset) -> list[tuple[list[int], list[int]]]:
    return [(dataset[index][0].tolist(), dataset[index][1].tolist()) for index in range(len(dataset))]


# Windows --------------------------------------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=8), length=st.integers(1, 6), stride=st.integers(1, 9))
@settings(max_examples=80, deadline=None)
def test_windows_are_what_one_would_cut_by_hand(lengths: list[int], length: int, stride: int) -> None:
    documents = [list(range(10 * place, 10 * place + size)) for place, size in enumerate(lengths)]
    joined = [token for document in documents for token in (*document, 99)]
    wanted = windows_of(joined, length, stride)
    apart = [window for document in documents for window in windows_of([*document, 99], length, stride)]
    for expected, end in ((wanted, None), (apart, 99)):
        if expected:
            dataset = TokenDataset(joined, sequence_length=length, stride=stride, end=end)
            assert len(dataset) == len(expected) and as_lists(dataset) == expected
            assert [window.tolist() for window in dataset[-1]] == [*map(list, expected[-1])]
        else:
            with pytest.raises(ConfigError, match=f"no window of {length + 1}"):
                TokenDataset(joined, sequence_length=length, stride=stride, end=end)


def test_the_ends_of_documents_are_found_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = list(TEXT.encode())
    whole = TokenDataset(tokens, sequence_length=16, end=10)
    monkeypatch.setattr("xffl.training.data.tokens.CHUNK", 1000)
    assert as_lists(TokenDataset(tokens, sequence_length=16, end=10)) == as_lists(whole)


def test_every_token_of_a_text_is_a_target_once() -> None:
    tokens = list(TEXT.encode())
    dataset = TokenDataset(tokens, sequence_length=32)
    targets = [token for window in as_lists(dataset) for token in window[1]]
    assert targets == tokens[1 : 1 + len(targets)] and len(tokens) - 1 - len(targets) < 32
    inputs, following = dataset[3]
    assert inputs.dtype == following.dtype == torch.int64 and inputs.shape == following.shape == (32,)
    with pytest.raises(IndexError, match="outside"):
        dataset[len(dataset)]


def test_causal_models_get_the_same_tokens_twice() -> None:
    dataset = TokenDataset(range(100), sequence_length=10, form="causal_lm")
    assert len(dataset) == 10  # no token is needed behind the last window
    sample = dataset[9]
    assert sample["input_ids"].tolist() == sample["labels"].tolist() == list(range(90, 100))
    sample["labels"][0] = -100
    assert sample["input_ids"][0] == 90


@pytest.mark.parametrize("end", [None, 10])
def test_a_split_leaves_no_window_over_the_cut(end: int | None) -> None:
    tokens = list(TEXT.encode())[:6000]
    whole = TokenDataset(tokens, sequence_length=16, stride=8, end=end)
    train, held_out = whole.split(0.9)
    cut = round(len(tokens) * 0.9)
    assert (train.tokens, held_out.tokens) == (cut, len(tokens) - cut)
    assert as_lists(train) == as_lists(TokenDataset(tokens[:cut], sequence_length=16, stride=8, end=end))
    assert as_lists(held_out) == as_lists(TokenDataset(tokens[cut:], sequence_length=16, stride=8, end=end))
    again = held_out.split(0.5)[1]
    assert as_lists(again) == as_lists(
        TokenDataset(tokens[cut + round((len(tokens) - cut) / 2) :], sequence_length=16, stride=8, end=end)
    )
    for wrong in (0.0, 1.0, -0.1):
        with pytest.raises(ConfigError, match="first must be a number between 0 and 1"):
            whole.split(wrong)
    with pytest.raises(ConfigError, match="no window"):
        whole.split(1e-9)


def test_identity_tells_other_windows_apart() -> None:
    tokens = np.frombuffer(TEXT.encode(), dtype=np.uint8)
    first = TokenDataset(tokens, sequence_length=16)
    assert first.identity == TokenDataset(tokens.astype(np.int32), sequence_length=16).identity
    changed = tokens.copy()
    changed[-1] ^= 1
    others = [
        TokenDataset(changed, sequence_length=16),
        TokenDataset(tokens, sequence_length=16, stride=8),
        TokenDataset(tokens, sequence_length=16, end=10),
        TokenDataset(tokens, sequence_length=16, form="causal_lm"),
        TokenDataset(tokens[:-1], sequence_length=16),
        *first.split(0.5),
    ]
    assert len({first.identity, *(other.identity for other in others)}) == 1 + len(others)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tokens": [[1]]}, "shape"),
        ({"tokens": [0.5, 1.0]}, "float64"),
        ({"sequence_length": 0}, "sequence_length must be a positive integer, got 0"),
        ({"sequence_length": 50}, "50 tokens have no window of 51"),
        ({"stride": 0}, "stride must be a positive integer, got 0"),
        ({"form": "dict"}, "form must be one of 'pair', 'causal_lm', got 'dict'"),
        ({"end": 1.5}, "end must be an integer of 0 or more, got 1.5"),
        ({"end": "x"}, "end must be an integer of 0 or more, got 'x'"),
        ({"vocabulary_size": "x"}, "vocabulary_size must be a positive integer, got 'x'"),
        ({"tokens": "nowhere.npy"}, "no file of tokens 'nowhere.npy'"),
    ],
)
def test_windows_that_cannot_be_meant_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TokenDataset(**{"tokens": range(50), "sequence_length": 4, **change})


# Files ----------------------------------------------------------------------------------------------------------------


def test_tokens_are_written_and_mapped(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    documents = list(encoded(TOPICS, ByteTokenizer()))
    count = write_tokens(path, iter(documents), vocabulary_size=257, end=END)
    joined = [token for document in documents for token in (*document.tolist(), END)]
    mapped = open_tokens(path)
    assert isinstance(mapped, np.memmap) and mapped.dtype == np.uint16 and not mapped.flags.writeable
    assert mapped.tolist() == joined and count == len(joined)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["tokens.npy", "tokens.npy.json"]
    dataset = TokenDataset(path, sequence_length=64, end=END)
    assert dataset.vocabulary_size == 257
    assert as_lists(dataset) == as_lists(TokenDataset(joined, sequence_length=64, end=END))
    # A worker opens the file itself.
    pickled = pickle.dumps(dataset.split(0.5)[1])
    assert len(pickled) < 4000 < path.stat().st_size
    assert as_lists(pickle.loads(pickled)) == as_lists(dataset.split(0.5)[1])
    assert pickle.loads(pickle.dumps(TokenDataset(joined, sequence_length=64))).tokens == len(joined)


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    for size, dtype in ((1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)):
        write_tokens(tmp_path / "tokens.npy", [[size - 1, 0]], vocabulary_size=size)
        assert open_tokens(tmp_path / "tokens.npy").dtype == dtype
        assert open_tokens(tmp_path / "tokens.npy").tolist() == [size - 1, 0]


def killed(*args: Any, **kwargs: Any) -> None:
    raise KeyboardInterrupt


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokens.npy"
    write_tokens(path, [[1, 2, 3]], vocabulary_size=10)
    before = path.read_bytes()
    for wrong, message in (
        ([[1], [2, 10]], "document 1 has tokens 2 to 10, but the vocabulary has 10"),
        ([[-1]], "-1"),
    ):
        with pytest.raises(ConfigError, match=message):
            write_tokens(path, wrong, vocabulary_size=10)
    for options, message in (
        ({"vocabulary_size": 1 << 33}, "vocabulary_size must be an integer from 1 to 4294967296"),
        ({"vocabulary_size": 9, "end": 1.5}, "end must be an integer of 0 or more, got 1.5"),
    ):
        with pytest.raises(ConfigError, match=message):
            write_tokens(path, [[1]], **options)  # type: ignore[arg-type]
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 2
    with monkeypatch.context() as patch:
        patch.setattr("xffl.training.data.tokens.write_whole", killed)  # after the tokens, before what tells of them
        with pytest.raises(KeyboardInterrupt):
            write_tokens(path, [[1, 1, 1]], vocabulary_size=2)
    assert TokenDataset(path, sequence_length=1).vocabulary_size in (None, 2)
    with pytest.raises(ConfigError, match="must end in .npy"):
        write_tokens(tmp_path / "tokens.bin", [[1]], vocabulary_size=10)


def test_files_that_hold_no_tokens_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    path.write_bytes(b"no array")
    with pytest.raises(ConfigError, match="is not an array of tokens"):
        open_tokens(path)
    np.save(path, np.array([{}]))
    with pytest.raises(ConfigError, match="is not an array of tokens"):
        open_tokens(path)
    with pytest.raises(ConfigError, match="is not an array of tokens"):
        open_tokens(path.rename(tmp_path / "a.bin"), "toaster")
    np.save(path, np.zeros((2, 2), dtype=np.int64))
    with pytest.raises(ConfigError, match="shape"):
        open_tokens(path)
    write_tokens(path, [range(9)], vocabulary_size=10)
    np.save(path, np.arange(8))
    with pytest.raises(ConfigError, match="has 8 tokens, but tokens.npy.json says 9"):
        TokenDataset(path, sequence_length=2)
    (tmp_path / "tokens.npy.json").write_text("{}")
    with pytest.raises(ConfigError, match="does not describe tokens.npy"):
        TokenDataset(path, sequence_length=2)


def test_a_raw_array_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    np.arange(50, dtype=np.uint16).tofile(path)
    assert as_lists(TokenDataset(path, sequence_length=4)) == windows_of(list(range(50)), 4, 4)
    np.arange(50, dtype=np.uint32).tofile(path)
    assert TokenDataset(open_tokens(path, np.uint32), sequence_length=4)[2][0].tolist() == [8, 9, 10, 11]


def test_text_files_become_tokens(tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text(TOPICS[3], encoding="utf-8")
    second.write_text("größer → " + TOPICS[4], encoding="utf-8")
    raw = list(TOPICS[3].encode() + ("größer → " + TOPICS[4]).encode())
    dataset = TokenDataset.from_text([first, second], sequence_length=8)
    assert as_lists(dataset) == windows_of(raw, 8, 8) and dataset.vocabulary_size == 256
    ended = TokenDataset.from_text([first, second], "characters", sequence_length=8, end=1000)
    assert ended.tokens == len(TOPICS[3]) + len("größer → " + TOPICS[4]) + 2
    one = TokenDataset.from_text(first, lambda text: [len(word) for word in text.split()], sequence_length=2)
    assert one[0][0].tolist() == [len(word) for word in TOPICS[3].split()[:2]]
    with pytest.raises(ConfigError, match="no text file"):
        TokenDataset.from_text(tmp_path / "c.txt", sequence_length=8)
    marked = tmp_path / "marked.txt"
    marked.write_bytes(b"\xef\xbb\xbfabc")  # as some editors begin a file
    assert TokenDataset.from_text(marked, sequence_length=2).tokens == 3
    with pytest.raises(ConfigError, match="cannot be read: .*directory"):
        TokenDataset.from_text(tmp_path, sequence_length=8)
    first.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        TokenDataset.from_text(first, sequence_length=8)


# Tokenizers -----------------------------------------------------------------------------------------------------------


@given(st.text(min_size=1), st.text())
@settings(max_examples=60, deadline=None)
def test_characters_and_bytes_come_back(text: str, more: str) -> None:
    tokenizer = CharacterTokenizer.from_text([text, more])
    assert tokenizer.decode(tokenizer.encode(text)) == text and tokenizer.decode(tokenizer.encode(more)) == more
    assert tokenizer.vocabulary_size == len(set(text + more)) and tokenizer.characters == "".join(
        sorted({*text, *more})
    )
    assert tokenizer.encode(text).tolist() == [tokenizer.characters.index(one) for one in text]
    assert ByteTokenizer().decode(ByteTokenizer().encode(text)) == text


def test_a_vocabulary_is_kept(tmp_path: Path) -> None:
    tokenizer = CharacterTokenizer("zaö→")
    tokenizer.save(tmp_path / "vocabulary.json")
    again = CharacterTokenizer.load(tmp_path / "vocabulary.json")
    assert again.characters == "zaö→" and again.encode("→az").tolist() == [3, 1, 0]
    with pytest.raises(ConfigError, match="the character 'b' is not in the vocabulary of 4"):
        tokenizer.encode("ab")
    for wrong, message in (("", "at least one character"), ("aba", "got 'a' twice")):
        with pytest.raises(ConfigError, match=message):
            CharacterTokenizer(wrong)
    with pytest.raises(ConfigError, match="no vocabulary"):
        CharacterTokenizer.load(tmp_path / "other.json")
    for text in ("[]", '{"characters": [1, 2]}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ConfigError, match="is not a vocabulary"):
            CharacterTokenizer.load(tmp_path / "other.json")
    with pytest.raises(ConfigError, match="is not a vocabulary"):
        CharacterTokenizer.load(tmp_path)
    with pytest.raises(ConfigError, match="tokenizer must be .* got 'words'"):
        find_tokenizer("words")
    with pytest.raises(ConfigError, match="tokenizer must be .* got 'characters'"):
        find_tokenizer("characters")


def word_tokenizer() -> Any:
    """A tokenizer of Hugging Face's own, made here of words."""
    tokenizers = pytest.importorskip("tokenizers")
    words = sorted(set(TEXT.split()))
    model = tokenizers.models.WordLevel({"[UNK]": 0, **{word: 1 + at for at, word in enumerate(words)}}, "[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return tokenizer


def test_tokenizers_of_hugging_face_encode(tmp_path: Path) -> None:
    raw = word_tokenizer()
    transformers = pytest.importorskip("transformers")
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]", bos_token="[BOS]")
    place = {word: 1 + at for at, word in enumerate(sorted(set(TEXT.split())))}
    file = tmp_path / "text.txt"
    file.write_text(TOPICS[9], encoding="utf-8")
    wanted = windows_of([place[word] for word in TOPICS[9].split()], 4, 4)
    for tokenizer, size in ((raw, 1 + len(place)), (wrapped, 2 + len(place))):
        dataset = TokenDataset.from_text(file, tokenizer, sequence_length=4)
        assert as_lists(dataset) == wanted and dataset.vocabulary_size == size


# In a loader ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_token_windows_resume_in_a_loader(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "tokens.npy"
    write_tokens(path, encoded([TEXT[:9000]], ByteTokenizer()), vocabulary_size=256)  # as long in every Python
    topology = Topology(3, (2, 1))

    def loader(length: int = 32) -> CellLoader:
        return CellLoader(
            TokenDataset(path, sequence_length=length), DataPlace(topology, 1), batch_size=16, workers=workers
        )

    whole = list(loader())
    assert whole[0][0].shape == (16, 32) and (whole[0][0][:, 1:] == whole[0][1][:, :-1]).all()
    first = loader()
    for _, _batch in zip(range(3), first, strict=False):
        pass
    state = json.loads(json.dumps(first.state_dict()))
    second = loader()
    second.load_state_dict(state)
    rest = list(second)
    assert len(rest) == len(whole) - state["position"]
    assert all(
        torch.equal(x, y)
        for mine, theirs in zip(rest, whole[state["position"] :], strict=True)
        for x, y in zip(mine, theirs, strict=True)
    )
    with pytest.raises(ConfigError, match="saved with dataset"):
        loader(31).load_state_dict(state)


# Hugging Face's datasets ----------------------------------------------------------------------------------------------


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return pytest.importorskip("datasets")


def test_a_dataset_of_files_goes_into_a_loader(offline: Any, tmp_path: Path) -> None:
    rows = [{"x": [float(at), 2.0 * at], "y": at, "name": f"row {at}"} for at in range(50)]
    made = offline.Dataset.from_list(rows)
    made.save_to_disk(tmp_path / "saved")
    made.to_parquet(tmp_path / "rows.parquet")
    made.to_json(tmp_path / "rows.jsonl")
    topology = Topology(3, (2, 1))
    for path in ("saved", "rows.parquet", "rows.jsonl"):
        dataset = open_dataset(tmp_path / path, columns=["x", "y"], cache=tmp_path / "cache")
        seen = []
        for rank in range(3):
            for batch in CellLoader(dataset, DataPlace(topology, rank), batch_size=4, workers=int(rank == 0)):
                assert set(batch) == {"x", "y"} and torch.equal(batch["x"][:, 1], 2.0 * batch["y"])
                seen += batch["y"].tolist()
        assert sorted(seen) == list(range(50))
    offline.DatasetDict({"train": made, "test": made.select(range(5))}).save_to_disk(tmp_path / "both")
    assert len(open_dataset(tmp_path / "both", split="test", form=None)) == 5
    (tmp_path / "line 1.txt").write_text("not this\n")
    lines = tmp_path / "line [123]*'.txt"  # a pattern of the other's name, too
    lines.write_text("one\ntwo\nthree\n")
    assert open_dataset([lines], cache=tmp_path / "cache", form=None)["text"][:] == ["one", "two", "three"]


def test_data_that_cannot_be_opened_is_refused(offline: Any, tmp_path: Path) -> None:
    made = offline.Dataset.from_dict({"text": ["a b"]})
    made.save_to_disk(tmp_path / "saved")
    offline.DatasetDict({"train": made}).save_to_disk(tmp_path / "both")
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "a.png").write_text("a")
    (tmp_path / "a.jsonl").write_text("")
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (tmp_path / "nothing", {}, "no data at"),
        (tmp_path / "empty", {}, "was not written by save_to_disk"),
        (tmp_path / "saved", {"split": "train"}, "has no splits"),
        (tmp_path / "both", {}, r"has the splits \['train'\], not None"),
        (tmp_path / "saved", {"columns": ["label"]}, r"no columns \['label'\]; choose of \['text'\]"),
        (tmp_path / "a.png", {}, r"end in \['.png'\]"),
        ([tmp_path / "a.png", tmp_path / "a.txt"], {}, "cannot be read together"),
        (tmp_path / "a.txt", {"split": "test"}, "files have no splits"),
        (tmp_path / "a.jsonl", {}, "cannot be read as .jsonl"),
    ]
    for path, options, message in wrong:
        with pytest.raises(ConfigError, match=message):
            open_dataset(path, **options)
    with pytest.raises(ConfigError, match="no column 'body'"):
        token_dataset(made, "bytes", column="body", sequence_length=2)
    for tokenizer in ("bytes", word_tokenizer()):
        with pytest.raises(ConfigError, match="must hold texts, got None"):
            token_dataset(offline.Dataset.from_dict({"text": ["a", None]}), tokenizer, sequence_length=1)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=f"needs datasets, .*{re.escape(install_command('hf'))}"):
        open_dataset("anything")


def test_columns_become_blocks_of_tokens(offline: Any, tmp_path: Path) -> None:
    dataset = offline.Dataset.from_dict({"text": TOPICS}).with_format("torch")
    wanted = windows_of([token for text in TOPICS for token in (*text.encode(), END)], 64, 64)
    kept = token_dataset(dataset, "bytes", sequence_length=64, end=END, vocabulary_size=257)
    mapped = token_dataset(
        dataset, "bytes", path=tmp_path / "t.npy", sequence_length=64, end=END, vocabulary_size=257, form="causal_lm"
    )
    joined = TokenDataset(open_tokens(tmp_path / "t.npy"), sequence_length=64)
    assert as_lists(joined) == wanted and mapped.vocabulary_size == kept.vocabulary_size == 257
    apart = [w for text in TOPICS for w in windows_of([*text.encode(), END], 64, 64)]
    assert as_lists(kept) == apart
    transformers = pytest.importorskip("transformers")
    raw = word_tokenizer()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]")
    one, other = (token_dataset(dataset, each, sequence_length=8) for each in (raw, wrapped))
    assert as_lists(one) == as_lists(other) and one.vocabulary_size == other.vocabulary_size
    assert as_lists(one) == windows_of([i for text in TOPICS for i in raw.encode(text).ids], 8, 8)
    assert [ids.tolist() for ids in encoded_column(dataset, raw)] == [raw.encode(text).ids for text in TOPICS]
    with pytest.raises(ConfigError, match="does not say how many tokens"):
        token_dataset(dataset, lambda text: [1], path=tmp_path / "u.npy", sequence_length=2)
