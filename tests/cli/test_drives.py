"""A run over several drives, as a person and as a tool meet it."""

from __future__ import annotations

import json

import pytest

from holdfast.measure import drive_rates
from holdfast.store.reader import RunReader
from support.tiny_keys import TINY, words

pytestmark = pytest.mark.filterwarnings("ignore:the drives .* are on one file system")


@pytest.fixture
def arguments(tmp_path):
    """The command line of a tiny run, with other keys over it."""
    (tmp_path / "text").write_text("def return self(): pass\n" * 200)

    def of(run, **sets):
        keys = TINY | {"train.steps": 4, "run.dir": run, "data.text": tmp_path / "text"}
        return ["train", *words(keys | {k.replace("__", "."): v for k, v in sets.items()})]

    return of


@pytest.fixture(autouse=True)
def different_disks(monkeypatch):
    monkeypatch.setattr(drive_rates, "rate_of", lambda directory, limits: 1e9)
    monkeypatch.setattr(drive_rates, "device_of", hash)


@pytest.fixture
def run(tmp_path, arguments, holdfast):
    """Four steps over two drives."""
    result = holdfast(*arguments(tmp_path / "run", offload__drives=f"[{tmp_path / 'drive'}]"))
    assert result.code == 0, result.err
    assert str(tmp_path / "drive") in "".join(result.out.split()), "its space is announced"
    return tmp_path / "run"


@pytest.mark.slow
def test_the_verbs_read_the_run_as_any_other(holdfast, run, tmp_path, bucket):
    assert any("drive_1" in ref.path for ref in RunReader(run).head().files.values())
    assert holdfast("verify", run).code == 0
    assert "4" in holdfast("ls", run).out and "parameters" in holdfast("show", run).out
    assert holdfast("report", run).code == 0
    out = tmp_path / "out.safetensors"
    assert holdfast("convert", run, out, "--to", "safetensors").code == 0
    assert holdfast("convert", run, tmp_path / "other", "--to", "holdfast").code == 0
    result = holdfast("push", run, bucket)
    assert result.code == 0, result.err
    for other in (out, tmp_path / "other", bucket):
        assert holdfast("diff", run, other).code == 0
    named = {ref.path for ref in RunReader(bucket).head().files.values()}
    assert named and all(path.count("/") == 1 for path in named), "a bucket knows of no drives"
    assert holdfast("prune", run, "--keep-last", 1).code == 0
    assert holdfast("verify", run).code == 0


@pytest.mark.slow
def test_a_run_goes_on_with_its_drives_and_leaves_them_only_if_told_so(
    holdfast, run, arguments, tmp_path, monkeypatch
):
    drive = tmp_path / "drive"
    result = holdfast(*arguments(run, train__steps=5))
    assert result.code == 2 and f"Say --set 'offload.drives=[{drive}]' to go on" in result.err
    assert "--set 'offload.drives=[]' to change" in result.err
    monkeypatch.chdir(tmp_path)
    assert holdfast(*arguments(run, train__steps=5, offload__drives="drive")).code == 0
    assert list(drive.glob("*.safetensors"))
    result = holdfast(*arguments(run, train__steps=8, offload__drives="[]"))
    assert result.code == 0, result.err
    assert not any("drive_1" in ref.path for ref in RunReader(run).head().files.values())
    assert holdfast("verify", run).code == 0


@pytest.mark.slow
def test_a_drive_that_is_not_mounted_is_one_clear_error(holdfast, run, arguments, tmp_path):
    drive = tmp_path / "drive"
    drive.rename(tmp_path / "away")
    result = holdfast(*arguments(run, train__steps=5, offload__drives=f"[{drive}]"))
    assert result.code == 2 and f"the drive {drive}, which is not there. Mount its disk" in result.err
    result = holdfast("verify", run, "--json")
    assert result.code == 1 and f"its drive {drive} is not there" in json.dumps(json.loads(result.out))
