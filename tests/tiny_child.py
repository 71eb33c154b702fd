"""A process that runs the store alone and dies: ``tiny_child.py ROOT STEPS [--cut MOUNT]``.

Prints ``resumed N`` and then ``acknowledged N`` for each step that ``publish`` returned from. The
environment's failpoint ends it by SIGKILL; with ``--cut`` the power of MOUNT goes first, and it goes as
well right after the last acknowledgement.
"""

from __future__ import annotations

import sys

from holdfast import failpoints
from powercut import shut_down
from tiny_run import TinyRun


def main(root: str, steps: str, cut: str = "", mount: str = "") -> None:
    def die() -> None:
        if mount:
            shut_down(mount)
        failpoints.kill()

    failpoints.action = die
    with TinyRun(root) as run:
        print("resumed", run.step, flush=True)
        for _ in range(int(steps)):
            run.take_step()
            print("acknowledged", run.step, flush=True)
        if mount:
            die()


if __name__ == "__main__":
    main(*sys.argv[1:])
