"""Filter expressions: a line of Python over a tap's tags, checked once and turned into a predicate.

    search('attn', name) and layer < 4 and step == 0

Nothing is ever evaluated as code. The text is parsed to a syntax tree. Each node must be on the list below, and the
tree becomes nested closures over the mapping of tags:

* a name is a tag; a tag that is absent is ``None``; a ``recompute_status`` of ``"original"`` also equals
  ``"disabled"``, unless checkpointing will repeat that forward pass;
* constants (text, numbers, ``True``, ``False``, ``None``) and tuples, lists and sets of expressions;
* ``and``, ``or``, ``not`` and ``a if test else b``;
* ``==``, ``!=``, ``is``, ``is not``, ``in``, ``not in`` as in Python, also with ``None``: a tag that is absent is
  ``not in (1, 2)``;
* ``<``, ``<=``, ``>``, ``>=``: false when either side is ``None``, so that their ``not`` is true;
* a comparison that Python cannot carry out, such as ``'x' in None``, is false; ``!=`` is true;
* ``+``, ``-``, ``*``, ``/``, ``//``, ``%`` on numbers; on anything else, or for a division by zero, ``None``;
* ``search(pattern, value)``, ``match(pattern, value)``, ``fullmatch(pattern, value)``: the functions of `re`, with a
  match or ``None`` as result; ``None`` for ``None``. A value that is not text is matched as ``str(value)``. A match has
  its groups: ``search(...).group(1)``, ``search(...)[1]``; both are ``None`` without a match.

Anything else is refused when the filter is made, with the position in the text. A compiled filter never raises on a
rank, whatever the tags contain.
"""

from __future__ import annotations

import ast
import difflib
import numbers
import operator
import re
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NoReturn

from graftlab.base.sources import parse_expression
from graftlab.base.text import counted
from graftlab.errors import FilterError
from graftlab.filters.functions import FUNCTIONS, METHODS, call_method, item_or_slice, items_of
from graftlab.filters.patterns import bounded

Tags = Mapping[str, object]
Evaluate = Callable[[Tags], Any]
Compare = Callable[[Any, Any], bool]
Find = Callable[[str], object]

HELPERS = ("search", "match", "fullmatch")
"""The functions that a filter may call; their names cannot be used as tags."""

MAX_LENGTH = 10_000
"""Characters in an expression. A longer one is a paste into the wrong field."""

MAX_DEPTH = 100
"""Levels of nesting, so that a compiled filter cannot exhaust the stack of a rank."""


@dataclass(frozen=True)
class Filter:
    """A compiled filter expression: immutable, equal and hashable by its text, pickled as its text.

    ``text`` is the expression as it was written and ``names`` the tags that it mentions. A blank text matches
    nothing. Raises `FilterError`, with the position of the fault, for a text that is not a filter expression.
    """

    text: str
    names: frozenset[str] = field(init=False, compare=False)
    _evaluate: Evaluate = field(init=False, compare=False)

    def __post_init__(self) -> None:
        evaluate, names = _compile(self.text)
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "_evaluate", evaluate)

    def matches(self, tags: Tags) -> bool:
        """Whether ``tags`` satisfy the expression. Never raises."""
        return _truth(self._evaluate(tags))

    def may_match(self, path: str) -> bool:
        """Whether a tap whose name begins with ``path`` may satisfy the expression, whatever its other tags."""
        if not self.text.strip():
            return False
        return True in _possible_truths(parse_expression(f"({self.text}\n)"), path)

    def __reduce__(self) -> tuple[type[Filter], tuple[str]]:
        return Filter, (self.text,)

    def __repr__(self) -> str:
        return f"Filter({self.text!r})"


def compile_filter(expression: str | None) -> Filter:
    """Compile a filter expression; ``None`` and blank text give a filter that matches nothing.

    >>> compile_filter("search('attn', name) and layer < 4").matches({"name": "attn_out", "layer": 3})
    True

    Raises `FilterError` (a `ValueError`), which names the fault, its position, and what to write instead.
    """
    if expression is not None and not isinstance(expression, str):
        kind = type(expression).__name__
        raise FilterError(f"a filter is text, not {kind}; write it in quotes, for example \"name == 'attn_out'\"")
    return Filter(expression or "")


# -- from text to a checked tree --------------------------------------------------------------------------------------

_STRING_COMMENT_OR_BRACKET = re.compile(
    r"""
    '{3}(?:\\.|(?!'{3}).)*'{3} | "{3}(?:\\.|(?!"{3}).)*"{3}
    | '(?:\\.|[^'\\\r\n])*' | "(?:\\.|[^"\\\r\n])*"
    | \#[^\r\n]*
    | [()\[\]{}'"]
    """,
    re.VERBOSE | re.DOTALL,
)
_LINE_END = re.compile(r"\r\n?|\n")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}


def _compile(text: str) -> tuple[Evaluate, frozenset[str]]:
    if not text.strip():
        return _nothing, frozenset()
    _check_characters(text)
    _check_brackets(text)
    # The parentheses let an expression run over several lines; the text's own brackets are balanced, so it cannot
    # take the closing one. The newline ends a comment on the last line.
    compiler = _Compiler(text, f"({text}\n)")
    try:
        root = parse_expression(compiler.source)
        if isinstance(root, ast.Tuple) and compiler.offset(root) < 0:
            if not root.elts:
                return _nothing, frozenset()  # nothing but a comment
            compiler.refuse(root, "a comma makes a tuple, which always matches; write 'and' or 'or'")
        return compiler.build(root), frozenset(compiler.names)
    except FilterError:
        raise
    except SyntaxError as error:
        raise compiler.syntax_error(error) from None
    except (RecursionError, MemoryError, ValueError):
        raise FilterError("the expression is nested too deeply; split it up", text, 0) from None


def _nothing(tags: Tags) -> bool:
    return False


def _check_characters(text: str) -> None:
    if len(text) > MAX_LENGTH:
        found = f"the expression has {len(text)} characters, and a filter at most {MAX_LENGTH}"
        raise FilterError(f"{found}; write a condition such as layer < 4", text, MAX_LENGTH)
    if "\0" in text:
        raise FilterError("the expression contains a null character; delete it", text, text.index("\0"))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise FilterError("the expression contains half a surrogate pair; delete it", text, error.start) from None


def _check_brackets(text: str) -> None:
    """Refuse unbalanced brackets, which Python reports differently in each release, and rarely at the right place."""
    opened: list[tuple[str, int]] = []
    for found in _STRING_COMMENT_OR_BRACKET.finditer(text):
        lexeme, position = found.group(), found.start()
        fault = ""
        if lexeme in ("'", '"'):
            fault = f"this string is never closed; write {lexeme} at its end"
        elif lexeme in _CLOSERS:
            opened.append((lexeme, position))
            if len(opened) > MAX_DEPTH:
                fault = f"brackets are nested more than {MAX_DEPTH} deep; split the expression up"
        elif lexeme in _CLOSERS.values():
            opener = opened.pop()[0] if opened else ""
            if not opener:
                fault = f"this {lexeme} closes nothing; delete it, or open it before"
            elif lexeme != _CLOSERS[opener]:
                fault = f"this {lexeme} closes a {opener}; write {_CLOSERS[opener]}"
        if fault:
            raise FilterError(fault, text, position)
    if opened:
        opener, position = opened[-1]
        raise FilterError(f"this {opener} is never closed; write {_CLOSERS[opener]}", text, position)


# -- from the tree to closures ----------------------------------------------------------------------------------------

_NO_COMPREHENSION = "comprehensions are not allowed; write the values out, as in layer in (1, 2, 3)"
_REFUSED: dict[type[ast.AST], str] = {
    ast.Attribute: "attributes are not allowed; name a tag, and test its text with search('pattern', tag)",
    ast.Lambda: "lambda is not allowed; write the condition itself",
    ast.ListComp: _NO_COMPREHENSION,
    ast.SetComp: _NO_COMPREHENSION,
    ast.DictComp: _NO_COMPREHENSION,
    ast.GeneratorExp: "a generator is only allowed as the one argument of any() or all()",
    ast.Slice: "a slice is only allowed alone, as in name[:4]",
    ast.NamedExpr: "':=' is not allowed; write '==' to compare",
    ast.JoinedStr: "f-strings are not allowed; write a plain string",
    ast.Starred: "'*' in front of a value is not allowed; write the values out",
    ast.Dict: "dicts are not allowed; write a tuple, list or set",
    ast.Pow: "'**' is not allowed; write the number itself",
    ast.MatMult: "'@' is not allowed; write '*' to multiply",
    ast.LShift: "'<<' is not allowed; write '<' to compare",
    ast.RShift: "'>>' is not allowed; write '>' to compare",
    ast.BitAnd: "'&' is not allowed; write 'and'",
    ast.BitOr: "'|' is not allowed; write 'or'",
    ast.BitXor: "'^' is not allowed; write '!='",
    ast.Invert: "'~' is not allowed; write 'not'",
}
# What other languages write, and what Python writes for it.
_FOREIGN_OPERATOR = re.compile(r"&&|\|\||(?<![=!<>:])=(?!=)|!(?!=)")
_OWN_OPERATOR = {"&&": "and", "||": "or", "=": "==", "!": "not"}
_USAGE = "search('pattern', tag), match('pattern', tag) or fullmatch('pattern', tag)"


class _Compiler:
    """Turns the nodes of one expression into closures, and knows each node's position in the text."""

    def __init__(self, text: str, source: str) -> None:
        self.text = text
        self.source = source  # the text after one added character
        self.names: set[str] = set()
        self._bound = ""  # the variable of the generator being compiled
        self._line_starts = [0, *(found.end() for found in _LINE_END.finditer(source))]

    def offset(self, node: ast.AST) -> int:
        """Return ``node``'s start in the text, in characters (`ast` counts UTF-8 bytes); -1 is the added character."""
        start = self._line_starts[getattr(node, "lineno", 1) - 1]
        column = getattr(node, "col_offset", 0)
        # A character has at least one byte, so this slice covers all the bytes in question.
        return start + len(self.source[start : start + column].encode()[:column].decode(errors="ignore")) - 1

    def refuse(self, node: ast.AST, message: str) -> NoReturn:
        position = self.offset(node)
        raise FilterError(message, self.text, position if position >= 0 else self._first_character())

    def syntax_error(self, error: SyntaxError) -> FilterError:
        line = min(max(error.lineno or 1, 1), len(self._line_starts)) - 1
        position = self._line_starts[line] + max(error.offset or 1, 1) - 2
        position = min(max(position, self._first_character()), len(self.text))
        if not self.text[position:].strip():
            return FilterError("the expression ends too early; finish it", self.text, len(self.text.rstrip()))
        strings_blanked = _STRING_COMMENT_OR_BRACKET.sub(lambda found: " " * len(found.group()), self.text)
        foreign = _FOREIGN_OPERATOR.search(strings_blanked)
        if foreign:
            message = f"{foreign.group()!r} is not an operator here; write {_OWN_OPERATOR[foreign.group()]!r}"
            return FilterError(message, self.text, foreign.start())
        if "comma" in error.msg:  # Python suggests a comma, which would make a tuple
            return FilterError("two values side by side; write 'and' or 'or' between them", self.text, position)
        message = f"not a Python expression ({error.msg}); write a condition such as layer < 4"
        return FilterError(message, self.text, position)

    def _first_character(self) -> int:
        return len(self.text) - len(self.text.lstrip())

    def build(self, node: ast.expr, depth: int = 0) -> Evaluate:
        if depth > MAX_DEPTH:
            self.refuse(node, f"more than {MAX_DEPTH} levels of nesting; split the expression up")
        build = getattr(self, f"_build_{type(node).__name__}", None)
        if build is None:
            default = f"{type(node).__name__} is not allowed; write a condition such as layer < 4"
            self.refuse(node, _REFUSED.get(type(node), default))
        evaluate: Evaluate = build(node, depth + 1)
        return evaluate

    def _build_Name(self, node: ast.Name, depth: int) -> Evaluate:
        name = node.id
        if name in HELPERS:
            self.refuse(node, f"{name} is a helper, not a tag; write {name}('pattern', tag)")
        if name != self._bound:
            self.names.add(name)
        if name == "recompute_status":
            return lambda tags: (
                UnrepeatedStatus() if type(found := tags.get(name)) is str and found == "original" else found
            )
        return lambda tags: tags.get(name)

    def _build_Constant(self, node: ast.Constant, depth: int) -> Evaluate:
        value = node.value
        if value is not None and not isinstance(value, str | int | float):
            self.refuse(node, f"{value!r} is not allowed; write text, an int, a float, True, False or None")
        return lambda tags: value

    def _build_collection(self, node: ast.Tuple | ast.List | ast.Set, depth: int) -> Evaluate:
        items = [self.build(item, depth) for item in node.elts]
        kind = {ast.Tuple: tuple, ast.List: list, ast.Set: set}[type(node)]

        def collect(tags: Tags) -> Any:
            try:
                return kind([item(tags) for item in items])
            except TypeError:  # an unhashable value in a set
                return None

        return collect

    _build_Tuple = _build_List = _build_Set = _build_collection

    def _build_BoolOp(self, node: ast.BoolOp, depth: int) -> Evaluate:
        *parts, last = [self.build(value, depth) for value in node.values]
        decisive = isinstance(node.op, ast.Or)  # the value at which `or`, respectively `and`, stops

        def decide(tags: Tags) -> Any:
            for part in parts:
                value = part(tags)
                if _truth(value) is decisive:
                    return value
            return last(tags)

        return decide

    def _build_IfExp(self, node: ast.IfExp, depth: int) -> Evaluate:
        test, body, otherwise = (self.build(part, depth) for part in (node.test, node.body, node.orelse))
        return lambda tags: body(tags) if _truth(test(tags)) else otherwise(tags)

    def _build_Compare(self, node: ast.Compare, depth: int) -> Evaluate:
        self._refuse_match_as_boolean(node)
        first = self.build(node.left, depth)
        operands = [self.build(operand, depth) for operand in node.comparators]
        links = list(zip((_COMPARISONS[type(op)] for op in node.ops), operands, strict=True))

        def compare(tags: Tags) -> bool:
            left = first(tags)
            for holds, operand in links:
                right = operand(tags)
                if not holds(left, right):
                    return False
                left = right
            return True

        return compare

    def _refuse_match_as_boolean(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for one, other in [*pairwise(operands), *pairwise(operands[::-1])]:
            called = isinstance(one, ast.Call) and isinstance(one.func, ast.Name) and one.func.id in HELPERS
            if called and isinstance(other, ast.Constant) and isinstance(other.value, bool):
                self.refuse(other, "a match is never True or False; write the call alone, with 'not', or 'is None'")

    def _build_UnaryOp(self, node: ast.UnaryOp, depth: int) -> Evaluate:
        if isinstance(node.op, ast.Invert):
            self.refuse(node, _REFUSED[ast.Invert])
        operand = self.build(node.operand, depth)
        if isinstance(node.op, ast.Not):
            return lambda tags: not _truth(operand(tags))
        sign = operator.neg if isinstance(node.op, ast.USub) else operator.pos
        return lambda tags: _calculate(sign, operand(tags))

    def _build_BinOp(self, node: ast.BinOp, depth: int) -> Evaluate:
        if type(node.op) not in _ARITHMETIC:
            self.refuse(node, _REFUSED[type(node.op)])
        apply, left, right = _ARITHMETIC[type(node.op)], self.build(node.left, depth), self.build(node.right, depth)
        return lambda tags: _calculate(apply, left(tags), right(tags))

    def _build_Subscript(self, node: ast.Subscript, depth: int) -> Evaluate:
        value = self.build(node.value, depth)
        if not isinstance(node.slice, ast.Slice):
            key = self.build(node.slice, depth)
            return lambda tags: item_or_slice(value(tags), key(tags))
        bounds = [
            None if part is None else self.build(part, depth)
            for part in (node.slice.lower, node.slice.upper, node.slice.step)
        ]
        return lambda tags: item_or_slice(value(tags), slice(*(part and part(tags) for part in bounds)))

    def _build_Call(self, node: ast.Call, depth: int) -> Evaluate:
        if isinstance(node.func, ast.Attribute):
            return self._build_method(node, node.func, depth)
        if not isinstance(node.func, ast.Name):
            self.refuse(node.func, _REFUSED.get(type(node.func), f"only a helper can be called; write {_USAGE}"))
        helper = node.func.id
        if helper in FUNCTIONS:
            return self._build_function(node, helper, depth)
        if helper not in HELPERS:
            close = difflib.get_close_matches(helper, (*HELPERS, *FUNCTIONS), n=1)
            instead = f"did you mean {close[0]!r}?" if close else f"write {_USAGE}"
            self.refuse(node, f"{helper!r} is not a helper, and tags cannot be called; {instead}")
        if node.keywords:
            self.refuse(node.keywords[0], f"keyword arguments are not allowed; write {helper}('pattern', tag)")
        arguments = [self.build(argument, depth) for argument in node.args]
        if len(arguments) != 2:
            self.refuse(
                node, f"{counted(len(arguments), 'argument')}, not a pattern and a tag; write {helper}('pattern', tag)"
            )
        pattern, value = arguments
        if isinstance(node.args[0], ast.Constant):
            find = self._compiled_pattern(node.args[0], helper)
            return lambda tags: _found(lambda: find, value(tags))
        return lambda tags: _found(lambda: bounded(pattern(tags), helper), value(tags))

    def _build_method(self, node: ast.Call, function: ast.Attribute, depth: int) -> Evaluate:
        name = function.attr
        if name not in METHODS:
            self.refuse(node, f"{name!r} is not a method that filters have; the methods are {', '.join(METHODS)}")
        if node.keywords:
            self.refuse(node.keywords[0], f"keyword arguments are not allowed; write them by position in {name}()")
        value, arguments = self.build(function.value, depth), [self.build(each, depth) for each in node.args]
        return lambda tags: call_method(name, value(tags), [each(tags) for each in arguments])

    def _build_function(self, node: ast.Call, name: str, depth: int) -> Evaluate:
        function, fewest, most = FUNCTIONS[name]
        if node.keywords:
            self.refuse(node.keywords[0], f"keyword arguments are not allowed; write them by position in {name}()")
        if not fewest <= len(node.args) <= most:
            expected = str(fewest) if fewest == most else f"{fewest} to {most}"
            self.refuse(node, f"{name}() has {counted(len(node.args), 'argument')}, not {expected}")
        if name in ("any", "all") and isinstance(node.args[0], ast.GeneratorExp):
            return self._build_generator(node.args[0], any if name == "any" else all, depth)
        arguments = [self.build(each, depth) for each in node.args]
        return lambda tags: function(*(each(tags) for each in arguments))

    def _build_generator(self, node: ast.GeneratorExp, decide: Callable[..., bool], depth: int) -> Evaluate:
        (loop, *others), outer = node.generators, self._bound
        if others or outer:
            self.refuse(node, "nested generators are not allowed; write out the values of the outer one")
        if loop.is_async or not isinstance(loop.target, ast.Name) or loop.target.id in HELPERS:
            self.refuse(loop.target, "a generator has one variable, as in any(part in name for part in ('q', 'k'))")
        if not _is_simple(loop.iter):
            self.refuse(loop.iter, "a generator iterates over a tag, values written out, a range or a split text")
        values = self.build(loop.iter, depth)
        self._bound = variable = loop.target.id
        element, tests = self.build(node.elt, depth), [self.build(test, depth) for test in loop.ifs]
        self._bound = ""

        def evaluate(tags: Tags) -> bool | None:
            items = items_of(values(tags))
            if items is None:
                return None
            scopes = (ChainMap({variable: item}, tags) for item in items)  # type: ignore[arg-type]
            return decide(_truth(element(scope)) for scope in scopes if all(_truth(test(scope)) for test in tests))

        return evaluate

    def _compiled_pattern(self, node: ast.Constant, helper: str) -> Find:
        if not isinstance(node.value, str):
            self.refuse(node, f"the pattern is {node.value!r}, not text; write {helper}('pattern', tag)")
        try:
            find: Find = bounded(node.value, helper)
        except FilterError as error:
            self.refuse(node, error.message)
        except (re.error, OverflowError, RecursionError) as error:
            self.refuse(node, f"bad pattern ({error}); correct it, or write a backslash before a special character")
        return find


def _is_simple(node: ast.expr) -> bool:
    """Whether a generator may iterate over this."""
    if isinstance(node, ast.Call):
        function = node.func
        is_range = isinstance(function, ast.Name) and function.id == "range"
        return is_range or (isinstance(function, ast.Attribute) and function.attr == "split")
    return isinstance(node, ast.Name | ast.Constant | ast.Tuple | ast.List | ast.Set)


# -- what a name's beginning excludes ---------------------------------------------------------------------------------

_EITHER = frozenset((True, False))


def _possible_truths(node: ast.expr, path: str) -> frozenset[bool]:
    """Return the results that a condition may have for names that begin with ``path``."""
    if isinstance(node, ast.BoolOp):
        parts = [_possible_truths(value, path) for value in node.values]
        decisive = isinstance(node.op, ast.Or)
        rest = [not decisive] if all((not decisive) in part for part in parts) else []
        return frozenset([*([decisive] if any(decisive in part for part in parts) else []), *rest])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return frozenset(not each for each in _possible_truths(node.operand, path))
    if isinstance(node, ast.Constant):
        return frozenset((bool(node.value),))
    if isinstance(node, ast.Tuple) and not node.elts:
        # What a comment alone leaves.
        return frozenset((False,))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        names = _constants(node.left, node.ops[0], node.comparators[0])
        if names is not None and not any(isinstance(name, str) and name.startswith(path) for name in names):
            return frozenset((isinstance(node.ops[0], (ast.NotEq, ast.NotIn)),))
    return _EITHER


def _constants(left: ast.expr, op: ast.cmpop, right: ast.expr) -> list[object] | None:
    """Return the constants that a comparison compares a tap's name with; None for any other comparison."""
    if isinstance(op, (ast.Eq, ast.NotEq)):
        if isinstance(left, ast.Constant):
            left, right = right, left
        items = [right]
    elif isinstance(op, (ast.In, ast.NotIn)) and isinstance(right, (ast.Tuple, ast.List, ast.Set)):
        items = right.elts
    else:
        return None
    if not (isinstance(left, ast.Name) and left.id == "name"):
        return None
    found: list[object] = [item.value for item in items if isinstance(item, ast.Constant)]
    return found if len(found) == len(items) else None


class UnrepeatedStatus(str):
    """The status of a forward pass that is not repeated. Outside checkpointing other kits call it ``"disabled"``."""

    def __new__(cls) -> UnrepeatedStatus:
        return super().__new__(cls, "original")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str(other) in ("original", "disabled")

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class CheckpointedStatus(str):
    """The status of a forward pass that checkpointing will repeat: ``"original"``, and not ``"disabled"``."""


def _contains(item: Any, items: Any) -> bool:
    # A set looks up by hash, and this text may equal a different one.
    return item in (tuple(items) if type(item) is UnrepeatedStatus and isinstance(items, set) else items)


# -- operations on values, which never raise --------------------------------------------------------------


def _truth(value: object) -> bool:
    try:
        return bool(value)
    except Exception:  # such as an array with several elements, which is neither true nor false
        return False


def _guarded(compare: Compare, if_it_raises: bool = False) -> Compare:
    def holds(left: Any, right: Any) -> bool:
        try:
            return bool(compare(left, right))
        except Exception:  # a tag can hold anything, so its comparison can raise anything
            return if_it_raises

    return holds


def _unless_absent(compare: Compare) -> Compare:
    holds = _guarded(compare)
    return lambda left, right: left is not None and right is not None and holds(left, right)


_COMPARISONS: dict[type[ast.cmpop], Compare] = {
    ast.Eq: _guarded(operator.eq),
    ast.NotEq: _guarded(operator.ne, if_it_raises=True),
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Lt: _unless_absent(operator.lt),
    ast.LtE: _unless_absent(operator.le),
    ast.Gt: _unless_absent(operator.gt),
    ast.GtE: _unless_absent(operator.ge),
    ast.In: _guarded(_contains),
    ast.NotIn: _guarded(lambda item, items: not _contains(item, items)),
}

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _calculate(apply: Callable[..., Any], *operands: object) -> Any:
    if not all(isinstance(operand, numbers.Number) for operand in operands):
        return None
    try:
        return apply(*operands)
    except Exception:  # division by zero, overflow, or a class of numbers without this operation
        return None


def _found(compiled: Callable[[], Find], value: object) -> object:
    if value is None:
        return None
    try:
        return compiled()(value if isinstance(value, str) else str(value))
    except FilterError:  # the search ran out of time, so the result is unknown
        raise
    except Exception:  # a pattern from a tag that is not a regex, or a value whose str() raises
        return None
