"""The command line."""

from inlay.cli.app import app, main
from inlay.cli.commands import calibrate, check, compare, requantize, run, search, show

# Importing a module registers its commands.
__all__ = ["app", "calibrate", "check", "compare", "main", "requantize", "run", "search", "show"]
