"""Read and edit FX graphs: matching, inputs, values without data, copies, printing, passes."""

from inlay.graph.editing import copy, mutates, require_nodes
from inlay.graph.inputs import (
    SlotInput,
    add_input,
    bind,
    erase_with_inputs,
    inputs_of,
    label_inputs,
    slot_input,
    slot_inputs,
    tensor_of,
)
from inlay.graph.matching import (
    WeightUse,
    attention_states,
    module_path,
    replace_weight,
    weight_use,
)
from inlay.graph.meta import (
    annotate,
    folded_parts,
    made_by,
    mark_folded,
    mark_observer,
    observes,
    slots_of,
    stamp,
)
from inlay.graph.pass_base import Pass, PassResult, Pipeline
from inlay.graph.printing import format_graph
from inlay.graph.shapes import fake_value, propagate_shapes

__all__ = [
    "Pass",
    "PassResult",
    "Pipeline",
    "SlotInput",
    "WeightUse",
    "add_input",
    "annotate",
    "attention_states",
    "bind",
    "copy",
    "erase_with_inputs",
    "fake_value",
    "folded_parts",
    "format_graph",
    "inputs_of",
    "label_inputs",
    "made_by",
    "mark_folded",
    "mark_observer",
    "module_path",
    "mutates",
    "observes",
    "propagate_shapes",
    "replace_weight",
    "require_nodes",
    "slot_input",
    "slot_inputs",
    "slots_of",
    "stamp",
    "tensor_of",
    "weight_use",
]
