"""``python -m holdfast`` is ``holdfast``."""

from .cli.main import main

if __name__ == "__main__":
    main()
