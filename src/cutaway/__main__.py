"""``python -m cutaway`` is ``cutaway``."""

from cutaway.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
