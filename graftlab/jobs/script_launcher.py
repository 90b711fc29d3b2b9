"""Launches two scripts: starts their commands, and admits the processes that call a model as ranks of a session."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from graftlab.base.world import Place, Side
from graftlab.control.core import SessionCore
from graftlab.errors import GraftError, LaunchError
from graftlab.exchange.channel import SocketChannel
from graftlab.jobs.handshake import (
    HoldAccepted,
    HoldRequest,
    RequestRefused,
    receive_handshake,
    send_handshake,
)
from graftlab.jobs.held_script import FOLDER, MODEL, SIDE, other_models
from graftlab.jobs.refusals import RefusalLog
from graftlab.jobs.rendezvous import Rendezvous, peer_uid
from graftlab.jobs.script_process import ScriptCommand, ScriptProcess
from graftlab.jobs.script_rank import forget_claims
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import to_wire
from graftlab.ranks.descriptors import SharedDescriptors, send_descriptors
from graftlab.ranks.devices import DeviceAssignment
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.held_call import WatchChoice
from graftlab.ranks.options import LaunchOptions

_BOOTSTRAP = Path(__file__).with_name("bootstrap")
# Seconds that a process has to send its request, once it has connected.
_HANDSHAKE_LIMIT = 10.0
# Seconds between two calls of the function that shows the progress.
_LOOK = 0.5
# Variables of jobs, which would make a script join a session of jobs, or record.
_OF_JOBS = ("GRAFTLAB_ENABLE", "GRAFTLAB_RECORD", "GRAFTLAB_ROLE", "DUMPER_GRAFTER_ENABLE")


class ScriptRankHandle(RankHandle):
    """The handle of a rank whose process belongs to a script."""

    can_restart = False

    def __init__(
        self,
        place: Place,
        request: HoldRequest,
        process: ScriptProcess,
        line: socket.socket,
        wake: socket.socket,
        death_pipe: socket.socket,
        segment: int,
    ) -> None:
        super().__init__(
            place, DeviceAssignment(request.device, request.backend), SocketChannel(line), wake, segment, process.log
        )
        self.pid = request.pid
        self.process = process
        self._death_pipe = death_pipe

    def signal(self, number: int) -> None:
        """Do nothing: a script handles its own signals."""

    def join(self, timeout: float) -> bool:
        return self.process.keeps_going or self.process.wait(timeout)

    def kill(self) -> None:
        self.process.kill()

    def end_programs(self) -> None:
        """Do nothing: another rank of the script may still run."""

    def release(self) -> None:
        super().release()
        self.process.release()
        self._death_pipe.close()

    def release_in_child(self) -> None:
        self._death_pipe.close()

    def how_it_ended(self) -> str:
        if self._ended_by_us is not None:
            return self._ended_by_us
        self.process.wait(1.0)
        return self.process.how_it_ended() if self.process.has_ended else "closed its connection"


@dataclass(frozen=True)
class ScriptSettings:
    """The settings with which both sides' scripts are started.

    ``model`` is the class of the model to hold, or None for the first. With ``inject`` an interpreter without graftlab
    uses this copy. ``timeout`` bounds, in seconds, the time until both sides have called their models.
    """

    choice: WatchChoice = field(default_factory=WatchChoice)
    model: str | None = None
    inject: bool = False
    timeout: float = 600.0


def start_scripts(
    commands: Mapping[Side, ScriptCommand],
    options: LaunchOptions,
    plan: GraftPlan,
    folder: Path,
    settings: ScriptSettings,
    on_wait: Callable[[Sequence[ScriptProcess], Sequence[str]], None],
) -> list[RankHandle]:
    """Start both commands, and wait until all their ranks have called a model; returns the ranks.

    ``on_wait`` is called about twice a second with the processes and the ranks that have not joined yet. Raises
    :class:`LaunchError`, with the last lines of the side's output, if a side ends or does not call a model in time;
    then both have ended.
    """
    processes: list[ScriptProcess] = []
    try:
        with Rendezvous(folder) as rendezvous, rendezvous.locked():
            listener = rendezvous.listen()
            if listener is None:
                raise LaunchError(f"a session already listens in {folder}; pass another folder")
        forget_claims(folder)
        with listener:
            for side, command in commands.items():
                environment = _environment(side, folder, settings, command.variables or {})
                processes.append(ScriptProcess(side, command, folder / "logs" / f"{side}.log", environment))
            return _Admission(processes, options, plan, settings.choice, folder).wait(
                listener, settings.timeout, on_wait
            )
    except BaseException:
        for process in processes:
            process.release()
        raise


def _environment(side: Side, folder: Path, settings: ScriptSettings, given: Mapping[str, str]) -> dict[str, str]:
    environment = {name: value for name, value in {**os.environ, **given}.items() if name not in _OF_JOBS}
    path = [str(_BOOTSTRAP), *filter(None, [environment.get("PYTHONPATH")])]
    environment.update(
        {
            FOLDER: str(folder),
            SIDE: side,
            "PYTHONPATH": os.pathsep.join(path),
            # The folder of this copy of graftlab.
            "GRAFTLAB_COMPARE_LENDS": str(Path(__file__).resolve().parents[2]),
            "GRAFTLAB_COMPARE_PREFIX": sys.prefix,
            # Otherwise its last lines would be missing in its log while it waits.
            "PYTHONUNBUFFERED": "1",
        }
    )
    if settings.model is not None:
        environment[MODEL] = settings.model
    if settings.inject:
        environment["GRAFTLAB_COMPARE_INJECT"] = "1"
    return environment


_WHAT_IS_A_MODEL = (
    " A model is a torch.nn.Module with parameters that is called from Python; a program that sets PYTHONPATH, or "
    "starts Python with -I, -E or -S, is not seen. FILE.py:FUNCTION with --inputs compares functions without a model."
)


def _advice_on_ranks(command: ScriptCommand) -> str:
    """What to do if several ranks were expected of a script that no launcher starts; blank for other commands."""
    program, *script = command.arguments
    if command.ranks < 2 or program != sys.executable or not (script and script[0].endswith(".py")):
        return ""
    launched = f"torchrun --nproc-per-node {command.ranks} {shlex.join(script)}"
    return (
        f" --ranks expects {command.ranks} ranks of it, and the command starts one process. If the script does not "
        f"start the others itself, give the command that does: {launched!r}."
    )


class _Admission:
    """Admits each process that has reached a model's call, until all ranks have joined."""

    def __init__(
        self,
        processes: Sequence[ScriptProcess],
        options: LaunchOptions,
        plan: GraftPlan,
        choice: WatchChoice,
        folder: Path,
    ) -> None:
        self._folder = folder
        self._processes = {process.side: process for process in processes}
        self._options, self._plan, self._choice = options, plan, choice
        self._places = Place("baseline", 0, options.baseline, options.target).everyone()
        self._joined: dict[str, ScriptRankHandle] = {}
        self._shared = SharedDescriptors(self._places)
        self._refused: dict[str, str] = {}
        self._refusals = RefusalLog()

    def wait(
        self,
        listener: socket.socket,
        timeout: float,
        on_wait: Callable[[Sequence[ScriptProcess], Sequence[str]], None],
    ) -> list[RankHandle]:
        self._shared.make()
        deadline = time.monotonic() + timeout
        poller = select.poll()
        poller.register(listener, select.POLLIN)
        for process in self._processes.values():
            poller.register(process.ended, select.POLLIN)
        try:
            while missing := [place.label for place in self._places if place.label not in self._joined]:
                on_wait(list(self._processes.values()), missing)
                ready = [descriptor for descriptor, _ in poller.poll(_LOOK * 1000)]
                if listener.fileno() in ready:
                    connection, _ = listener.accept()
                    with connection:
                        self._accept(connection)
                    continue
                self._refuse_ended()
                if time.monotonic() > deadline:
                    raise LaunchError(self._describe_wait(missing, timeout))
            return [self._joined[place.label] for place in self._places]
        except BaseException:
            for rank in self._joined.values():
                rank.release()
            raise
        finally:
            self._shared.release()
            self._refusals.close()

    def _refuse_ended(self) -> None:
        """Raise :class:`LaunchError` if a side has ended before all of its ranks joined."""
        for side, process in self._processes.items():
            if not process.has_ended:
                continue
            missing = [p for p in self._places if p.side == side and p.label not in self._joined]
            if side in self._refused:
                # Its output only repeats this, once for each rank.
                raise LaunchError(f"{self._refused[side]} (`{process.command.text}`, whose output is in {process.log})")
            what = "before it called a model" if missing else "while the other side had not called its model yet"
            advice = self._other_models(side) or _advice_on_ranks(process.command)
            shown = process.last_lines()
            if not advice and "EOFError" in shown:
                advice = (
                    " Scripts have no standard input; give answers in the command, such as 'echo yes | python it.py'."
                )
            elif not advice and process.is_done:
                advice = _WHAT_IS_A_MODEL
            raise LaunchError(
                f"the {side} `{process.command.text}` {process.how_it_ended()} {what}.{advice} Its output "
                f"({process.log}) ends:\n{shown}"
            )

    def _other_models(self, side: Side) -> str:
        """A sentence on the models that a side has called instead of the requested one; blank if there are none."""
        path = other_models(self._folder, side)
        called = list(dict.fromkeys(path.read_text().split())) if path.exists() else []
        return f" It has called {', '.join(called)} only; --model names a different model." if called else ""

    def _describe_wait(self, missing: Sequence[str], timeout: float) -> str:
        parts = [f"{', '.join(missing)} had not called a model within {timeout:g} s; --timeout waits longer"]
        for side, process in self._processes.items():
            if any(label.startswith(side) for label in missing):
                parts.append(
                    f"The output of the {side} `{process.command.text}` ends:\n{process.last_lines()}"
                    f"{self._other_models(side)}{self._other_ranks(side, missing)}"
                )
        return ". ".join(parts)

    def _other_ranks(self, side: Side, missing: Sequence[str]) -> str:
        """A sentence on the ranks of this side that wait in their first call, for which others may wait."""
        waiting = [label for label in self._joined if label.startswith(side)]
        if not waiting:
            return ""
        return (
            f" Meanwhile {', '.join(waiting)} waits in a first call, which is held. If that is what the others wait "
            "for, as the next stage of a pipeline does, these calls cannot be compared: run all stages in one process, "
            "or join both programs to a session as jobs."
        )

    def _accept(self, connection: socket.socket) -> None:
        connection.settimeout(_HANDSHAKE_LIMIT)
        try:
            if (uid := peer_uid(connection)) != os.getuid():
                self._refusals.warn(f"a process of user {uid} was refused")
                return
            request = receive_handshake(connection)
            if not isinstance(request, HoldRequest):
                send_handshake(connection, RequestRefused("it is not a request to hold a call", settings=False))
                return
            why = self._objection(request)
            if why:
                self._refused[request.side] = why
                send_handshake(connection, RequestRefused(why, settings=True))
                return
            self._admit(connection, request)
        except (OSError, EOFError, GraftError) as error:
            self._refusals.warn(f"a process was refused: {error}")
            with contextlib.suppress(OSError, GraftError):
                send_handshake(connection, RequestRefused(f"its request could not be read: {error}", settings=False))

    def _objection(self, request: HoldRequest) -> str:
        expected = {"baseline": self._options.baseline, "target": self._options.target}
        if request.world_size != expected[request.side]:
            right = expected | {request.side: request.world_size}
            return (
                f"the {request.side} has {request.world_size} ranks and {expected[request.side]} were expected; give "
                f"--ranks {right['baseline']},{right['target']}"
            )
        label = f"{request.side}[{request.rank}]"
        if label in self._joined:
            return f"{label} has joined already, as pid {self._joined[label].pid}"
        return ""

    def _admit(self, connection: socket.socket, request: HoldRequest) -> None:
        place = next(p for p in self._places if (p.side, p.rank) == (request.side, request.rank))
        line, theirs = socket.socketpair()
        wake, their_wake = socket.socketpair()
        death_pipe, their_death_pipe = socket.socketpair()
        with theirs, their_wake, their_death_pipe:
            ends = [theirs.fileno(), their_wake.fileno(), their_death_pipe.fileno()]
            descriptors = [*self._shared.of(place), *ends]
            options = self._options
            send_handshake(
                connection,
                HoldAccepted(
                    place.other_world_size,
                    self._shared.segment_size,
                    len(descriptors),
                    options.tap_limit,
                    options.buffer_budget,
                    options.keep_budget,
                    to_wire(self._plan),
                    self._choice.include,
                    self._choice.functions,
                    self._choice.inside,
                ),
            )
            send_descriptors(connection, descriptors)
        process = self._processes[place.side]
        segment = self._shared.segments[place.world_rank]
        self._joined[place.label] = ScriptRankHandle(place, request, process, line, wake, death_pipe, segment)


def scripts_of(session: SessionCore) -> dict[Side, ScriptProcess]:
    """The processes of a session's scripts, by side."""
    return {rank.place.side: rank.process for rank in session.ranks if isinstance(rank, ScriptRankHandle)}
