"""Tables as people have them: Parquet, and folders of ``datasets``; records and errors are those of JSON lines."""

from __future__ import annotations

import sys

import pytest

from holdfast.data import documents
from holdfast.data.chats import Chat
from holdfast.data.corpus import Corpus
from holdfast.data.documents import records
from holdfast.data.tokens import encoded
from holdfast.errors import BadInput

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

PAIRS = [{"prompt": f"{n} is", "completion": f" {n}", "more": n} for n in range(5)]
CHAT = [
    {"role": "user", "content": "a", "tool_calls": None},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": 1, "y": None}}]},
]


class Bytes:
    begin, end, pad, digest = [256], [257], 258, "bytes"

    def encode_with_ends(self, texts):
        return [(list(text.encode()), list(range(1, len(text) + 1))) for text in texts]


def as_parquet(path, rows):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    return path


def test_rows_are_records(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "ROWS", 2)
    path = as_parquet(tmp_path / "a.Parquet", PAIRS)
    found = [(record.prompt, record.text, record.where) for record in records(path)]
    assert found == [(f"{n} is", f" {n}", f"{path}, row {n + 1}") for n in range(5)]


def test_missing_values_are_left_out_of_messages(tmp_path):
    """A column of a table has all keys in every row."""
    [record] = records(as_parquet(tmp_path / "a.parquet", [{"messages": CHAT, "tools": '[{"name": "f"}]'}]))
    calls = [{"name": "f", "arguments": {"x": 1}}]
    assert record.chat == Chat(
        [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}], [{"name": "f"}]
    )


def test_saved_dataset_is_read_in_its_order(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(PAIRS)
    rows.save_to_disk(tmp_path / "saved", num_shards=2)
    text = encoded(str(tmp_path / "saved"), Bytes(), tmp_path / "kept", context=16)
    found = [bytes(text.training[n]["input_ids"][1:-1].tolist()) for n in range(5)]
    assert found == [f"{n} is {n}".encode() for n in range(5)]
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "splits")
    with pytest.raises(
        BadInput, match=r"has the splits test, train: name one, such as data\.text=.*/splits/"
    ):
        encoded(str(tmp_path / "splits"), Bytes(), tmp_path / "other", context=16)


@pytest.mark.parametrize(
    ("rows", "cut", "said"),
    [
        ([{"a": 1}], None, r"a\.parquet has neither a column .* it has a"),
        ([{"text": None}], None, r"a\.parquet, row 1 has neither"),
        (PAIRS, 100, r"a\.parquet is no whole table after row 0: "),
        ([{"messages": [{"role": "bot", "content": "x"}]}], None, r'row 1, message 1, has the "role" "bot"'),
    ],
)
def test_wrong_table_is_named_by_row(tmp_path, rows, cut, said):
    path = as_parquet(tmp_path / "a.parquet", rows)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(BadInput, match=said):
        list(records(path))


def test_table_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    path = as_parquet(tmp_path / "a.parquet", PAIRS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BadInput, match=r"pip install 'holdfast\[tables\]'"):
        list(records(path))


def test_table_is_no_text_of_bytes(tmp_path):
    path = as_parquet(tmp_path / "a.parquet", PAIRS)
    with pytest.raises(BadInput, match=r"a\.parquet, which is a table"):
        Corpus(str(path), context=2)
