"""``python -m graftlab.engine.serve``: a small model behind HTTP, whose requests can be recorded."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from graftlab.base.text import positive
from graftlab.control.run_folder import home
from graftlab.engine.access import write_token
from graftlab.engine.engine import Engine
from graftlab.engine.presets import DTYPES, PRESETS, build_model
from graftlab.engine.server import Server
from graftlab.errors import GraftError
from graftlab.requests import RequestDumper, RequestLogging
from graftlab.requests.configure_logging import TOKEN_VARIABLE

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Serves until SIGTERM or SIGINT; returns the exit status: 0, or 1 when it could not start."""
    parser = _parser()
    options = parser.parse_args(argv)
    token = options.token or os.environ.get(TOKEN_VARIABLE) or None
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        parser.error("a token is sent in an HTTP header; use printable ASCII without spaces")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("tornado.access").setLevel(logging.ERROR)  # the settings decide what is logged
    if token is not None:
        # Files of recorded requests contain the command line, and are shared with others.
        hidden = {token: "***", f"--token={token}": "--token=***"}
        sys.orig_argv[:] = [hidden.get(argument, argument) for argument in sys.orig_argv]
    elif not options.no_token:
        token = secrets.token_urlsafe(24)
    else:
        logger.warning(
            "without a token, every client that can reach %s may use this server: at least every user of this machine",
            options.host,
        )
    made = token is not None and options.token is None and TOKEN_VARIABLE not in os.environ
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        engine, dumper = _engine(options), _dumper(options)
    # torch raises an AssertionError if it was built without the device.
    except (GraftError, ValueError, RuntimeError, AssertionError) as error:
        return _cannot_start(error)
    root = options.dump_root or options.dump_requests_folder or home() / "dumps"
    requests = RequestLogging(dumper, options.log_requests, options.log_requests_level, root=Path(root))
    return asyncio.run(_serve(options, engine, requests, token, made))


def _engine(options: argparse.Namespace) -> Engine:
    model = build_model(
        options.model,
        seed=options.seed,
        sliding_window=options.sliding_window,
        dtype=options.dtype,
        device=options.device,
    )
    return Engine(
        model,
        max_requests=options.max_requests,
        max_tokens=options.max_tokens,
        max_prefill_tokens=options.max_prefill_tokens,
        request_ids=options.request_ids or None,
    )


def _dumper(options: argparse.Namespace) -> RequestDumper:
    return RequestDumper(
        options.dump_requests_folder,
        threshold=options.dump_requests_threshold,
        crash_folder=options.crash_dump_folder,
        server_args={name: value for name, value in vars(options).items() if name != "token"},
        catch_crashes=True,
    )


async def _serve(
    options: argparse.Namespace, engine: Engine, requests: RequestLogging, token: str | None, made: bool
) -> int:
    server = Server(engine, requests, token=token, max_live=options.max_live)
    ending, hurry = asyncio.Event(), asyncio.Event()

    def end() -> None:
        # A second signal means: do not wait.
        (hurry if ending.is_set() else ending).set()

    # They replace the dumper's handlers for SIGTERM: this is an orderly end, which closes the dumper.
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end)
    try:
        port = server.listen(options.host, options.port)
        if made and token is not None:
            path = home() / f"engine-{port}.token"
            write_token(path, token)
    except (OSError, OverflowError) as error:
        requests.dumper.close()
        return _cannot_start(error)
    host = f"[{options.host}]" if ":" in options.host else options.host
    sys.stdout.write(f"graftlab engine: {options.model} model, ready at http://{host}:{port}\n")
    if made:
        sys.stdout.write(f"its token, which is also in {path}: {token}\n")
    sys.stdout.flush()
    await ending.wait()
    await server.close(options.drain_seconds, hurry)
    await asyncio.to_thread(requests.dumper.close)
    if made:
        path.unlink(missing_ok=True)
    return 0


def _cannot_start(error: BaseException) -> int:
    sys.stderr.write(f"python -m graftlab.engine.serve: {error}\n")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m graftlab.engine.serve",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    where = parser.add_argument_group("where")
    where.add_argument("--host", default="127.0.0.1", help="address to listen at")
    where.add_argument("--port", type=int, default=30000, help="0 takes a free port and prints it")
    where.add_argument("--token", help=f"bearer token that clients must send; better given as {TOKEN_VARIABLE}")
    where.add_argument("--no-token", action="store_true", help="serve every client; else a token is made and printed")
    model = parser.add_argument_group("model")
    model.add_argument("--model", choices=PRESETS, default="tiny", help="its weights are random")
    model.add_argument("--seed", type=int, default=0, help="of the weights")
    model.add_argument("--sliding-window", type=positive, metavar="N", help="tokens that attention looks back over")
    model.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and cache")
    model.add_argument("--device", default="cpu", help="such as cuda:0")
    model.add_argument("--threads", type=positive, metavar="N", help="torch's CPU threads; None for torch's default")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--max-requests", type=positive, default=8, metavar="N", help="requests in the cache at a time")
    engine.add_argument("--max-tokens", type=positive, default=4096, metavar="N", help="tokens in the cache")
    engine.add_argument("--max-prefill-tokens", type=positive, default=512, metavar="N", help="prompt tokens a forward")
    engine.add_argument("--max-live", type=positive, default=1000, metavar="N", help="requests that wait or run")
    engine.add_argument("--request-ids", action="store_true", help="put the requests' identities into batches")
    engine.add_argument("--drain-seconds", type=float, default=10.0, metavar="S", help="for live requests, at the end")
    record = parser.add_argument_group("recording", "changed later by python -m graftlab.requests.configure_logging")
    record.add_argument("--dump-requests-folder", metavar="D", help="where requests are dumped")
    record.add_argument(
        "--dump-requests-threshold", type=positive, default=1000, metavar="N", help="requests in a file"
    )
    record.add_argument("--dump-root", metavar="D", help="clients may choose dump folders only below this one")
    record.add_argument("--crash-dump-folder", metavar="D", help="where a crash writes its requests")
    record.add_argument("--log-requests", action="store_true", help="log each request")
    record.add_argument("--log-requests-level", type=int, choices=range(4), default=0, help="how much of it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
