"""Rows of a tensor in another order, or some of them, such as when one batch pads or sorts another's sequences.

:class:`Gather` lists the rows of one batch; :class:`Rows` has the rule by which they are found in any batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from graftlab.errors import LayoutError
from graftlab.layouts.row_alignment import FoundRows
from graftlab.layouts.steps import StepContext, call, check_count


@dataclass(frozen=True)
class Gather:
    """Takes rows, which the first dimensions ``of`` count, and arranges them in the dimensions ``into``.

    ``runs`` are the rows to take, each a first row and a number of rows. A first row of -1 stands for rows that the
    whole does not have, such as padding: they are 0 and unknown, so they are neither compared nor grafted. A gather
    holds for one batch; it refuses a tensor with other numbers of rows.
    """

    of: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    into: tuple[int, ...]
    caveat: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        for name in ("of", "into"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            for extent in getattr(self, name):
                check_count("gather", f"each number in {name}", extent)
        object.__setattr__(self, "runs", tuple(tuple(run) for run in self.runs))
        total = math.prod(self.of)
        for run in self.runs:
            if len(run) != 2 or any(type(number) is not int for number in run) or run[1] < 1:
                raise LayoutError(f"gather: a run is a first row and a number of rows, not {list(run)!r}")
            if not (run[0] == -1 or 0 <= run[0] <= total - run[1]):
                raise LayoutError(f"gather: the run {list(run)!r} is not within {total} rows")
        if sum(length for _, length in self.runs) != math.prod(self.into):
            raise LayoutError(f"gather: the runs do not add up to the {math.prod(self.into)} rows of {list(self.into)}")

    @classmethod
    def of_rows(cls, of: Sequence[int], rows: Iterable[int], into: Sequence[int]) -> Gather:
        """Make one from the row to take at each place; -1 for none."""
        runs: list[list[int]] = []
        for row in rows:
            if runs and (row == runs[-1][0] == -1 or (runs[-1][0] >= 0 and row == sum(runs[-1]))):
                runs[-1][1] += 1
            else:
                runs.append([int(row), 1])
        return cls(tuple(of), tuple((first, count) for first, count in runs), tuple(into))

    @cached_property
    def rows(self) -> Tensor:
        """The row to take at each place, int64; -1 for none."""
        return torch.cat(
            [
                torch.full((length,), -1, dtype=torch.int64, device="cpu")
                if first < 0
                else torch.arange(first, first + length, device="cpu")
                for first, length in self.runs
            ]
        )

    @cached_property
    def leaves_out(self) -> str | None:
        left = math.prod(self.of) - len({row for row in self.rows.tolist() if row >= 0})
        return f"{left} of {math.prod(self.of)} rows" if left else None

    @cached_property
    def lacks(self) -> bool:
        """Whether some of the places have no row of the whole."""
        return any(first < 0 for first, _ in self.runs)

    @cached_property
    def text(self) -> str:
        return call("gather", of=list(self.of), runs=[list(run) for run in self.runs], into=list(self.into))

    def get(self, before: Tensor, at: StepContext) -> Tensor:
        count = len(self.of)
        if tuple(before.shape[:count]) != self.of:
            raise LayoutError(
                f"the rows of this pair were found in a batch of {' x '.join(map(str, self.of))} rows, and this tensor "
                f"is {list(before.shape)}: match again for this batch"
            )
        flat = before.flatten(0, count - 1)
        # Computed on the CPU: on the device "meta" torch imports its compiler for that, which takes a second.
        taken = flat[self.rows.clamp(min=0).to(before.device)]
        if self.lacks:
            taken[(self.rows < 0).to(before.device)] = 0
        return taken.reshape(*self.into, *flat.shape[1:])

    def put(self, after: Tensor, at: StepContext, shape: Sequence[int] | None) -> Tensor:
        count = len(self.into)
        if tuple(after.shape[:count]) != self.into:
            raise LayoutError(
                f"the rows of this pair were found in a batch of {' x '.join(map(str, self.into))} rows, and this "
                f"tensor is {list(after.shape)}: match again for this batch"
            )
        flat = after.flatten(0, count - 1)
        rows = self.rows.to(after.device)
        whole = after.new_zeros((math.prod(self.of), *flat.shape[1:]))
        whole[rows[rows >= 0]] = flat[rows >= 0]
        return whole.reshape(*self.of, *flat.shape[1:])


@dataclass(frozen=True)
class Rows:
    """Takes the rows that two taps show to be equal, found anew in every batch.

    ``of`` is a tap of the side that has the whole, and ``into`` a tap of the other side. Both show the rows of a batch,
    by token ids or by values, before the taps that the layout is for. The result has the dimensions that ``into`` has,
    or with ``flat`` a single one. Rows that the whole lacks are as in :class:`Gather`. ``found`` are the rows that the
    taps have shown; without it no tensor can be converted.
    """

    of: str
    into: str
    flat: bool = False
    found: FoundRows | None = field(default=None, compare=False, repr=False)
    caveat: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        if not all(isinstance(name, str) and name for name in (self.of, self.into)):
            raise LayoutError(f"rows: of and into are names of taps, not {self.of!r} and {self.into!r}")

    def with_found(self, found: FoundRows) -> Rows:
        """The same for one batch."""
        return replace(self, found=found)

    @property
    def leaves_out(self) -> str | None:
        if self.found is None:
            return f"rows that only {self.of} or {self.into} has"
        left = math.prod(self.found.of) - int((self.found.index >= 0).sum())
        return f"{left} of {math.prod(self.found.of)} rows" if left else None

    @property
    def lacks(self) -> bool:
        """Whether some of the places are known to have no row of the whole."""
        return self.found is None or bool((self.found.index < 0).any())

    @property
    def text(self) -> str:
        return call("rows", of=self.of, into=self.into, flat=self.flat or None)

    def _fixed(self, rows: FoundRows, of: tuple[int, ...], flat: bool) -> Gather:
        into = (math.prod(rows.into),) if flat else rows.into
        return Gather.of_rows(of, rows.index.tolist(), into)

    def _found(self) -> FoundRows:
        if self.found is None:
            raise LayoutError(f"{self.text}: in this call, these taps have not shown their rows before this tap")
        return self.found

    def _dims(self, dims: tuple[int, ...], shape: Sequence[int]) -> tuple[int, ...]:
        """The leading dimensions of a tensor that count these rows: as the tap has them, or one."""
        for found in (dims, (math.prod(dims),)):
            if tuple(shape[: len(found)]) == found:
                return found
        raise LayoutError(
            f"{self.text}: a tensor of shape {list(shape)} does not begin with the {' x '.join(map(str, dims))} rows "
            "that the taps have shown"
        )

    def get(self, before: Tensor, at: StepContext) -> Tensor:
        found = self._found()
        return self._fixed(found, self._dims(found.of, before.shape), self.flat).get(before, at)

    def put(self, after: Tensor, at: StepContext, shape: Sequence[int] | None) -> Tensor:
        found = self._found()
        of = found.of if shape is None else self._dims(found.of, shape)
        self._dims((math.prod(found.into),) if self.flat else found.into, after.shape)
        return self._fixed(found, of, self.flat).put(after, at, shape)
