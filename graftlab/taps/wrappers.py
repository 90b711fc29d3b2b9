"""The names and parameters of modules without those of wrappers, such as DDP, PEFT and ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

# The attribute in which a wrapper keeps its module: names that occur only in wrappers; and common names, by the
# wrapper's class. Classes are given by name, so that none of them has to be imported.
_WRAPPED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "PeftModel": "base_model",
    "BaseTuner": "model",
}


def unwrapped(path: str, modules: Mapping[str, torch.nn.Module]) -> str:
    """Return a module's name without the parts that wrappers among these modules add."""
    parts = path.split(".")
    kept = []
    for place, part in enumerate(parts):
        above = modules[".".join(parts[:place])]
        wraps = any(_WRAPPERS.get(each.__name__) == part for each in type(above).__mro__)
        if part not in _WRAPPED and not wraps:
            kept.append(part)
    return ".".join(kept)


def forward_of(model: torch.nn.Module) -> Callable[..., Any]:
    """Return the forward of the module inside wrappers, which has the parameter names; a wrapper's takes ``*args``."""
    modules = dict(model.named_modules())
    inside = [module for path, module in modules.items() if not unwrapped(path, modules)]
    forward: Callable[..., Any] = inside[-1].forward
    return forward
