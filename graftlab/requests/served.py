"""Requests and responses of the kit's own engine: in this room, because files of recorded requests may hold them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict

from graftlab.errors import RequestError
from graftlab.requests.request_id import request_id_to_int

FinishReason = Literal["stop", "length", "abort", "error"]
"""A stop token was sampled, ``max_new_tokens`` were made, a client or a shutdown ended it, or the engine failed."""

_INT64_MAX = 2**63 - 1
_HOTTEST = 1e6


class Encoder(Protocol):
    """The part of a tokenizer that encodes text."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids. Raises `UnicodeEncodeError` for text that cannot be encoded."""


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it.

    ``temperature`` 0 is greedy; above it, tokens are drawn by ``seed`` and position alone, from the ``top_k`` likeliest
    (None: from all). ``text`` is what the prompt was made from, where it was text, and is only kept. A token of
    ``stop_token_ids`` ends the output, and is its last.

    Raises :class:`RequestError` naming the invalid field.
    """

    rid: str
    input_ids: tuple[int, ...]
    max_new_tokens: int = 16
    temperature: float = 0.0
    seed: int = 0
    top_k: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    bootstrap_room: int | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        request_id_to_int(self.rid)  # raises for an id without a number
        for name in ("input_ids", "stop_token_ids"):
            ids = getattr(self, name)
            if not isinstance(ids, list | tuple):
                raise RequestError(f"{name} must be a list of token ids, got {_shown(ids)}")
            # A frozen value must not hold a list that the caller may change.
            object.__setattr__(self, name, tuple(_int(f"{name}[{i}]", value, 0) for i, value in enumerate(ids)))
        if not self.input_ids:
            raise RequestError("the prompt is empty; give at least one token")
        _int("max_new_tokens", self.max_new_tokens, 1)
        _int("seed", self.seed, 0)
        if self.top_k is not None:
            _int("top_k", self.top_k, 1)
        if self.bootstrap_room is not None:
            _int("bootstrap_room", self.bootstrap_room, -_INT64_MAX - 1)
        if isinstance(self.temperature, bool) or not isinstance(self.temperature, int | float):
            raise RequestError(f"temperature must be a number, got {_shown(self.temperature)}")
        if not 0 <= self.temperature <= _HOTTEST:
            raise RequestError(f"temperature must be from 0 to {_HOTTEST:g}, got {_shown(self.temperature)}")

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], tokenizer: Encoder) -> Request:
        """Make a request from the body of ``POST /generate``, or a recorded one: ``text`` or ``input_ids``, and more.

        None counts as not given; a missing ``rid`` is generated. Raises :class:`RequestError`.
        """
        if unknown := fields.keys() - cls.__dataclass_fields__.keys():
            raise RequestError(
                f"there is no field {_shown(min(unknown, key=str))}; "
                f"the fields are {', '.join(cls.__dataclass_fields__)}"
            )
        given = {name: value for name, value in fields.items() if value is not None}
        if ("text" in given) == ("input_ids" in given):
            raise RequestError("the prompt is either text or input_ids: give one of them, and not both")
        if "text" in given:
            if not isinstance(given["text"], str):
                raise RequestError(f"text must be a string, got {_shown(given['text'])}")
            try:
                given["input_ids"] = tokenizer.encode(given["text"])
            except UnicodeEncodeError as error:
                raise RequestError(f"the text cannot be written in UTF-8: {error.reason}") from error
        given.setdefault("rid", uuid.uuid4().hex)
        return cls(**given)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for :meth:`from_dict`, with the prompt once, in the form in which it was given."""
        fields = {**vars(self), "input_ids": list(self.input_ids), "stop_token_ids": list(self.stop_token_ids)}
        del fields["text" if self.text is None else "input_ids"]
        return fields


class Response(TypedDict):
    """``meta_info``: ``id``, ``finish_reason``, ``prompt_tokens``, ``completion_tokens``, and in seconds
    ``queue_seconds`` (until its prefill began), ``first_token_seconds`` (None without a token) and ``total_seconds``;
    for finish reason ``error`` also ``error``, in words."""

    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]


@dataclass(frozen=True)
class FinishedRequest:
    """A request that is over; ``created`` and ``finished`` are seconds since the epoch."""

    request: Request
    response: Response
    created: float
    finished: float


def _int(name: str, value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name} must be an int, got {_shown(value)}")
    if not least <= value <= _INT64_MAX:
        raise RequestError(f"{name} must be from {least} to {_INT64_MAX}, got {_shown(value)}")
    return value


def _shown(value: object) -> str:
    """Return a value as an error message shows it, shortened if it is long."""
    try:
        text = repr(value)
    except Exception:  # a value whose repr raises must not hide the error about the value
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
