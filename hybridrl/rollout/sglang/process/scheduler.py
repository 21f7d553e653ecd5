"""The scheduler process of SGLang's own Engine, with hybridrl's sampler, shared weights, and memory that sleeps.

SGLang runs its own loop; methods here whose names begin with `hybrid_` are called through `Engine.collective_rpc`, on
all ranks of the replica between two steps.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridrl.rollout.samples import SamplingParams
from hybridrl.rollout.seeds import UniformStream
from hybridrl.rollout.sglang import internals as sg
from hybridrl.rollout.sglang.built import checked_parameters, replica_layout
from hybridrl.rollout.sglang.capture import new_rows
from hybridrl.rollout.sglang.cpu.patches import laid_out_as_on_a_gpu
from hybridrl.rollout.sglang.kv import KvMemory
from hybridrl.rollout.sglang.latents import match_trainer
from hybridrl.rollout.sglang.process.outcome import STOP_STRINGS
from hybridrl.rollout.sglang.process.shared import share
from hybridrl.rollout.sglang.replaced import replaced
from hybridrl.rollout.sglang.sampler import SeededSampler
from hybridrl.rollout.stops import Decode, StopStrings, decoder

ALL_TOKENS = 1 << 30
"""SGLang's `top_k` for none."""

BUSY = "SGLang holds requests"
"""The error of a flush that came too early: requests that have ended are let go in the step after."""


@dataclass(frozen=True)
class _Row:
    params: SamplingParams
    uniform: float


class BesideScheduler(sg.Scheduler):
    """SGLang's scheduler in a process of its own."""

    vocab_limit: int | None = None
    decode_text: Decode | None = None
    waiting_queue: list[Any]

    def run_event_loop(self) -> None:
        self.model_config.hf_eos_token_id = set()  # as in process: a request's own stop tokens end it
        self.tp_worker.model_runner.sampler = sampler = SeededSampler()
        sampler.vocab_limit = self.vocab_limit
        self._kv = KvMemory(self.tp_worker.model_runner)
        super().run_event_loop()

    def run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self.tp_worker.model_runner.sampler.rows = [_row(req) for req in batch.reqs]
        result = super().run_batch(batch, *args, **kwargs)
        if sg.get_global_experts_capturer() is not None:
            held = [getattr(req, "hybridrl_routes", []) for req in batch.reqs]
            for req, parts, part in zip(
                batch.reqs, held, new_rows(self, batch.reqs, [sum(map(len, parts)) for parts in held]), strict=True
            ):
                req.hybridrl_routes = [*parts, part] if len(part) else parts
        if any(req.sampling_params.custom_params for req in batch.reqs):
            self._end_by_text(batch.reqs, result.next_token_ids.tolist())
        return result

    def _end_by_text(self, reqs: Sequence[Any], tokens: Sequence[int]) -> None:
        """Has SGLang end those requests whose text holds a stop string with the token just drawn."""
        for req, token in zip(reqs, tokens, strict=True):
            stops = (req.sampling_params.custom_params or {}).get(STOP_STRINGS)
            if not stops or req.inflight_middle_chunks > 0:
                continue
            assert self.decode_text is not None
            if not hasattr(req, "hybridrl_stops"):
                req.hybridrl_stops = StopStrings(stops, self.decode_text)
            if req.hybridrl_stops.append(token):
                req.to_finish = sg.FINISH_MATCHED_TOKEN(matched=token)

    def abort_request(self, recv_req: Any) -> None:
        """As SGLang's own, but a queued request that has tokens (it was retracted) returns them."""
        kept = []
        for req in self.waiting_queue:
            if len(req.output_ids) and (recv_req.abort_all or req.rid.startswith(recv_req.rid)):
                req.finished_reason = sg.FINISH_ABORT()
                _give_routes(req)
                self.output_streamer.stream_output([req], req.return_logprob)
            else:
                kept.append(req)
        self.waiting_queue = kept
        super().abort_request(recv_req)

    def hybrid_share(self, folders: Sequence[str]) -> None:
        """Shares this rank's parameters through its folder of `folders`, one a rank.

        Raises ValueError where the trainer must not write them as the layout says (see `checked_parameters`).
        """
        rank = sg.get_parallel().tp_rank
        model = self.tp_worker.model_runner.model
        share(checked_parameters(model, replica_layout(self.server_args), rank), Path(folders[rank]))
        match_trainer(model)

    def hybrid_sleep(self) -> None:
        """Gives the KV pool back."""
        self._flush()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # SGLang's own stream may still use it
        self._kv.free()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # else this process's allocator keeps it from the trainer's process

    def hybrid_wake(self) -> None:
        """Takes the KV pool again."""
        self._kv.restore()

    def hybrid_publish(self, version: str) -> None:
        """Puts what the parameters hold into service."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        match_trainer(self.tp_worker.model_runner.model)
        self._flush()
        self.record_weight_version_change(version)

    def hybrid_flush(self) -> None:
        """Forgets all prefixes."""
        self._flush()

    def hybrid_pause(self) -> None:
        """Retracts every request."""
        self.pause_generation(sg.PauseGenerationReqInput(mode="retract"))

    def hybrid_resume(self) -> None:
        """Goes on."""
        self.continue_generation(sg.ContinueGenerationReqInput(torch_empty_cache=False))

    def _flush(self) -> None:
        if not self.flush_cache(empty_cache=False):
            raise RuntimeError(BUSY)


def _give_routes(req: Any) -> None:
    """All rows as they were computed, in the place of what the KV's places hold when the request ends."""
    if parts := getattr(req, "hybridrl_routes", []):
        req.routed_experts = torch.from_numpy(np.concatenate(parts))


def _row(req: Any) -> _Row:
    sp = req.sampling_params
    if not hasattr(req, "hybridrl_uniforms"):
        req.hybridrl_uniforms = UniformStream(sp.sampling_seed)
    params = SamplingParams(temperature=sp.temperature, top_p=sp.top_p, top_k=0 if sp.top_k >= ALL_TOKENS else sp.top_k)
    return _Row(params, req.hybridrl_uniforms[len(req.output_ids)])


def run_scheduler(*args: Any, vocab_limit: int | None = None, tokenizer: Path | None = None, **kwargs: Any) -> None:
    """SGLang's `run_scheduler_process`, with `BesideScheduler`. The entry of a process that the Engine spawns."""
    sg.check()
    BesideScheduler.vocab_limit = vocab_limit
    BesideScheduler.decode_text = None if tokenizer is None else decoder(tokenizer)
    with ExitStack() as stack:
        if sg.ON_CPU:
            stack.enter_context(laid_out_as_on_a_gpu())
        stack.enter_context(replaced(sg.scheduler_module, Scheduler=BesideScheduler))
        collect = {"_maybe_collect_routed_experts": lambda _, req: _give_routes(req)}
        stack.enter_context(replaced(sg.SchedulerBatchResultProcessor, **collect))
        sg.scheduler_module.run_scheduler_process(*args, **kwargs)
