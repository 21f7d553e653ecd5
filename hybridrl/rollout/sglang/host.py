"""SGLang's Scheduler hosted by a rank: built on the trainer's world, stepped by the rank, without sockets or processes.

The scheduler keeps its continuous batching, radix prefix cache, chunked prefill and retraction. What its process would
do around it (receive, loop, send) is `HostedScheduler.step`, which restates SGLang's `event_loop_normal`.
"""

import logging
import os
import random
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hybridrl.rollout.samples import Finish
from hybridrl.rollout.sglang import internals as sg
from hybridrl.rollout.sglang.capture import new_rows
from hybridrl.rollout.sglang.cpu.patches import laid_out_as_on_a_gpu
from hybridrl.rollout.sglang.replaced import replaced
from hybridrl.rollout.sglang.sampler import SeededSampler
from hybridrl.rollout.sglang.trace import Trace
from hybridrl.rollout.sglang.world import adopted_world


class _Nowhere:
    """Stands where SGLang sends its outputs; the rank reads requests directly."""

    socket = None

    def send_output(self, output: object, recv_obj: object = None) -> None:
        """Drops it."""


class HostedScheduler(sg.Scheduler):
    """A Scheduler without channels, that runs when `step` is called."""

    records_routes = False
    """Whether traces are told the experts that their tokens were routed to."""
    ran = False
    """Whether the last step ran a batch, of this rank or, with data-parallel attention, of one that steps with it."""
    running_batch: Any
    last_batch: Any

    def init_ipc_channels(self, port_args: Any) -> None:
        self.ipc_channels = sg.SchedulerIpcChannels(
            recv_from_tokenizer=None,
            recv_from_rpc=None,
            send_to_tokenizer=_Nowhere(),
            send_to_detokenizer=_Nowhere(),
            send_metrics_from_scheduler=None,
        )
        self.load_snapshot_writer = None
        self.recv_from_tokenizer = None

    @property
    def model_runner(self) -> Any:
        return self.tp_worker.model_runner

    def start(self) -> None:
        """What SGLang's `run_event_loop` sets before its first step, and hybridrl's sampler."""
        self.model_runner.sampler = SeededSampler()
        if self.device == "cpu":
            self.schedule_stream.synchronize = lambda: None
        self.records_routes = sg.get_global_experts_capturer() is not None
        self._war_barrier_enabled = False  # orders overlapped steps, of which there are none
        self.enable_continuous_input_polling = False
        self.enable_skip_finishing_decode = False
        self.model_config.hf_eos_token_id = set()  # the trace says what ends a request
        self.metrics_reporter.start_scheduler_time_accounting()

    @sg.DynamicGradMode()
    def step(self, traces: Mapping[str, Trace]) -> tuple[list[Any], list[float]]:
        """Runs one batch: its requests, row by row, and the log-probs of the tokens drawn. None to run: ([], []).

        `traces` has the trace of every request by its id.
        """
        with self.device_module.StreamContext(self.schedule_stream):
            plan = self.get_next_batch_to_run(running_batch=self.running_batch, last_batch=self.last_batch)
            self.running_batch = plan.running_batch
            batch = plan.batch_to_run
            self.cur_batch_for_debug = batch
            self.ran = bool(batch)
            rows: list[Any] = []
            log_probs: list[float] = []
            if batch and batch.forward_mode.is_idle():
                self.model_runner.sampler.rows = []
                self.process_batch_result(batch, self.run_batch(batch))
            elif batch:
                rows = list(batch.reqs)
                self.model_runner.sampler.rows = [traces[req.rid] for req in rows]
                result = self.run_batch(batch)
                if self.records_routes:
                    held = [traces[req.rid].routed_tokens for req in rows]
                    for req, part in zip(rows, new_rows(self, rows, held), strict=True):
                        traces[req.rid].add_routes(part)
                self._end(rows, result.next_token_ids.tolist(), traces)
                log_probs = self.model_runner.sampler.take_log_probs()
                self.process_batch_result(batch, result)
            else:
                self._sched_idled = True
                self.on_idle()
            self.last_batch = batch
        return rows, log_probs

    def _end(self, rows: Sequence[Any], tokens: Sequence[int], traces: Mapping[str, Trace]) -> None:
        """Has SGLang end those requests whose trace ends with the token just drawn, by its id or by its text."""
        for req, token in zip(rows, tokens, strict=True):
            gains = req.inflight_middle_chunks <= 0
            if gains and traces[req.rid].foresee(token) is Finish.STOP:
                req.to_finish = sg.FINISH_MATCHED_TOKEN(matched=token)

    def settle(self) -> None:
        """Lets go of requests that have ended, which SGLang does in the step after; checks its memory for leaks."""
        self.step({})
        if not self.is_fully_idle():
            raise RuntimeError("SGLang is not idle after its last request ended")

    def admit(self, requests: Sequence[tuple[str, Trace]]) -> None:
        """Queues requests under their ids, alike on all ranks of a replica. Raises ValueError if SGLang refuses one."""
        self.process_input_requests([_tokenized(rid, trace) for rid, trace in requests])
        admitted = {req.rid: req for req in self.waiting_queue}
        for rid, trace in requests:
            req = admitted.get(rid)
            name = f"prompt {trace.request.prompt.id}, sample {trace.request.index}"
            if req is None or req.to_finish is not None or req.finished():
                reason = None if req is None else req.to_finish or req.finished_reason
                raise ValueError(f"{name}: SGLang refused the request: {getattr(reason, 'message', 'not queued')}")
            if req.sampling_params.max_new_tokens != trace.max_new_tokens:
                raise ValueError(
                    f"{name}: SGLang cut {trace.max_new_tokens} response tokens to {req.sampling_params.max_new_tokens}"
                )


def _tokenized(rid: str, trace: Trace) -> Any:
    params = sg.SamplingParams(
        max_new_tokens=trace.max_new_tokens,
        temperature=1.0,  # the distribution is the sampler's, by the trace
        # SGLang reserves all of a request's tokens at once for one that nothing can end early
        ignore_eos=not (trace.params.stop_token_ids or trace.params.stop),
    )
    params.normalize(None)
    return sg.TokenizedGenerateReqInput(
        rid=rid,
        input_text=None,
        input_ids=array("q", trace.request.prompt.token_ids),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )


def build(server_args: Mapping[str, Any], ranks: Sequence[int]) -> HostedScheduler:
    """A scheduler on this rank, with random weights. All ranks of the world build at the same time.

    `server_args` are fields of SGLang's ServerArgs; `tp_size` says how many consecutive slots make up a replica, and
    `ranks` which world rank is in each. The process is left as it was found: random states, default dtype, gradient
    mode, environment, threads.
    """
    sg.check()
    tp = int(server_args["tp_size"])
    gpu = torch.cuda.current_device() if torch.cuda.is_available() else 0
    args = sg.ServerArgs(**server_args)
    with host_state_kept(), adopted_world(tp, ranks), ExitStack() as stack:
        os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # by a few positions that are never used
        stack.enter_context(quiet("sglang"))
        stack.enter_context(replaced(sg.scheduler_module, create_scheduler_watchdog=lambda *_, **__: None))
        if sg.ON_CPU:
            stack.enter_context(laid_out_as_on_a_gpu())
        sg.publish(
            args, role="scheduler", ranks=sg.SpawnRanks(world_rank=ranks.index(dist.get_rank()) % tp, gpu_id=gpu)
        )
        scheduler = HostedScheduler(args, sg.PortArgs.init_new(args))
        scheduler.start()
    return scheduler


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """No warnings of that logger and those under it: they are of choices that were made here on purpose."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def host_state_kept() -> Iterator[None]:
    """Puts back, at the end, the process-wide state that SGLang sets while it is built."""
    state = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    dtype, threads, environment = torch.get_default_dtype(), torch.get_num_threads(), dict(os.environ)
    try:
        yield
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.set_rng_state(state[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
