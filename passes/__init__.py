"""The passes of Inlay: each a function from graph to graph."""

from inlay.graph import Pass, PassResult, Pipeline
from inlay.passes.annotate import Annotate
from inlay.passes.compare_layers import CompareLayers
from inlay.passes.fold_qparams import FoldQParams
from inlay.passes.inline_calls import InlineCalls
from inlay.passes.insert_observers import InsertObservers
from inlay.passes.leave_out_padding import LeaveOutPadding
from inlay.passes.outline_repeats import OutlineRepeats
from inlay.passes.prune_unobserved import PruneUnobserved
from inlay.passes.remove_observers import RemoveObservers
from inlay.passes.share_observers import ShareObservers

__all__ = [
    "COMPARE",
    "FINALIZE",
    "PREPARE",
    "Annotate",
    "CompareLayers",
    "FoldQParams",
    "InlineCalls",
    "InsertObservers",
    "LeaveOutPadding",
    "OutlineRepeats",
    "Pass",
    "PassResult",
    "Pipeline",
    "PruneUnobserved",
    "RemoveObservers",
    "ShareObservers",
]

# From a traced graph to one that observes.
PREPARE: tuple[type[Pass], ...] = (
    InlineCalls,  # first: the others see only ops of the graph itself
    Annotate,  # matches ops by their weights, which later passes move and replace
    InsertObservers,  # needs the annotations
    ShareObservers,  # before pruning: what is observed twice is needed twice
    LeaveOutPadding,  # after sharing: there are fewer observers then; not if padding shall count
    PruneUnobserved,  # only where no outputs are wanted; leaves nothing dangling in the blocks
    OutlineRepeats,  # last: the others look at the whole graph
)

# From a graph that observes, not yet pruned or cut, to one that quantizes.
FINALIZE: tuple[type[Pass], ...] = (
    FoldQParams,  # reads from the observers which slots share a scale
    RemoveObservers,
)

# From a traced graph to one that computes the same and compares its layers with quantized ones.
COMPARE: tuple[type[Pass], ...] = (
    InlineCalls,  # first, as above
    Annotate,
    CompareLayers,  # needs the annotations
)
