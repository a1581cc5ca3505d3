"""The passes of Inlay: each a function from graph to graph."""

from inlay.pass_base import Pass, PassResult, Pipeline

__all__ = ["Pass", "PassResult", "Pipeline"]
