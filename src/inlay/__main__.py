"""`python -m inlay`."""

from inlay.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
