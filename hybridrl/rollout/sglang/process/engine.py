"""The SGLang engine in processes of its own, fed in place: what the trainer's ranks call.

The first rank of a replica talks to the server and tells the others what came of it; each rank maps the parameters of
its rank of the engine. Nothing is sent in a weight sync: the plan writes into the engine's own memory. The fence is
`publish`: it begins when every rank of the replica has written, and nothing generates before it has ended.
"""

import base64
import shutil
import tempfile
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.models.weights import ITEM_BYTES
from hybridrl.rollout.parameters import by_layout
from hybridrl.rollout.samples import Finish
from hybridrl.rollout.sglang.base import SGLangBase
from hybridrl.rollout.sglang.options import EngineOptions, kv_token_bytes, subprocess_args
from hybridrl.rollout.sglang.placing import layout_of
from hybridrl.rollout.sglang.process.client import ServerError, ServerProcess
from hybridrl.rollout.sglang.process.outcome import STOP_STRINGS, Outcome
from hybridrl.rollout.sglang.process.shared import attach
from hybridrl.rollout.sglang.trace import Trace
from hybridrl.rollout.sglang.versions import require_supported

SHARED_MEMORY = Path("/dev/shm")
POLL_S = 0.05
FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}


class SGLangProcessEngine(SGLangBase):
    """An engine over SGLang's own Engine, one a replica.

    All ranks of the world build it together; the ranks of a replica are on one node. Raises ValueError for options that
    make no engine, ServerError where SGLang does not start.
    """

    def __init__(self, options: EngineOptions, *, vocab_limit: int | None = None) -> None:
        require_supported()
        rank, tp = dist.get_rank(), options.tp
        super().__init__(options, layout_of(options), rank // tp, dist.get_world_size() // tp)
        self._leader = self.replica * tp
        firsts = range(0, self.num_replicas * tp, tp)
        self._group = [dist.new_group(range(first, first + tp), backend="gloo") for first in firsts][self.replica]
        self._server: ServerProcess | None = None
        self._together(lambda: self._start(vocab_limit))
        self._parameters = self._map(rank)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the tokens in this rank's KV pool, which is in the engine's process; 0 while asleep."""
        if self._cache_asleep:
            return 0
        item = ITEM_BYTES[self._options.dtype]
        return self._options.kv_tokens * kv_token_bytes(self.spec, self._options.tp, item)

    def parameters(self) -> Mapping[str, Tensor]:
        """The memory of this rank's engine process, under the layout's names."""
        return self._parameters

    def step(self) -> int:
        """Waits a moment; the number of requests still in flight."""
        self._require_service("step")
        for rid, outcome in self._together(self._poll).items():
            trace = self._live.pop(rid)
            self._fill(trace, outcome)
            self._count(trace)
            self._done[rid] = trace
        return len(self._live)

    def close(self) -> None:
        """Ends the replica's processes."""
        self._parameters = {}
        if self._server is not None:
            self._server.close()
            self._server = None

    def _start(self, vocab_limit: int | None) -> None:
        first_gpu = torch.cuda.current_device() if torch.cuda.is_available() else 0
        self._server = ServerProcess(subprocess_args(self._options, first_gpu), vocab_limit, self._options.tokenizer)

    def _map(self, rank: int) -> dict[str, Tensor]:
        """Maps the parameters of this rank's engine process; what led to them is removed at once."""

        def offer() -> list[str]:
            parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
            folders = [tempfile.mkdtemp(prefix="hybridrl-", dir=parent) for _ in range(self._options.tp)]
            self._command("call", "hybrid_share", {"folders": folders})
            return folders

        folders = self._together(offer)
        try:
            mapped = attach(Path(folders[rank - self._leader]))
            return by_layout(mapped, self._layout, rank, owner="SGLang's model")
        finally:
            dist.barrier(self._group)
            shutil.rmtree(folders[rank - self._leader])
            dist.barrier(self._group)

    def _poll(self) -> dict[str, Outcome]:
        self._command("poll", POLL_S)
        taken: dict[str, Outcome] = self._command("take")
        return taken

    def _call(self, method: str, **arguments: Any) -> None:
        self._together(lambda: self._command("call", method, arguments))

    def _command(self, name: str, *arguments: Any) -> Any:
        if self._server is None:
            raise ServerError("SGLang's server is not running")
        return self._server.command(name, *arguments)

    def _together(self, act: Callable[[], Any]) -> Any:
        """What `act` returns on the replica's first rank, on all its ranks; what it raises is raised on all."""
        told: list[Any] = [None, None]
        if dist.get_rank() == self._leader:
            try:
                told[0] = act()
            except (ServerError, OSError) as error:
                told[1] = str(error)
        if self._options.tp > 1:
            dist.broadcast_object_list(told, src=self._leader, group=self._group)
        if told[1] is not None:
            raise ServerError(told[1])
        return told[0]

    def _release(self) -> None:
        """The weights stay: they are the engine processes' own."""
        if not self._cache_asleep:
            self._call("hybrid_sleep")

    def _restore_weights(self) -> None:
        """They never left."""

    def _restore_cache(self) -> None:
        if self._cache_asleep:
            self._call("hybrid_wake")

    def _begin_service(self, version: int) -> None:
        """All ranks of the replica have written once this has begun on all of them."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier(self._group)
        self._call("hybrid_publish", version=str(version))

    def _queue(self, traces: Mapping[str, Trace]) -> None:
        sent = [_arguments(rid, trace, self._options.routed_experts) for rid, trace in traces.items()]
        self._together(lambda: self._command("submit", sent))

    def _retract(self) -> None:
        self._call("hybrid_pause")

    def _go_on(self) -> None:
        self._call("hybrid_resume")

    def _end(self, traces: Mapping[str, Trace]) -> None:
        for rid, outcome in self._together(lambda: self._command("abort", list(traces))).items():
            self._fill(traces[rid], outcome)

    def _flush(self) -> None:
        self._call("hybrid_flush")

    def _fill(self, trace: Trace, outcome: Outcome) -> None:
        """What a request has come to. Raises RuntimeError where SGLang refused it, FloatingPointError for NaN."""
        if outcome.finish not in FINISHES:
            raise RuntimeError(
                f"prompt {trace.request.prompt.id}, sample {trace.request.index}: SGLang ended it by "
                f"{outcome.finish or 'nothing'!r}: {outcome.message}"
            )
        broken = [i for i, value in enumerate(outcome.log_probs) if not isfinite(value)]
        if broken:
            raise FloatingPointError(
                f"prompt {trace.request.prompt.id}, sample {trace.request.index}: the logits of token {broken[0]} of "
                "the response are not finite; the weights in service are broken"
            )
        trace.tokens, trace.log_probs = outcome.tokens, outcome.log_probs
        trace.versions = [int(version) for version, start, end in outcome.spans for _ in range(start, end)]
        trace.finish, trace.cached_tokens = FINISHES[outcome.finish], outcome.cached_tokens
        moe = self.spec.moe
        if outcome.routed_experts is not None and moe is not None:
            ids = np.frombuffer(base64.b64decode(outcome.routed_experts), np.int32)
            trace.add_routes(ids.reshape(-1, len(moe.layers), moe.top_k))


def _arguments(rid: str, trace: Trace, routed_experts: bool) -> dict[str, Any]:
    request, params = trace.request, trace.params
    return {
        "rid": rid,
        "input_ids": list(request.prompt.token_ids),
        "return_logprob": True,
        "return_routed_experts": routed_experts,
        "sampling_params": {
            "max_new_tokens": trace.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "stop_token_ids": list(params.stop_token_ids) or None,
            "ignore_eos": not (params.stop_token_ids or params.stop),
            "sampling_seed": request.seed,
            "custom_params": {STOP_STRINGS: list(params.stop)} if params.stop else None,
        },
    }
