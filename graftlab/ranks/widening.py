"""Repeats a call in float32 instead of 16 bits, to show mistakes that rounding hides."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from graftlab.base.free_memory import free_bytes
from graftlab.errors import SessionError
from graftlab.grafting.in_float64 import MOVES, returns_views, tensors_in, written_tensors
from graftlab.grafting.self_graft import is_mask
from graftlab.ranks.state_snapshot import own_part
from graftlab.taps.untraced import UntracedMode

NARROW = (torch.bfloat16, torch.float16)
PLAIN = (torch.Tensor, torch.nn.Parameter)
_BUDGET = 1 << 30
"""The most bytes of the wide copies on a device whose free memory is unknown."""
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""The namespaces of torch's operators between ranks."""
_FAILED = "failed: "
_LOCAL = ("wait_tensor", "_wrap_tensor_autograd")


class WideTensors:
    """The 16-bit tensors among these, widened in place to float32 until :meth:`narrow`.

    ``numbers`` are values that replace those of a tensor, by its id; they may be of tensors with more bits. They take
    at most half of the free memory, divided by the ``sharing`` processes that do the same at this moment. Tensors whose
    ids are ``unwritten`` may share memory with each other.

    Raises :class:`SessionError`, and changes nothing, if the results might differ or it takes too much memory.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        numbers: Mapping[int, torch.Tensor] | None = None,
        sharing: int = 1,
        unwritten: Collection[int] = (),
    ) -> None:
        numbers = numbers or {}
        chosen = {id(each): each for each in tensors if each.dtype in NARROW or id(each) in numbers}
        self._narrow: list[tuple[torch.Tensor, torch.Tensor]] = []
        if not chosen:
            raise SessionError("no tensor of 16 bits was found")
        for each in chosen.values():
            known = type(each) in PLAIN or _is_dtensor(each)
            if not known or each.layout != torch.strided:
                raise SessionError("some tensors are sparse, or of a class that is not torch's")
        parts = [own_part(each) for each in chosen.values()]
        # A write into one of two views must reach the other.
        written = [own_part(each) for key, each in chosen.items() if key not in unwritten]
        if len(memory_of(written)) < sum(1 for part in written if part.numel()):
            raise SessionError("some tensors share their memory")
        refuse_too_large(parts, sharing)
        try:
            for each in chosen.values():
                own = numbers[id(each)].to(each.device) if id(each) in numbers else each.data
                self._put(each, own.float() if each.dtype in NARROW else own, each.data)
        except RuntimeError as error:
            # Tensors of torch.inference_mode may refuse it.
            self.narrow()
            raise SessionError(str(error).partition("\n")[0]) from error

    def _put(self, tensor: torch.Tensor, wide: torch.Tensor, narrow: torch.Tensor) -> None:
        # A gradient must have its tensor's dtype. A snapshot restores the gradient.
        tensor.grad = None
        if _is_dtensor(tensor):
            # Its data is not only that of the tensor; afterwards the other one has what is narrow.
            narrow = wide.requires_grad_(tensor.requires_grad)
            torch.utils.swap_tensors(tensor, narrow)  # type: ignore[no-untyped-call]
        else:
            tensor.data = wide
        self._narrow.append((tensor, narrow))

    def narrow(self) -> None:
        """Restore the 16-bit tensors."""
        for tensor, data in self._narrow:
            tensor.grad = None
            if _is_dtensor(tensor):
                torch.utils.swap_tensors(tensor, data)  # type: ignore[no-untyped-call]
            else:
                tensor.data = data
        self._narrow = []


def memory_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The addresses of the memory of tensors; nothing for sparse ones, and for classes that are not torch's."""
    parts = (own_part(each) for each in tensors if each.layout == torch.strided)
    return {each.untyped_storage().data_ptr() for each in parts if type(each) in PLAIN and each.numel()}


def refuse_too_large(parts: Iterable[torch.Tensor], sharing: int = 1, dtype: torch.dtype = torch.float32) -> None:
    """Raise :class:`SessionError` if the copies of these in a dtype with more bits would take too much memory."""
    needed: Counter[torch.device] = Counter()
    for part in parts:
        needed[part.device] += part.numel() * max(part.itemsize, dtype.itemsize)
    for device, size in needed.items():
        free = free_bytes(device)
        # The ranks of a session are spread over its GPUs.
        processes = -(-sharing // torch.cuda.device_count()) if device.type == "cuda" else sharing
        most = _BUDGET if free is None else free // (2 * processes)
        if size > most:
            name = str(dtype).removeprefix("torch.")
            raise SessionError(
                f"in {name} its numbers take {size >> 20:,} MiB on {device}, and a rank may take {most >> 20:,} MiB "
                "of the free memory there; free some, or compare a model with fewer layers"
            )


def _is_dtensor(tensor: torch.Tensor) -> bool:
    # Where nothing has imported them, there are none.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _dtypes_in(values: Iterable[Any]) -> Iterator[torch.dtype]:
    for each in values:
        if isinstance(each, torch.Tensor):
            yield each.dtype
        elif isinstance(each, list):
            # Operators get all their sequences as lists.
            yield from _dtypes_in(each)


class TrialOfRanks(UntracedMode):
    """Lets the ranks of one side try a call in which each waits for the others: it succeeds on all of them, or on none.

    Within it, a rank makes a collective only after all have come to the same one, with tensors of the same dtypes. So
    none waits for a rank whose call has failed, or whose tensors are of another size. ``path`` is a file of this trial
    alone, on the machine of these ``ranks``.
    """

    def __init__(self, path: str, rank: int, ranks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._store = FileStore(path, ranks)
        self._rank, self._ranks = rank, ranks
        self._count = 0
        self._failure: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if func.namespace in _COLLECTIVES and name.partition("::")[2] not in _LOCAL:
            if "send" in name or "recv" in name:
                # Its two ranks may come to it at any point of their calls.
                self._fail(f"it sends tensors from rank to rank ({name})")
            self._agree(" ".join([name, *map(str, _dtypes_in([*args, *(kwargs or {}).values()]))]))
        return func(*args, **(kwargs or {}))

    def end(self, reason: str | None) -> str | None:
        """Tell the other ranks the ``reason`` of a failure; returns that, or one of theirs, or None if none failed."""
        reason = reason or self._failure
        if reason is not None:
            self._post(_FAILED + reason)
            return reason
        try:
            self._agree("the end of the call")
        except (SessionError, RuntimeError) as error:
            return str(error)
        return None

    def _agree(self, place: str) -> None:
        """Wait for the other ranks. Raises :class:`SessionError` if one has reached a different place than this one."""
        if self._failure is not None:
            # The call has caught the exception, and the other ranks are no longer there.
            raise SessionError(self._failure)
        self._post(place)
        for rank in range(self._ranks):
            found = self._store.get(f"{rank}/{self._count}").decode()
            if found.startswith(_FAILED):
                self._fail(f"rank {rank} {found}")
            if found != place:
                self._fail(f"rank {rank} has reached {found!r}, and rank {self._rank} {place!r}")

    def _fail(self, reason: str) -> NoReturn:
        self._failure = reason
        raise SessionError(reason)

    def _post(self, place: str) -> None:
        self._count += 1
        self._store.set(f"{self._rank}/{self._count}", place)


class ReadsOf16Bits(UntracedMode):
    """Notes the operators that round to 16 bits and read a tensor of 16 bits that no operator has computed within it.

    Such a tensor, as a weight of a plain object, was in 16 bits before. ``operators`` has the names of the operators.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: dict[str, None] = {}
        self._computed: set[int] = set()
        self._written: set[int] = set()
        # By id, what code holds; and views and copies of it, which are kept, because ids are reused.
        self._stored: dict[int, torch.Tensor] = {}
        self._of_stored: dict[int, torch.Tensor] = {}

    @property
    def stored(self) -> list[torch.Tensor]:
        """The tensors of 16 bits that were read as code holds them, in a closure for example, and not written to."""
        return [each for each in self._stored.values() if _address(each) not in self._written]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [*_of_16_bits([*args, *kwargs.values()])]
        result = func(*args, **kwargs)
        of_stored = [each for each in given if _address(each) not in self._computed]
        self._stored.update({id(each): each for each in of_stored if id(each) not in self._of_stored})
        arranged = {id(each): each for each in _of_16_bits([result])} if of_stored else {}
        if returns_views(func):
            self._of_stored.update(arranged)
            return result
        made = {_address(each) for each in _of_16_bits([result])}
        # Operators of other libraries return nothing of what they write to, such as a cache.
        self._written |= made | {_address(each) for each in _of_16_bits([*written_tensors(func, args, kwargs)])}
        if of_stored:
            if func in MOVES:
                # Memory may have been that of another tensor.
                self._computed -= made
                self._of_stored.update(arranged)
                return result
            if made:
                self.operators[func.name()] = None
        self._computed |= made
        return result


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _of_16_bits(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    """The tensors of 16 bits among these that are more than one number."""
    for each in tensors_in(values):
        is_plain = type(each) in PLAIN and each.layout == torch.strided
        if is_plain and each.dtype in NARROW and each.dim() and each.numel():
            yield each


def rounded_at_random(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers in float32, each moved at random by at most four roundings to a dtype of 16 bits; a mask stays."""
    if is_mask(numbers):
        return numbers.float()
    drawn = torch.rand(numbers.shape, generator=torch.Generator().manual_seed(0), device="cpu").to(numbers.device)
    return numbers.float() * (1 + 2 * torch.finfo(dtype).eps * (2 * drawn - 1))
