"""Routed experts, taken from SGLang's capture pass by pass.

SGLang keeps them by the place of a token's KV, and gives them when a request ends: a request that was computed anew
after new weights, or that is aborted, would have others, or none. So the rows of a pass are taken right after it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hybridrl.rollout.sglang import internals as sg


def new_rows(scheduler: Any, reqs: Sequence[Any], held: Sequence[int]) -> list[NDArray[np.int32]]:
    """For each request of the batch that just ran, int32 [tokens, layers, top-k] of its tokens from `held[i]` on.

    They reach to the token whose pass gave the request its next one; none where a part of a prompt was computed. It
    must be called before the batch's result is processed, which may free the KV.
    """
    spans = [
        (req.kv.req_pool_idx, start, _computed(req) if req.inflight_middle_chunks <= 0 else start)
        for req, start in zip(reqs, held, strict=True)
    ]
    table = scheduler.req_to_token_pool.req_to_token
    rows = torch.tensor([row for row, start, end in spans for _ in range(start, end)], dtype=torch.int64)
    columns = torch.tensor([column for _, start, end in spans for column in range(start, end)], dtype=torch.int64)
    places = table[rows.to(table.device), columns.to(table.device)].cpu().long()
    taken = sg.get_global_experts_capturer().host_cache.buffer[places]
    return [part.numpy() for part in taken.split([end - start for _, start, end in spans])]


def _computed(req: Any) -> int:
    return len(req.origin_input_ids) + len(req.output_ids)
