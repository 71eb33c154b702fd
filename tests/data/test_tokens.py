"""Text and JSON lines as tokens: every id once, completions alone as targets, kept and made again."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

from holdfast.data import tokens
from holdfast.data.tokens import IGNORED, encoded
from holdfast.errors import BadInput

BEGIN, END, PAD = 1000, 1001, 1002


class Bytes:
    """A byte is a token."""

    begin, end, pad, digest = [BEGIN], [END], PAD, "bytes"

    def __init__(self):
        self.calls = 0

    def encode(self, texts):
        self.calls += 1
        return [list(text.encode()) for text in texts]

    def encode_with_ends(self, texts):
        ends = [[n for n, letter in enumerate(text, 1) for _ in letter.encode()] for text in texts]
        return list(zip(self.encode(texts), ends, strict=True))


class Words(Bytes):
    """Tokens are words with the space before them, "!" and what follows it, and runs of lines; of a text that does not
    begin with a space, the first word is another token, as if it had one."""

    digest = "words"

    def __init__(self, says_ends=True):
        super().__init__()
        self.known, self.says_ends = {}, says_ends

    def encode(self, texts):
        return [ids for ids, _ in self._encoded(texts)]

    def encode_with_ends(self, texts):
        return self._encoded(texts) if self.says_ends else None

    def _encoded(self, texts):
        found = []
        for text in texts:
            parts = list(re.finditer(r"!.| ?[^\s!]+|\n+| +", text, re.DOTALL))
            names = [("_" if part.start() == 0 else "") + part.group() for part in parts]
            ids = [self.known.setdefault(name, len(self.known)) for name in names]
            found.append((ids, [part.end() for part in parts]))
        return found


def lines(path, *told):
    path.write_text("".join(json.dumps(each) + "\n" for each in told))
    return path


@pytest.mark.parametrize("size", [1, 7])
def test_every_id_is_a_target_once_and_documents_have_their_marks(tmp_path, monkeypatch, size):
    """In pieces of any size, from several files and lines."""
    monkeypatch.setattr(tokens, "PIECE_CHARACTERS", size)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("one\ntwo and three\n\nfour")
    (tmp_path / "text" / "b.txt").write_text("")
    lines(tmp_path / "text" / "c.jsonl", {"text": "five"}, {"text": "six", "more": 1})
    text = encoded(str(tmp_path / "text"), Bytes(), tmp_path / "kept", context=5)
    documents = [(tmp_path / "text" / "a.txt").read_bytes(), b"five", b"six"]
    whole = [each for document in documents for each in (BEGIN, *document, END)]
    targets = []
    for index in range(len(text.training)):
        sample = text.training[index]
        assert torch.equal(sample["input_ids"], sample["labels"]) and len(sample["labels"]) == 5
        targets += sample["labels"][1:].tolist()
    assert targets == whole[1 : 1 + len(targets)]
    assert len(whole) - 1 - len(targets) < 4


def test_of_a_pair_the_completion_alone_is_a_target(tmp_path):
    path = lines(
        tmp_path / "pairs.jsonl",
        {"prompt": "2+2=", "completion": "4"},
        {"prompt": "a", "completion": "long one that is cut"},
        {"prompt": "as long as the context", "completion": "!"},
    )
    with (
        pytest.warns(UserWarning, match=r"1 of 3 samples are left out: .* model\.context = 10 tokens"),
        pytest.warns(UserWarning, match=r"1 of 2 samples are longer than model\.context = 10 tokens"),
    ):
        text = encoded(str(path), Bytes(), tmp_path / "kept", context=10)
    first, second = (text.training[index] for index in range(2))
    assert first["input_ids"].tolist() == [BEGIN, *b"2+2=4", END]
    assert first["labels"].tolist() == [IGNORED] * 5 + [*b"4", END]
    assert second["input_ids"].tolist() == [BEGIN, *b"along one"]
    batch = text.stack([first, second])
    assert batch["attention_mask"].tolist() == [[1] * 7 + [0] * 3, [1] * 10]
    assert batch["input_ids"][0, 7:].tolist() == [PAD] * 3
    assert batch["labels"][0, 7:].tolist() == [IGNORED] * 3
    assert len(text.training) == 2 and len(text.validation) == 0


def test_some_are_held_out_and_never_trained_on(tmp_path):
    path = lines(tmp_path / "pairs.jsonl", *({"prompt": f"{n}", "completion": "x"} for n in range(20)))
    text = encoded(str(path), Bytes(), tmp_path / "kept", context=10, validation_fraction=0.1)
    trained, held = (
        {bytes(part[i]["input_ids"][1:-2].tolist()) for i in range(len(part))}
        for part in (text.training, text.validation)
    )
    assert len(trained) == 18 and len(held) == 2 and not trained & held


def test_what_is_kept_is_taken_again_until_anything_of_it_changes(tmp_path):
    path, kept, encoder = tmp_path / "a.txt", tmp_path / "kept", Bytes()
    path.write_text("some text, " * 10)

    def made(**options):
        before = encoder.calls
        text = encoded(str(path), encoder, kept, **({"context": 8} | options))
        return encoder.calls > before, text.fingerprint

    first, fingerprint = made()
    assert first and made() == (False, fingerprint)
    (kept / tokens.IDS).write_bytes((kept / tokens.IDS).read_bytes()[:-1] + b"\7")
    assert made() == (True, fingerprint)
    (kept / tokens.SAMPLES).unlink()
    assert made() == (True, fingerprint)
    (kept / tokens.ABOUT).write_text("{")
    assert made() == (True, fingerprint)
    path.write_text("other text, " * 10)
    again, other = made()
    assert again and other != fingerprint
    encoder.digest = "another"
    assert made()[0]
    assert made(context=9)[0]


def test_ids_that_need_four_bytes_come_back(tmp_path):
    encoder = Bytes()
    encoder.begin = [2**32 - 1]
    (tmp_path / "a.txt").write_text("abc")
    text = encoded(str(tmp_path / "a.txt"), encoder, tmp_path / "kept", context=3)
    assert text.training[0]["input_ids"].tolist() == [2**32 - 1, *b"ab"]
    assert text.ids.dtype == np.uint32


@pytest.mark.parametrize("size", [20, 100, 1000])
def test_pieces_have_the_tokens_of_the_whole(tmp_path, monkeypatch, size):
    monkeypatch.setattr(tokens, "PIECE_CHARACTERS", size)
    text, encoder = "one two!\n\n\nthree  four!five\nsix seven\n!\n eight" * 40, Words()
    (tmp_path / "a.txt").write_text(text)
    found = encoded(str(tmp_path / "a.txt"), encoder, tmp_path / "kept", context=8)
    assert list(found.ids) == [BEGIN, *encoder.encode([text])[0], END]


@pytest.mark.parametrize(
    ("prompt", "completion", "names"),
    [
        ("say it:\n", "Paris is it", ["Paris", " is", " it"]),
        ("say", " Paris", [" Paris"]),
        ("well!", "no doubt", ["!n", "o", " doubt"]),  # a token of both belongs to the completion
        ("", "Paris", ["_Paris"]),
    ],
)
def test_completions_are_encoded_with_their_prompts(tmp_path, prompt, completion, names):
    path, encoder = lines(tmp_path / "a.jsonl", {"prompt": prompt, "completion": completion}), Words()
    sample = encoded(str(path), encoder, tmp_path / "kept", context=20).training[0]
    ids, labels = (sample[key].tolist() for key in ("input_ids", "labels"))
    assert ids == [BEGIN, *encoder.encode([prompt + completion])[0], END]
    assert [each for each in labels if each != IGNORED] == [*(encoder.known[name] for name in names), END]


def test_encoder_without_ends_encodes_parts(tmp_path):
    path, encoder = lines(tmp_path / "a.jsonl", {"prompt": "say it:", "completion": "Paris"}), Words(False)
    sample = encoded(str(path), encoder, tmp_path / "kept", context=20).training[0]
    assert sample["input_ids"].tolist() == [
        BEGIN,
        *encoder.encode(["say it:"])[0],
        *encoder.encode(["Paris"])[0],
        END,
    ]


def test_tokens_of_an_older_run_are_kept(tmp_path):
    """A run goes on with the samples that it began with, though they would be encoded otherwise now."""
    path, encoder = lines(tmp_path / "a.jsonl", {"prompt": "say it:\n", "completion": "Paris"}), Words()
    new = encoded(str(path), encoder, tmp_path / "kept", context=20).fingerprint
    encoder.says_ends = False
    assert encoded(str(path), encoder, tmp_path / "kept", context=20).fingerprint == new
    assert encoded(str(path), encoder, tmp_path / "other", context=20).fingerprint != new
    about = json.loads((tmp_path / "kept" / tokens.ABOUT).read_text())
    del about["of"]["encoding"]
    (tmp_path / "kept" / tokens.ABOUT).write_text(json.dumps(about))
    assert encoded(str(path), encoder, tmp_path / "kept", context=20).fingerprint == new


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": 3}\n', r"a\.jsonl:2 has neither .*; it has text"),
        ("a.jsonl", b'{"text": "a"}\n\n{"prompt": "b"}\n', r"a\.jsonl:3 has neither"),
        ("a.jsonl", b'{"text": "a"\n', r"a\.jsonl:1 is no JSON"),
        ("a.jsonl", b"[1]\n", r"a\.jsonl:1 has neither .*; it has no keys"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"prompt": "b", "completion": "c"}\n',
            "pairs and conversations are samples of",
        ),
        ("a.txt", b"abc\xff", r"a\.txt:1 is no text in UTF-8"),
        ("a.txt", b"ab", "the text has 4 tokens, which makes 0 samples of 8 tokens; at least 1"),
        ("a.jsonl", b'{"prompt": "long enough", "completion": "c"}\n', "has 0 samples"),
    ],
)
@pytest.mark.filterwarnings("ignore:1 of 1 samples are left out")
def test_what_is_no_text_is_refused_by_file_and_line(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=said):
        encoded(str(tmp_path / name), Bytes(), tmp_path / "kept", context=8)


def test_a_sample_of_one_token_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(BadInput, match=r"model\.context = 1"):
        encoded(str(tmp_path / "a.txt"), Bytes(), tmp_path / "kept", context=1)
    assert not (tmp_path / "kept").exists()


class Turns(Bytes):
    """A turn is its first letter and its bytes; those of the assistant, with an end mark, are targets."""

    template_digest = "turns"

    def encode_chat(self, messages, tools, where):
        self.calls += 1
        ids, targets = [], []
        for message in messages:
            own = [*message["content"].encode(), END]
            ids += [ord(message["role"][0]), *own]
            targets += [False, *[message["role"] == "assistant"] * len(own)]
        return ids, targets


def chat(*contents):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": each} for n, each in enumerate(contents)]}


def test_targets_of_a_conversation_are_kept(tmp_path):
    path = lines(
        tmp_path / "chats.jsonl",
        chat("a", "bc", "d", "e"),
        chat("a question that is long", "b"),
        chat("a", "bcdefghijklmn"),
    )
    with pytest.warns(UserWarning) as told:
        text = encoded(str(path), Turns(), tmp_path / "kept", context=14)
    assert [str(each.message).partition(" model")[0] for each in told] == [
        "1 of 3 samples are left out: their prompts alone have",
        "1 of 2 conversations are longer than",
    ]
    first, second = (text.training[index] for index in range(2))
    assert first["input_ids"].tolist() == [*b"ua", END, *b"abc", END, *b"ud", END, *b"ae", END]
    assert first["labels"].tolist() == [IGNORED] * 4 + [*b"bc", END] + [IGNORED] * 4 + [*b"e", END]
    assert second["labels"].tolist() == [IGNORED] * 4 + [*b"bcdefghijk"]
    assert (text.length(0), text.length(1)) == (13, 14)


def test_conversations_are_encoded_again_for_another_template(tmp_path):
    path, encoder = lines(tmp_path / "chats.jsonl", chat("a", "b")), Turns()

    def made():
        return encoded(str(path), encoder, tmp_path / "kept", context=9).fingerprint

    first = made()
    assert made() == first and encoder.calls == 1
    encoder.template_digest = "other turns"
    assert made() != first and encoder.calls == 2


def test_wrong_text_leaves_nothing_behind(tmp_path):
    """And what was kept before stays."""
    path, kept = lines(tmp_path / "chats.jsonl", chat("a", "b"), {"text": "c"}), tmp_path / "run" / "kept"
    with pytest.raises(BadInput, match="lines with messages and other text besides"):
        encoded(str(path), Turns(), kept, context=9)
    assert not kept.parent.exists()
    first = encoded(str(lines(path, chat("a", "b"))), Turns(), kept, context=9).fingerprint
    with pytest.raises(BadInput):
        encoded(str(lines(tmp_path / "other.jsonl", chat("a"))), Turns(), kept, context=9)
    assert sorted(each.name for each in kept.iterdir()) == sorted((tokens.IDS, tokens.SAMPLES, tokens.ABOUT))
    calls = Turns()
    assert encoded(str(path), calls, kept, context=9).fingerprint == first and calls.calls == 0
