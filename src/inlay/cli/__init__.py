"""The command line."""

from inlay.cli.app import app, main
from inlay.cli.commands import calibrate, check, requantize, run, show

# Importing a module registers its commands.
__all__ = ["app", "calibrate", "check", "main", "requantize", "run", "show"]
