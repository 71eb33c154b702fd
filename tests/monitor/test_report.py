"""The report: one file that needs nothing else, that shows what was measured, and says what is not there."""

import re
from html.parser import HTMLParser

import pytest

import logged
from holdfast.monitor.facts import Drive, drive_of, percent
from holdfast.monitor.history import History
from holdfast.monitor.run_report import Look, document, html

VOID = {"meta", "br", "line", "rect", "circle"}


def look(log, name="runs/a", **other):
    given = {"commits": [], "drive": None, "step_seconds": None, "now": logged.BEGAN + 65, **other}
    return Look(name, History(log), **given)


class Reader(HTMLParser):
    """Checks that tags nest; keeps the text of each section, and all attributes."""

    def __init__(self):
        super().__init__()
        self.open, self.attributes, self.tags = [], [], set()
        self.sections, self.title = {}, None

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["h2"]:
            self.title = data
            self.sections[data] = ""
        elif self.title:
            self.sections[self.title] += data + "\n"


def read(text):
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return reader


LOGS = {
    "engine": logged.engine_log(),
    "checkpointer": logged.checkpointer_log(),
    "empty": [],
    "odd": [{"event": "step"}],
}


@pytest.mark.parametrize("log", LOGS.values(), ids=LOGS)
def test_the_page_nests_and_asks_for_nothing_else(log):
    text = html(look(log, drive=Drive("sda", 10, 20), commits=[{"step": 6, "created": 1.0, "bytes": 7}]))
    reader = read(text)
    assert not reader.tags & {"script", "link", "img", "iframe", "object", "base"}
    assert not [
        name
        for name, _ in reader.attributes
        if name in ("src", "href", "xlink:href", "style") or name.startswith("on")
    ]
    assert "http" not in text and "url(" not in text and "@import" not in text
    assert text.endswith("</html>\n")


def test_every_table_scrolls_inside_its_card():
    text = html(look(logged.engine_log(), commits=[{"step": 6, "created": 1.0, "bytes": 7}]))
    assert text.count("<table>") >= 5
    assert len(re.findall(r'<div class="wide"><table>.*?</table></div>', text)) == text.count("<table>")
    assert re.search(r"\.wide\{overflow-x:auto[;}]", text)


@pytest.mark.parametrize("inner", [336, 520])
def test_labels_are_readable_on_a_phone(inner):
    """``inner`` is the width that a card leaves to a drawing where the page is 390 and 574 pixels wide."""
    text = html(look(logged.engine_log()))
    phone = re.search(r"@media\(max-width:600px\)\{(.*?)\n\}", text, re.S)[1]
    assert "svg.large{display:none}" in phone and "svg.small{display:block}" in phone
    assert "svg.small{display:none}" in text.replace(phone, "")
    assert text.count('<svg class="small') == text.count('<svg class="large') >= 4
    sizes = [int(size) for size in re.findall(r"[\n}]\.(?:tick|lane)[^{}]*\{[^}]*font-size:(\d+)px", text)]
    assert len(sizes) == 2 and "font-size" not in phone.replace("table{font-size:13px}", "")
    for width in re.findall(r'<svg class="small[^>]*viewBox="0 0 (\d+) ', text):
        assert all(10 <= size * inner / int(width) <= 20 for size in sizes)


def test_every_section_of_an_engine_has_its_numbers():
    log = [*logged.engine_log(), {"event": "validation", "time": 1.0, "step": 0, "loss": 5.5}]
    commits = [{"step": 6, "created": logged.BEGAN, "bytes": 2**20}]
    sections = read(
        html(look(log, commits=commits, step_seconds=8.0, drive=Drive("sda", 10, 2**30)))
    ).sections
    assert "From 4.900 at step 1 to 4.400 at step 6." in sections["Loss"]
    assert "loss on held-out text" in sections["Loss"]
    assert (
        "The median is 10 s" in sections["Time of a step"] and "predicted: 8 s" in sections["Time of a step"]
    )
    assert "The busiest is computing, for 80% of the step" in sections["One step by lane"]
    assert re.search(r"load params\n\(2n − 1\) P\n1000 B\n1000 B\nnone", sections["Traffic against formulas"])
    assert "budget: 4.0 GiB" in sections["Memory against budget"]
    assert re.search(r"optimizer state\n5.9 KiB\n4.0 KiB", sections["Memory against budget"])
    assert re.search(r"time of a step, median\n8 s\n10 s\n1.25", sections["Predicted and measured"])
    assert "Step 6 of 6 survives a power cut" in sections["Commits and what a power cut would take"]
    assert "On the disk now: 1 commit" in sections["Commits and what a power cut would take"]
    life = sections["What was written, and the life of the SSD"]
    assert (
        "This run has written 48.8 KiB in 1 sitting" in life and "The drive sda was written 1.0 GiB" in life
    )


def test_a_validation_that_is_no_number_is_counted_and_said():
    losses = [(0, 5.5), (2, None), (4, None), (6, 4.5)]
    told = [{"event": "validation", "time": 1.0, "step": step, "loss": loss} for step, loss in losses]
    seen = look([*logged.engine_log(), *told])
    said = read(html(seen)).sections["Loss"]
    assert "Not drawn: the loss on held-out text was not finite at 2 steps, the last one step 4." in said
    found = document(seen)
    assert found["validations"] == losses and found["lines_not_understood"] == 0


def test_losses_that_are_all_no_numbers_are_said():
    log = [{**event, "loss": None} if event["event"] == "step" else event for event in logged.engine_log()]
    said = read(html(look(log))).sections["Loss"]
    assert "Not drawn: the loss was not finite at 6 steps" in said


def test_what_is_not_there_is_said():
    sections = read(html(look(logged.checkpointer_log()))).sections
    assert "No losses were logged: a Checkpointer does not see them" in sections["Loss"]
    assert "There are no lanes" in sections["One step by lane"]
    assert "Not known" in sections["Traffic against formulas"]
    assert "The time of a step was not predicted" in sections["Predicted and measured"]
    assert "No commit was found" in sections["Commits and what a power cut would take"]
    assert "1 sitting did not end in order" in sections["What was written, and the life of the SSD"]
    assert "counters are not there" in sections["What was written, and the life of the SSD"]
    assert "Keeping the steps took 10.0% of the time" in sections["Time of a step"]
    assert "base\nstep 20, durable step 22" in sections["What happened"]
    empty = read(html(look([]))).sections
    assert all(text.strip() for text in empty.values())
    assert "No step has been logged yet." in empty["Loss"]


def test_a_difference_of_traffic_is_told_in_percent():
    less = [
        logged.step(n, moved={"ssd_read": {"load_params": 900}, "ssd_write": {"other": 5}}) for n in (1, 2)
    ]
    said = read(html(look([logged.engine(), logged.schedule(), *less]))).sections["Traffic against formulas"]
    assert "-10.0%" in said and "-100.0%" in said and "not in the schedule" in said


def traffic_of(inputs, tokens, config=None):
    """What the section of traffic says of steps that upload ``inputs`` bytes, where the schedule has 1,000."""
    first = [{"event": "run", "time": 1.0, "first_step": 0, "config": config}] if config else []
    planned = logged.schedule() | {
        "moves": {"upload": {"upload_input": 1000}, "ssd_write": {"store_state": 300}}
    }
    moved = {"upload": {"upload_input": inputs}, "ssd_write": {"store_state": 300}}
    steps = [logged.step(n, tokens=tokens, moved=moved) for n in (1, 2, 3)]
    return read(html(look([logged.engine(), *first, planned, *steps]))).sections["Traffic against formulas"]


CONTEXT = {"train.micro_batches": 2, "train.micro_batch_size": 4, "model.context": 100}


def test_samples_shorter_than_the_context_explain_a_difference():
    said = traffic_of(230, 184, CONTEXT)
    assert "-77.0%, shorter samples" in said and "800 tokens in a step; these steps had 184 on the" in said


@pytest.mark.parametrize("inputs, tokens", [(230, 800), (1300, 184), (0, 184)])
def test_nothing_explains_what_tokens_do_not(inputs, tokens):
    assert "shorter samples" not in traffic_of(inputs, tokens, CONTEXT)


def test_inputs_of_a_script_are_of_another_size():
    said = traffic_of(1300, 184)
    assert "+30.0%, inputs of another size" in said and "these steps had 184 tokens" in said


@pytest.mark.parametrize(
    "written, reason", [(200, "rest under way"), (400, "rest of an earlier step"), (149, "")]
)
def test_writes_of_one_step_may_be_under_way(written, reason):
    """Of two steps, that is: as much as one step writes is explained, and no more."""
    moves = {"ssd_write": {"store_state": 400 if written == 200 else 300}}
    steps = [logged.step(n, moved={"ssd_write": {"store_state": written}}) for n in (1, 2, 3)]
    text = html(look([logged.engine(), logged.schedule() | {"moves": moves}, *steps]))
    said = read(text).sections["Traffic against formulas"]
    assert (f", {reason}" in said) if reason else ("-50.3%\n" in said)


def test_skipped_steps_are_told_of():
    log = [*logged.engine_log()[:-1], logged.step(7, loss=None, skipped="the loss of micro-batch 1 is nan")]
    assert (
        "1 step changed nothing, the last one step 7: the loss of micro-batch 1"
        in read(html(look(log))).sections["Loss"]
    )


def test_names_and_texts_are_escaped():
    log = [*logged.checkpointer_log(), {"event": "failed", "time": 1.0, "error": "<script>x</script>"}]
    text = html(look(log, name="runs/<b>"))
    assert "<b>" not in text and "<script>" not in text and "&lt;script&gt;x" in text
    read(text)


def test_the_document_has_the_same_facts_as_the_page():
    found = document(look(logged.engine_log()))
    assert found["losses"][-1] == [6, 4.4]
    assert (found["lanes"]["step"], found["traffic"]["steps"]) == (3, 5)
    assert found["durability"] == {
        "step": 6,
        "durable_step": 6,
        "longest_lag_steps": 1,
        "mean_lag_steps": 1.0,
    }


def test_the_drive_of_a_path_is_the_disk_of_its_partition(tmp_path, monkeypatch):
    import os

    disk = tmp_path / "sys" / "devices" / "sda"
    part = disk / "sda1"
    part.mkdir(parents=True)
    (part / "partition").write_text("1\n")
    (disk / "stat").write_text("  5 0 2048 7 9 0 4096 1 0 1 1\n")
    device = os.stat(tmp_path).st_dev
    (tmp_path / "sys" / "dev" / "block").mkdir(parents=True)
    link = tmp_path / "sys" / "dev" / "block" / f"{os.major(device)}:{os.minor(device)}"
    link.symlink_to(part)
    assert drive_of(tmp_path, tmp_path / "sys") == Drive("sda", 2048 * 512, 4096 * 512)
    (disk / "stat").write_text("nothing\n")
    assert drive_of(tmp_path, tmp_path / "sys") is None
    assert drive_of(tmp_path / "absent") is None


def test_shares_have_two_digits():
    assert [percent(share) for share in (0.0, 0.0000537, 0.0234, 0.31, 1.0)] == [
        "0 %",
        "0.0054 %",
        "2.3 %",
        "31 %",
        "100 %",
    ]


def test_formulas_are_named_only_for_the_order_that_they_are_of():
    for other in ({"order": "snake"}, {"delayed_fraction": 0.5}):
        log = [logged.engine(), logged.schedule() | other, logged.step(1), logged.step(2)]
        said = read(html(look(log))).sections["Traffic against formulas"]
        assert "load params" in said and "(2n − 1) P" not in said


def test_inputs_whose_size_was_not_known_beforehand_are_said_to_be():
    steps = [logged.step(n, moved={"upload": {"upload_input": 5, "other": 5}}) for n in (1, 2)]
    said = read(html(look([logged.engine(), logged.schedule(), *steps]))).sections["Traffic against formulas"]
    assert said.count("not measured beforehand") == 1 and said.count("not in the schedule") == 1


def planned_log():
    """A log whose sitting was planned: 5 s a step, where 10 s were measured."""
    plan = {
        "event": "plan", "time": logged.BEGAN, "step_seconds": 5.0, "on_host": {"params": 1.0, "optimizer": 0.5},
        "delayed_fraction": 0.25, "stated": ["params"], "busiest": "ssd", "busiest_part": 0.75,
    }  # fmt: skip
    first, *others = logged.engine_log()
    return [first, plan, *others]


def test_what_the_planner_predicted_stands_beside_what_was_measured():
    sections = read(html(look(planned_log()))).sections
    assert "predicted: 5 s" in sections["Time of a step"]
    said = sections["Predicted and measured"]
    assert "100% of params, 50% of optimizer in host memory, 25% of updates delayed" in said
    assert "Given, not chosen: params" in said and "ssd was to be busy 75%" in said
    rows = {row["what"]: row for row in document(look(planned_log()))["predictions"]}
    row = rows["time of a step, median of the sitting"]
    assert (row["predicted"], row["measured"]) == (5.0, 10.0)
    given = {row["what"]: row for row in document(look(planned_log(), step_seconds=8.0))["predictions"]}
    assert given["time of a step, median"]["predicted"] == 8.0


def test_a_plan_of_an_earlier_sitting_is_not_compared():
    resumed = [logged.engine(6, time=logged.BEGAN + 200), *(logged.step(n) for n in (7, 8, 9))]
    rows = [row["what"] for row in document(look([*planned_log(), *resumed]))["predictions"]]
    assert "time of a step, median of the sitting" not in rows


LIGHT = {
    "event": "plan", "step_seconds": 5.0, "micro_batches": 2, "busiest": "ssd",
    "busy_seconds": {"compute": 3.6, "ssd_read": 2.5, "ssd_write": 1.25},
}  # fmt: skip
"""A plan whose SSD works 3.75 s of a step, for reads and writes in turns."""


def test_the_report_says_the_speed_of_light():
    first, *others = logged.engine_log()
    seen = look([first, LIGHT, *others])
    found = document(seen)["speed_of_light"]
    assert found == {"share": 0.375, "lane": "ssd", "light_seconds": 3.75, "median_seconds": 10.0}
    page = read(html(seen))
    assert "Steps ran at 38% of the speed of light (the SSD)" in page.sections["Predicted and measured"]
    assert document(look(logged.engine_log()))["speed_of_light"] is None  # it was not planned


def test_only_planned_steps_have_a_speed():
    """Neither the first step of a sitting, nor a skipped one, nor one of more micro-batches is compared."""
    other = [{"seconds": 99.0}, {"seconds": 98.0, "skipped": "nan"}, {"seconds": 97.0, "micro_batches": 4}]
    steps = [logged.step(number, **kind) for number, kind in enumerate(other, 1)]
    assert document(look([logged.engine(), LIGHT, *steps]))["speed_of_light"] is None
    found = document(look([logged.engine(), LIGHT, *steps, logged.step(4)]))["speed_of_light"]
    assert found["median_seconds"] == 10.0


def test_faster_than_light_is_explained():
    said = read(html(look([logged.engine(), LIGHT, *(logged.step(n, seconds=3.0) for n in (1, 2))]))).sections
    assert "125% of the speed of light" in said["Predicted and measured"]
    assert "rates were measured too low" in said["Predicted and measured"]


def test_what_every_auto_has_chosen_stands_with_what_is_durable():
    chosen = {
        "event": "every",
        "time": 1.0,
        "step": 9,
        "was": 1,
        "every": 40,
        "why": "a base every 40 steps <b>.",
    }
    log = [*logged.checkpointer_log(), chosen]
    assert "Chosen at step 9: a base every 40 steps &lt;b&gt;." in html(look(log))
    assert "Chosen at step" not in html(look(log[:-1]))
    assert document(look(log))["cadence"]["every"] == 40
