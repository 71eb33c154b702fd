"""Conversations as ids: the targets are those that a template marks, and what is not certain is refused by its line."""

from __future__ import annotations

import pytest

from holdfast.errors import BadInput
from holdfast.models.tokenizer import Tokenizer

pytest.importorskip("transformers")

from tiny_folders import write_folder, write_tokenizer

HEAD = "{% if tools %}<s>tools {{ tools | tojson }}</s>{{ '\\n' }}{% endif %}"
TURN = "{{ m.content }}{% for call in m.tool_calls %}<call>{{ call.function.arguments | tojson }}{% endfor %}</s>"
END = "{% if add_generation_prompt %}<s>assistant{{ '\\n' }}{% endif %}"


def template(turn, end=END, before="", head=HEAD):
    """A template; ``turn`` writes a turn of the assistant, and ``before`` what all turns before it are given."""
    return (
        head + "{% for m in messages %}<s>{{ m.role }}{{ '\\n' }}"
        "{% if m.role == 'assistant' %}"
        + before
        + turn
        + "{% else %}{{ m.content }}</s>{% endif %}{{ '\\n' }}"
        "{% endfor %}" + end
    )


MARKED = template("{% generation %}" + TURN + "{% endgeneration %}")
PLAIN = template(TURN)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("folder"))
    write_tokenizer(folder)
    return folder


@pytest.fixture
def encode(folder):
    """``encode(template, messages, tools)``: ids, and the texts of the runs of targets."""
    own = Tokenizer(folder)

    def call(text, messages, tools=None):
        own._own.chat_template = text
        own.__dict__.pop("template", None)
        ids, targets = own.encode_chat(messages, tools, "chats.jsonl:7")
        return ids, targets, own._own

    return call


def turns(ids, targets, tokenizer):
    """The text of each run of targets."""
    found, before = [], False
    for each, target in zip(ids, targets, strict=True):
        if target and not before:
            found.append([])
        if target:
            found[-1].append(each)
        before = target
    return [tokenizer.decode(each) for each in found]


def said(*contents):
    """A conversation in which user and assistant take turns, the user first."""
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome", "days": 2}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": {}}}
]
CHATS = {
    "one turn": (said("The bay", "the lanterns"), None),
    "several turns": (
        said("a", "the mast", "b", "two  lanterns\n\n  of the bay ", "c", "é\N{PILE OF POO}"),
        None,
    ),
    "system": ([{"role": "system", "content": "Be brief."}, *said("why", " leading space")], None),
    "tools": (
        [
            *said("Rome?", ""),
            {"role": "tool", "content": "sun"},
            {"role": "assistant", "content": "It is the sun."},
        ],
        TOOLS,
    ),
    "end mark in the content": (said("say </s> twice", "</s></s>", "again", "the bay"), None),
}
CHATS["tools"][0][1]["tool_calls"] = [CALL]


@pytest.mark.parametrize("name", CHATS)
def test_targets_are_those_of_the_template(encode, name):
    """Token by token: as transformers has it for marks, and the same for the template without them."""
    messages, tools = CHATS[name]
    ids, targets, tokenizer = encode(MARKED, messages, tools)
    own = tokenizer.apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids == own["input_ids"] and targets == [bool(each) for each in own["assistant_masks"]]
    assert encode(PLAIN, messages, tools)[:2] == (ids, targets)
    assert len(turns(ids, targets, tokenizer)) == sum(each["role"] == "assistant" for each in messages)


def test_turn_written_otherwise_when_last_is_found(encode):
    """As Qwen 3 does: an empty thought stands before the last turn alone."""
    text = template(TURN, before="{% if loop.last %}<think></think>{% endif %}")
    found = encode(text, said("a", "one", "b", "two", "c", "three"))
    assert turns(*found) == ["one</s>", "two</s>", "<think></think>three</s>"]


def test_turns_without_generation_prompt_are_found(encode):
    """As Mistral does: the user's turn ends with a mark, and the answer follows at once.

    Instructions stand in the last turn of the user.
    """
    text = (
        "{% set last = messages | selectattr('role', 'eq', 'user') | list | last %}"
        "{% for m in messages %}{% if m.role == 'user' %}[{% if m == last and messages[0].role == 'system' %}"
        "{{ messages[0].content }} {% endif %}{{ m.content }}]{% elif m.role == 'assistant' %}"
        "{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    assert turns(*encode(text, said("a", "one", "b", "two"))) == ["one</s>", "two</s>"]
    system = {"role": "system", "content": "Be brief."}
    assert turns(*encode(text, [system, *said("a", "one")])) == ["one</s>"]


CUT = template("{{ m.content if loop.last else m.content[2:] }}</s>")
COUNTED = template(TURN, head="{{ messages | length }}")


def test_arguments_are_text_where_a_template_prints_them(encode):
    messages, _ = CHATS["tools"]
    for printed in ("{{ call.function.arguments }}", "{{ call.function.arguments + '' }}"):
        text = PLAIN.replace("{{ call.function.arguments | tojson }}", printed)
        assert turns(*encode(text, messages))[0] == '<call>{"city": "Rome", "days": 2}</s>'
        with pytest.raises(BadInput, match='does not write the "reasoning"'):
            encode(text, [{**m, "reasoning": "why"} if m["role"] == "assistant" else m for m in messages])


@pytest.mark.parametrize(
    ("text", "messages", "why"),
    [
        (CUT, said("a", "one", "b", "two"), "message 2: .* when more follows"),
        (COUNTED, said("a", "one"), "message 2: .* written otherwise when it follows"),
        (template(TURN, end=""), said("a", "one"), "message 2: .* has no generation prompt"),
        (template(TURN, end="<s>assistant{{ '\\n' }}"), said("a", "one"), "message 2: .* stands behind it"),
        (PLAIN, said("a", "one")[1:], "message 1: .* nothing comes before it"),
        ("{{ raise_exception('roles must alternate') }}", said("a", "one"), "does not take it: roles must alternate"),
        ("{% generation %}{% endgeneration %}a", said("a", "one"), "has no token of the assistant"),
    ],
)  # fmt: skip
def test_uncertain_targets_are_refused(encode, text, messages, why):
    with pytest.raises(BadInput, match=f"^chats.jsonl:7.*{why}"):
        encode(text, messages)


def test_folder_without_template_is_refused(folder):
    with pytest.raises(BadInput, match="has no chat template"):
        Tokenizer(folder).encode_chat(said("a", "b"), None, "chats.jsonl:1")


@pytest.mark.parametrize("key", ["tools", "tool_calls", "reasoning_content"])
def test_what_a_template_leaves_out_is_refused(encode, key):
    messages = said("Rome?", "It is the sun.")
    messages[1] |= {"tool_calls": [CALL]} if key == "tool_calls" else {"reasoning_content": "No cloud."}
    bare = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>{% endfor %}" + END
    with pytest.raises(BadInput, match=f'chats.jsonl:7: the chat template in .* does not write the "{key}"'):
        encode(bare, messages, TOOLS if key == "tools" else None)


def test_marks_that_are_no_thoughts_are_no_reason_to_refuse(encode):
    """A blank thought, and switches in other messages than the assistant's."""
    messages = [{"role": "system", "content": "Be brief.", "reasoning": "low"}, *said("Rome?", "Sun.")]
    messages[1]["thinking"] = True
    messages[2]["reasoning_content"] = "\n"
    plain = [{key: m[key] for key in ("role", "content")} for m in messages]
    assert encode(template(TURN), messages) == encode(template(TURN), plain)
