"""Python processes that have imported torch before they begin.

An interpreter takes seconds of the processor to import torch, and tests start hundreds. So the workers of pytest share
one that does nothing else, and a script runs in a fork of it, as ``__main__``, with a command line, an environment, a
folder and streams. It is a process like any other: it is killed, watched and waited for as one that was
started by its path. What a test promises of how Python starts needs ``subprocess.Popen``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import io
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias

from kit import ending, spare
from kit.deadline import DEADLINE

# Nothing of graftlab's: what it does when it is imported, and after a fork, is part of what is tested.
_IMPORTED = (
    "torch",
    "torch.distributed",
    "torch.multiprocessing",
    "numpy",
    "pandas",
    "msgspec",
    "cloudpickle",
    "zmq",
    "torch._dynamo",
)
# What a script may ask for besides, which takes as long as torch.
TRANSFORMERS = ("transformers.models.bert.modeling_bert", "transformers.models.auto.tokenization_auto")
_ROOTS = tuple(str(Path(__file__).resolve().parents[up]) for up in (1, 2))
# Python and OpenMP have read these before a fork could change them.
_READ_AT_START = ("PYTHON", "OMP_")
# A variable with the path of the socket by which this process shares another's nursery.
_SHARED = "GRAFTLAB_TESTS_NURSERY"
# Above whatever number a descriptor has in a script.
_HIGH = 1000


class Script:
    """A running script, with the methods of ``subprocess.Popen``. Its streams are pipes of text unless one is given.

    ``network`` is the file of the network namespace to run in. Then the first of ``own_folder`` shows the second.
    ``imports`` are more modules that it has imported before it begins. With ``forkserver`` what it starts as its first
    forkserver has imported all that, too; with ``children`` so have the Python processes that it starts. ``prepare``
    names a function that it calls before it begins. ``pass_fds`` have the same numbers in it.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        env: Mapping[str, str],
        cwd: str | Path | None = None,
        start_new_session: bool = False,
        stdout: int | IO[Any] = subprocess.PIPE,
        stderr: int | IO[Any] = subprocess.PIPE,
        network: str | None = None,
        own_folder: tuple[str, str] | None = None,
        imports: Sequence[str] = (),
        forkserver: bool = False,
        children: bool = False,
        prepare: str = "",
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.args = [str(argument) for argument in arguments]
        self.returncode: int | None = None
        pipes = [os.pipe() for _ in range(3)]
        told, tells = socket.socketpair()
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1], tells.fileno()]
        for stream, given in ((1, stdout), (2, stderr)):
            if given != subprocess.PIPE:
                theirs[stream] = given if isinstance(given, int) else given.fileno()
        asked = {
            "arguments": self.args,
            "env": dict(env),
            "cwd": str(cwd or Path.cwd()),
            "session": start_new_session,
            "network": network,
            "own_folder": own_folder,
            "imports": imports,
            "forkserver": forkserver,
            "children": children,
            "prepare": prepare,
            "pass_fds": [*pass_fds],
        }
        self.pid = nursery().start(asked, [*theirs, *pass_fds])
        tells.close()
        for descriptor in (pipes[0][0], pipes[1][1], pipes[2][1]):
            os.close(descriptor)
        self.stdin: IO[str] = os.fdopen(pipes[0][1], "w")
        self.stdout: IO[str] = os.fdopen(pipes[1][0])
        self.stderr: IO[str] = os.fdopen(pipes[2][0])
        self._told = told

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *raised: object) -> None:
        for stream in (self.stdout, self.stderr, self.stdin):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self.wait()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._told.settimeout(timeout)
            try:
                self.returncode = int(self._told.recv(16))
            except (TimeoutError, BlockingIOError):
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout) from None
            self._told.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        """Send ``input``, and read both streams to their ends. May be called again after it ran out of time."""
        with contextlib.suppress(BrokenPipeError):
            if not self.stdin.closed:
                self.stdin.write(input or "")
                self.stdin.close()
        for reader in self._readers:
            reader.join(timeout)
            if reader.is_alive():
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
        self.wait(timeout)
        return self._read[self.stdout], self._read[self.stderr]

    @functools.cached_property
    def _readers(self) -> list[threading.Thread]:
        def read(stream: IO[str]) -> None:
            self._read[stream] = stream.read()
            stream.close()

        readers = [threading.Thread(target=read, args=(each,), daemon=True) for each in (self.stdout, self.stderr)]
        for reader in readers:
            reader.start()
        return readers

    @functools.cached_property
    def _read(self) -> dict[IO[str], str]:
        return {}


Running: TypeAlias = Script | subprocess.Popen[str]


def start(arguments: Sequence[object], env: Mapping[str, str], **how: Any) -> Running:
    """Start ``python ARGUMENTS``: warm, or cold where the environment says what Python reads when it starts."""
    if may_be_warm(env):
        return Script(arguments, env, **how)
    cold = {name: value for name, value in how.items() if name not in ("imports", "forkserver", "children")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **cold}
    return subprocess.Popen([sys.executable, *map(str, arguments)], env=dict(env), text=True, **pipes)


def may_be_warm(env: Mapping[str, str] | None) -> bool:
    """Whether this process has begun with what Python and OpenMP would read in this environment."""
    given = os.environ if env is None else env
    wanted = {name: value for name, value in given.items() if name.startswith(_READ_AT_START) and name != "PYTHONPATH"}
    return wanted == {name: value for name, value in os.environ.items() if name in wanted}


def run(*arguments: object, timeout: float = 100.0, **how: Any) -> subprocess.CompletedProcess[str]:
    """The result of ``python ARGUMENTS``. ``env`` and ``cwd`` are those of this process unless they are given."""
    with start(arguments, **{"env": os.environ, **how}) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.wait(), out, err)


# ---- the process that is forked -------------------------------------------------------------------------------------


class Nursery:
    """The other end of the process that has imported everything."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()

    def start(self, asked: Mapping[str, Any], descriptors: list[int]) -> int:
        with self._lock:
            self._socket.settimeout(DEADLINE)
            request = json.dumps(asked).encode()
            socket.send_fds(self._socket, [len(request).to_bytes(8, "little")], descriptors)
            self._socket.sendall(request)
            answer = self._socket.recv(16)
            assert answer, "the process that scripts are forked from is gone"
            return int(answer)


@functools.cache
def nursery() -> Nursery:
    """The process that this one's scripts are forked from."""
    if path := os.environ.get(_SHARED):
        shared = socket.socket(socket.AF_UNIX)
        shared.connect(path)
        return Nursery(shared)
    return Nursery(_start_nursery())


def share() -> None:
    """Let the processes that this one starts from now on have one nursery. It imports nothing before the first asks."""
    folder = tempfile.mkdtemp(prefix="gl-warm-")
    path = f"{folder}/socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        _start_nursery(listener)
    os.environ[_SHARED] = path
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def _start_nursery(listener: socket.socket | None = None) -> socket.socket:
    """Start a process that ends with this one; the connection to it."""
    ours, theirs = socket.socketpair()
    descriptors = [each.fileno() for each in (theirs, listener) if each]
    run = f"warm.run_as_main(warm.next_script({', '.join(map(str, descriptors))}))"
    path = os.pathsep.join([*_ROOTS, *filter(None, [os.environ.get("PYTHONPATH")])])
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", f"from kit import ending, warm; {run}"],
            # Hugging Face's packages read the latter when they are imported.
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=descriptors,
            start_new_session=True,
        )

    def end() -> None:
        ours.close()
        process.wait(DEADLINE)

    atexit.register(end)
    return ours


def _request(asks: socket.socket) -> tuple[bytes, list[int]]:
    """One request, and the descriptors that came with it; no request from a worker that has ended, even within one."""
    with contextlib.suppress(ConnectionResetError):
        size, descriptors, *_ = socket.recv_fds(asks, 8, 8)
        request = b""
        while len(request) < int.from_bytes(size, "little"):
            if not (more := asks.recv(1 << 16)):
                return b"", descriptors
            request += more
        return request, descriptors
    return b"", []


def next_script(descriptor: int, listener: int | None = None) -> dict[str, Any]:
    """Import everything; fork for each request, and return it in the child.

    Ends with the other end of the socket ``descriptor``. Others may connect to ``listener``.
    """
    connections = {descriptor: socket.socket(fileno=descriptor)}
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    if listener is not None:
        listens = connections[listener] = socket.socket(fileno=listener)
        poller.register(listener, select.POLLIN)
    running: dict[int, tuple[int, int]] = {}
    unread: dict[int, int] = {}
    while True:
        for ready, _ in poller.poll():
            if ready in running:
                pid, tells = running.pop(ready)
                poller.unregister(ready)
                os.close(ready)
                # As with subprocess.Popen, its number is its own until the status is read.
                ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                assert ended is not None
                status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                with contextlib.suppress(OSError):  # no process waits for it any longer
                    os.write(tells, str(status).encode())
                poller.register(tells, 0)  # for the end of the other side
                unread[tells] = pid
                continue
            if ready in unread:
                os.waitpid(unread.pop(ready), 0)
                poller.unregister(ready)
                os.close(ready)
                continue
            if ready == listener:
                asks, _ = listens.accept()
                connections[asks.fileno()] = asks
                poller.register(asks, select.POLLIN)
                continue
            asks = connections[ready]
            request, descriptors = _request(asks)
            if not request:
                if ready == descriptor:
                    sys.exit()
                for each in descriptors:
                    os.close(each)
                poller.unregister(ready)
                connections.pop(ready).close()
                continue
            asked: dict[str, Any] = json.loads(request)
            _import(*_IMPORTED, *asked["imports"])
            if (pid := os.fork()) == 0:
                for pidfd, (_, tells) in running.items():
                    os.close(pidfd)
                    os.close(tells)
                for tells in unread:
                    os.close(tells)
                if asked["session"]:
                    os.setsid()  # before its number is known, which kills its group
                asks.sendall(str(os.getpid()).encode())
                for connection in connections.values():
                    connection.close()
                os.close(descriptors[3])
                for stream, given in enumerate(descriptors[:3]):
                    os.dup2(given, stream)
                    os.close(given)
                _take_over(descriptors[4:], asked["pass_fds"])
                return asked
            for given in [*descriptors[:3], *descriptors[4:]]:
                os.close(given)
            pidfd = os.pidfd_open(pid)
            running[pidfd] = pid, descriptors[3]
            poller.register(pidfd, select.POLLIN)


def _take_over(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give the descriptors these numbers."""
    high = [fcntl.fcntl(each, fcntl.F_DUPFD, _HIGH) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for each, number in zip(high, numbers, strict=True):
        os.dup2(each, number)
        os.close(each)


def _import(*modules: str) -> None:
    gc.disable()  # or it would look through all that again and again, for a tenth of the time
    for module in modules:
        importlib.import_module(module)
    gc.enable()
    gc.freeze()  # or each child would look through all that, and copy it


def run_as_main(asked: Mapping[str, Any]) -> None:
    """Do what ``python ARGUMENTS`` does."""
    ending.spare_what_was_imported()
    os.environ.clear()
    os.environ.update(asked["env"])
    os.environ.pop(_SHARED, None)  # its own scripts are on its machine
    # What was imported may have asked for it, in the environment of the first test of all.
    tempfile.tempdir = None
    if asked["network"]:
        _change_machine(asked["network"], *asked["own_folder"])
    os.chdir(asked["cwd"])
    if "PYTHONUNBUFFERED" in asked["env"]:
        for stream in (sys.stdout, sys.stderr):
            assert isinstance(stream, io.TextIOWrapper)
            stream.reconfigure(write_through=True)
    if asked["prepare"]:
        module, _, function = asked["prepare"].rpartition(".")
        getattr(importlib.import_module(module), function)()
    if asked["forkserver"]:
        spare.prepare()
    if asked["children"]:
        importlib.import_module("kit.children").prepare()
    what, *rest = asked["arguments"]
    if what == "-m":
        module, *sys.argv[1:] = rest
        sys.path[0] = asked["cwd"]
        if module == "ipykernel_launcher":
            # When it is imported pandas asks whether it writes to a terminal, where it shows as many as are as wide.
            sys.modules["pandas"].set_option("display.max_columns", 20)
    else:
        sys.argv[:] = [what, *rest]
        sys.path[0] = str(Path(what).resolve().parent)
    try:
        if what == "-m":
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            main.__dict__["__builtins__"] = __builtins__
            if what == "-c":
                code: str | bytes = rest[0]
                sys.argv[:] = ["-c", *rest[1:]]
                sys.path[0] = ""
            else:
                code = Path(what).read_bytes()
                main.__dict__["__file__"] = what
            exec(compile(code, "<string>" if what == "-c" else what, "exec"), main.__dict__)
    except Exception as error:
        sys.last_value = error
        # Without the lines of this file, which come first.
        sys.excepthook(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        sys.exit(1)


def _change_machine(network: str, place: str, folder: str) -> None:
    """What ``ip netns exec`` and ``mount --bind`` do. Python has no names for these calls before 3.12."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_network, new_mounts, bind, recursive, slave = 1 << 30, 1 << 17, 1 << 12, 1 << 14, 1 << 19
    with open(network) as namespace:
        done = [
            libc.setns(namespace.fileno(), new_network),
            libc.unshare(new_mounts),
            libc.mount(b"none", b"/", None, recursive | slave, None),
            libc.mount(folder.encode(), place.encode(), None, bind, None),
        ]
    if any(done):
        raise OSError(ctypes.get_errno(), f"cannot change to {network}: {done}")
