"""``watch`` of runs that were trained here, and of one that another process writes; ``report`` of the same."""

import json
import signal
import time
from itertools import pairwise

import pytest
import torch

import holdfast as library
import logged
from support.grouped import grouped
from training import adamw, batches, decoder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """An engine's run of five steps, and a Checkpointer's of three."""
    root = tmp_path_factory.mktemp("runs")
    model = decoder(blocks=3)
    options = {"sample": batches(0, 1)[0], "micro_batches": 2, "activations_on_host": 0.0}
    with library.offload(model, adamw(model), root / "engine", **grouped(dtype="fp32", **options)) as engine:
        for number in range(5):
            engine.step(batches(number, 2))
    plain = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(plain.parameters())
    with library.Checkpointer(root / "kept", model=plain, optimizer=optimizer) as kept:
        kept.resume()
        for _ in range(3):
            plain(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            kept.step()
    return root


@pytest.mark.slow
def test_a_run_is_shown_once(runs, holdfast):
    said = holdfast("watch", runs / "engine", "--once")
    assert said.code == 0, said.err
    for part in (
        "step 5",
        "loss",
        "lanes",
        "computing",
        "SSD writes",
        "memory",
        "survives power loss",
        "closed",
    ):
        assert part in said.out, (part, said.out)
    assert max(map(len, said.out.splitlines())) == 100
    assert "durable   step 3" in holdfast("watch", runs / "kept", "--once").out


def test_a_run_is_one_json_document(runs, holdfast):
    found = json.loads(holdfast("watch", runs / "engine", "--json").out)
    assert (found["step"], found["durable_step"], found["state"]) == (5, 5, "closed")
    assert found["lanes"]["step"] == 3 and found["lanes"]["busy_seconds"]["compute"] > 0
    assert json.loads(holdfast("watch", runs / "kept", "--json").out)["memory"]["ring_bytes"] > 0


def lines_of(process, count):
    return [process.stdout.readline().strip() for _ in range(count)]


@pytest.mark.slow
def test_a_run_that_is_being_written_is_followed_until_ctrl_c(tmp_path, holdfast_process):
    log = logged.write(tmp_path / "events.jsonl", [logged.engine(), logged.step(1)])
    process = holdfast_process("watch", tmp_path)
    [first] = lines_of(process, 1)
    assert first.startswith("step 1  loss 4.900") and "durable 0" in first
    with open(log, "a") as file:
        file.write(json.dumps(logged.step(2, time=time.time())) + "\n")
    [second] = lines_of(process, 1)
    assert second.startswith("step 2  loss 4.800")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize("verb", ["watch", "report"])
def test_what_has_no_log_is_refused_by_name(tmp_path, holdfast, verb):
    for place, said in (
        (tmp_path / "absent", "is not a directory"),
        (tmp_path, "has no events.jsonl"),
        ("s3://a/b", "bucket"),
    ):
        result = holdfast(verb, place)
        assert result.code == 2 and said in result.err and result.err.count("\n") == 1, result
    assert list(tmp_path.iterdir()) == []


def test_the_report_is_one_file_beside_the_log(runs, holdfast):
    for name in ("engine", "kept"):
        said = holdfast("report", runs / name)
        assert said.code == 0 and "report.html" in said.out, said
        text = (runs / name / "report.html").read_text()
        assert text.startswith("<!doctype html>") and text.endswith("</html>\n")
        assert holdfast("verify", runs / name).code == 0  # which a page beside does not harm
        (runs / name / "report.html").unlink()


def test_the_report_goes_where_it_is_told_and_says_what_was_predicted(runs, holdfast, tmp_path):
    assert holdfast("report", runs / "engine", "--out", tmp_path / "a.html", "--predicted", "250ms").code == 0
    assert "predicted: 250 ms" in (tmp_path / "a.html").read_text()
    assert not (runs / "engine" / "report.html").exists()


def test_bad_options_write_nothing(runs, holdfast, tmp_path):
    result = holdfast("report", runs / "engine", "--out", tmp_path / "a.html", "--predicted", "soon")
    assert (result.code, list(tmp_path.iterdir())) == (2, [])
    assert "--predicted: 'soon' is not a time" in result.err
    result = holdfast("report", runs / "engine", "--out", tmp_path / "no" / "a.html")
    assert result.code == 2 and "cannot be written: No such file or directory" in result.err


def test_the_traffic_of_a_real_run_is_that_of_its_schedule(runs, holdfast):
    found = json.loads(holdfast("report", runs / "engine", "--json").out)
    assert found["traffic"]["steps"] == 4
    for row in found["traffic"]["rows"]:
        in_pages = row["kind"] in (
            "download_input",
            "upload_input",
            "download_input_grad",
            "upload_input_grad",
        )
        if not in_pages:  # inputs of these batches are less than a page, by which they are counted
            last = row["lane"] == "ssd_write"  # what the last step leaves is written after it
            assert row["moved"] == row["expected"] or (last and 0 < row["moved"] <= 1.25 * row["expected"]), (
                row
            )
    assert found["life"]["written_bytes"] > 4 * 3000 and found["life"]["sittings_not_closed"] == 0
    assert [commit["step"] for commit in found["commits"]] == [5, 4]


def test_a_trace_is_written_alone_unless_the_page_is_asked_for_too(runs, holdfast, tmp_path):
    said = holdfast("report", runs / "engine", "--trace", tmp_path / "a.json")
    assert said.code == 0 and "ui.perfetto.dev" in said.out
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert {"forward", "update", "commit"} <= {
        event["name"].split(",")[0] for event in events if event["ph"] == "X"
    }
    assert not (runs / "engine" / "report.html").exists()
    assert (
        holdfast("report", runs / "engine", "--trace", tmp_path / "b.json", "--out", tmp_path / "b.html").code
        == 0
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.html", "b.json"]


def test_the_operations_of_real_steps_nest_in_the_trace(runs):
    from holdfast.monitor.history import History
    from holdfast.monitor.trace import chrome_trace

    history = History.read(runs / "engine" / "events.jsonl")
    assert history.num_unreadable == 0 and len(history.sittings[0].timelines) == 2
    rows = {}
    for event in chrome_trace(history, "a")["traceEvents"]:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    for found in rows.values():
        found.sort()
        assert all(a[1] <= b[0] + 1 for a, b in pairwise(found))  # microseconds; of steps, as they are told
