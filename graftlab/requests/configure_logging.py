"""``python -m graftlab.requests.configure_logging``: change what a running server records and logs of its requests."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import Any, NoReturn

from graftlab.base.text import positive

_TIMEOUT = 10.0
TOKEN_VARIABLE = "GRAFTLAB_ENGINE_TOKEN"

DEFAULT_URL = "http://127.0.0.1:30000"
"""Where ``python -m graftlab.engine.serve`` listens by default."""


class _OneLineParser(argparse.ArgumentParser):
    """Reports a usage error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {_one_line(message)}\n")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET, which changes nothing and may still be answered with 200."""

    def redirect_request(self, *args: Any) -> None:
        return None


class _PostError(Exception):
    """The server cannot be reached, or refused the change."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Post the given settings; return 0 if the server accepted them, else 1. A bad value exits with 2, unsent."""
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    url, token = given.pop("url"), given.pop("token")
    changes = {name: value for name, value in given.items() if value is not None}
    try:
        settings = post(f"{url}/configure_logging", changes, token)
    except _PostError as error:
        sys.stderr.write(f"{parser.prog}: {_one_line(str(error))}\n")
        return 1
    sys.stdout.write(f"{settings}\n")
    return 0


def post(url: str, changes: dict[str, Any], token: str | None = None) -> str:
    """Post the changes and return the server's answer. Raises :class:`_PostError`."""
    headers = {"Content-Type": "application/json"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    # Straight to the server: a proxy from the environment cannot reach this machine's ports.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
    try:
        request = urllib.request.Request(url, json.dumps(changes).encode(), headers, method="POST")
        with opener.open(request, timeout=_TIMEOUT) as answer:
            return str(answer.read().decode("utf-8", "replace")).strip()
    except urllib.error.HTTPError as error:
        with error:
            raise _PostError(f"{url} refused: {error.code} {error.reason}: {_reason(error)}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _PostError(f"{url} cannot be reached: {getattr(error, 'reason', error)}") from None


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        body = error.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        return "no reason given"
    try:
        return str(json.loads(body)["error"])
    except (ValueError, TypeError, KeyError):
        return body or "no reason given"


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="configure_logging",
        description="Change what a running server records and logs of its requests. Settings that are not given stay; "
        "the settings then in force are printed.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--url", type=_url, default=DEFAULT_URL, help=f"the server's address; {DEFAULT_URL} unless given"
    )
    parser.add_argument(
        "--token",
        default=os.environ.get(TOKEN_VARIABLE),
        help=f"the token that the server printed; ${TOKEN_VARIABLE} unless given",
    )
    parser.add_argument("--dump-requests-folder", metavar="D", help='on the server; "" ends dumping')
    parser.add_argument("--dump-requests-threshold", metavar="N", type=positive, help="requests in a file")
    parser.add_argument(
        "--dump-requests-exclude-meta-keys",
        metavar="A,B",
        type=_names,
        help='keys of meta_info that are left out; "" keeps every key',
    )
    parser.add_argument("--log-requests", action=argparse.BooleanOptionalAction, help="log each request")
    parser.add_argument(
        "--log-requests-level",
        metavar="N",
        type=_level,
        help="0 ids and durations, 1 metadata too, 2 shortened inputs and outputs, 3 complete ones; unchanged "
        "unless given",
    )
    return parser


def _url(text: str) -> str:
    try:
        parts = urllib.parse.urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError(f"{text!r} is not the address of a server, such as {DEFAULT_URL}")
    return text.rstrip("/")


def _level(text: str) -> int:
    if text not in ("0", "1", "2", "3"):
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 3, not {text!r}")
    return int(text)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 500 else f"{line[:500]}..."


if __name__ == "__main__":
    sys.exit(main())
