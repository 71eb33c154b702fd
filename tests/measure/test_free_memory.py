"""Free memory is what the machine and its container leave."""

import pytest

from holdfast.measure.free_memory import free_host_bytes


@pytest.mark.parametrize(
    "meminfo, limit, used, expected",
    [
        (1000, None, None, 1000 * 1024),
        (1000, "4096\n", None, 4096),
        (1000, "max\n", "9\n", 1000 * 1024),
        (1, "4096", "0", 1024),
        (1000, "10000", "4000", 6000 + 700),
        (1000, "10000", "20000", 0),
    ],
)
def test_free_memory_is_what_the_machine_and_the_container_leave(tmp_path, meminfo, limit, used, expected):
    (tmp_path / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:    {meminfo} kB\n")
    for name, text in (("memory.max", limit), ("memory.current", used)):
        if text is not None:
            (tmp_path / name).write_text(text)
    if used == "4000":
        (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 500\nactive_file 200\n")
    assert free_host_bytes(tmp_path, tmp_path) == expected


@pytest.mark.parametrize("hierarchy, line", [("", "0::/job/step"), ("memory", "4:cpu,memory:/job/step")])
@pytest.mark.parametrize("limited", ["job", "job/step"])
def test_the_limits_of_the_groups_that_the_process_is_in_count(tmp_path, hierarchy, line, limited):
    files = {
        "": ("memory.max", "memory.current"),
        "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    }
    (tmp_path / "meminfo").write_text("MemAvailable:    1000 kB\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(f"9:name=systemd:/\n{line}\n")
    group = tmp_path / hierarchy / limited
    group.mkdir(parents=True)
    for name, text in zip(files[hierarchy], ("9000", "2000"), strict=True):
        (group / name).write_text(text)
    assert free_host_bytes(tmp_path, tmp_path) == 7000


def test_a_machine_without_proc_still_has_memory(tmp_path):
    assert free_host_bytes(tmp_path, tmp_path) > 2**20
