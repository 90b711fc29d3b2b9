"""From what the scheduler planned to the tensors of a batch."""

from __future__ import annotations

import torch

from graftlab.engine.batch import ForwardBatch, SamplingBatchInfo
from graftlab.engine.scheduler import Work
from graftlab.requests.identity import bootstrap_rooms_tensor, request_ids_tensor


def assemble(work: Work, vocab_size: int, device: torch.device, request_ids: bool) -> ForwardBatch:
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
    seq_lens_cpu = torch.tensor([span.stop for span in work.spans], dtype=torch.int64)
    seq_lens = seq_lens_cpu.to(device)
    rids_int = rooms = None
    if request_ids:
        rids_int = request_ids_tensor([request.rid for request in requests], device)
        rooms = bootstrap_rooms_tensor([request.bootstrap_room for request in requests], device)
    extend_lens_cpu = None
    if work.mode == "prefill":
        extend_lens_cpu = torch.tensor([span.stop - span.live.computed for span in work.spans], dtype=torch.int64)
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
