"""The campaign: all combinations and all repeated kills, of which CI takes a part that is the same everywhere.

    python benchmarks/campaign.py [TARGET ...] [--keep]

Runs the targets of the Makefile one after the other (``make campaign`` runs all and keeps the figures) with
``HOLDFAST_CAMPAIGN=1``, and counts what pytest says. Hours; alone on the machine, since kills happen at moments.
Exits with 1 if a test failed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from common import finish, machine, options_of, table

TARGETS = ("test", "test-rest", "test-dist", "test-crash", "test-matrix", "test-peers")
SUMMARY = re.compile(r"^=* ?(?=\d+ (?:passed|failed|skipped|error)).* in [\d.]+s")
COUNTS = ("passed", "failed", "errors", "skipped")


def counted(output: list[str]) -> Counter[str]:
    """Return how many tests passed, failed and were skipped, by the last lines of all runs of pytest in ``output``."""
    found: Counter[str] = Counter()
    for line in filter(SUMMARY.match, output):
        for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", line):
            found["errors" if word.startswith("error") else word] += int(number)
    return found


def run(target: str) -> tuple[dict[str, float], bool]:
    """Run one target. Returns its counts with the minutes that it took, and whether it was good."""
    lines, start = [], time.monotonic()
    with subprocess.Popen(
        ["make", target], cwd=Path(__file__).parents[1], env={**os.environ, "HOLDFAST_CAMPAIGN": "1"},
        stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout
        for line in process.stdout:
            sys.stderr.write(line)
            lines.append(line)
    found = counted(lines)
    minutes = round((time.monotonic() - start) / 60, 1)
    return {name: found[name] for name in COUNTS} | {"minutes": minutes}, process.returncode == 0


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all, if none is named"
    )
    arguments = parser.parse_args()
    about, rows, good = machine(), [], True  # before the kept lines change a file of the commit
    for target in arguments.targets or TARGETS:
        counts, passed = run(target)
        good &= passed
        rows.append({"size": target, **counts})
        finish("campaign", rows[-1] | about, arguments.keep)
    table([list(rows[0]), *([str(value) for value in row.values()] for row in rows)])
    sys.exit(not good)


if __name__ == "__main__":
    main()
