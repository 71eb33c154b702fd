"""The speed of light of a run that ``holdfast train`` planned: in its report, in ``watch`` and in its own panel."""

import json
import random

import pytest

from holdfast.cli.train import train_job
from holdfast.events import read_events
from support.tiny_keys import TINY, words


def test_all_views_show_one_percentage(tmp_path, holdfast, monkeypatch):
    panels = []

    class Panel(train_job.TrainingPanel):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            panels.append(self)

    monkeypatch.setattr(train_job, "TrainingPanel", Panel)
    run, text = tmp_path / "run", tmp_path / "text"
    text.write_text("".join(random.Random(0).choices(["def ", "self", "(", ")", ":\n"], k=2000)))
    keys = TINY | {"train.steps": 4, "run.dir": run, "data.text": text}
    assert holdfast("train", *words(keys)).code == 0
    events = list(read_events(run / "events.jsonl"))
    plan = next(event for event in events if event["event"] == "plan")
    seconds = sorted(event["seconds"] for event in events if event["event"] == "step")
    light = json.loads(holdfast("report", run, "--json").out)["speed_of_light"]
    assert light["lane"] == plan["busiest"]
    assert light["share"] == pytest.approx(light["light_seconds"] / light["median_seconds"])
    assert seconds[0] <= light["median_seconds"] <= seconds[-1]
    assert json.loads(holdfast("watch", run, "--json").out)["speed_of_light"] == light
    assert panels[0].busiest_seconds == (light["lane"], pytest.approx(light["light_seconds"]))
