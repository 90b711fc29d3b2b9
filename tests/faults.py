"""Realistic faults in Python code: what people forget, confuse or tidy away, as edits of one file.

Cosmic Ray swaps operators. These are the other mistakes: a guard that was dropped, a copy that looked superfluous, an
argument that was not passed on, a clean-up that was lost, a wrong unit or sign, the first in place of the last, a text
with another value or the wrong word.
"""

from __future__ import annotations

import ast
import bisect
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_COPYING_METHODS = {"clone", "contiguous", "copy", "detach"}
_COPYING_FUNCTIONS = {"list", "tuple", "dict", "set", "frozenset", "sorted", "bytes", "deepcopy"}
# Calls whose last positional argument is what they return for what is missing, by their number of arguments.
_DEFAULTING = {("get", 2), ("pop", 2), ("getattr", 3), ("next", 2)}
# Arguments without which a correct program does the same; None is that of ``**options``.
_SAFEGUARDS = (None, "strict", "maxsize", "stacklevel")
_WIDE = ("Exception", "BaseException")
_OPPOSITES = {"max": "min", "min": "max", "any": "all", "all": "any"}
# What a text may have confused, both ways.
_CONFUSED = [
    *(("first", "last"), ("baseline", "target"), ("at least", "at most"), ("before", "after"), ("more", "less")),
    *(("rank", "side"), ("row", "column"), ("step", "call"), ("can", "cannot"), ("above", "below")),
]
_UNITS = {60, 100, 1000, 1024, 3600, 1e6, 1e9, 1e-3, 1e-6, 1e-9}


@dataclass(frozen=True)
class Fault:
    """One edit of a file: the bytes from ``start`` to ``end`` become ``text``."""

    kind: str
    path: Path
    line: int
    start: int
    end: int
    text: str

    def applied(self) -> str:
        """The file's text with the fault in it."""
        source = self.path.read_bytes()
        return (source[: self.start] + self.text.encode() + source[self.end :]).decode()


def faults_of(path: Path) -> list[Fault]:
    """All faults that can be put into a file, in the order of its lines; :func:`is_fault` drops those that are none."""
    source = path.read_bytes()
    finder = _Finder(path, source)
    for node in _code(ast.parse(source)):
        finder.look_at(node)
    return sorted(set(finder.found), key=lambda fault: (fault.start, fault.end, fault.text))


def is_fault(fault: Fault) -> bool:
    """Whether the file is still Python with the fault in it, and more than its parentheses differ."""
    try:
        return ast.dump(ast.parse(fault.applied())) != ast.dump(ast.parse(fault.path.read_bytes()))
    except SyntaxError:
        return False


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree without annotations, and without what only type checkers read."""
    yield tree
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns") or (isinstance(tree, ast.If) and _source(tree.test) == "TYPE_CHECKING"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST):
                yield from _code(node)


def _source(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


class _Finder:
    """Collects the faults of one file."""

    def __init__(self, path: Path, source: bytes) -> None:
        self.found: list[Fault] = []
        # Differences that count by their size alone.
        self._unsigned: set[ast.AST] = set()
        # Where the values of texts are: a text in an expression within a text is part of that text.
        self._texts: set[ast.AST] = set()
        self._path = path
        self._source = source
        # ast counts columns in bytes.
        self._lines = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]

    def look_at(self, node: ast.AST) -> None:
        """Add the faults that can be made at this node."""
        if isinstance(node, ast.If):
            if _source(node.test) != "TYPE_CHECKING":
                self._replace("branch", node.test, "False")
        elif isinstance(node, ast.IfExp):
            for kept in (node.body, node.orelse):
                self._replace("branch", node, self._text(kept))
        elif isinstance(node, ast.BoolOp):
            word = " and " if isinstance(node.op, ast.And) else " or "
            for dropped in node.values:
                rest = [self._text(each) for each in node.values if each is not dropped]
                self._replace("branch", node, word.join(rest))
        elif isinstance(node, ast.comprehension):
            for test in node.ifs:
                self._replace("branch", test, "True")
        elif isinstance(node, ast.Call):
            self._look_at_call(node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for default in [*node.args.defaults, *node.args.kw_defaults]:
                self._change_default(default)
        elif isinstance(node, ast.ClassDef):
            for each in node.body:
                self._change_default(each.value if isinstance(each, ast.AnnAssign) else None)
        elif isinstance(node, ast.Try) and node.finalbody:
            self._edit("cleanup", self._at(node.finalbody[0]), self._end(node.finalbody[-1]), "pass")
        elif (
            isinstance(node, ast.ExceptHandler)
            and node.type
            and _source(node.type) not in ("Exception", "BaseException")
        ):
            self._replace("cleanup", node.type, "Exception")
        elif isinstance(node, ast.BinOp):
            self._look_at_arithmetic(node)
        elif (
            isinstance(node, ast.UnaryOp)
            and isinstance(node.op, ast.USub)
            and not isinstance(node.operand, ast.Constant)
        ):
            self._replace("unit", node, self._text(node.operand))
        elif isinstance(node, ast.Subscript):
            self._look_at_ends(node)
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            self._look_at_comparison(node, node.ops[0])
        elif isinstance(node, (ast.JoinedStr, ast.Constant)) and node not in self._texts:
            self._look_at_text(node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            self._texts.add(node.value)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            self._replace("statement", node, "pass")

    def _look_at_call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else _source(node.func)
        if isinstance(node.func, ast.Attribute) and name in _COPYING_METHODS and not (node.args or node.keywords):
            self._replace("copy", node, self._text(node.func.value))
        one = (
            len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], (ast.GeneratorExp, ast.Starred))
        )
        if name in _COPYING_FUNCTIONS and one:
            self._replace("copy", node, self._text(node.args[0]))
        if name in _OPPOSITES and isinstance(node.func, ast.Name):
            self._replace("end", node.func, _OPPOSITES[name])
        if name == "abs" and one:
            self._unsigned.add(node.args[0])
            self._replace("unit", node, self._text(node.args[0]))
        arguments: list[ast.expr | ast.keyword] = sorted([*node.args, *node.keywords], key=self._at)
        for at, argument in enumerate(arguments):
            is_default = (name, len(node.args)) in _DEFAULTING and argument is node.args[-1]
            if is_default or (isinstance(argument, ast.keyword) and argument.arg not in _SAFEGUARDS):
                start = self._end(arguments[at - 1]) if at else self._at(argument)
                following = self._at(arguments[1]) if not at and len(arguments) > 1 else self._end(argument)
                self._edit("argument", start, following, "")

    def _look_at_arithmetic(self, node: ast.BinOp) -> None:
        left, right = node.left, node.right
        if isinstance(node.op, (ast.Mult, ast.Div, ast.FloorDiv)):
            if isinstance(right, ast.Constant) and right.value in _UNITS:
                self._replace("unit", node, self._text(left))
            if isinstance(left, ast.Constant) and left.value in _UNITS and isinstance(node.op, ast.Mult):
                self._replace("unit", node, self._text(right))
        elif isinstance(node.op, (ast.Add, ast.Sub)):
            if isinstance(right, ast.Constant) and right.value == 1:
                self._replace("end", node, self._text(left))
            elif isinstance(node.op, ast.Sub) and not isinstance(right, ast.Constant) and node not in self._unsigned:
                self._replace("unit", node, f"{self._text(right)} - {self._text(left)}")

    def _look_at_ends(self, node: ast.Subscript) -> None:
        index = node.slice
        if isinstance(index, ast.Constant) and index.value == 0 and not isinstance(index.value, bool):
            self._replace("end", index, "-1")
        elif isinstance(index, ast.UnaryOp) and isinstance(index.operand, ast.Constant) and index.operand.value == 1:
            self._replace("end", index, "0")
        elif isinstance(index, ast.Slice):
            for bound in (index.lower, index.upper):
                if bound is not None:
                    self._edit("end", self._at(bound), self._end(bound), "")

    def _look_at_comparison(self, node: ast.Compare, operator: ast.cmpop) -> None:
        of = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
        if type(operator) in of:
            left, right = self._text(node.left), self._text(node.comparators[0])
            self._replace("end", node, f"{left} {of[type(operator)]} {right}")

    def _look_at_text(self, node: ast.JoinedStr | ast.Constant) -> None:
        """Another value of the same text in place of one, and words that are confused."""
        if isinstance(node, ast.Constant) and not (isinstance(node.value, str) and " " in node.value):
            return
        self._texts.update(ast.walk(node))
        start, end = self._at(node), self._end(node)
        text = self._source[start:end]
        values = (
            list(re.finditer(rb"(?<!\{)\{([A-Za-z_][\w.]*)(?=[}:!])", text)) if isinstance(node, ast.JoinedStr) else []
        )
        for one, other in zip(values, [*values[1:], *values[:1]], strict=True):
            if one[1] != other[1]:
                self._edit("message", start + one.start(1), start + one.end(1), other[1].decode())
        for one_word, other_word in [*_CONFUSED, *((b, a) for a, b in _CONFUSED)]:
            for found in re.finditer(rf"\b{one_word}\b".encode(), text):
                self._edit("message", start + found.start(), start + found.end(), other_word)

    def _change_default(self, node: ast.expr | None) -> None:
        if not isinstance(node, ast.Constant):
            return
        if isinstance(node.value, bool):
            self._replace("argument", node, str(not node.value), parentheses=False)
        elif isinstance(node.value, (int, float)):
            self._replace("argument", node, repr(node.value * 2 or 1), parentheses=False)

    def _replace(self, kind: str, node: ast.AST, text: str, *, parentheses: bool = True) -> None:
        bare = not parentheses or text.isidentifier() or isinstance(node, ast.stmt) or text in ("-1", "0")
        self._edit(kind, self._at(node), self._end(node), text if bare else f"({text})")

    def _edit(self, kind: str, start: int, end: int, text: str) -> None:
        line = bisect.bisect_right(self._lines, start)
        self.found.append(Fault(kind, self._path, line, start, end, text))

    def _text(self, node: ast.AST) -> str:
        text = self._source[self._at(node) : self._end(node)].decode()
        return text if text.isidentifier() else f"({text})"

    def _at(self, node: ast.AST) -> int:
        return self._lines[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined,no-any-return]

    def _end(self, node: ast.AST) -> int:
        return self._lines[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined,no-any-return]
