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

_TIMEOUT = 10.0
TOKEN_VARIABLE = "GRAFTLAB_ENGINE_TOKEN"

DEFAULT_URL = "http://127.0.0.1:30000"
"""Where ``python -m graftlab.engine.serve`` listens unless told otherwise."""


class _OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {_one_line(message)}\n")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET, which changes nothing and may well answer 200."""

    def redirect_request(self, *args: Any) -> None:
        return None


class _PostError(Exception):
    """The server cannot be reached, or did not do as it was told."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Post what was given; 0 when the server took it, 1 when not. A bad value exits with 2, before anything is sent."""
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
    """The server's answer to these changes. Raises :class:`_PostError`."""
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
        description="Change what a running server records and logs of its requests. Settings that are not given stay "
        "unchanged; the resulting settings are printed.",
        allow_abbrev=False,
    )
    parser.add_argument("--url", type=_url, default=DEFAULT_URL, help=f"address of the server (default: {DEFAULT_URL})")
    parser.add_argument(
        "--token",
        default=os.environ.get(TOKEN_VARIABLE),
        help=f"token that the server printed (default: ${TOKEN_VARIABLE})",
    )
    parser.add_argument("--dump-requests-folder", metavar="D", help='folder on the server; "" stops recording')
    parser.add_argument("--dump-requests-threshold", metavar="N", type=_count, help="requests per file")
    parser.add_argument(
        "--dump-requests-exclude-meta-keys",
        metavar="A,B",
        type=_names,
        help='keys of meta_info to leave out; "" keeps every key',
    )
    parser.add_argument("--log-requests", action=argparse.BooleanOptionalAction, help="log each request")
    parser.add_argument(
        "--log-requests-level",
        metavar="N",
        type=_level,
        help="0: ids and durations; 1: also metadata; 2: also inputs and outputs, shortened; 3: the same in full",
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


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, not {text!r}")
    return int(text)


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
