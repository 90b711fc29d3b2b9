"""What was judged of two scripts so far, and the sentences that say it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from graftlab.base.text import counted, listed, numbered
from graftlab.comparison.answers import Comparison
from graftlab.comparison.call_remarks import AFTER_CALL
from graftlab.comparison.held_units import PartOfModel
from graftlab.judging.unmeasured import BEGIN_INPUT
from graftlab.verdict.wording import NOT_CHECKED

# The beginning of a verdict's sentence on weights.
_WEIGHTS_DIFFER = "The weights already differ"


class UnitsSoFar:
    """The calls and updates of two scripts that were judged, left out or only looked at, in their order."""

    def __init__(self) -> None:
        # The models of the judged calls.
        self.models: list[str] = []
        # The models of calls after the judged ones whose results agree.
        self.results: list[str] = []
        # How many updates were judged, and how many calls followed the last of them.
        self.updates = self.since_update = 0
        # The numbers of calls and updates at the end of the last judgement.
        self.judged: tuple[int, int] | None = None
        # The names of the buffers of the newest call's models.
        self.buffers: set[str] = set()
        # The calls that show no difference but were compared too little to agree, by their place among the models.
        self.undecided: dict[int, Comparison] = {}
        # The same of updates, by their number.
        self.undecided_updates: dict[int, Comparison] = {}
        # Sentences on calls that raise.
        self.raised: list[str] = []
        # How many calls of one side were left out because its model is perhaps a part of the other side's.
        self.of_parts: Counter[PartOfModel] = Counter()
        # By sentence, the calls in which this was not checked.
        self._not_checked: dict[str, list[int]] = {}

    @property
    def looked_at(self) -> int:
        """How many calls were judged, or had their results compared."""
        return len(self.models) + len(self.results)

    @property
    def all_undecided(self) -> list[Comparison]:
        """The comparisons of the calls and updates that can only be judged in part."""
        return [*self.undecided.values(), *self.undecided_updates.values()]

    @property
    def of_other_batch(self) -> Comparison | None:
        """The comparison of the first call in which the sides have different batches."""
        return next((each for each in self.undecided.values() if each.has_other_batch), None)

    @property
    def known(self) -> str:
        """A sentence on the findings so far."""
        if not self.judged or not any(self.judged):
            return "Nothing was judged yet."
        return f"So far: {self.agreed(*self.judged)}"

    def add_call(self, model: str, compared: Comparison) -> None:
        """Note a call that was judged."""
        self.models.append(model)
        for line in dict.fromkeys(compared.text.splitlines()):
            if line.startswith(NOT_CHECKED):
                self._not_checked.setdefault(line, []).append(len(self.models))

    def add_undecided_call(self, compared: Comparison) -> None:
        """Note that the last call can only be judged in part."""
        self.undecided[len(self.models) - 1] = compared

    def add_update(self) -> None:
        """Note an update that was judged, and so what followed the calls before it."""
        self.updates += 1
        after = f"{NOT_CHECKED}{AFTER_CALL}"
        self._not_checked.pop(after, None)
        for place, call in self.undecided.items():
            self.undecided[place] = replace(call, remarks=tuple(line for line in call.remarks if line != after))

    def complete_call(self) -> Comparison | None:
        """Let the last call agree if it lacks only its result, which a part has shown; None if it lacks more."""
        last = len(self.models) - 1
        if last not in self.undecided or not self.undecided[last].lacks_result:
            return None
        return self.undecided.pop(last).with_result()

    def forget_call(self) -> None:
        """Forget the last call, which shows nothing by itself."""
        for calls in self._not_checked.values():
            if calls[-1:] == [len(self.models)]:
                calls.pop()
        self.models.pop()

    def leave_out(self, part: PartOfModel) -> None:
        """Forget the last call, which is of a part of the other side's model."""
        self.forget_call()
        self.of_parts[part] = 0

    def clear_updates(self, later: Comparison) -> None:
        """Let earlier updates by different sets of optimizers agree if their weights are equal before a later update.

        Weights may differ there by the rounding of earlier updates, and so little may be a whole update.
        """
        for number, update in [*self.undecided_updates.items()]:
            if not update.left_to_next_update:
                continue
            if later.equal_weights.issuperset(update.left_to_next_update):
                del self.undecided_updates[number]
            else:
                why = f"Before update {self.updates} they differ by more than one rounding."
                self.undecided_updates[number] = followed_by(replace(update, left_to_next_update=()), [why])

    def leave_last_update_out(self) -> None:
        """Leave the last update out if only a further one would show whether its weights agree, and all others do."""
        last = self.undecided_updates.get(self.updates)
        if self.updates > 1 and len(self.undecided_updates) == 1 and last is not None and last.left_to_next_update:
            self.updates -= 1
            self.undecided_updates.clear()

    # ---- sentences ----------------------------------------------------------------------------------------------

    def agreed(self, calls: int | None = None, updates: int | None = None) -> str:
        """A sentence on what agrees among the first calls and updates, and on the calls that prove nothing."""
        models = self.models[:calls]
        counts = Counter(model for place, model in enumerate(models) if place not in self.undecided)
        agreed = [f"{counted(count, 'call')} of {model}" for model, count in counts.items()]
        made = self.updates if updates is None else updates
        in_part = [number for number in self.undecided_updates if number <= made]
        made -= len(in_part)
        agreed += [f"{counted(made, 'update')} of the weights"] if made else []
        parts = []
        if agreed:
            several = sum(counts.values()) + made > 1
            parts.append(f"{listed(agreed)} agree{'' if several else 's'}")
        if self.results:
            following = "call" if len(self.results) == 1 else counted(len(self.results), "call")
            parts.append(f"{'and so do ' if parts else ''}the results of the next {following}")
            parts[-1] += "" if len(parts) > 1 else " agree"
        unclear = [str(place + 1) for place in self.undecided if place < len(models)]
        said = [f"{first[0].upper()}{first[1:]}."] if (first := ", ".join(parts)) else []
        for kind, numbers in (("Call", unclear), ("Update", [str(number) for number in in_part])):
            if numbers:
                said.append(f"{kind}{'' if len(numbers) == 1 else 's'} {listed(numbers)} can only be judged in part.")
        return " ".join(said)

    def not_checked_elsewhere(self, compared: Comparison) -> list[str]:
        """Sentences on what was not checked in other calls than the one of this comparison."""
        own = compared.text.splitlines()
        return [
            f"{NOT_CHECKED}in {numbered('call', calls)}, {line.removeprefix(NOT_CHECKED)}"
            for line, calls in self._not_checked.items()
            if calls and line not in own
        ]

    def with_calls_before(self, compared: Comparison) -> Comparison:
        """The comparison of the last call, with a sentence on the calls before it, if there are any."""
        if len(self.models) == 1 and not self.updates:
            return compared
        before = f"{self.agreed(len(self.models) - 1)} {self.at_last_call(compared)}".strip()
        return replace(compared, remarks=(before, *compared.remarks))

    def at_last_call(self, compared: Comparison) -> str:
        """A sentence on where the last call differs: in it, or before it."""
        number, found = self.looked_at, compared.findings
        if found.weights and self.buffers.issuperset(found.weights):
            # Such as a norm's running mean.
            return (
                f"Before call {number} buffers of the model differ, and its weights agree: an earlier call has written "
                "the buffers differently."
            )
        if any(line.startswith(_WEIGHTS_DIFFER) for line in found.data):
            return (
                f"Before call {number} the weights differ, so the difference arises after the last call: in "
                "the loss, the update, or code that writes weights."
            )
        if number > 1 and any(line.startswith(BEGIN_INPUT) for line in found.not_grafted):
            return (
                f"Before call {number}, of {self.models[-1]}, its inputs have different shapes: one side has made an "
                "extra call before it, or the scripts' own code between the calls differs."
            )
        if number > 1 and found.named and {*found.named} <= {*found.inputs} and not found.unexplained:
            before = "no call before it is known to differ" if self.undecided else "the calls before it agree"
            return (
                f"Before call {number}, of {self.models[-1]}, its inputs differ, and {before}: the "
                "scripts' own code between the calls differs, or rounding has flipped a choice, such as a token."
            )
        before = ""
        if self.undecided_updates:
            # Weights that were not compared in it may differ since.
            updates = numbered("update", [*self.undecided_updates])
            before = f", or before it in {updates}, which can only be judged in part"
        elif self.undecided and found.inputs and len(self.models) - 1 not in self.undecided:
            # Its inputs may be made of an earlier call's result, such as tokens.
            calls = numbered("call", [place + 1 for place in self.undecided])
            before = f", or before it in {calls}, which can only be judged in part, since its inputs differ already"
        return f"In call {number}, of {self.models[-1]}{before}:"


def followed_by(compared: Comparison, remarks: Sequence[str]) -> Comparison:
    """The comparison with further sentences."""
    return replace(compared, remarks=(*compared.remarks, *remarks))
