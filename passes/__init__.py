"""The passes of Inlay. Each maps a graph to a graph."""

from inlay.graph import Pass, PassResult, Pipeline
from inlay.passes.annotate import Annotate
from inlay.passes.compare_layers import CompareLayers
from inlay.passes.find_equalizable import FindEqualizable
from inlay.passes.fold_qparams import FoldQParams
from inlay.passes.inline_calls import InlineCalls
from inlay.passes.insert_observers import InsertObservers
from inlay.passes.leave_out_padding import LeaveOutPadding
from inlay.passes.lower_to_kernels import LowerToKernels, kept_from_kernels
from inlay.passes.outline_repeats import OutlineObservers, OutlineRepeats
from inlay.passes.prune_unobserved import PruneUnobserved
from inlay.passes.remove_observers import RemoveObservers
from inlay.passes.share_observers import ShareObservers
from inlay.passes.speed_up_products import SpeedUpProducts
from inlay.passes.use_equalized import UseEqualized

__all__ = [
    "PREPARE",
    "Annotate",
    "CompareLayers",
    "FindEqualizable",
    "FoldQParams",
    "InlineCalls",
    "InsertObservers",
    "LeaveOutPadding",
    "LowerToKernels",
    "OutlineObservers",
    "OutlineRepeats",
    "Pass",
    "PassResult",
    "Pipeline",
    "PruneUnobserved",
    "RemoveObservers",
    "ShareObservers",
    "SpeedUpProducts",
    "UseEqualized",
    "kept_from_kernels",
]

# Turns a traced graph into one that observes. PruneUnobserved follows where outputs are not wanted.
# OutlineRepeats is the last pass of every phase, because the others look at the whole graph.
PREPARE: tuple[type[Pass], ...] = (
    InlineCalls,  # first: the other passes see only ops of the graph itself
    Annotate,  # matches ops by their weights, which later passes move and replace
    FindEqualizable,  # needs the annotations, and the whole graph; only if the recipe equalizes
    InsertObservers,  # needs the annotations
    ShareObservers,  # before pruning, which keeps all that each observer needs
    LeaveOutPadding,  # after sharing, which leaves fewer observers; only for batches with padding
)
