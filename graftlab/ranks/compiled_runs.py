"""What a comparison with compiled code runs on ranks: a call in a grad mode, a search of the compiler's switches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graftlab.diffs.results import distance, tensors_of
from graftlab.errors import GraphError
from graftlab.ranks.remote_functions import Callee, bind_callee
from graftlab.taps.compiled_calls import CompiledCall, GradMode, in_mode

# The settings of torch._inductor.config that change the code, with the value under which inductor does less.
_SWITCHES: dict[str, object] = {
    "pattern_matcher": False,
    "use_pre_grad_passes": False,
    "use_joint_graph_passes": False,
    "use_post_grad_passes": False,
    "joint_graph_constant_folding": False,
    "split_cat_fx_passes": False,
    "batch_fusion": False,
    "group_fusion": False,
    "permute_fusion": False,
    "efficient_conv_bn_eval_fx_passes": False,
    "decompose_mem_bound_mm": False,
    "layout_optimization": False,
    "comprehensive_padding": False,
    "shape_padding": False,
    "reorder_for_locality": False,
    "loop_ordering_after_fusion": False,
    "inplace_buffers": False,
    "epilogue_fusion": False,
    "prologue_fusion": False,
    "max_fusion_size": 1,
    "cpp.simdlen": 1,
    "emulate_precision_casts": True,
    "fallback_random": True,
}


@dataclass(frozen=True)
class CallInMode:
    """A call of a side's code in a grad mode; None is the mode of the caller."""

    callee: Callee
    mode: GradMode | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with in_mode(self.mode):
            return bind_callee(self.callee, args, kwargs)()


def runs_without_gradients(callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Run the callee; return whether its results require gradients, and it also runs where none are computed."""
    if not any(tensor.requires_grad for tensor in tensors_of(bind_callee(callee, args, kwargs)())):
        return False
    try:
        CallInMode(callee, "no_grad")(*args, **kwargs)
    except Exception:  # a backward pass inside raises, and so may anything that the user's code does about it
        return False
    return True


def what_is_compiled(call: CompiledCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Compile and call once; return None if torch can compile the call as a whole.

    Otherwise return torch's reason, where the modules that the call makes can be compiled instead. Raises
    :class:`GraphError` where it calls none.
    """
    from torch._dynamo.utils import counters

    def fault_of(attempt: CompiledCall) -> str | None:
        counters.clear()
        try:
            attempt.called_anew(args, kwargs)
        except Exception as error:  # the compiler raises errors of any class, its own assertions included
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return " ".join([f"{type(error).__name__}:", *lines[:2]]).rstrip(".")
        # Where torch compiles nothing it runs the call as it is, which is no comparison.
        return None if counters["stats"].get("unique_graphs") else "torch found nothing to compile in it"

    reason = fault_of(call)
    if reason is None:
        return None
    # Raises what the call itself raises, compiled or not.
    modules = call.modules(args, kwargs)
    if not modules or fault_of(replace(call, by_modules=True)) is not None:
        raise GraphError(
            f"compare_compiled: torch.compile cannot compile this call: {reason}. Compare the function in it that you "
            "compile; grad_mode= says under which mode, so that torch.inference_mode() need not be part of it"
        ) from None
    return reason


@dataclass(frozen=True)
class SwitchSearch:
    """Which of inductor's switches make a compiled result right: ``{"pattern_matcher": False}``, all of them together.

    Empty if no switch does. ``compilations`` is the number of compilations that it took.
    """

    settings: Mapping[str, object]
    compilations: int


def search_switches(
    callee: Callee, call: CompiledCall, limit: float, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> SwitchSearch:
    """Compile the callee with ever fewer of inductor's steps switched off, as long as its result is right.

    ``call`` compiles it, without taps; a result is right if its rel_l2 from the eager one is at most ``limit``.
    """
    expected = [tensors_of(CallInMode(callee, call.mode)(*args, **kwargs))]
    config = _inductor_config()
    usable = {name: value for name, value in _SWITCHES.items() if _setting(config, name) not in (value, _ABSENT)}
    compilations = 0

    def is_right(names: Sequence[str]) -> bool:
        nonlocal compilations
        compilations += 1
        patch = {name: usable[name] for name in names}
        if hasattr(config, "force_disable_caches"):
            patch["force_disable_caches"] = True
        with config.patch(patch):
            try:
                found = call.called_anew(args, kwargs)
            except Exception:  # what this combination of switches cannot compile is not right
                return False
        apart = distance(expected, [tensors_of(found)])
        return not math.isnan(apart) and apart <= limit

    names = list(usable)
    if not names or is_right(()) or not is_right(names):
        return SwitchSearch({}, compilations)
    while len(names) > 1:
        half = len(names) // 2
        for part in (names[:half], names[half:]):
            if is_right(part):
                names = part
                break
        else:
            # It takes several of them together.
            break
    return SwitchSearch({name: usable[name] for name in names}, compilations)


_ABSENT = object()


def _inductor_config() -> Any:
    import torch._inductor.config

    return torch._inductor.config


def _setting(config: Any, name: str) -> object:
    """Return a setting's value; a mark if this release of torch lacks it."""
    value = config
    for part in name.split("."):
        value = getattr(value, part, _ABSENT)
    return value
