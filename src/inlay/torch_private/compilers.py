"""Private parts of torch: Dynamo and Inductor."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from inlay.torch_private.changing import Shared, changed
from inlay.torch_private.tensors import FakeTensorMode

__all__ = [
    "branch_errors",
    "cause_of",
    "compile_options",
    "compiler_named",
    "compiling_in",
    "graph_break_errors",
    "inductor_settings",
    "is_tracing_error",
    "mark_varying",
    "module_behind",
    "observing_dynamo",
    "package_exported",
    "varying_dims",
]


def compiler_named(name: str) -> Callable[..., Any]:
    """The Dynamo backend of that name. torch 2.0; `list_backends`, which is public, only lists."""
    from torch._dynamo.backends.registry import lookup_backend

    compiler: Callable[..., Any] = lookup_backend(name)
    return compiler


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

    `torch.compile(recompile_limit=…)` is public from 2.13 on. Settings are per thread there.
    torch 2.6; what is missing is left alone.
    """
    from torch._dynamo import config

    limits = dict.fromkeys(("recompile_limit", "accumulated_recompile_limit"), 1 << 20)
    with changed(config, run_gc_after_compile=False, **limits), _NO_DETOURS:
        yield


@contextmanager
def _without_detours() -> Iterator[None]:
    """Skip what Dynamo does for its logs alone.

    It empties the processor's caches to time guards, and reads source files for function names.
    """
    from torch._dynamo import guards, symbolic_convert

    with (
        changed(guards, profile_guard_manager=lambda *_: 0.0),
        changed(symbolic_convert, get_funcname=lambda *_: None),
    ):
        yield


_NO_DETOURS = Shared(_without_detours)


def graph_break_errors() -> tuple[type[Exception], ...]:
    """Return the errors that Dynamo raises with `fullgraph=True` where the graph would break.

    torch 2.1; the second is for breaks inside a region, which has to be traced as a whole. The
    third is raised where sizes follow from numbers that are read from tensors, as in Funnel: with
    `fullgraph=True` Dynamo keeps such numbers in the graph.
    """
    from torch._dynamo.exc import (
        InternalTorchDynamoError,
        UncapturedHigherOrderOpError,
        Unsupported,
    )

    return Unsupported, UncapturedHigherOrderOpError, InternalTorchDynamoError


def branch_errors() -> tuple[type[Exception], ...]:
    """Return the errors that Dynamo raises where code branches on the values of tensors.

    torch 2.1; those that `graph_break_errors` returns are left out.
    """
    from torch._dynamo.exc import UserError

    return (UserError,)


def is_tracing_error(error: BaseException | None) -> bool:
    """Return whether Dynamo raised an error because it could not trace code.

    torch 2.1; what Dynamo raises has no public base class. Errors of compilers do not count.
    """
    from torch._dynamo.exc import (
        BackendCompilerFailed,
        FailOnRecompileLimitHit,
        TorchDynamoException,
    )

    raised = isinstance(error, (TorchDynamoException, FailOnRecompileLimitHit))
    return raised and not isinstance(error, BackendCompilerFailed)


def cause_of(error: BaseException) -> BaseException:
    """Return what a backend raised, from behind the error that Dynamo makes of it. torch 2.0."""
    from torch._dynamo.exc import BackendCompilerFailed

    if not isinstance(error, BackendCompilerFailed):
        return error
    cause: BaseException = error.inner_exception
    return cause


def mark_varying(tensor: torch.Tensor, dim: int) -> None:
    """Compile for every size of a dimension from the start, where that is possible.

    torch 2.1; the documented `torch._dynamo.mark_dynamic` raises where it is not.
    """
    from torch._dynamo import maybe_mark_dynamic

    maybe_mark_dynamic(tensor, dim)


def varying_dims(tensor: torch.Tensor) -> set[int]:
    """The dimensions that were marked as varying, by Inlay or by the user.

    torch 2.1; nothing public reads these marks.
    """
    marks = ("_dynamo_weak_dynamic_indices", "_dynamo_dynamic_indices")
    return {dim for mark in marks for dim in getattr(tensor, mark, ())}


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


def package_exported(exported: Any, path: str) -> None:
    """Compile an exported program with AOTInductor into a file.

    torch 2.6; it is documented, and has no public name.
    """
    from torch._inductor import aoti_compile_and_package

    aoti_compile_and_package(exported, package_path=path)
