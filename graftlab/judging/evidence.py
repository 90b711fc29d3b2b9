"""What the runs of a verdict measured, as a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import pandas as pd

from graftlab.grafting.self_graft import SelfGraft
from graftlab.judging.measured_floors import MeasuredFloors
from graftlab.judging.mechanisms import LentWeights
from graftlab.judging.swaps import OutputTap
from graftlab.rows.schema import MEASURED
from graftlab.verdict.added import rows_where
from graftlab.verdict.optimizer_settings import SettingsDifference
from graftlab.verdict.returned_values import ReturnedValues


@dataclass(frozen=True)
class Evidence:
    """What the runs of a verdict measured.

    ``compared`` are the rows of a run without grafts, ``grafted`` those of a run in which every tap had the baseline's
    value, and ``returned`` and ``returned_grafted`` what the functions returned in them; None for jobs. ``outputs`` are
    the taps at which effects are measured, ``selves`` the results of running the baseline against itself.
    """

    compared: pd.DataFrame
    grafted: pd.DataFrame
    returned: ReturnedValues | None
    returned_grafted: ReturnedValues | None
    outputs: Sequence[OutputTap]
    selves: Sequence[SelfGraft]
    floors: MeasuredFloors
    one_sided: str | None
    """A filter for the taps that only one side has. A swap must not wait for them."""
    settings: SettingsDifference
    weights: LentWeights = field(default_factory=LentWeights)
    masks_alike: Sequence[str] = ()
    """The names of taps that one side masks by minus infinity and the other by a number."""
    summed_at: Mapping[str, str] = field(default_factory=dict)
    """By the name of a tap that follows partial sums, the name of the tap that has them."""

    @cached_property
    def measured(self) -> pd.DataFrame:
        """The rows of taps that were grafted and measured."""
        return rows_where(self.grafted, self.grafted["status"].isin(MEASURED))
