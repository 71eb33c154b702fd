"""Stands for SIGKILL where the process that dies is the test's own: what an armed failpoint raises instead."""


class Killed(BaseException):
    """The process is gone."""


def kill() -> None:
    raise Killed
