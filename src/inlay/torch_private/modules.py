"""Private parts of torch: modules, and the process group."""

from typing import Any

from torch import nn

__all__ = [
    "default_store",
    "has_hooks",
]


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module runs anything besides its `forward`.

    torch 2.0; hooks can be registered in public, but not listed.
    """
    from torch.nn.modules.module import _has_any_global_hook

    own = (module._forward_pre_hooks, module._forward_hooks)
    backward = (module._backward_pre_hooks, module._backward_hooks)
    has_any: bool = _has_any_global_hook()  # type: ignore[no-untyped-call]
    return has_any or any(own) or any(backward)


def default_store() -> Any:
    """The store of the default process group, through which its processes found each other.

    torch 1.8; without it, a store of one's own (`torch.distributed.TCPStore`) would need an address
    that all processes know.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
