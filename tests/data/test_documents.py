"""Text as people have it: names in any case, packed, with marks; what is wrong is named by file, line and byte."""

from __future__ import annotations

import codecs
import gzip
import json

import pytest

from holdfast.data.chats import Chat
from holdfast.data.corpus import Corpus
from holdfast.data.documents import Document, chunks, form_of, records
from holdfast.errors import BadInput


def packed(data):
    """Pack without the time of day, since these are names of cases as well."""
    return gzip.compress(data, mtime=0)


ONE, TWO = '{"text": "one"}', '{"prompt": "t", "completion": "wo"}'
LINES, ARRAY = f"{ONE}\n\n{TWO}\n".encode(), f"[\n {ONE},\n\n {TWO} ]\n".encode()


def read(path):
    if form_of(path) == "plain":
        return "".join(chunks(path, 7))
    return [(record.text, record.prompt) for record in records(path)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.JSONL", LINES),
        ("a.ndjson", LINES.replace(b"\n", b"\r\n")),
        ("a.jsonl", codecs.BOM_UTF8 + LINES),
        ("a.Json", ARRAY),
        ("a.json", LINES),
        ("a.json", codecs.BOM_UTF8 + ARRAY),
        ("a.jsonl.gz", packed(LINES[:20]) + packed(LINES[20:])),
        ("a.json.GZ", packed(ARRAY)),
    ],
)
def test_records_are_read_in_any_form(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert read(tmp_path / name) == [("one", None), ("wo", "t")]


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_text_is_read_in_any_form(tmp_path, size):
    text = "één\r\n\ufefftwo\n\n\N{PILE OF POO}"  # a mark that is not at the beginning stays
    for name, content in {
        "a.TXT": codecs.BOM_UTF8 + text.encode(),
        "a.txt.gz": packed(text.encode()),
        "a.md": text.encode(),
        "empty.txt": b"",
    }.items():
        (tmp_path / name).write_bytes(content)
        assert "".join(chunks(tmp_path / name, size)) == (text if content else "")


def test_chunks_end_with_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\n")
    assert list(chunks(tmp_path / "a.txt", 5)) == ["one\ntwo\n", "three\n"]


def test_zstd_is_read_where_it_is_installed(tmp_path):
    path = tmp_path / "a.jsonl.zst"
    try:
        import zstandard
    except ImportError:
        path.write_bytes(b"")
        with pytest.raises(BadInput, match=r"a\.jsonl\.zst needs zstandard"):
            read(path)
        return
    path.write_bytes(zstandard.compress(LINES[:20]) + zstandard.compress(LINES[20:]))
    assert read(path) == [("one", None), ("wo", "t")]
    path.write_bytes(b"no zstd at all")
    with pytest.raises(BadInput, match=r"a\.jsonl\.zst is no whole zstd file"):
        read(path)


def test_records_know_their_lines(tmp_path):
    (tmp_path / "a.json").write_bytes(ARRAY)
    assert list(records(tmp_path / "a.json"))[1] == Document("wo", "t", f"{tmp_path / 'a.json'}:4")


GOOD = ONE.encode() + b"\n"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"a\nb\nc\xffd", r"a\.txt:3 .* UTF-8 \(byte 5 of the file, 0xff\)"),
        ("a.txt", b"abc\n" * 9 + b"\xc3", r"a\.txt:10 .*\(byte 36 of the file, 0xc3\)"),
        ("a.jsonl", GOOD + b'{"text": "\xe9"}\n', r"a\.jsonl:2 .*\(byte 26 of the file, 0xe9\)"),
        ("a.txt", b"a\nb\0c", r"a\.txt:2 has a NUL \(byte 3 of the file\)"),
        ("a.txt", "abcdefé\0".encode(), r"a\.txt:1 has a NUL \(byte 8 of the file\)"),
        ("a.txt", "text".encode("utf-16"), r"a\.txt is UTF-16, by its byte order mark.* iconv"),
        ("a.jsonl", codecs.BOM_UTF32_LE + ONE.encode("utf-32-le"), r"a\.jsonl is UTF-32"),
        ("a.jsonl", GOOD + b'{"text": "a \\ud83d b"}\n', r'a\.jsonl:2 has \\ud83d in "text" \(character 2\)'),
        ("a.jsonl", b'{"text": ' + b"[" * 100_000 + b"\n", r"a\.jsonl:1 is no JSON: it is nested too deeply"),
        ("a.jsonl", b'{"text": "a", "prompt": "b", "completion": "c"}', r'a\.jsonl:1 has "text", and "prompt"'),
        ("a.jsonl", GOOD + b'{"text": "a", "text": "b"}', r'a\.jsonl:2 has "text" twice'),
        ("a.jsonl", GOOD + b'{"text": "a"} {"text": "b"}', r"a\.jsonl:2 is no JSON: something follows"),
        ("a.jsonl", b'{"text": ' + b"1" * 5000 + b"}", r"a\.jsonl:1 is no JSON: Exceeds the limit"),
        ("a.jsonl", GOOD + b'{"text": "a"\n', r"a\.jsonl:2 is no JSON: .*\(column"),
        ("a.json", b"[\n" + GOOD + GOOD + b"]", r"a\.json:3 is no JSON: a comma is missing"),
        ("a.json", b"[\n" + GOOD, r"a\.json:3 is no JSON: its array has no end"),
        ("a.json", b"[\n" + GOOD + b",\n{,}]", r"a\.json:4 is no JSON"),
        ("a.json", b"[" + GOOD + b"]\n1", r"a\.json:3 is no JSON: something follows its array"),
        ("a.json", b'{\n "texts": []}', r'a\.json:1 has neither .* it has texts'),
        ("a.json", b'{\n "messages": []}', r'a\.json:1 has no conversation'),
        ("a.jsonl.gz", b"no gzip", r"a\.jsonl\.gz is no whole gzip file"),
        ("a.txt.gz", packed(b"text")[:10] + b"\xff" * 20, r"a\.txt\.gz is no whole gzip file: .* block type"),
        ("a.txt.gz", packed(b"text" * 99)[:-9], r"a\.txt\.gz is no whole gzip file"),
    ],
)  # fmt: skip
def test_bad_text_is_named_by_place(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=said):
        read(tmp_path / name)


def said_by(role, **more):
    return {"role": role, **({"content": "a"} | more)}


CALL = {"name": "f", "arguments": "{"}
AGAIN = '{"messages": [{"role": "user", "role": "system", "content": "a"}]}'


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"messages": [said_by("asistant")]}, r'a\.jsonl:2, message 1, has the "role" "asistant"'),
        ({"messages": [said_by("user")]}, r"a\.jsonl:2 has no message of the assistant"),
        ({"messages": [said_by("user"), {"role": "assistant"}]}, 'message 2, has no "content"'),
        ({"messages": ["a"]}, "message 1, is no object"),
        ({"messages": [said_by("user", content="\ud83d")]}, r'a\.jsonl:2 has \\ud83d in "messages"'),
        ({"messages": [said_by("user", content=[{"type": "image"}])]}, "message 1, has .* images"),
        ({"messages": [said_by("assistant", weight=0)]}, 'has "weight", which is not read'),
        ({"messages": [said_by("assistant", tool_calls=[CALL])]}, 'call of f whose "arguments" are no JSON'),
        ({"messages": [said_by("assistant", tool_calls=[{}])]}, 'without the "name" of its function'),
        ({"messages": [said_by("assistant")], "text": "b"}, 'has "messages" and "text"'),
        ({"messages": [said_by("assistant")], "tools": "f"}, '"tools" that are no list'),
        (AGAIN, r'a\.jsonl:2 has an object in "messages" that has a key twice'),
    ],
)
def test_wrong_conversation_is_named_by_line_and_message(tmp_path, record, said):
    line = record if isinstance(record, str) else json.dumps(record)
    (tmp_path / "a.jsonl").write_bytes(GOOD + line.encode())
    with pytest.raises(BadInput, match=said):
        read(tmp_path / "a.jsonl")


def test_conversation_is_read_as_templates_take_it(tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [said_by("user", content=parts, name=None), {"role": "assistant", "tool_calls": [call]}]
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"messages": messages, "tools": [{"name": "f"}], "prompt": "p"})
    )
    [record] = records(tmp_path / "a.jsonl")
    called = {"type": "function", "function": {"name": "f", "arguments": {"x": [1]}}}
    assert record.chat == Chat(
        [{"role": "user", "content": "ab"}, {"role": "assistant", "tool_calls": [called]}], [{"name": "f"}]
    )
    assert (record.text, record.prompt) == ("", None)


def test_duplicate_keys_elsewhere_are_no_matter(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a"})[:-1] + ', "more": {"text": 1, "text": 2}}')
    assert read(tmp_path / "a.jsonl") == [("a", None)]


def test_packed_bytes_are_no_corpus(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(packed(b"text" * 99))
    with pytest.raises(BadInput, match=r"a\.txt\.gz, which is packed"):
        Corpus(str(tmp_path / "a.txt.gz"), context=2)
