"""Private parts of torch. Nothing else in Inlay touches them: a new torch breaks this folder only.

Each entry says what it is for, since which release of torch it works as used here, and what to do
when it goes. Dynamo and Inductor take a second to import, so functions import them when called.
"""

from inlay.torch_private.compilers import (
    branch_errors,
    cause_of,
    compile_options,
    compiler_named,
    compiling_in,
    graph_break_errors,
    inductor_settings,
    is_tracing_error,
    mark_varying,
    module_behind,
    observing_dynamo,
    varying_dims,
)
from inlay.torch_private.copies import SharedCopy
from inlay.torch_private.graphs import (
    adopt_calling_convention,
    example_of,
    graph_break,
    lazy_graph_module,
    new_graph_like,
    trace_symbolically,
)
from inlay.torch_private.modules import (
    default_store,
    has_hooks,
)
from inlay.torch_private.ops import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    TorchDispatchMode,
    aten_name,
    is_grouped_product,
    onednn_linear,
    set_autocast,
    set_grad_enabled,
    without_torch_function,
    written_operands,
)
from inlay.torch_private.tensors import (
    FakeTensor,
    FakeTensorMode,
    allow_real_tensors,
    counting_guards_of_code,
    fake_mode_of,
    is_proxied,
    lost_guards,
    quiet_about_failures,
    share_memory,
    without_fake_mode,
)

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "SharedCopy",
    "TorchDispatchMode",
    "adopt_calling_convention",
    "allow_real_tensors",
    "aten_name",
    "branch_errors",
    "cause_of",
    "compile_options",
    "compiler_named",
    "compiling_in",
    "counting_guards_of_code",
    "default_store",
    "example_of",
    "fake_mode_of",
    "graph_break",
    "graph_break_errors",
    "has_hooks",
    "inductor_settings",
    "is_grouped_product",
    "is_proxied",
    "is_tracing_error",
    "lazy_graph_module",
    "lost_guards",
    "mark_varying",
    "module_behind",
    "new_graph_like",
    "observing_dynamo",
    "onednn_linear",
    "quiet_about_failures",
    "set_autocast",
    "set_grad_enabled",
    "share_memory",
    "trace_symbolically",
    "varying_dims",
    "without_fake_mode",
    "without_torch_function",
    "written_operands",
]
