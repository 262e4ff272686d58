"""``python -m paceline`` is the command line."""

from __future__ import annotations

from paceline.cli.main import main

if __name__ == "__main__":
    main()
