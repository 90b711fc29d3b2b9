"""The engine: requests in, one forward a step, finished requests out."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from graftlab.engine.batch import ForwardBatch, SamplingBatchInfo
from graftlab.engine.kv_cache import KVCache
from graftlab.engine.model_inputs import with_model_inputs
from graftlab.engine.runners.eager import EagerRunner, RunnerFactory
from graftlab.engine.sampling import sample
from graftlab.engine.scheduler import LiveRequest, Scheduler, Work
from graftlab.errors import RequestError
from graftlab.models import CrossAttentionTransformer, Transformer
from graftlab.models.transformer import Attention
from graftlab.requests.identity import bootstrap_rooms_tensor, is_switched_on, request_ids_tensor
from graftlab.requests.served import FinishedRequest, FinishReason, Request, Response

Prompt = str | Sequence[int] | Request | Mapping[str, Any]

_BYTES = 256


class ByteTokenizer:
    """Text as UTF-8 bytes, one token each: enough for models whose words mean nothing.

    Token ids 0 to 255 are the bytes themselves; ids above stand for nothing and decode to U+FFFD.
    """

    def encode(self, text: str) -> list[int]:
        """The bytes of `text`. Raises `UnicodeEncodeError` (a `ValueError`) for half a surrogate pair."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        """Decode any ids; invalid UTF-8 becomes U+FFFD."""
        # 0xFF occurs nowhere in UTF-8, so it decodes to U+FFFD by itself and cuts no neighbour short.
        return bytes(token if token < _BYTES else 0xFF for token in ids).decode("utf-8", errors="replace")


class Engine:
    """Serves a `Transformer` (a tensor-parallel one on every rank of its group, with the same calls on each).

    At most ``max_requests`` are in the cache at a time, with ``max_tokens`` tokens between them; a prefill takes up to
    ``max_prefill_tokens`` at once; the rest waits. A request has ``max_context`` tokens at most, output included (by
    default the model's ``max_positions``).

    ``runner`` makes the runner of batches. With ``request_ids``, which may be set at any time and applies from the next
    batch on, batches carry their requests' ids as int64. ``on_step`` is called with each batch once its forward is
    done; the engine itself never ends a graftlab step, so give ``on_step=lambda batch: gl.step()`` to make each forward
    a step.

    Not for several threads at once. After an exception in a forward, or in ``on_step``, nothing is lost: the next
    :meth:`step` does the same forward again.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        max_requests: int = 8,
        max_tokens: int = 4096,
        max_prefill_tokens: int = 512,
        max_context: int | None = None,
        tokenizer: ByteTokenizer | None = None,
        runner: RunnerFactory = EagerRunner,
        request_ids: bool | None = None,
        on_step: Callable[[ForwardBatch], object] | None = None,
    ) -> None:
        config = model.config
        max_context = config.max_positions if max_context is None else max_context
        limits = {
            "max_requests": max_requests,
            "max_tokens": max_tokens,
            "max_prefill_tokens": max_prefill_tokens,
            "max_context": max_context,
        }
        for name, limit in limits.items():
            if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
                raise ValueError(f"Engine: {name} must be an int of at least 1, got {limit!r}")
        if not callable(runner):
            raise TypeError(
                f"Engine: runner is called as runner(model, cache), and got a {type(runner).__name__}; give the "
                "class, as runner=DecodeGraphRunner, with options through functools.partial"
            )
        if max_context > config.max_positions:
            raise ValueError(
                f"Engine: max_context={max_context} exceeds the model's max_positions={config.max_positions}"
            )
        self.model = model
        self.tokenizer = tokenizer or ByteTokenizer()
        self.request_ids = is_switched_on() if request_ids is None else request_ids
        self.on_step = on_step
        self.device = model.embedding.weight.device
        # A rank of a tensor-parallel model has fewer heads than its config says.
        kv_width = next(module for module in model.modules() if isinstance(module, Attention)).k_proj.out_features
        self.cache = KVCache(
            config.num_layers,
            kv_width // config.head_dim,
            config.head_dim,
            max_requests=max_requests,
            max_context=max_context,
            max_tokens=max_tokens,
            dtype=model.embedding.weight.dtype,
            device=self.device,
            encoder_states=isinstance(model, CrossAttentionTransformer),
        )
        self.runner = runner(model, self.cache)
        self._scheduler = Scheduler(self.cache, max_prefill_tokens)
        self._live: dict[str, LiveRequest] = {}
        self._names = itertools.count()

    @property
    def live(self) -> list[str]:
        """The ids of live requests, in order of arrival."""
        return list(self._live)

    def status(self) -> dict[str, Any]:
        """How many requests run and wait, how much of the cache is free, and the status of the ``runner``."""
        return {
            "running": len(self._scheduler.running),
            "waiting": len(self._scheduler.waiting),
            "free_requests": self.cache.available_rows,
            "free_tokens": self.cache.available_slots,
            "runner": self.runner.status(),
        }

    def check(self, request: Request) -> None:
        """Raise :class:`RequestError` for a request that this engine can never serve. Safe on any thread."""
        vocab_size = self.model.config.vocab_size
        if (largest := max(request.input_ids)) >= vocab_size:
            raise RequestError(f"token id {largest} is not in the model's vocabulary of {vocab_size}")
        asked = len(request.input_ids) + request.max_new_tokens
        if asked > self.cache.max_context:
            raise RequestError(
                f"{len(request.input_ids)} prompt tokens and max_new_tokens={request.max_new_tokens} are {asked} "
                f"tokens, more than a request may have ({self.cache.max_context}); shorten the prompt or ask for less"
            )
        if (needed := self._scheduler.tokens_needed(request)) > self.cache.max_tokens:
            raise RequestError(f"{needed} tokens would be in the cache, which has room for {self.cache.max_tokens}")

    def add(self, request: Request) -> None:
        """Put a request into the queue.

        Raises :class:`RequestError` if it can never be served, or if a request with its id is still live.
        """
        self.check(request)
        if request.rid in self._live:
            raise RequestError(
                f"a request with the id {request.rid!r} is not over yet; ids of live requests must be unique"
            )
        live = LiveRequest(request, created=time.time(), arrived=time.monotonic())
        self._live[request.rid] = live
        self._scheduler.waiting.append(live)

    def step(self) -> list[FinishedRequest]:
        """Make one forward, if there is work; returns the requests that it finished."""
        work = self._scheduler.plan()
        if work is None:
            return []
        for span in work.spans:
            span.live.started = span.live.started or time.monotonic()
        batch = _assemble(work, self.model.config.vocab_size, self.device, self.request_ids)
        batch = with_model_inputs(batch, work, self.model, self.cache)
        assert batch.sampling_info is not None
        tokens = sample(self.runner.forward(batch), batch.sampling_info).tolist()
        if self.on_step is not None:
            self.on_step(batch)
        self._scheduler.done(work)
        finished = []
        for span, token in zip(work.spans, tokens, strict=True):
            if span.completes and (reason := self._append(span.live, token)):
                finished.append(self._end(span.live, reason))
        return finished

    def _append(self, live: LiveRequest, token: int) -> FinishReason | None:
        live.tokens.append(token)
        live.first_token = live.first_token or time.monotonic()
        if token in live.request.stop_token_ids:
            return "stop"
        return "length" if len(live.output_ids) == live.request.max_new_tokens else None

    def abort(self, rid: str, error: str | None = None) -> FinishedRequest | None:
        """End a request with the output so far; None if no such request is live. Its finish reason is ``abort``, or
        ``error`` if an error is given, in words, for ``meta_info``.
        """
        live = self._live.get(rid)
        return None if live is None else self._end(live, "abort" if error is None else "error", error)

    def _end(self, live: LiveRequest, reason: FinishReason, error: str | None = None) -> FinishedRequest:
        self._scheduler.remove(live)
        del self._live[live.request.rid]
        ended = time.monotonic()

        def since_arrival(moment: float | None) -> float | None:
            return None if moment is None else moment - live.arrived

        meta_info: dict[str, Any] = {
            "id": live.request.rid,
            "finish_reason": reason,
            "prompt_tokens": len(live.request.input_ids),
            "completion_tokens": len(live.output_ids),
            "queue_seconds": since_arrival(live.started),
            "first_token_seconds": since_arrival(live.first_token),
            "total_seconds": since_arrival(ended),
        }
        if error is not None:
            meta_info["error"] = error
        response: Response = {
            "text": self.tokenizer.decode(live.output_ids),
            "output_ids": live.output_ids,
            "meta_info": meta_info,
        }
        return FinishedRequest(live.request, response, live.created, live.created + ended - live.arrived)

    def generate(self, prompts: Iterable[Prompt], max_new_tokens: int = 16, **options: Any) -> list[Response]:
        """Serve a whole workload to its end; responses in the order of `prompts`.

        A prompt is text or token ids, and `options` are the other fields of a `Request`; or it is a `Request` or a
        recorded request's dict, with its own options. Raises :class:`RequestError` if one can never be served, and
        `RuntimeError` while other requests are live, whose answers would be lost. If it ends early, for whatever
        reason, none of its requests stays live.
        """
        if self._live:
            raise RuntimeError(
                f"generate() needs the engine for itself, and {len(self._live)} requests are still live; "
                "finish them with step(), or abort() them"
            )
        requests = [self._request(prompt, max_new_tokens, options) for prompt in prompts]
        responses: dict[str, Response] = {}
        try:
            for request in requests:
                self.add(request)
            while self._live:
                responses.update((done.request.rid, done.response) for done in self.step())
        finally:
            for rid in self.live:
                self.abort(rid)
        return [responses[request.rid] for request in requests]

    def _request(self, prompt: Prompt, max_new_tokens: int, options: dict[str, Any]) -> Request:
        if isinstance(prompt, Request):
            return prompt
        if not isinstance(prompt, Mapping):
            asked = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
            rid = f"generate-{next(self._names)}"
            prompt = {**asked, "rid": rid, "max_new_tokens": max_new_tokens, **options}
        return Request.from_dict(prompt, self.tokenizer)


def _assemble(work: Work, vocab_size: int, device: torch.device, request_ids: bool) -> ForwardBatch:
    """Make the batch for `work` on `device`; with `request_ids`, with the requests' identities as int64."""
    input_ids: list[int] = []
    positions: list[int] = []
    out_cache_loc: list[int] = []
    rows: list[int] = []
    for span in work.spans:
        live = span.live
        assert live.place is not None, "the scheduler plans only requests that have a place"
        input_ids += live.tokens[live.computed : span.stop]
        positions += range(live.computed, span.stop)
        out_cache_loc += live.place.slots[live.computed : span.stop]
        rows.append(live.place.row)

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    requests = [span.live.request for span in work.spans]
    seq_lens_cpu = torch.tensor([span.stop for span in work.spans], dtype=torch.int64, device="cpu")
    seq_lens = seq_lens_cpu.to(device)
    rids_int = rooms = None
    if request_ids:
        rids_int = request_ids_tensor([request.rid for request in requests], device)
        rooms = bootstrap_rooms_tensor([request.bootstrap_room for request in requests], device)
    extend_lens_cpu = None
    if work.mode == "prefill":
        extend_lens_cpu = torch.tensor(
            [span.stop - span.live.computed for span in work.spans], dtype=torch.int64, device="cpu"
        )
    temperatures = [request.temperature for request in requests]
    return ForwardBatch(
        mode=work.mode,
        input_ids=tensor(input_ids),
        positions=tensor(positions),
        out_cache_loc=tensor(out_cache_loc),
        req_pool_indices=tensor(rows),
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens_cpu,
        extend_lens_cpu=extend_lens_cpu,
        rids_int=rids_int,
        bootstrap_room_ids_int=rooms,
        request_ids=tuple(request.rid for request in requests),
        sampling_info=SamplingBatchInfo(
            temperatures=torch.tensor(temperatures, dtype=torch.float32, device=device),
            seeds=tensor([request.seed for request in requests]),
            positions=seq_lens,
            top_ks=tensor([request.top_k or vocab_size for request in requests]),
            all_greedy=not any(temperatures),
            rids_int=rids_int,
            bootstrap_room_ids_int=rooms,
        ),
    )
