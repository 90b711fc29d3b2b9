"""The state that a call of a model may change: buffers, attributes, caches among its arguments, random numbers."""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch

from graftlab.grafting.overwrite import one_place_each

# Attributes in which torch keeps a module's parts, apart from its buffers. A forward pass does not change parameters.
_OF_MODULES = frozenset(vars(torch.nn.Module()))
_OF_TORCH = _OF_MODULES - {"training", "_buffers", "_modules"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)
# Kinds of objects whose state is not simply their attributes.
_KNOWN = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
# Objects nest a few levels below a module or an argument: a cache, its layers, their tensors.
_MAX_DEPTH = 6


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _is_of_sharding(value: Any) -> bool:
    """Whether this is torch's state of a sharded model, which must match where its weights are at the moment."""
    return type(value).__module__.startswith("torch.distributed.") and not isinstance(value, _KNOWN)


def _stays(hook: Any) -> bool:
    """Whether this is a hook of graftlab's taps, or of torch's sharding, whose state is not brought back either."""
    while isinstance(hook, partial):
        hook = hook.func
    return f"{getattr(hook, '__module__', '')}.".startswith(("graftlab.", "torch.distributed."))


class StateSnapshot:
    """The state of modules and arguments when this object is made. :meth:`restore` brings it back, in place.

    It covers the tensors, their gradients, lists, dicts, sets and attributes of objects that can be reached from
    ``roots``, and the random numbers of torch, numpy and Python. Hooks that a module's own code has installed since are
    removed. The values of parameters are copied only if ``weights`` is true, as for an optimizer's step, which changes
    them.
    """

    def __init__(self, roots: Iterable[Any], *, weights: bool = False) -> None:
        self._weights = weights
        self._undo: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}
        self._kept: dict[int, torch.Tensor] = {}
        for root in roots:
            self._look_at(root, 0)
        self._random = _random_states()

    def restore(self) -> None:
        """Bring the state back. Containers come before their contents, so that replaced objects are in place again."""
        for undo in self._undo:
            undo()
        for put_back in self._random:
            put_back()

    def written(self, roots: Mapping[str, Any], budget: int) -> tuple[dict[str, torch.Tensor], list[str]]:
        """The tensors written since the snapshot: a copy of each one with new values, by its path from ``roots``.

        Unchanged values are 0 in the copy, because memory that is reserved and not written yet may have any values. The
        second result has the paths of tensors that do not fit into ``budget`` bytes.
        """
        found: dict[str, torch.Tensor] = {}
        left: list[str] = []
        for path, tensor in tensors_by_path(roots):
            local = own_part(tensor).detach()
            before = self._kept.get(id(tensor))
            if before is not None and _same_bits(local, before):
                continue
            budget -= local.nbytes
            if budget < 0:
                left.append(path)
            elif before is None or before.shape != local.shape or before.dtype != local.dtype:
                found[path] = local.clone()
            else:
                is_new = (local != before) & ~((local != local) & (before != before))
                found[path] = torch.where(is_new, local, torch.zeros_like(local))
        return found, left

    def _look_at(self, value: Any, depth: int) -> None:
        if isinstance(value, _PLAIN) or id(value) in self._seen or _is_of_sharding(value):
            return
        # Keeps the object alive, so that no other object gets its id.
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            if value.is_leaf and value.requires_grad:
                self._keep_gradient(value)
            if self._weights or not isinstance(value, torch.nn.Parameter):
                self._keep_tensor(value)
        elif isinstance(value, torch.nn.Module):
            self._keep_module(value)
        elif isinstance(value, torch.optim.Optimizer):
            # Hooks may be installed between the snapshot and its return.
            hooks = frozenset(name for name in vars(value) if name.endswith("_hooks"))
            self._keep_attributes(vars(value), hooks, depth)
        elif (put_back := _generator_state(value)) is not None:
            self._undo.append(put_back)
        elif depth > _MAX_DEPTH or isinstance(value, type) or callable(value):
            return
        elif isinstance(value, (list, deque)):
            self._keep_items(value, list(value), value.extend)
            self._look_at_each(value, depth)
        elif isinstance(value, set):
            self._keep_items(value, list(value), value.update)
        elif isinstance(value, dict):
            self._keep_items(value, dict(value), value.update)
            self._look_at_each(value.values(), depth)
        elif isinstance(value, (tuple, frozenset)):
            self._look_at_each(value, depth)
        if hasattr(value, "__dict__") and not isinstance(value, _KNOWN):
            self._keep_attributes(vars(value), frozenset(), depth)

    def _look_at_each(self, values: Iterable[Any], depth: int) -> None:
        for each in list(values):
            self._look_at(each, depth + 1)

    def _keep_module(self, module: torch.nn.Module) -> None:
        # The nesting of modules has no limit, so each one counts its own levels, which include its children's dict.
        self._keep_attributes(vars(module), _OF_TORCH, 0)
        self._keep_hooks(module)
        for weight in module._parameters.values():
            self._look_at(weight, 0)

    def _keep_hooks(self, module: torch.nn.Module) -> None:
        # A model may install hooks in its first call, and note that in an attribute, which is brought back.
        hooks: list[dict[int, Any]] = [vars(module).get(name, {}) for name in _HOOKS]
        kept = {key for each in hooks for key in each}

        def undo() -> None:
            for each in hooks:
                for key in [key for key, hook in each.items() if key not in kept and not _stays(hook)]:
                    del each[key]

        self._undo.append(undo)

    def _keep_attributes(self, attributes: MutableMapping[str, Any], left_out: frozenset[str], depth: int) -> None:
        kept = {name: value for name, value in attributes.items() if name not in left_out}

        def undo() -> None:
            for name in [name for name in attributes if name not in kept and name not in left_out]:
                del attributes[name]
            attributes.update(kept)

        self._undo.append(undo)
        self._look_at_each(kept.values(), depth)

    def _keep_items(self, container: Any, items: Any, fill: Callable[[Any], None]) -> None:
        def undo() -> None:
            if not _same_items(container, items):
                container.clear()
                fill(items)

        self._undo.append(undo)

    def _keep_gradient(self, leaf: torch.Tensor) -> None:
        gradient = leaf.grad
        kept = None if gradient is None else gradient.detach().clone()

        def undo() -> None:
            leaf.grad = gradient
            if gradient is not None and kept is not None:
                gradient.data.copy_(kept)

        self._undo.append(undo)

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta" or tensor.layout != torch.strided:
            return
        local = own_part(tensor)
        memory = local.detach()
        kept = memory.clone()
        self._kept[id(tensor)] = kept

        def undo() -> None:
            # Resized, or given other data: values of another shape cannot be copied to it.
            if (local.shape, local.dtype) != (memory.shape, memory.dtype):
                local.data = memory
            # Only changed tensors: the memory of others may be read-only, as that of a mapped file.
            if not _same_bits(local.detach(), kept):
                place, values = one_place_each(local.data, kept)
                place.copy_(values)

        self._undo.append(undo)


def tensors_by_path(roots: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a snapshot of ``roots`` finds, each once, without parameters."""
    seen: set[int] = set()

    def of(value: Any, path: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(value, (*_PLAIN, torch.nn.Parameter, torch.optim.Optimizer)) or id(value) in seen:
            return
        if _is_of_sharding(value):
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.device.type != "meta" and value.layout == torch.strided:
                yield path, value
        elif isinstance(value, torch.nn.Module):
            own = {name: each for name, each in vars(value).items() if name not in _OF_MODULES}
            # The nesting of modules has no limit, so each one counts its own levels.
            for name, each in {**own, **value._buffers, **value._modules}.items():
                yield from of(each, f"{path}.{name}", 1)
        elif depth > _MAX_DEPTH or isinstance(value, type) or callable(value):
            return
        elif isinstance(value, dict):
            for key, each in list(value.items()):
                yield from of(each, f"{path}[{key!r}]", depth + 1)
        elif isinstance(value, (list, tuple, deque)):
            for place, each in enumerate(list(value)):
                yield from of(each, f"{path}[{place}]", depth + 1)
        # Also of an object that is a dict or a list as well, such as a cache.
        if hasattr(value, "__dict__") and not isinstance(value, _KNOWN):
            for name, each in list(vars(value).items()):
                yield from of(each, f"{path}.{name}", depth + 1)

    for path, root in roots.items():
        yield from ((found.removeprefix("."), tensor) for found, tensor in of(root, path, 0))


def _same_items(container: Any, items: Any) -> bool:
    if isinstance(items, Mapping):
        return list(container) == list(items) and all(container[key] is items[key] for key in items)
    if isinstance(container, set):
        return container == set(items)
    return len(container) == len(items) and all(a is b for a, b in zip(container, items, strict=True))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # Bytes are those of a tensor that is not conjugated or negated only when it is read.
    one, other = one.resolve_conj().resolve_neg(), other.resolve_conj().resolve_neg()
    return (
        torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        if one.dim()
        else bool(torch.equal(one, other) or (one != one and other != other))
    )


def _generator_state(value: Any) -> Callable[[], None] | None:
    """A function that sets a random number generator to its present state; None for any other object."""
    if isinstance(value, torch.Generator):
        state = value.get_state()

        def set_back() -> None:
            value.set_state(state)

        return set_back
    if isinstance(value, random.Random):
        drawn = value.getstate()
        return lambda: value.setstate(drawn)
    bits = getattr(value, "bit_generator", None)
    if bits is not None and hasattr(bits, "state"):
        kept = copy.deepcopy(bits.state)
        return lambda: setattr(bits, "state", kept)
    return None


def _random_states() -> list[Callable[[], None]]:
    """Functions that set each random number generator to its present state."""
    on_cpu, of_python = torch.get_rng_state(), random.getstate()
    found: list[Callable[[], None]] = [lambda: torch.set_rng_state(on_cpu), lambda: random.setstate(of_python)]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        on_gpus = torch.cuda.get_rng_state_all()
        found.append(lambda: torch.cuda.set_rng_state_all(on_gpus))
    if (numpy := sys.modules.get("numpy")) is not None:
        of_numpy = numpy.random.get_state()
        found.append(lambda: numpy.random.set_state(of_numpy))
    return found
