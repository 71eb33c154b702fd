from __future__ import annotations
from pathlib import Path
from .local import WithNumbers


class Universal(WithNumbers):
    def __init__(self, path: Path) -> None:
        raise NotImplementedError
