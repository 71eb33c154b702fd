"""Free memory is what the machine and its container leave."""

import pytest

from holdfast.measure.machine_probe import free_host_bytes


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


def test_a_machine_without_proc_still_has_memory(tmp_path):
    assert free_host_bytes(tmp_path, tmp_path) > 2**20
