"""The SGLang engine in processes of its own, fed in place: what the trainer's ranks call.

The first rank of a replica talks to the server and tells the others what came of it; each rank maps the parameters of
its rank of the engine. Nothing is sent in a weight sync: the plan writes into the engine's own memory. The fence is
`publish`: it begins when every rank of the replica has written, and nothing generates before it has ended.
"""

import base64
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.models.weights import ITEM_BYTES
from hybridrl.reshard.layout import Layout
from hybridrl.rollout import sampling
from hybridrl.rollout.engine import EngineStateError
from hybridrl.rollout.routes import pack
from hybridrl.rollout.samples import Finish, Request, Sample
from hybridrl.rollout.sglang.checks import check_parameters, layout_of
from hybridrl.rollout.sglang.options import EngineOptions, kv_token_bytes, subprocess_args
from hybridrl.rollout.sglang.process.client import ServerError, ServerProcess
from hybridrl.rollout.sglang.process.outcome import Outcome
from hybridrl.rollout.sglang.process.shared import attach
from hybridrl.rollout.sglang.trace import budget, problems
from hybridrl.rollout.sglang.versions import require_supported

SHARED_MEMORY = Path("/dev/shm")
POLL_S = 0.05
FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}


class SGLangProcessEngine:
    """An `Engine` over SGLang's own Engine, one a replica; its methods are those of `SGLangEngine`.

    All ranks of the world build it together; the ranks of a replica are on one node. Raises ValueError for options that
    make no engine, ServerError where SGLang does not start.
    """

    def __init__(self, options: EngineOptions, *, vocab_limit: int | None = None) -> None:
        require_supported()
        self._options = options
        self._layout = layout_of(options)
        rank, tp = dist.get_rank(), options.tp
        self.replica, self.num_replicas = rank // tp, dist.get_world_size() // tp
        self._leader = self.replica * tp
        firsts = range(0, self.num_replicas * tp, tp)
        self._group = [dist.new_group(range(first, first + tp), backend="gloo") for first in firsts][self.replica]
        self._server: ServerProcess | None = None
        self._together(lambda: self._start(vocab_limit))
        self._parameters = self._map(rank)
        self._live: dict[str, Request] = {}
        self._done: dict[str, Sample] = {}
        self._submitted = 0
        self._version: int | None = None
        self._asleep = self._cache_asleep = self._paused = False
        self.prompt_tokens = 0
        self.cached_tokens = 0

    @property
    def layout(self) -> Layout:
        """SGLang's own parameters on every rank, under its names."""
        return self._layout

    @property
    def version(self) -> int | None:
        """Version of the weights in service, None before the first `publish` and after `sleep`."""
        return self._version

    @property
    def cache_bytes(self) -> int:
        """Bytes of the tokens in this rank's KV pool, which is in the engine's process; 0 while asleep."""
        if self._cache_asleep:
            return 0
        item = ITEM_BYTES[self._options.dtype]
        return self._options.kv_tokens * kv_token_bytes(self._layout.weights.spec, self._options.tp, item)

    def parameters(self) -> Mapping[str, Tensor]:
        """The memory of this rank's engine process, under the layout's names."""
        return self._parameters

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        """See `SGLangEngine.generate`."""
        if self._live or self._done:
            raise EngineStateError(
                f"{len(self._live)} requests are in flight and {len(self._done)} samples were not taken: step to their "
                "end and take them, or abort them, before generate"
            )
        self.submit(requests)
        while self.step():
            pass
        return self.take()

    def sleep(self) -> None:
        """Gives back the KV cache. The weights stay where they are."""
        if self._asleep:
            return
        self._require_no_running("sleep")
        self._version = None
        if not self._cache_asleep:
            self._call("hybrid_sleep")
        self._asleep = self._cache_asleep = True

    def wake(self) -> None:
        """Takes the KV cache again."""
        self.wake_weights()
        self.wake_cache()

    def wake_weights(self) -> None:
        """The first stage of `wake`. The weights never left."""
        self._asleep = False

    def wake_cache(self) -> None:
        """The second stage of `wake`: the KV pool. Raises EngineStateError before `wake_weights`."""
        if self._asleep:
            raise EngineStateError("the engine's weights are asleep: call wake_weights before wake_cache")
        if self._cache_asleep:
            self._call("hybrid_wake")
        self._cache_asleep = False

    def publish(self, version: int) -> None:
        """Puts the parameters into service as weights `version`, once all ranks of the replica have written them."""
        if self._asleep:
            raise EngineStateError(f"weights {version} were published to an engine that is asleep: call wake first")
        self._require_no_running(f"publish({version})")
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier(self._group)
        self._call("hybrid_publish", version=str(version))
        self._version = version

    def submit(self, requests: Sequence[Request]) -> None:
        """See `SGLangEngine.submit`."""
        self._require_service("generate")
        limit = self._options.max_positions
        found = problems(
            requests,
            vocab_size=self._layout.weights.spec.vocab_size,
            kv_tokens=self._options.kv_tokens,
            max_positions=limit,
        )
        if found:
            raise ValueError("; ".join(found))
        sampling.check([r.params for r in requests])
        started = {}
        for request in requests:
            rid = f"{self._submitted:016d}"
            self._submitted += 1
            if budget(request, limit):
                started[rid] = request
            else:
                self._done[rid] = self._sample(request, Outcome([], [], [], "length", "", 0, None))
        self._live |= started
        sent = [_arguments(rid, r, budget(r, limit), self._options.routed_experts) for rid, r in started.items()]
        self._together(lambda: self._command("submit", sent))

    def step(self) -> int:
        """Waits a moment; the number of requests still in flight."""
        self._require_service("step")
        outcomes = self._together(self._poll)
        for rid, outcome in outcomes.items():
            request = self._live.pop(rid)
            self.prompt_tokens += len(request.prompt.token_ids)
            self.cached_tokens += outcome.cached_tokens
            self._done[rid] = self._sample(request, outcome)
        return len(self._live)

    def take(self) -> list[Sample]:
        """See `SGLangEngine.take`."""
        done, self._done = self._done, {}
        return [done[rid] for rid in sorted(done)]

    def pause(self, mode: str = "retract") -> None:
        """See `SGLangEngine.pause`."""
        if mode != "retract":
            raise ValueError(f"pause mode {mode!r}: only 'retract' leaves no KV of older weights in use")
        if self._paused:
            return
        self._require_service("pause")
        self._call("hybrid_pause")
        self._paused = True

    def resume(self) -> None:
        """See `SGLangEngine.resume`."""
        if not self._paused:
            return
        self._require_weights("resume")
        self._call("hybrid_resume")
        self._paused = False

    def abort(self, which: Collection[tuple[int, int]] | None = None) -> list[Sample]:
        """See `SGLangEngine.abort`."""
        ended = {rid: r for rid, r in self._live.items() if which is None or (r.prompt.id, r.index) in which}
        if not ended:
            return []
        if not self._paused:
            self._call("hybrid_pause")
        outcomes = self._together(lambda: self._command("abort", list(ended)))
        if not self._paused:
            self._call("hybrid_resume")
        for rid in ended:
            del self._live[rid]
        return [self._sample(request, outcomes[rid]) for rid, request in ended.items()]

    def flush(self) -> None:
        """See `SGLangEngine.flush`."""
        self._require_no_running("flush")
        self._call("hybrid_flush")

    def close(self) -> None:
        """Ends the replica's processes."""
        self._parameters = {}
        if self._server is not None:
            self._server.close()
            self._server = None

    def _start(self, vocab_limit: int | None) -> None:
        first_gpu = torch.cuda.current_device() if torch.cuda.is_available() else 0
        self._server = ServerProcess(subprocess_args(self._options, first_gpu), vocab_limit)

    def _map(self, rank: int) -> dict[str, Tensor]:
        """Maps the parameters of this rank's engine process; what led to them is removed at once."""

        def offer() -> list[str]:
            parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
            folders = [tempfile.mkdtemp(prefix="hybridrl-", dir=parent) for _ in range(self._options.tp)]
            self._command("call", "hybrid_share", {"folders": folders})
            return folders

        folders = self._together(offer)
        try:
            return check_parameters(attach(Path(folders[rank - self._leader])), self._layout, rank)
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

    def _sample(self, request: Request, outcome: Outcome) -> Sample:
        """Raises RuntimeError where SGLang refused the request, ValueError where its lists are not of one length."""
        if outcome.finish not in FINISHES:
            raise RuntimeError(
                f"prompt {request.prompt.id}, sample {request.index}: SGLang ended it by "
                f"{outcome.finish or 'nothing'!r}: {outcome.message}"
            )
        routed, moe = None, self._layout.weights.spec.moe
        if outcome.routed_experts is not None and moe is not None:
            ids = np.frombuffer(base64.b64decode(outcome.routed_experts), np.int32)
            routed = pack([ids.reshape(-1, len(moe.layers), moe.top_k)], moe)
        return Sample(
            prompt=request.prompt,
            index=request.index,
            response_ids=outcome.tokens,
            log_probs=outcome.log_probs,
            versions=[int(version) for version, start, end in outcome.spans for _ in range(start, end)],
            finish=FINISHES[outcome.finish],
            routed_experts=routed,
        )

    def _require_weights(self, what: str) -> None:
        if self._asleep or self._cache_asleep:
            raise EngineStateError(f"the engine is asleep: call wake, sync the weights and publish before {what}")
        if self._version is None:
            raise EngineStateError(f"no weights are in service: sync them and call publish before {what}")

    def _require_service(self, what: str) -> None:
        self._require_weights(what)
        if self._paused:
            raise EngineStateError(f"the engine is paused: call resume before {what}")

    def _require_no_running(self, what: str) -> None:
        if self._live and not self._paused:
            raise EngineStateError(f"{len(self._live)} requests are in flight: pause or abort them before {what}")


def _arguments(rid: str, request: Request, max_new_tokens: int, routed_experts: bool) -> dict[str, Any]:
    params = request.params
    return {
        "rid": rid,
        "input_ids": list(request.prompt.token_ids),
        "return_logprob": True,
        "return_routed_experts": routed_experts,
        "sampling_params": {
            "max_new_tokens": max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "stop_token_ids": list(params.stop_token_ids) or None,
            "ignore_eos": not params.stop_token_ids,
            "sampling_seed": request.seed,
        },
    }
