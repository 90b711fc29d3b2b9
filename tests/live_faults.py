"""Fast tests with a fault, in seconds: one process has collected them, and a fork of it changes the functions.

A function that has been imported gets the code of the file with the fault in it, and a constant of a module the other
value. What else runs on import cannot be changed in this way, nor what was computed from a constant: unless a test
fails, :meth:`CollectedTests.first_failure` returns None for such a fault, and it is tried in a process that has not
imported the package.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import gc
import json
import os
import select
import signal
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

# The name, the file, and the first line: what finds a function's code in the text that it was compiled from.
Key = tuple[str, str, int]
# Of a test that hangs with a fault, in seconds.
_LIMIT_OF_A_TEST = 30


class CollectedTests:
    """The fast tests of the folder that this process is in, collected in another process."""

    def __init__(self, markers: str, limit: float) -> None:
        asked, self._ask = os.pipe()
        self._answers, answer = os.pipe()
        self._process = os.fork()
        if not self._process:
            os.close(self._ask)
            os.close(self._answers)
            _serve(markers, limit, asked, answer)
        os.close(asked)
        os.close(answer)

    def first_failure(self, path: Path, before: str, after: str, tests: Sequence[str]) -> str | None:
        """The test that fails first with ``after`` in place of ``before``; blank if all pass, None if unknown."""
        os.write(self._ask, json.dumps([str(path), before, after, list(tests)]).encode() + b"\n")
        with open(self._answers, closefd=False) as answers:
            line = answers.readline()
        if not line:
            raise RuntimeError("the tests could not be collected")
        found: str | None = json.loads(line)
        return found

    def close(self) -> None:
        os.close(self._ask)
        os.close(self._answers)
        os.waitpid(self._process, 0)


class _Server:
    """A plugin of pytest that answers requests once all tests are collected, and runs none itself."""

    def __init__(self, limit: float, asked: int, answer: int) -> None:
        self._limit = limit
        self._asked = asked
        self._answer = answer

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = collections.defaultdict(list)
        for item in session.items:
            items[item.nodeid].append(item)
            items[item.nodeid.partition("::")[0]].append(item)
        functions = _functions_of_the_package()
        with open(self._asked) as requests:
            for line in requests:
                path, before, after, tests = json.loads(line)
                chosen = [item for test in tests for item in items.get(test, ())]
                os.write(self._answer, json.dumps(self._found(functions, path, before, after, chosen)).encode() + b"\n")
        return True

    def _found(
        self,
        functions: dict[Key, list[types.FunctionType]],
        path: str,
        before: str,
        after: str,
        items: Sequence[pytest.Item],
    ) -> str | None:
        try:
            pairs, constant = list(_changed(_compiled(path, before), _compiled(path, after))), None
        except OutsideFunctionsError:
            pairs, constant = [], _changed_constant(before, after)
            if constant is None:
                return None
        reading, writing = os.pipe()
        process = os.fork()
        if not process:
            try:
                os.setsid()
                for code, changed in pairs:
                    for function in functions.get(_key(code), ()):
                        function.__code__ = changed
                if constant is not None:
                    _set_constant(path, *constant)
                _run(items, writing)
            finally:
                os._exit(1)
        os.close(writing)
        try:
            ended, _, _ = select.select([reading], [], [], self._limit)
            found = os.read(reading, 1 << 16).decode() if ended else "no test ended in time"
        finally:
            os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
        if constant is not None and found in ("passed", ""):
            return None
        return "" if found == "passed" else found or "the process ended"


class OutsideFunctionsError(Exception):
    """The fault is in code that runs on import."""


def _serve(markers: str, limit: float, asked: int, answer: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    try:
        options = ["-q", "-n0", "-p", "no:cacheprovider", "--timeout", str(_LIMIT_OF_A_TEST), "-m", markers]
        pytest.main([*options, "tests"], plugins=[_Server(limit, asked, answer)])
    finally:
        os._exit(0)


def _run(items: Sequence[pytest.Item], writing: int) -> None:
    found = "passed"
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if item.session.testsfailed:
            found = item.nodeid
            break
    os.write(writing, found.encode())


def _functions_of_the_package() -> dict[Key, list[types.FunctionType]]:
    # What is frozen is not listed.
    gc.unfreeze()
    found: dict[Key, list[types.FunctionType]] = collections.defaultdict(list)
    for each in gc.get_objects():
        if isinstance(each, types.FunctionType) and each.__module__ and each.__module__.startswith("graftlab"):
            found[_key(each.__code__)].append(each)
    gc.freeze()
    return found


def _key(code: types.CodeType) -> Key:
    return code.co_name, os.path.relpath(code.co_filename), code.co_firstlineno


def _compiled(path: str, text: str) -> types.CodeType:
    return compile(text, str(Path(path).resolve()), "exec", dont_inherit=True)


def _changed(before: types.CodeType, after: types.CodeType) -> Iterator[tuple[types.CodeType, types.CodeType]]:
    """The functions whose code differs: as it was, and as it is with the fault."""
    old, new = _codes_in(before), _codes_in(after)
    are_same = [each.co_name for each in old] == [each.co_name for each in new]
    is_function = bool(before.co_flags & 0x2)  # CO_NEWLOCALS
    if is_function:
        if before.co_freevars != after.co_freevars:
            raise OutsideFunctionsError
        yield before, after
    elif not are_same or _own(before) != _own(after):
        raise OutsideFunctionsError
    if are_same:
        for one, other in zip(old, new, strict=True):
            if one != other:
                yield from _changed(one, other)


def _changed_constant(before: str, after: str) -> tuple[str, ast.expr] | None:
    """The name and the new value of the one assignment that differs between the statements of two modules."""
    old, new = ast.parse(before).body, ast.parse(after).body
    differing = [pair for pair in zip(old, new, strict=False) if ast.dump(pair[0]) != ast.dump(pair[1])]
    if len(old) != len(new) or len(differing) != 1:
        return None
    match differing[0]:
        case (
            ast.Assign(targets=[ast.Name(id=one)]),
            ast.Assign(targets=[ast.Name(id=other)], value=value),
        ) if one == other:
            return one, value
    return None


def _set_constant(path: str, name: str, value: ast.expr) -> None:
    """Set it in the module, and in those that have imported it."""
    [module] = [each for each in list(sys.modules.values()) if getattr(each, "__file__", None) == os.path.abspath(path)]
    before = vars(module)[name]
    after = eval(compile(ast.Expression(value), path, "eval"), vars(module))
    for each in list(sys.modules.values()):
        if getattr(each, "__dict__", {}).get(name, module) is before:
            setattr(each, name, after)


def _codes_in(code: types.CodeType) -> list[types.CodeType]:
    return [each for each in code.co_consts if isinstance(each, types.CodeType)]


def _own(code: types.CodeType) -> tuple[object, ...]:
    """What runs in a module or class, without its functions."""
    constants = [repr(each) for each in code.co_consts if not isinstance(each, types.CodeType)]
    return code.co_code, constants, code.co_names, code.co_varnames


if __name__ == "__main__":
    sys.exit("tests/mutants.py uses this")
