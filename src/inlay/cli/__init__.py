"""The command line."""

from inlay.cli.app import app, main

# Importing these modules registers their commands with the program, in this order.
from inlay.cli import commands, checking, listings  # isort: skip

__all__ = ["app", "checking", "commands", "listings", "main"]
