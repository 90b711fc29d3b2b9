"""Holds a script's calls of its models, and the steps of its optimizers: the script waits there as a rank.

The rank repeats the call as the notebook asks. Then the script makes the call itself, from the state in which it was
reached.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from graftlab.base.world import Side
from graftlab.diffs.results import named_tensors
from graftlab.jobs.script_rank import ScriptRank, become_rank
from graftlab.ranks.float32_state import Float32State
from graftlab.ranks.held_call import HeldCall, WatchChoice, arguments_by_name
from graftlab.ranks.held_update import GradientWatch, HeldUpdate, TensorSample
from graftlab.taps.outermost_calls import OutermostCalls
from graftlab.taps.watch import Watch, watch

FOLDER, SIDE, MODEL = "GRAFTLAB_COMPARE_FOLDER", "GRAFTLAB_COMPARE_SIDE", "GRAFTLAB_COMPARE_MODEL"
"""Environment variables of a script's processes: where they join, as which side, which class of models to hold."""


def uncompared_calls(folder: Path, side: Side) -> Path:
    """The file in a comparison's folder which shows that a process of this side that is no rank called a model."""
    return folder / f"{side}-calls-elsewhere"


def other_models(folder: Path, side: Side) -> Path:
    """The file in a comparison's folder that lists the models which this side called before one that is held."""
    return folder / f"{side}-other-models"


class HeldScript:
    """Holds the outermost calls of all models in this process, of the models of a class, or of one model.

    ``wanted`` is a class, such as ``"Net"``, or one model of a class: ``"Net[1]"`` is the second one called.
    """

    def __init__(self, folder: Path, side: Side, wanted: str | None) -> None:
        self._folder, self._side, self._wanted = folder, side, wanted
        self._process = os.getpid()
        self._calls = OutermostCalls(self._before, self._after)
        self._rank: ScriptRank | None = None
        self._count = 0
        self._others: Counter[str] = Counter()
        # The models that were called, by name, and the state of the training step in progress.
        self._models: WeakValueDictionary[str, torch.nn.Module] = WeakValueDictionary()
        # The models' names in sentences: the class, with a number from the second model of a class on.
        self._names = WeakIdKeyDictionary()
        self._kinds: Counter[str] = Counter()
        self._gradients = GradientWatch()
        self._previous: dict[str, TensorSample] = {}
        self._updates = self._calls_in_step = 0
        self._updating: torch.optim.Optimizer | None = None
        self._is_held = False
        self._hooks: list[RemovableHandle] = []
        self._float32 = Float32State()
        # The call that was held, until the script has made it.
        self._held: HeldCall | None = None

    def begin(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take over this call, the first one of a model in this process, and all later ones. Returns its result."""
        self._calls.install()
        self._gradients.install()
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]
        return self._calls.call(module, args, kwargs)

    def remove(self) -> None:
        """Hold nothing from now on."""
        self._calls.remove()
        self._gradients.remove()
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A data loader's worker or a fork is no rank: the connections belong to the parent.
        if os.getpid() != self._process or torch.utils.data.get_worker_info() is not None:
            self._stop_holding()
            return
        kind = type(module).__name__
        if module not in self._names:
            self._models[f"{kind}{len(self._names) or ''}"] = module
            self._names[module] = f"{kind}[{self._kinds[kind]}]" if self._kinds[kind] else kind
            self._kinds[kind] += 1
        name: str = self._names[module]
        if self._is_held:
            # The closure of a held step made this call.
            return
        # An update that raised never reached its post-hook.
        self._updating = None
        if self._wanted not in (None, kind, name):
            if name not in self._others:
                self._note_other(name)
            self._others[name] += 1
            return
        self._count += 1
        self._calls_in_step += 1
        if self._rank is None:
            self._rank = become_rank(self._folder, self._side, self.remove)
        if self._rank is None:
            self._stop_holding()
            return
        if not self._rank.waits_in("call", self._count):
            return
        call = partial(module, *args, **kwargs)
        self._gradients.is_paused = True
        self._held = HeldCall(
            call,
            {"": module},
            arguments_by_name(args, kwargs),
            self._rank.choice,
            name=name,
            number=self._count,
            others=self._others,
            float32=self._float32,
            part_of=self._model_with(module),
        )
        self._rank.hold(self._held)
        self._gradients.is_paused = False

    def _model_with(self, module: torch.nn.Module) -> str:
        """The name of the first model called that has this one as a module; blank if none has."""
        others = (each for each in self._models.values() if each is not module)
        return next((self._names[each] for each in others if any(module is part for part in each.modules())), "")

    def _note_other(self, name: str) -> None:
        """Note a model that is not held, to report it if the script never calls the right one."""
        if self._rank is None:
            with contextlib.suppress(FileNotFoundError), other_models(self._folder, self._side).open("a") as file:
                file.write(f"{name}\n")

    def _stop_holding(self) -> None:
        """Stop holding calls in this process, and note that it has called a model."""
        self.remove()
        with contextlib.suppress(FileNotFoundError):
            # The comparison may be over, and its folder deleted.
            uncompared_calls(self._folder, self._side).touch()

    def _after(self, module: torch.nn.Module, result: Any) -> None:
        if self._held is not None:
            self._held.confirm_state()
            self._held = None
        if not torch.is_grad_enabled():
            return
        self._gradients.add_weights(module)
        place = f"call {self._calls_in_step}"
        self._gradients.add_results({f"{place}{path}": each for path, each in named_tensors(result).items()})

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if os.getpid() != self._process or self._rank is None or self._updating is not None:
            # The optimizer may belong to a larger one, whose step is held.
            return
        self._updating = optimizer
        self._updates += 1
        if not self._rank.waits_in("update", self._updates):
            self._begin_step()
            return
        has_closure = any(callable(each) for each in (*args[1:], *kwargs.values()))
        step = partial(type(optimizer).step, *args, **kwargs)
        update = HeldUpdate(
            step,
            optimizer,
            self._models,
            self._gradients,
            self._previous,
            number=self._updates,
            calls=self._calls_in_step,
            watch_calls=partial(_watch_calls, self._rank.choice) if has_closure else None,
        )
        self._is_held = self._gradients.is_paused = True
        self._rank.hold(update)
        self._is_held = self._gradients.is_paused = False
        self._previous = update.gradients
        self._begin_step()

    def _begin_step(self) -> None:
        self._gradients.begin_step()
        self._calls_in_step = 0

    def _after_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # The steps of repetitions end here too.
        if optimizer is self._updating and not self._is_held:
            self._updating = None


def _watch_calls(choice: WatchChoice, model: torch.nn.Module) -> Watch:
    return watch(
        model,
        include=choice.include,
        functions=choice.functions,
        inside=choice.inside,
        inputs=True,
        grads=True,
    )


def begin_from_environment(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Begin with the environment's settings; see :meth:`HeldScript.begin`."""
    side: Side = "baseline" if os.environ[SIDE] == "baseline" else "target"
    script = HeldScript(Path(os.environ[FOLDER]), side, os.environ.get(MODEL))
    return script.begin(module, args, kwargs)
