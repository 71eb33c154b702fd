"""Charts: points where they belong, and few of them."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

import logged
from holdfast.monitor.charts import (
    COLUMNS,
    LARGE,
    SMALL,
    Curve,
    Level,
    Scale,
    chart,
    columns_of,
    gantt,
    ticks,
)
from holdfast.monitor.lanes import Timeline
from holdfast.quantities import format_bytes

BYTES = Scale(format_bytes, binary=True)
PLAIN = Scale("{:g}".format, from_zero=False)

NUMBERS = st.floats(-1e9, 1e9).filter(lambda x: x == 0 or abs(x) > 1e-9)


def pictures(html):
    """The drawings without the legend, parsed: for a large screen, and for a small one."""
    return [ElementTree.fromstring(drawn) for drawn in re.findall(r"<svg.*?</svg>", html, re.S)]


def picture(html):
    """The large drawing."""
    return pictures(html)[0]


def texts(html):
    return [node.text for node in picture(html).iter("text")]


@given(st.lists(NUMBERS, min_size=1, max_size=400), st.booleans(), st.booleans())
def test_every_point_is_inside_the_frame(ys, from_zero, binary):
    drawn = pictures(chart([Curve("x", list(enumerate(ys)))], Scale(str, from_zero, binary)))
    for canvas, each in zip((LARGE, SMALL), drawn, strict=True):
        dots = list(each.iter("circle"))
        assert 0 < len(dots) <= COLUMNS
        for dot in dots:
            assert 0 <= float(dot.get("cx")) <= canvas.width and 0 <= float(dot.get("cy")) <= canvas.height


@given(st.floats(-1e3, 1e3), st.floats(1e-6, 1e6))
def test_ticks_are_few_and_hold_the_range(spans_up, span):
    low = spans_up * span
    found = ticks(low, low + span)
    slack = 1e-6 * (found[1] - found[0])  # of the distance of two, which no eye sees
    assert found[0] <= low + slack and found[-1] >= low + span - slack
    assert 2 <= len(found) <= 8


def test_a_scale_of_bytes_has_round_numbers_of_them():
    said = texts(chart([Curve("memory", [(1, 300 * 2**20), (2, 900 * 2**20)])], BYTES))
    assert said[:5] == ["0 B", "256.0 MiB", "512.0 MiB", "768.0 MiB", "1.0 GiB"]


def test_counts_have_whole_ticks():
    said = texts(chart([Curve("lag", [(1, 0), (2, 1)])], Scale("{:g}".format, are_counts=True)))
    assert said[:2] == ["0", "1"]


def test_many_points_are_a_mean_and_a_band():
    points = [(n, float(n % 2)) for n in range(10_000)]
    assert len(columns_of(points)) == COLUMNS
    drawn = chart([Curve("x", points)], PLAIN)
    assert drawn.count("<polygon") == 2 and len(drawn) < 80_000


def test_a_level_is_drawn_at_its_height_and_named():
    html = chart([Curve("x", [(0, 0.0), (10, 10.0)])], PLAIN, [Level("budget", 10.0)])
    [line] = [node for node in picture(html).iter("line") if "level" in node.get("class")]
    top = min(float(node.get("cy")) for node in picture(html).iter("circle"))
    assert float(line.get("y1")) == top
    assert "budget: 10" in html


def test_the_picture_of_a_step_has_every_lane_and_says_what_each_bar_is():
    html = gantt(Timeline.of(logged.timeline()))
    assert [text for text in texts(html) if text in ("computing", "SSD reads", "the optimizer", "commits")] == [
        "computing", "SSD reads", "the optimizer", "commits",
    ]  # fmt: skip
    titles = [node.text for node in picture(html).iter("title")]
    assert "load params, backward, block 0 of step 3: 2.5 s, from 3 s on, 1000 B" in titles
    other = [node for node in picture(html).iter("rect") if "other" in node.get("class")]
    assert len(other) == 1  # the update of the step before


@pytest.mark.slow
def test_ten_thousand_operations_are_a_small_picture():
    spans = [logged.span("compute", "forward", n / 1000, (n + 1) / 1000, 3) for n in range(10_000)]
    html = gantt(Timeline.of(logged.timeline(spans=spans)))
    assert html.count("<rect") < 2000
    assert re.search(r"\d+ operations, forward to forward", html)


def test_the_fifth_operation_at_once_is_in_the_fourth_row():
    spans = [logged.span("ssd_read", "load_params", 0.0, 5.0 + n, 3) for n in range(6)]
    drawn = picture(gantt(Timeline.of(logged.timeline(spans=spans))))
    assert len({node.get("y") for node in drawn.iter("rect") if "op" in node.get("class").split()}) == 4


def labels(drawn):
    """Each label with its box and the size of the drawing, if a character of 12 pixels is 0.56 of that wide."""
    width, height = map(float, drawn.get("viewBox").split()[2:])
    for node in drawn.iter("text"):
        x, length = float(node.get("x")), 0.56 * 12 * len(node.text)
        left = x - {"end": length, "middle": length / 2}.get(node.get("text-anchor"), 0.0)
        yield node.text, left, left + length, float(node.get("y")), width, height


DRAWINGS = {
    "bytes": lambda: chart([Curve("memory", [(1, 0.0), (1_000_000, 2**39 - 1)])], BYTES),
    "losses": lambda: chart([Curve("loss", [(n, 5.0 - n) for n in range(4)])], Scale("{:.3f}".format)),
    "step": lambda: gantt(Timeline.of(logged.timeline())),
    "long step": lambda: gantt(Timeline.of(logged.timeline(spans=[*logged.SPANS, LATE]))),
}
LATE = logged.span("commit", "commit", 11.0, 400.0, 3)


@pytest.mark.parametrize("make", DRAWINGS.values(), ids=DRAWINGS)
def test_labels_stay_inside_both_drawings(make):
    for drawn in pictures(make()):
        for text, left, right, y, width, height in labels(drawn):
            assert left >= 0 and right <= width and 10 <= y <= height, text


@pytest.mark.parametrize("make", DRAWINGS.values(), ids=DRAWINGS)
def test_labels_of_one_line_do_not_touch(make):
    for drawn in pictures(make()):
        lines = {}
        for text, left, right, y, *_ in labels(drawn):
            lines.setdefault(y, []).append((left, right, text))
        for found in lines.values():
            found.sort()
            assert all(a[1] <= b[0] for a, b in pairwise(found)), found
