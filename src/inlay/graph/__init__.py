"""Read and edit FX graphs: matching, inputs, values without data, copies, printing, passes."""

from inlay.graph.editing import (
    acts,
    bodies_of,
    body_held_by,
    closes_transform,
    copy,
    mutates,
    opens_transform,
    require_nodes,
    switches_modes,
)
from inlay.graph.higher_order import EnclosedSlot, enclosed_slots, transformed_nodes
from inlay.graph.inputs import (
    SlotInput,
    add_input,
    attention_masks,
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
    replace_value,
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
from inlay.graph.writes import Writes

__all__ = [
    "EnclosedSlot",
    "Pass",
    "PassResult",
    "Pipeline",
    "SlotInput",
    "WeightUse",
    "Writes",
    "acts",
    "add_input",
    "annotate",
    "attention_masks",
    "attention_states",
    "bind",
    "bodies_of",
    "body_held_by",
    "closes_transform",
    "copy",
    "enclosed_slots",
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
    "opens_transform",
    "propagate_shapes",
    "replace_value",
    "replace_weight",
    "require_nodes",
    "slot_input",
    "slot_inputs",
    "slots_of",
    "stamp",
    "switches_modes",
    "tensor_of",
    "transformed_nodes",
    "weight_use",
]
