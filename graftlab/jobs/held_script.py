"""A script's process as a rank: it joins where the script first calls its model, and holds that call and later ones.

While a call is held, the main loop of the rank runs inside it. It repeats the call as the notebook asks. Then the
script makes the call itself, from the state in which it was reached. Steps of optimizers are held in the same way.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from graftlab.base.world import Place, Side
from graftlab.diffs.results import named_tensors
from graftlab.errors import ConfigError, GraftError
from graftlab.exchange.channel import SocketChannel
from graftlab.grafting.kept import KeptPairs
from graftlab.jobs.handshake import HoldAccepted, HoldRequest, ask
from graftlab.jobs.rendezvous import Rendezvous
from graftlab.plan.wire import from_wire
from graftlab.ranks.connection import ControlConnection
from graftlab.ranks.descriptors import make_exchange, receive_descriptors
from graftlab.ranks.float32_state import Float32State
from graftlab.ranks.held_call import HeldCall, WatchChoice, arguments_by_name
from graftlab.ranks.held_update import GradientWatch, HeldUpdate, TensorSample
from graftlab.ranks.holding import ScriptEnd, UnitKind, held_unit, hold, release_call
from graftlab.ranks.messages import RunRequest
from graftlab.ranks.namespace import Namespace
from graftlab.ranks.own_place import own_backend, own_device, own_rank
from graftlab.ranks.process_end import die_with_notebook
from graftlab.ranks.worker import Rank
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


def forget_claims(folder: Path) -> None:
    """Let other processes become the ranks of a comparison in this folder."""
    for claim in folder.glob(f"*{_CLAIM}"):
        claim.unlink()


def _claim_rank(folder: Path, side: Side, rank: int) -> bool:
    """Whether this process is the first of a rank to call a model, and so becomes that rank.

    A script may start other processes, whose environment names the same rank.
    """
    try:
        os.close(os.open(folder / f"{side}-{rank}{_CLAIM}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except (FileExistsError, FileNotFoundError):
        return False
    return True


def package_folder() -> str:
    """The folder of this copy of graftlab."""
    return str(Path(__file__).resolve().parents[1])


_CLAIM = "-is-a-process"
# Seconds to wait for the answer of the process that compares.
_ANSWER_LIMIT = 60.0


class HeldScript:
    """Holds the outermost calls of all models in this process, of the models of a class, or of one model.

    ``wanted`` is a class, such as ``"Net"``, or one model of a class: ``"Net[1]"`` is the second one called.
    """

    def __init__(self, folder: Path, side: Side, wanted: str | None) -> None:
        self._folder, self._side, self._wanted = folder, side, wanted
        self._process = os.getpid()
        self._calls = OutermostCalls(self._before, self._after)
        self._rank: _ScriptRank | None = None
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
            self._rank = _joined(self._folder, self._side, self.remove)
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
        )
        self._rank.hold(self._held)
        self._gradients.is_paused = False

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


class _ScriptRank(Rank):
    """A rank whose main loop runs while its script waits in a held call."""

    choice: WatchChoice
    _next_unit: tuple[UnitKind, int] | None = None
    _has_begun = False
    _is_over = False

    def __init__(self, hold_nothing: Callable[[], None], death_pipe: int, *given: Any) -> None:
        self._hold_nothing = hold_nothing
        self._death_pipe = death_pipe
        self._runs = 0
        super().__init__(*given)
        atexit.register(self._report_end, os.getpid())

    def waits_in(self, kind: UnitKind, number: int) -> bool:
        """Whether the script waits in this call or update. It does not wait in those before the chosen one."""
        if self._next_unit not in (None, (kind, number)):
            return False
        self._next_unit = None
        return True

    def skip_to(self, kind: UnitKind, number: int) -> None:
        """Let the script continue to this call or update, unless it is already there."""
        if held_unit() != (kind, number):
            self._next_unit = (kind, number)
            release_call()

    def hold(self, call: HeldCall | HeldUpdate) -> None:
        """Repeat this call or update as the notebook asks, until it is released."""
        hold(call)
        with self._interruptible():
            if not self._has_begun:
                self._has_begun = True
                self.begin()
            while not call.is_released and not self._control.stopping:
                self.handle_next()
        if self._control.stopping:
            # The comparison is over, and the script ends with it.
            self._line.channel.drain(5.0)
            os._exit(0)

    def _run(self, request: RunRequest) -> None:
        super()._run(request)
        self._runs += 1

    def _report_end(self, process: int) -> None:
        """Answer the notebook's next request by the script's end: it calls no model again.

        The exit code of its command would not tell, because collective libraries may abort while a process ends.
        """
        if os.getpid() != process or self._is_over:
            return
        error = getattr(sys, "last_value", None)
        hold(ScriptEnd(None if error is None else f"{type(error).__name__}: {error}"))
        runs = self._runs
        while self._runs == runs and not self._control.stopping:
            self.handle_next()
        self._is_over = True
        self._line.channel.drain(5.0)

    def end(self) -> None:
        if not self._is_over:
            super().end()

    def leave(self) -> None:
        """Let the script continue without graftlab, even when the notebook ends."""
        self._is_over = True
        self._hold_nothing()
        release_call()
        fcntl.fcntl(self._death_pipe, fcntl.F_SETFL, fcntl.fcntl(self._death_pipe, fcntl.F_GETFL) & ~os.O_ASYNC)

    @contextlib.contextmanager
    def _interruptible(self) -> Any:
        if threading.current_thread() is not threading.main_thread():
            # Python handles signals only on the main thread, which runs the script's own code.
            yield
            return
        before = signal.signal(signal.SIGINT, self.on_interrupt)
        self._takes_interrupts = True
        try:
            yield
        finally:
            self._takes_interrupts = False
            signal.signal(signal.SIGINT, before)

    _takes_interrupts = False

    def _interrupt(self, run: int) -> None:
        if self._takes_interrupts:
            super()._interrupt(run)


_rank: _ScriptRank | None = None


def skip_to(kind: UnitKind, number: int) -> None:
    """Let this process continue to a call or an update. The notebook sends this function to ranks by its name."""
    assert _rank is not None
    _rank.skip_to(kind, number)


def leave() -> None:
    """End this process's part of the comparison. The notebook sends this function to ranks by its name."""
    assert _rank is not None
    _rank.leave()


def _joined(folder: Path, side: Side, hold_nothing: Callable[[], None]) -> _ScriptRank | None:
    """Become a rank, or end the process with the reason why it cannot. Returns None if another process is this rank."""
    global _rank
    try:
        if not _claim_rank(folder, side, own_rank()[0]):
            return None
        _rank = _join(folder, side, hold_nothing)
    except (GraftError, OSError, EOFError) as error:
        sys.stderr.write(f"graftlab compare: {error}\n")
        sys.stderr.flush()
        # A script might catch an exception, and then continue without being compared.
        os._exit(1)
    return _rank


def _join(folder: Path, side: Side, hold_nothing: Callable[[], None]) -> _ScriptRank:
    rank, size, _ = own_rank()
    device = own_device()
    with Rendezvous(folder) as rendezvous:
        connection = rendezvous.connect(_ANSWER_LIMIT)
    if connection is None:
        raise ConfigError(f"the comparison in {folder} is over")
    with connection:
        connection.settimeout(_ANSWER_LIMIT)
        request = HoldRequest(side, rank, size, os.getpid(), str(device), own_backend())
        answer = ask(connection, request, HoldAccepted, ConfigError)
        *shared, line, wake, death_pipe = receive_descriptors(connection, answer.descriptors)
    die_with_notebook(death_pipe)
    place = Place(side, rank, size, answer.other_world_size)
    exchange, own = make_exchange(
        place, shared, answer.segment_size, budget=answer.buffer_budget, timeout=answer.tap_timeout
    )
    joined = _ScriptRank(
        hold_nothing,
        death_pipe,
        place,
        device,
        from_wire(answer.plan),
        exchange,
        own,
        KeptPairs(answer.keep_budget),
        ControlConnection(SocketChannel(socket.socket(fileno=line)), socket.socket(fileno=wake)),
        Namespace(sys.modules["__main__"]),
    )
    joined.choice = WatchChoice(answer.include, answer.functions, answer.inside)
    return joined


def begin_from_environment(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Begin with the environment's settings; see :meth:`HeldScript.begin`."""
    side: Side = "baseline" if os.environ[SIDE] == "baseline" else "target"
    script = HeldScript(Path(os.environ[FOLDER]), side, os.environ.get(MODEL))
    return script.begin(module, args, kwargs)
