"""How long a person waits for ``make train`` and for the tests, where everything is installed.

    python benchmarks/times.py [train test test-rest ...] [--keep]

Runs each target of the Makefile once, in the order given, and takes its time; ``train`` in a fresh directory. The
default is ``train test``, some ten minutes. A target that fails ends it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import finish, options_of, table

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("targets", nargs="*", help="of the Makefile")
    options = parser.parse_args()
    targets = options.targets or ["train", "test"]
    seconds = {}
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="holdfast-bench-") as folder:
        for target in targets:
            command = ["make", target, f"ARGS=--set run.dir={folder}/run"]
            began = time.perf_counter()
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL)
            if done.returncode:
                sys.exit(f"make {target} ended with {done.returncode}")
            seconds[target] = round(time.perf_counter() - began, 1)
            print(f"make {target}: {seconds[target]:.0f} s", flush=True)
    table([["", "s"], *([name, f"{value:.1f}"] for name, value in seconds.items())])
    finish("times", {"seconds": seconds}, options.keep)


if __name__ == "__main__":
    main()
