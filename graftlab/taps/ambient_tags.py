"""The tags around taps: the blocks of ``gl.tags`` that a thread or task has open, and those that hold now.

A block in a generator holds while the generator runs, and not for its caller between two values.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType

from graftlab.base.tags import TagItems

ambient: ContextVar[TagItems] = ContextVar("graftlab_tags", default=())
"""The tags around a tap, after :func:`leave_out_suspended`."""


@dataclass(frozen=True, eq=False)
class _TagBlock:
    """An open ``with gl.tags(...)``.

    ``outside`` and ``shown_outside`` are what to restore at its end, ``base`` the tags outside all blocks.
    """

    given: TagItems
    generator: FrameType | None
    """The frame of the generator that opened it, if one did."""
    frame: FrameType | None
    """The same, where it holds only while that runs."""
    base: TagItems
    outside: TagItems
    shown_outside: tuple[_TagBlock, ...]

    @property
    def holds(self) -> bool:
        # A suspended generator has no caller.
        return self.frame is None or self.frame.f_back is not None


# The open blocks of this thread or task, outermost first, and those whose tags ``ambient`` has. They are no attributes
# of the object, because several threads may have entered that.
_blocks: ContextVar[tuple[_TagBlock, ...]] = ContextVar("graftlab_tag_blocks", default=())
_shown_blocks: ContextVar[tuple[_TagBlock, ...]] = ContextVar("graftlab_shown_tag_blocks", default=())
# The blocks that generators of any thread have open. Without any, the tags need not be looked at again at each tap.
in_generators: set[_TagBlock] = set()

_GENERATORS = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


def _generator_of(frame: FrameType) -> FrameType | None:
    """The frame, if it is a generator's."""
    return frame if frame.f_code.co_flags & _GENERATORS else None


def _is_for_its_caller(generator: FrameType) -> bool:
    """Whether contextlib makes this generator a context manager, which opens its tags for the caller."""
    caller = generator.f_back
    return caller is not None and caller.f_globals.get("__name__") == "contextlib"


def open_block(given: TagItems, opener: FrameType) -> None:
    """Add tags to the taps after this, for the function of this frame or its caller."""
    if in_generators:
        leave_out_suspended()
    before, blocks = ambient.get(), _blocks.get()
    generator = _generator_of(opener)
    frame = None if generator is None or _is_for_its_caller(generator) else generator
    block = _TagBlock(given, generator, frame, blocks[0].base if blocks else before, before, _shown_blocks.get())
    if frame is not None:
        in_generators.add(block)
    _blocks.set((*blocks, block))
    _shown_blocks.set((*block.shown_outside, block))
    ambient.set(tuple({**dict(before), **dict(given)}.items()))


def close_block(closer: FrameType) -> None:
    """Close the newest block that this generator opened, or the newest of no generator."""
    blocks, generator = _blocks.get(), _generator_of(closer)
    if not blocks:
        # This process became a rank inside the block.
        return
    opened = [place for place, block in enumerate(blocks) if block.generator is generator]
    if not opened:
        # A generator that was begun in one thread and ends in another, whose blocks are others.
        in_generators.difference_update([block for block in in_generators if block.generator is generator])
        return
    # A generator may outlive blocks that were opened after its own.
    place = opened[-1]
    block = blocks[place]
    _blocks.set((*blocks[:place], *blocks[place + 1 :]))
    in_generators.discard(block)
    if place == len(blocks) - 1:
        outside = tuple(each for each in block.shown_outside if each in blocks)
        if outside == block.shown_outside:
            _shown_blocks.set(outside)
            ambient.set(block.outside)
        else:
            # Some were closed before this one, which was opened inside them.
            _show_blocks(block.base, outside)
    else:
        _show_blocks(block.base, tuple(each for each in _shown_blocks.get() if each is not block))


def leave_out_suspended() -> None:
    """Give ``ambient`` the tags of this thread's blocks that hold now."""
    blocks, shown = _blocks.get(), _shown_blocks.get()
    # The blocks of a generator that has been resumed are inside those of its caller.
    holding = (*(block for block in shown if block.holds), *(b for b in blocks if b not in shown and b.holds))
    if holding != shown:
        _show_blocks(blocks[0].base, holding)


def _show_blocks(base: TagItems, blocks: tuple[_TagBlock, ...]) -> None:
    _shown_blocks.set(blocks)
    merged = dict(base)
    for block in blocks:
        merged.update(block.given)
    ambient.set(tuple(merged.items()))
