"""The layout: rooms import in one direction, without cycles, and class names are unique."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from pathlib import Path

import pytest
from kit.parsing import parsed, uncollected

import graftlab

__all__ = ["uncollected"]  # for each test

PACKAGE = Path(graftlab.__file__).parent

# From the ground up: a room may import from those before it, and from itself.
ROOMS = [
    "errors",
    "base",
    "requests",
    "diffs",
    "layouts",
    "filters",
    "exchange",
    "rows",
    "taps",
    "models",
    "transforms",
    "plan",
    "config",
    "matching",
    "lines",
    "verdict",
    "plots",
    "grafting",
    "graphs",
    "ranks",
    "recordings",
    "control",
    "judging",
    "jobs",
    "remote",
    "engine",
    "widgets",
    "session",
    "loaded_run",
    "launching",
    "comparison",
    "compat",
    "zoo",
    "magics",
    "pytest_plugin",
    "demo",
    "doctor",
    "__main__",
    "__init__",
]

# (importer, imported): why this one may go against the order.
EXCEPTIONS = {
    ("graftlab.transforms.spec", "graftlab"): "the namespace of a transform's source has `gl` in it",
    ("graftlab.ranks.namespace", "graftlab"): "the namespace in which cells run has `gl` in it",
    ("graftlab.taps.operation_names", "graftlab.lines.frames"): "it needs the stack alone, and frames imports no room",
    ("graftlab.demo", "graftlab"): "the demo is a user of the package",
}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Every node of a file that matters here, in any order."""
    return [node for node in ast.walk(parsed(path)) if isinstance(node, _THAT_MATTER)]


_THAT_MATTER = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.ExceptHandler, ast.Call)


def imports_of(module: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Every module of the package that this one names in an import statement, wherever that stands."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}, line {node.lineno}: imports are written out, from graftlab on"
            base = node.module or ""
            found.update(f"{base}.{a.name}" if f"{base}.{a.name}" in known else base for a in node.names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name for name in found if name.partition(".")[0] == "graftlab"} - {module}


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    known = modules()
    return {
        module: {name for name in imports_of(module, path, known) if (module, name) not in EXCEPTIONS}
        for module, path in known.items()
    }


def test_every_room_stands_in_the_order(graph: dict[str, set[str]]) -> None:
    assert {room_of(module) for module in graph} == set(ROOMS)


def test_rooms_import_one_way(graph: dict[str, set[str]]) -> None:
    height = {room: number for number, room in enumerate(ROOMS)}
    wrong = [
        f"{module} imports {name}, which stands above it"
        for module, names in graph.items()
        for name in names
        if height[room_of(name)] > height[room_of(module)]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_file_is_in_a_circle(graph: dict[str, set[str]]) -> None:
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way[way.index(module) :], module))
        if module not in done:
            for name in sorted(graph.get(module, ())):
                visit(name, (*way, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_the_exceptions_are_still_needed() -> None:
    known = modules()
    unused = [pair for pair in EXCEPTIONS if pair[1] not in imports_of(pair[0], known[pair[0]], known)]
    assert not unused


def test_no_class_name_occurs_twice() -> None:
    places: dict[str, list[str]] = {}
    for module, path in modules().items():
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


# What has a life: it is filled or moved on while it exists. All other dataclasses and structs are values.
MUTABLE = {
    "AlignedTaps",
    "AttentionOutput",
    "Cache",
    "GraphSlot",
    "LiveRequest",
    "MatchRecord",
    "ModelOutput",
    "Naming",
    "Opaque",
    "OpenRequest",
    "Peer",
    "Receipt",
    "RecordedTap",
    "SelfGraft",
    "SessionInternals",
    "Site",
    "WantedTaps",
    "_Atom",
    "_Chunk",
    "_ForwardedPair",
    "_KnownShare",
    "_OutgoingTensor",
    "_Side",
    "_Storage",
    "TracedCall",
}


def test_values_are_frozen() -> None:
    """They are shared, and keys of dicts and caches."""
    mutable = set()
    for path in modules().values():
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                makers = [each for each in node.decorator_list if "dataclass" in ast.unparse(each)]
                if any(ast.unparse(base).endswith("Struct") for base in node.bases):
                    makers = [ast.Call(ast.Name("Struct"), [], node.keywords)]
                if makers and "frozen=True" not in ast.unparse(makers[0]):
                    mutable.add(node.name)
    assert mutable == MUTABLE


def test_frames_and_messages_refuse_unknown_fields() -> None:
    """A field that the reader does not know comes from another version, which the handshake should have refused."""
    bases = {"Frame", "Message", "HandshakeMessage"}
    open_to_unknown = set()
    for module, path in modules().items():
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Struct") for base in node.bases):
                if "forbid_unknown_fields=True" in ast.unparse(node):
                    bases.discard(node.name)
                elif room_of(module) in ("exchange", "ranks", "plan", "remote"):
                    open_to_unknown.add(node.name)
    assert not bases | open_to_unknown


# How many handlers of each room take any error: those of the user's own code, of damaged or foreign data, of threads
# that must continue, and of graftlab itself in a user's job. Each other handler names the errors that it expects.
OF_ANY_ERROR = {
    "base": 6,
    "comparison": 2,
    "control": 2,
    "diffs": 1,
    "engine": 2,
    "exchange": 5,
    "filters": 8,
    "grafting": 9,
    "graphs": 3,
    "jobs": 7,
    "judging": 1,
    "lines": 2,
    "ranks": 19,
    "recordings": 3,
    "remote": 4,
    "requests": 14,
    "taps": 2,
    "transforms": 3,
    "widgets": 6,
}


def test_only_a_few_handlers_take_any_error() -> None:
    """Elsewhere a defect is not reported as the error that is expected there."""
    found: Counter[str] = Counter()
    for module, path in modules().items():
        for node in nodes_of(path):
            caught = node.args if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "suppress" else []
            if isinstance(node, ast.ExceptHandler) and not _raises_again(node):
                caught = [node.type or ast.Name("BaseException")]
            names = {each.id for one in caught for each in ast.walk(one) if isinstance(each, ast.Name)}
            found[room_of(module)] += bool(names & {"Exception", "BaseException"})
    assert {room: count for room, count in found.items() if count} == OF_ANY_ERROR


def _raises_again(handler: ast.ExceptHandler) -> bool:
    return isinstance(handler.body[-1], ast.Raise) and handler.body[-1].exc is None


# What torch makes on the default device, if no other is given.
MADE_BY_TORCH = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint"),
    *("randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
}


def test_every_new_tensor_has_a_device() -> None:
    """Code that calls ``torch.set_default_device("cuda")`` runs in the same process."""
    found = [
        f"{module}:{node.lineno}"
        for module, path in modules().items()
        for node in nodes_of(path)
        if room_of(module) != "zoo" and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch" and node.func.attr in MADE_BY_TORCH
        if not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]
    assert not found


def test_no_thread_keeps_a_process_alive() -> None:
    """A script that forgets to close a session ends nevertheless, and so does a job."""
    staying = []
    for module, path in modules().items():
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("threading.Thread", "Thread"):
                given = {each.arg: ast.unparse(each.value) for each in node.keywords}
                if given.get("daemon") != "True":
                    staying.append((module, given.get("name")))
    assert staying == []


def test_every_program_is_started_in_its_own_session_and_apart_from_the_terminal() -> None:
    """An interrupt of the terminal reaches the notebook alone, and no program takes its input or output."""
    apart = {"stdin", "stdout", "stderr", "start_new_session"}
    near = []
    for module, path in modules().items():
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("subprocess.Popen", "Popen"):
                given = {str(each.arg): ast.unparse(each.value) for each in node.keywords}
                if apart - given.keys() or given["start_new_session"] != "True":
                    near.append(module)
    assert near == []


def test_every_file_that_is_made_by_its_descriptor_is_its_owners_alone() -> None:
    """What a model prints and what requests hold is not for other users of the machine."""
    open_to_all = []
    for module, path in modules().items():
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "os.open" and "O_CREAT" in ast.unparse(node):
                modes = [ast.literal_eval(each) for each in node.args[2:]]
                # A recording is made to be shared.
                if room_of(module) != "recordings" and modes != [0o600]:
                    open_to_all.append(f"{module}:{node.lineno}")
    assert open_to_all == []
