"""``make_converter``: writes the source of a function that converts one model's weights to another's."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping, Sequence

import torch

from graftlab.base.text import first_of
from graftlab.errors import MatchError
from graftlab.layouts import Layout, Part, Rearrange, Scale, Step, Strided, Window
from graftlab.matching.names import numbers_of
from graftlab.matching.pair import Pair

_HEAD = '''{imports}


def {name}(state):
    """Make the target's state dict from the baseline's."""
    new = {{}}
'''


Name = tuple[str, str]
"""A parameter: its side, and its name there."""


def converter(
    pairs: Sequence[Pair],
    problems: Sequence[str],
    unmatched: Iterable[str],
    shapes: Mapping[Name, tuple[int, ...]],
    dtypes: Mapping[Name, torch.dtype],
    name: str,
) -> str:
    """See :func:`graftlab.make_converter`; ``shapes`` and ``dtypes`` are those of both sides' parameters."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise MatchError(f"{name!r} is not a valid function name; give one such as 'convert'")
    missing = list(unmatched)
    if missing:
        raise MatchError(
            f"a converter cannot make {first_of(missing, 5)}: no partner was found. match.unmatched_target has the "
            "reason for each"
        )
    made: dict[str, list[Pair]] = {}
    for pair in pairs:
        made.setdefault(pair.target, []).append(pair)
    written = {target: _assigned(target, of_it, shapes, dtypes) for target, of_it in made.items()}
    lines: list[str] = []
    looped: range | None = None
    for group in _loops(written):
        code = written[group[0]]
        comments = [f"# {text}" for target in group for text in problems if text.startswith(f"{target} ")]
        if len(group) == 1:
            looped = None
            lines += [f"    {line}" for line in (*comments, code)]
            continue
        layers = range(numbers_of(group[0])[0], numbers_of(group[-1])[0] + 1)
        if layers != looped:
            lines.append(f"    for n in range({layers.start}, {layers.stop}):")
        looped = layers
        lines += [f"        {line}" for line in (*comments, _indexed(code, layers.start))]
    imports = ["import torch"]
    if any("join_parts" in line for line in lines):
        imports += ["", "from graftlab.layouts import join_parts, parse_layout"]
    head = _HEAD.format(imports="\n".join(imports), name=name)
    return head + "\n".join([*lines, "    return new", ""])


def _assigned(
    target: str,
    pairs: Sequence[Pair],
    shapes: Mapping[Name, tuple[int, ...]],
    dtypes: Mapping[Name, torch.dtype],
) -> str:
    if pairs[0].whole == "baseline":
        pair = pairs[0]
        code = f"state[{pair.baseline!r}]{_code(pair.layout, shapes['baseline', pair.baseline])}"
        if pair.layout.steps:
            code += ".contiguous()"
    else:
        code = _fused(pairs, shapes["target", target])
    dtype = dtypes["target", target]
    if any(dtypes["baseline", pair.baseline] != dtype for pair in pairs):
        code += f".to({dtype})"
    return f"new[{target!r}] = {code}"


def _fused(pairs: Sequence[Pair], shape: Sequence[int]) -> str:
    """Code that fuses several parameters into one."""
    parts = [pair.layout.steps[0] for pair in pairs if len(pair.layout.steps) == 1]
    plain = [part for part in parts if isinstance(part, Part) and part.groups == 1]
    if len(plain) == len(pairs) and len({part.dim for part in plain}) == 1:
        starts = [sum(part.of[: part.index]) / sum(part.of) for part in plain]
        widths = [part.of[part.index] / sum(part.of) for part in plain]
        if abs(sum(widths) - 1) < 1e-9:
            ordered = [pair.baseline for _, pair in sorted(zip(starts, pairs, strict=True), key=lambda each: each[0])]
            dim = f", dim={plain[0].dim}" if plain[0].dim else ""
            return f"torch.cat([{', '.join(f'state[{one!r}]' for one in ordered)}]{dim})"
    listed = ", ".join(f"(parse_layout({pair.layout.text!r}), [state[{pair.baseline!r}]])" for pair in pairs)
    return f"join_parts([{listed}], shape={tuple(shape)}).whole"


def _code(layout: Layout, shape: Sequence[int]) -> str:
    """The torch calls of a layout, as code to append to a tensor of this shape."""
    code = ""
    now = torch.empty(tuple(shape), device="meta")
    for step in layout.steps:
        code += _step_code(step, tuple(now.shape))
        now = Layout((step,)).local(now)
    return code


def _step_code(step: Step, shape: tuple[int, ...]) -> str:
    if isinstance(step, Rearrange):
        return step.torch_code(shape)
    if isinstance(step, Part):
        dim, extent = step.dim % len(shape), shape[step.dim]
        start, length = sum(step.of[: step.index]), step.of[step.index]
        each = extent // (sum(step.of) * step.groups)
        at = dim if step.groups == 1 else dim + 1
        if len(set(step.of)) == 1:
            taken = f".chunk({len(step.of)}, dim={at})[{step.index}]"
        else:
            taken = f".narrow({at}, {start * each}, {length * each})"
        if step.groups == 1:
            return taken
        return f".unflatten({dim}, ({step.groups}, {extent // step.groups})){taken}.flatten({dim}, {dim + 1})"
    if isinstance(step, Window):
        start = step.start + (shape[step.dim] if step.start < 0 else 0)
        return f"[{':, ' * step.dim}{start}:{start + step.length * step.step}:{step.step}]"
    if isinstance(step, Scale):
        return f".mul({step.factor!r})" + (f".add({step.add!r})" if step.add else "")
    if isinstance(step, Strided):
        strided = f".contiguous().as_strided({step.sizes}, {step.strides}, {step.offset})"
        return f"{strided}.reshape({step.shape})"
    raise MatchError(f"a converter cannot express the step {step.text}; convert this weight with your own code")


def _loops(written: dict[str, str]) -> list[list[str]]:
    """Groups of targets whose lines differ only in the first number of every name, in consecutive layers."""
    groups: dict[tuple[str, str], list[str]] = {}
    for target, code in written.items():
        numbers = numbers_of(target)
        groups.setdefault(("loop", _indexed(code, numbers[0])) if numbers else ("", target), []).append(target)
    loops = []
    for (kind, _), targets in groups.items():
        layers = [numbers_of(target)[0] for target in targets] if kind else []
        if len(targets) > 1 and layers == list(range(layers[0], layers[0] + len(layers))):
            loops.append(targets)
        else:
            loops += [[target] for target in targets]
    return loops


def _indexed(code: str, layer: int) -> str:
    """The line with ``n`` for the layer in names whose path contains it."""

    def name(found: re.Match[str]) -> str:
        text = found.group(1)
        replaced, count = re.subn(rf"(?<![^.]){layer}(?![^.])", "{n}", text, count=1)
        return f"[f'{replaced}']" if count else found.group(0)

    return re.sub(r"\['([^']*)'\]", name, code)
