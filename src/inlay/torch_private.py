"""Private parts of torch. Nothing else in Inlay touches them, so a new torch breaks only this file.

Each entry says what it is for, since which release of torch it works as used here, and what to do
when it goes. Dynamo and Inductor take a second to import, so functions import them when called.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "TorchDispatchMode",
    "adopt_calling_convention",
    "allow_real_tensors",
    "compile_options",
    "compiler_cache_folder",
    "compiler_named",
    "compiling_in",
    "counting_guards_of_code",
    "default_store",
    "example_of",
    "fake_mode_of",
    "graph_break_errors",
    "has_hooks",
    "inductor_settings",
    "is_grouped_product",
    "is_proxied",
    "lazy_graph_module",
    "lost_guards",
    "mark_varying",
    "module_behind",
    "new_graph_like",
    "observing_dynamo",
    "onednn_linear",
    "set_autocast",
    "set_grad_enabled",
    "share_memory",
    "sizes_are_equal",
    "trace_symbolically",
    "without_fake_mode",
    "without_torch_function",
    "written_arguments",
]

# OpOverload, HigherOrderOperator: the types of ops in exported graphs and of ops that call graphs,
# to ask what they mutate and what they run. torch 2.0; both are in every exported graph, so a
# rename would be announced.
# TorchDispatchMode: to see every op that runs. torch 1.13; it is documented, if not public.


def written_arguments(op: OpOverload) -> list[tuple[int, str]]:
    """The arguments that an op writes to: their positions and names.

    torch 1.13; the schema of an op has no public form.
    """
    return [
        (position, argument.name)
        for position, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def default_store() -> Any:
    """The store of the default process group, through which its processes found each other.

    torch 1.8; without it, a store of one's own (`torch.distributed.TCPStore`) would need an address
    that all processes know.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def is_grouped_product(target: Any) -> bool:
    """Whether an op multiplies the rows of each expert by its matrix.

    `torch._grouped_mm` came with torch 2.8 and became `F.grouped_mm` in 2.10; transformers has an
    op of its own for where these do not compile.
    """
    op = target.overloadpacket if isinstance(target, OpOverload) else target
    owners = ((F, "grouped_mm"), (torch, "_grouped_mm"), (torch.ops.aten, "_grouped_mm"))
    known = (getattr(owner, name, None) for owner, name in owners)
    return any(op is each for each in known) or str(op) == "transformers.grouped_mm_fallback"


def onednn_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`F.linear` by oneDNN, for float32 on a CPU.

    torch 1.13; Inductor puts this op into its code. `F.linear` does the same, and calls MKL.
    """
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return result


def fake_mode_of(*values: Any) -> FakeTensorMode | None:
    """The fake mode of the first fake tensor among the values.

    Dynamo's current mode is another one by the time it calls a backend. torch 2.0; FakeTensor is
    documented for custom backends and likely to become public.
    """
    for value in values:
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return None


def example_of(argument: Any) -> Any:
    """What Dynamo traced an input of a graph with; None if nobody keeps it any more.

    torch 2.1; `meta["grapharg"]` knows tensors by weak references, and says that one is gone by an
    AssertionError.
    """
    try:
        return argument.example
    except AssertionError:
        return None


def lazy_graph_module(root: nn.Module, graph: Graph, class_name: str) -> GraphModule:
    """A graph module that writes its Python code when it is first run or printed.

    A pipeline copies a graph once for each pass and runs the last copy only. torch 2.2; Dynamo
    makes all its graphs this way. A plain `GraphModule` does the same, later.
    """
    return _LazyGraphModule(root, graph, class_name)


@contextmanager
def allow_real_tensors(mode: FakeTensorMode | None) -> Iterator[None]:
    """Let tensors with data take part in tracing: compressed-tensors keeps its ranges in some.

    torch 2.0; else pass these tensors in as inputs of the graph.
    """
    if mode is None:
        yield
        return
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before


def without_fake_mode() -> AbstractContextManager[Any]:
    """Compute with real tensors in the middle of tracing.

    torch 2.1; else make the call before tracing starts.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    context: AbstractContextManager[Any] = unset_fake_temporarily()
    return context


def is_proxied() -> bool:
    """Whether `make_fx` is recording. torch 2.2; else look for proxies among the arguments."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


def trace_symbolically(function: Callable[..., Any], *example: torch.Tensor) -> GraphModule:
    """Trace a function for tensors of every shape.

    torch 2.0, `make_fx`; `torch.export` with dynamic shapes is the public form, and refuses
    functions that are not modules.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*example)
    assert isinstance(traced, GraphModule)
    return traced


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are views of the same memory, also if they have no data.

    torch 2.0; `data_ptr` is public and refuses tensors without data. Tensors under `vmap` and the
    like do not tell, and count as if they did.
    """
    try:
        storages = [tensor.untyped_storage()._cdata for tensor in (one, other)]
    except (NotImplementedError, RuntimeError):
        return True
    return bool(storages[0] == storages[1])


def sizes_are_equal(one: Any, other: Any) -> bool:
    """Whether two sizes are equal, guarding where they are symbols that happen to be.

    torch 2.7; before, compare them plainly, which guards on either answer.
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(one == other))


def compiler_named(name: str) -> Callable[..., Any]:
    """The Dynamo backend of that name. torch 2.0; `list_backends`, which is public, only lists."""
    from torch._dynamo.backends.registry import lookup_backend

    compiler: Callable[..., Any] = lookup_backend(name)
    return compiler


def compiler_cache_folder() -> Path:
    """The folder in which Inductor keeps what it compiled.

    torch 2.5; TORCHINDUCTOR_CACHE_DIR names it in public, but it has a default too.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


@contextmanager
def compiling_in(mode: FakeTensorMode | None) -> Iterator[None]:
    """Compile a graph in the fake mode of its own inputs instead of Dynamo's newer one.

    torch 2.1; else move the inputs to Dynamo's mode before compiling.
    """
    from torch._guards import TracingContext, tracing

    with tracing(TracingContext(mode)):
        yield


def inductor_settings(**settings: Any) -> AbstractContextManager[None]:
    """Change settings of Inductor for a while.

    torch 2.0; `torch.compile(options=…)` is public and takes the same names, but does not reach
    graphs that a backend compiles itself.
    """
    import torch._inductor.config

    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        # torch runs such code on this machine already. Inductor would ask the C++ compiler once
        # for each set of instructions, which with an empty cache takes longer than all else.
        settings = {"cpp.vec_isa_ok": True, **settings}
    patch: AbstractContextManager[None] = torch._inductor.config.patch(**settings)
    return patch


@contextmanager
def observing_dynamo() -> Iterator[None]:
    """Have Dynamo compile the code of a class anew for each of its models, and take no detours.

    However many models there were: `torch.compile(recompile_limit=…)` is public in 2.13 only. The
    detours are for its logs: it empties the processor's caches to time the guards of each graph,
    and reads source files for the names of functions. torch 2.6; what is missing is left alone.
    """
    from torch._dynamo import config, guards, symbolic_convert

    limit = 1 << 20
    settings: dict[str, Any] = {"recompile_limit": limit, "accumulated_recompile_limit": limit}
    if hasattr(config, "run_gc_after_compile"):
        settings["run_gc_after_compile"] = False
    detours = [
        (guards, "profile_guard_manager", lambda *_: 0.0),
        (symbolic_convert, "get_funcname", lambda *_: None),
    ]
    own = [(module, name, getattr(module, name, None)) for module, name, _ in detours]
    with config.patch(**settings):
        for (module, name, nothing), (*_, present) in zip(detours, own, strict=True):
            if present is not None:
                setattr(module, name, nothing)
        try:
            yield
        finally:
            for module, name, present in own:
                if present is not None:
                    setattr(module, name, present)


def graph_break_errors() -> tuple[type[Exception], ...]:
    """What Dynamo raises with `fullgraph=True` where the graph would break.

    torch 2.1; the second is for breaks inside a region, which has to be traced as a whole.
    """
    from torch._dynamo.exc import UncapturedHigherOrderOpError, Unsupported

    return Unsupported, UncapturedHigherOrderOpError


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module runs anything besides its `forward`.

    torch 2.0; hooks can be registered in public, but not listed.
    """
    from torch.nn.modules.module import _has_any_global_hook

    own = (module._forward_pre_hooks, module._forward_hooks)
    backward = (module._backward_pre_hooks, module._backward_hooks)
    has_any: bool = _has_any_global_hook()  # type: ignore[no-untyped-call]
    return has_any or any(own) or any(backward)


def lost_guards(mode: FakeTensorMode | None) -> int:
    """How many conditions on sizes came up after Dynamo had written down those it checks.

    torch 2.1; else compile while Dynamo is tracing.
    """
    shapes = None if mode is None else mode.shape_env
    return 0 if shapes is None else int(shapes.counter["ignored_backward_guard"])


@contextmanager
def counting_guards_of_code(mode: FakeTensorMode | None) -> Iterator[None]:
    """Keep the cache of fake tensors from asking about sizes on its own account.

    torch 2.1; `lost_guards` would count what it asks, though no code depends on the answer.
    """
    if mode is None:
        yield
        return
    before, mode.cache_enabled = mode.cache_enabled, False
    try:
        yield
    finally:
        mode.cache_enabled = before


def mark_varying(tensor: torch.Tensor, dim: int) -> None:
    """Compile for every size of a dimension from the start, where that is possible.

    torch 2.1; the documented `torch._dynamo.mark_dynamic` raises where it is not.
    """
    from torch._dynamo import maybe_mark_dynamic

    maybe_mark_dynamic(tensor, dim)


def module_behind(module: Any) -> nn.Module | None:
    """The module that `torch.compile` wrapped; None for anything else. torch 2.0."""
    from torch._dynamo.eval_frame import OptimizedModule

    return module._orig_mod if isinstance(module, OptimizedModule) else None


def compile_options(compiled: Any) -> Mapping[str, Any]:
    """The options that `torch.compile` was given for a module, from behind its wrappers.

    torch 2.4; else keep a table of what was compiled.
    """
    backend: Any = compiled.dynamo_ctx.callback
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    options: Mapping[str, Any] = getattr(backend, "kwargs", {}).get("options", {})
    return options


def set_grad_enabled() -> Callable[..., Any]:
    """The op that switches gradients in a graph.

    torch 1.11; `torch.set_grad_enabled` is public, and a context, which a graph cannot hold.
    """
    return torch._C._set_grad_enabled


def set_autocast() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The ops that enter and leave autocast in a graph.

    torch 1.13; `torch.autocast` is public, and a context, which a graph cannot hold.
    """
    return torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast


def without_torch_function() -> AbstractContextManager[None]:
    """Call ops without the `TorchFunctionMode` that is on. torch 1.7."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return context


def new_graph_like(graph: Graph) -> Graph:
    """An empty graph of the same tracer. torch 1.13."""
    return Graph(tracer_cls=graph._tracer_cls)


def adopt_calling_convention(graph: Graph, like: Graph) -> None:
    """Let a graph take its arguments, and return its results, as another one does.

    torch 1.11; `set_codegen` is public, reading the codegen of a graph is not.
    """
    graph.set_codegen(like._codegen)
