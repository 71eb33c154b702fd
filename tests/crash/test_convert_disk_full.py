"""The disk runs full in a conversion: an error says where and how much, nothing looks whole, and the same conversion
ends when there is room."""

from __future__ import annotations

import errno
import shutil

import pytest

from convert_run import WRITERS
from crash.test_disk_full import MIB, mount  # noqa: F401 (a fixture)
from fork_server import fill_disk
from formats.deepspeed_files import random_state, write
from formats.test_deepspeed import bits
from holdfast.errors import DiskFull
from holdfast.formats.foreign_formats import open_source
from holdfast.opening import source_of

pytestmark = pytest.mark.root


@pytest.mark.parametrize("kind", WRITERS)
def test_a_conversion_says_what_is_full_and_ends_when_there_is_room(tmp_path, mount, kind):  # noqa: F811
    writer, name = WRITERS[kind]
    shapes = [{f"{number}.weight": (128, 1024) for number in range(3)}]
    write(tmp_path / "source", random_state(shapes), 1, 2)  # 4.5 MiB
    source, out, fill = open_source(tmp_path / "source"), mount / kind, mount / "fill"
    shutil.rmtree(out, ignore_errors=True)
    fill_disk(str(fill))
    with open(fill, "r+b") as file:
        file.truncate(fill.stat().st_size - MIB)
    try:
        with pytest.raises(DiskFull) as raised:
            writer(source, out)
        assert str(mount) in str(raised.value) and " are free" in str(raised.value)
        if isinstance(raised.value.__cause__, OSError):
            assert raised.value.__cause__.errno == errno.ENOSPC
        assert not any(
            (out / each).exists()
            for each in ("latest_universal", ".metadata", "model.safetensors", name or "x")
        )
    finally:
        fill.unlink()
    writer(source, out)
    again = source_of(str(out / name))
    wanted = bits(source)
    if kind == "huggingface":
        wanted = {key: held for key, held in wanted.items() if key.endswith("/param")}
    assert bits(again) == wanted
    shutil.rmtree(out)
