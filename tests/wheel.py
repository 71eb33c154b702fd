"""Check a wheel that was installed into a folder: ``make test-wheel`` builds it and runs this.

    PYTHONPATH=FOLDER python tests/wheel.py FOLDER

An editable install, as tests use it, also finds files that a wheel lacks.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import holdfast

SOURCE = Path(__file__).parents[1] / "src" / "holdfast"


def files_of(package: Path) -> set[str]:
    """Code, profiles, rule packs, and the mark that there are types."""
    return {
        str(path.relative_to(package))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def said_by(*arguments: str) -> str:
    command = [sys.executable, "-m", "holdfast", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(folder: Path) -> None:
    package = folder.resolve() / "holdfast"
    assert Path(holdfast.__file__).resolve().parent == package, f"{holdfast.__file__} is another one"
    assert files_of(package) == files_of(SOURCE), files_of(package) ^ files_of(SOURCE)
    for name in holdfast.__all__:
        assert getattr(holdfast, name), name
    assert said_by("--version") == f"holdfast {holdfast.__version__}\n"
    kept = {path.stem for path in (SOURCE / "formats" / "packs").glob("*.toml")}
    listed = said_by("rules", "packs").split()
    assert kept and kept <= {*listed}, kept - {*listed}
    assert (folder / "bin" / "holdfast").is_file()
    print(f"The wheel has {len(files_of(package))} files and {len(holdfast.__all__)} public names; it runs.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
