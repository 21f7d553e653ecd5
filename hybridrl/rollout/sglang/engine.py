"""The SGLang engine in the trainer's own processes: each rank hosts one rank of it.

Slots [0, tp), [tp, 2·tp), … hold a model each, and rank r is in slot r unless ranks are placed. Each is a replica: its
ranks make the same calls in the same order and so step their schedulers alike, while replicas go their own ways.

With data-parallel attention (`rollout.dp`) each tp / dp of a model's slots are a replica, with requests and a KV cache
of its own. The experts are still computed by all of the model's ranks together, so its replicas step in lockstep:
SGLang has those without requests take part in the passes of the others. They make the same calls, with requests of
their own, or none.

Overlapped scheduling and CUDA graphs are off here, since weights and KV memory move between phases and a graph would
keep their old addresses.
"""

from collections.abc import Mapping
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.rollout.engine import EngineStateError
from hybridrl.rollout.parameters import EngineWeights
from hybridrl.rollout.samples import Finish
from hybridrl.rollout.sglang import host
from hybridrl.rollout.sglang import internals as sg
from hybridrl.rollout.sglang.base import SGLangBase
from hybridrl.rollout.sglang.built import checked_parameters
from hybridrl.rollout.sglang.kv import KvMemory
from hybridrl.rollout.sglang.latents import match_trainer
from hybridrl.rollout.sglang.options import EngineOptions, field_problems, in_process_args
from hybridrl.rollout.sglang.placing import layout_of
from hybridrl.rollout.sglang.trace import Trace
from hybridrl.rollout.sglang.world import leave_world

STALLED_STEPS = 8  # so many steps in a row that run nothing while requests wait: SGLang will never run them


class SGLangEngine(SGLangBase):
    """An engine over SGLang's scheduler in this process.

    - `release_weights`: `sleep` gives back the weights' storage too. The tensors stay the same objects; what they hold
      after `wake` is undefined until a sync. Tensors that were re-pointed to foreign storage are left alone;
    - `vocab_limit`: the tokenizer's length where the checkpoint's vocabulary is padded beyond it: ids from there on are
      never sampled. None keeps all rows.

    All ranks of the world build it at the same time, once `torch.distributed` is initialised. A process has one engine:
    `close` makes room for another.

    Raises ValueError for options that make no engine, UnsupportedSGLangError for another SGLang than the known ones.
    """

    _open = False

    def __init__(
        self, options: EngineOptions, *, release_weights: bool = False, vocab_limit: int | None = None
    ) -> None:
        layout, rank = layout_of(options), dist.get_rank()
        slots = list(layout.slots)
        over = layout.sizes.attention_tp
        super().__init__(options, layout, slots.index(rank) // over, dist.get_world_size() // over)
        if SGLangEngine._open:
            raise RuntimeError("this process has an SGLang engine already: close it before another is built")
        server_args = in_process_args(options)
        unknown = field_problems(server_args, sg.SERVER_ARGS)
        if unknown:
            raise ValueError("; ".join(unknown))
        SGLangEngine._open = True
        self._scheduler = host.build(server_args, slots)
        self._scheduler.model_runner.sampler.vocab_limit = vocab_limit
        self._kv = KvMemory(self._scheduler.model_runner)
        model = self._scheduler.model_runner.model
        self._weights = EngineWeights(checked_parameters(model, layout, rank), release=release_weights)
        match_trainer(model)
        self._idle_steps = 0
        self._lockstep = options.dp > 1

    @property
    def kv_bytes(self) -> int:
        """Bytes of this rank's KV cache, which `sleep` gives back."""
        return self._kv.nbytes

    @property
    def cache_bytes(self) -> int:
        """`kv_bytes`, and 0 while asleep."""
        return 0 if self._cache_asleep else self._kv.nbytes

    def parameters(self) -> Mapping[str, Tensor]:
        """Live tensors under the layout's names. Raises EngineStateError while `sleep` has released them."""
        return self._weights.tensors()

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes these tensors' storage in place of the parameters' own; see `SharingEngine.adopt`."""
        self._weights.adopt(tensors)

    def step(self) -> int:
        """Runs one batch; the number of requests still in flight. Raises as `generate` does.

        With data-parallel attention it counts the requests of all ranks that step together while they run none, and at
        least 1 while they run some.
        """
        self._require_service("step")
        rows, log_probs = self._scheduler.step(self._live)
        self._idle_steps = 0 if rows or not self._live else self._idle_steps + 1
        if self._idle_steps >= STALLED_STEPS:
            raise RuntimeError(
                f"SGLang runs none of {len(self._live)} requests; of its KV cache of {self._options.kv_tokens} tokens "
                f"{self._scheduler.token_to_kv_pool_allocator.available_size()} are free"
            )
        for req, log_prob in zip(rows, log_probs, strict=True):
            self._advance(req, log_prob)
        in_flight = self._in_flight()
        if not in_flight:
            self._scheduler.settle()
        return in_flight

    def _in_flight(self) -> int:
        if not self._lockstep:
            return len(self._live)
        if self._scheduler.ran:
            return max(1, len(self._live))
        count = torch.tensor(len(self._live))
        dist.all_reduce(count, group=self._scheduler.tp_cpu_group)
        return int(count)

    def close(self) -> None:
        """Gives up the engine's process groups and memory, on all ranks of the world together."""
        if not SGLangEngine._open:
            return
        self._live, self._done = {}, {}
        del self._scheduler, self._kv, self._weights
        sg.destroy_global_experts_capturer()
        leave_world()
        SGLangEngine._open = False

    def _release(self) -> None:
        self._flush()
        if not sg.ON_CPU:
            torch.cuda.synchronize()  # SGLang's own stream may still use what is given back here
        self._kv.free()
        self._weights.free()

    def _restore_weights(self) -> None:
        self._weights.restore()

    def _restore_cache(self) -> None:
        self._kv.restore()

    def _begin_service(self, version: int) -> None:
        if not sg.ON_CPU:
            torch.cuda.synchronize()  # the weights were written on the trainer's stream, SGLang reads them on its own
        match_trainer(self._scheduler.model_runner.model)
        self._flush()

    def _queue(self, traces: Mapping[str, Trace]) -> None:
        self._scheduler.admit(list(traces.items()))

    def _retract(self) -> None:
        self._scheduler.pause_generation(sg.PauseGenerationReqInput(mode="retract"))

    def _go_on(self) -> None:
        self._scheduler.continue_generation(sg.ContinueGenerationReqInput(torch_empty_cache=False))

    def _end(self, traces: Mapping[str, Trace]) -> None:
        for rid, trace in traces.items():
            self._scheduler.abort_request(sg.AbortReq(rid=rid))
            trace.finish = Finish.ABORT

    def _advance(self, req: Any, log_prob: float) -> None:
        """Takes over what a row of the last batch has gained: one token, or none for a part of a prompt."""
        trace = self._live[req.rid]
        gained = len(req.output_ids) - len(trace.tokens)
        if gained == 0:
            return
        name = f"prompt {trace.request.prompt.id}, sample {trace.request.index}"
        if gained != 1:
            raise RuntimeError(f"{name}: SGLang added {gained} tokens in one step, expected one")
        if not isfinite(log_prob):
            raise FloatingPointError(
                f"{name}: the logits of token {len(trace.tokens)} of the response are not finite; the weights "
                f"published as version {self._version} are broken"
            )
        if not trace.tokens:
            trace.cached_tokens = req.cached_tokens
            self._count(trace)
        trace.retractions = req.retraction_count
        assert self._version is not None
        trace.append(req.output_ids[-1], log_prob, self._version)
        if (trace.finish is not None) != req.finished():
            raise RuntimeError(
                f"{name}: ended by {trace.finish} after {len(trace.tokens)} tokens, while SGLang's own state is "
                f"{req.finished_reason}"
            )
        if trace.finish is not None:
            self._done[req.rid] = self._live.pop(req.rid)

    def _flush(self) -> None:
        if not self._scheduler.flush_cache(empty_cache=False):
            raise EngineStateError("SGLang did not flush its prefix cache: it holds requests that are unknown here")
