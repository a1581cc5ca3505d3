"""The command line."""

from inlay.cli.commands import app, main

__all__ = ["app", "main"]
