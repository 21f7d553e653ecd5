"""The SGLang engine in the trainer's own processes: each rank hosts one rank of a replica.

Slots [0, tp), [tp, 2·tp), … are replicas, and rank r is in slot r unless ranks are placed. Every rank of a replica
makes the same calls in the same order and so steps its scheduler as often as the others; replicas go their own ways.
Overlapped scheduling and CUDA graphs are off here, since weights and KV memory move between phases and a graph would
keep their old addresses.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.reshard.layout import Layout
from hybridrl.reshard.layouts.sglang import SGLangLayout
from hybridrl.rollout import sampling
from hybridrl.rollout.engine import EngineStateError
from hybridrl.rollout.samples import Finish, Request, Sample
from hybridrl.rollout.sglang import host
from hybridrl.rollout.sglang import internals as sg
from hybridrl.rollout.sglang.adopt import adopt, order_problems
from hybridrl.rollout.sglang.checks import check_parameters, layout_of
from hybridrl.rollout.sglang.kv import KvMemory, Storages
from hybridrl.rollout.sglang.options import EngineOptions, field_problems, in_process_args
from hybridrl.rollout.sglang.trace import Trace, budget, problems
from hybridrl.rollout.sglang.world import leave_world

STALLED_STEPS = 8  # so many steps in a row that run nothing while requests wait: SGLang will never run them


class SGLangEngine:
    """An `Engine` over SGLang's scheduler in this process; see `hybridrl.rollout.engine`.

    Beside the protocol there are the parts of `generate` (`submit`, `step`, `take`) and what acts between steps
    (`pause`, `resume`, `abort`).

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
        self._options = options
        self._layout = layout_of(options)
        rank = dist.get_rank()
        slots = list(self._layout.slots)
        self.replica = slots.index(rank) // options.tp
        self.num_replicas = dist.get_world_size() // options.tp
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
        if found := order_problems(model):
            raise ValueError(f"SGLang's modules hold parameters otherwise than its checkpoints: {'; '.join(found)}")
        have = dict(model.requires_grad_(False).named_parameters())
        self._parameters = check_parameters(have, self._layout, rank)
        self._padded = _padded(self._layout, self._parameters, rank)
        self._zero_padding()
        self._derived = bool(self._layout.derived(rank))
        self._weights = Storages(self._parameters.values()) if release_weights else None
        self._foreign: set[str] = set()
        """Parameters whose storage is the trainer's."""
        self._live: dict[str, Trace] = {}
        self._done: dict[str, Trace] = {}
        self._submitted = 0
        self._idle_steps = 0
        self._version: int | None = None
        self._asleep = self._cache_asleep = False
        self._paused = False
        self.prompt_tokens = 0
        """Prompt tokens of all requests that have produced a token so far."""
        self.cached_tokens = 0
        """Those of them whose KV was found in the prefix cache."""

    # ---------------------------------------------------------------- the protocol

    @property
    def layout(self) -> Layout:
        """SGLang's own parameters on every rank, under its names."""
        return self._layout

    @property
    def version(self) -> int | None:
        """Version of the weights in service, None before the first `publish` and after `sleep`."""
        return self._version

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
        if self._weights is not None and self._asleep:
            raise EngineStateError("the engine's weights are released: call wake before parameters")
        return self._parameters

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes these tensors' storage in place of the parameters' own; see `SharingEngine.adopt`."""
        adopt(self._scheduler.model_runner.model, tensors)
        self._foreign |= tensors.keys()
        own = {name: tensor for name, tensor in self._parameters.items() if name not in self._foreign}
        self._padded = _padded(self._layout, own, dist.get_rank())
        if self._weights is not None:
            self._weights = Storages(own.values())

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        """One sample a request, in the order of the requests.

        Log-probs are fp32 under the sampling distribution, top-p and top-k included; at a temperature of 0 that has one
        token, with log-prob 0. A prompt that fills the context gives an empty response, cut by length.

        Raises EngineStateError while asleep, paused, before `publish`, or with other requests in flight; ValueError
        that lists what is wrong with the requests; FloatingPointError where logits are not finite.
        """
        if self._live or self._done:
            raise EngineStateError(
                f"{len(self._live)} requests are in flight and {len(self._done)} samples were not taken: resume and "
                "step to their end and take them, or abort them, before generate"
            )
        self.submit(requests)
        while self._live:
            self.step()
        return self.take()

    def sleep(self) -> None:
        """Gives back the KV cache, and the weights if so configured. Sleeping twice is the same as once.

        Raises EngineStateError with requests in flight, unless they are paused.
        """
        if self._asleep:
            return
        self._require_no_running("sleep")
        self._version = None
        self._flush()
        self._kv.free()
        if self._weights is not None:
            self._weights.free()
        self._asleep = self._cache_asleep = True

    def wake(self) -> None:
        """Gives the engine its memory again. What the weights hold is not in service before `publish`."""
        self.wake_weights()
        self.wake_cache()

    def wake_weights(self) -> None:
        """The first stage of `wake`: a sync may write the weights."""
        if self._weights is not None:
            self._weights.restore()
            self._zero_padding()
        self._asleep = False

    def wake_cache(self) -> None:
        """The second stage of `wake`: the KV pool. Raises EngineStateError before `wake_weights`."""
        if self._asleep:
            raise EngineStateError("the engine's weights are asleep: call wake_weights before wake_cache")
        self._kv.restore()
        self._cache_asleep = False

    def publish(self, version: int) -> None:
        """Puts the parameters into service as weights `version`, and forgets the KV of all prefixes.

        Raises EngineStateError while asleep, or with requests in flight that are not paused: their KV is of older
        weights.
        """
        if self._asleep:
            raise EngineStateError(f"weights {version} were published to an engine that is asleep: call wake first")
        self._require_no_running(f"publish({version})")
        if not sg.ON_CPU:
            torch.cuda.synchronize()  # the weights were written on the trainer's stream, SGLang reads them on its own
        if self._derived:
            self._scheduler.model_runner.model.post_load_weights()
        self._flush()
        self._version = version

    # ---------------------------------------------------------------- between steps

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests; `step` works on them. Raises as `generate` does."""
        self._require_service("generate")
        found = problems(
            requests,
            vocab_size=self._layout.weights.spec.vocab_size,
            kv_tokens=self._options.kv_tokens,
            max_positions=self._options.max_positions,
        )
        if found:
            raise ValueError("; ".join(found))
        sampling.check([r.params for r in requests])
        traces = {}
        for request in requests:
            # of one length, since SGLang takes an id for all ids that begin with it
            rid = f"{self._submitted:016d}"
            self._submitted += 1
            traces[rid] = Trace(request, budget(request, self._options.max_positions))
        empty = {rid: trace for rid, trace in traces.items() if not trace.max_new_tokens}
        for rid, trace in empty.items():
            trace.finish = Finish.LENGTH
            self._done[rid] = trace
        rest = {rid: trace for rid, trace in traces.items() if rid not in empty}
        self._live |= rest
        self._scheduler.admit(list(rest.items()))

    def step(self) -> int:
        """Runs one batch; the number of requests still in flight. Raises as `generate` does."""
        self._require_service("step")
        rows, log_probs = self._scheduler.step(self._live)
        self._idle_steps = 0 if rows else self._idle_steps + 1
        if self._live and self._idle_steps >= STALLED_STEPS:
            raise RuntimeError(
                f"SGLang runs none of {len(self._live)} requests; of its KV cache of {self._options.kv_tokens} tokens "
                f"{self._scheduler.token_to_kv_pool_allocator.available_size()} are free"
            )
        for req, log_prob in zip(rows, log_probs, strict=True):
            self._advance(req, log_prob)
        if not self._live:
            self._scheduler.settle()
        return len(self._live)

    def take(self) -> list[Sample]:
        """Samples that ended since the last call, in the order in which they were submitted."""
        done, self._done = self._done, {}
        return [done[rid].sample(self._layout.weights.spec.moe) for rid in sorted(done)]

    def pause(self, mode: str = "retract") -> None:
        """Stops between steps and takes every request off its KV; they are computed anew after `resume`.

        So weights may change meanwhile: `publish` them, then `resume`. Tokens drawn so far are kept. Raises ValueError
        for SGLang's other mode, `in_place`, which keeps KV of the old weights and goes on with it.
        """
        if mode != "retract":
            raise ValueError(f"pause mode {mode!r}: only 'retract' leaves no KV of older weights in use")
        if self._paused:
            return
        self._require_service("pause")
        self._scheduler.pause_generation(sg.PauseGenerationReqInput(mode=mode))
        self._paused = True

    def resume(self) -> None:
        """Goes on after `pause`. Raises EngineStateError while asleep or before the weights are published."""
        if not self._paused:
            return
        self._require_weights("resume")
        self._scheduler.continue_generation(sg.ContinueGenerationReqInput(torch_empty_cache=False))
        self._paused = False

    def abort(self, which: Collection[tuple[int, int]] | None = None) -> list[Sample]:
        """Ends requests at once, with the tokens they have; their samples, finished by `ABORT`.

        `which` holds (prompt id, index) of those to end; None ends all. The others are retracted and go on with the
        next step.
        """
        ended = {
            rid: trace
            for rid, trace in self._live.items()
            if which is None or (trace.request.prompt.id, trace.request.index) in which
        }
        if ended and not self._paused:
            self._scheduler.pause_generation(sg.PauseGenerationReqInput(mode="retract"))
        for rid, trace in ended.items():
            self._scheduler.abort_request(sg.AbortReq(rid=rid))
            trace.finish = Finish.ABORT
            del self._live[rid]
        if ended and not self._paused:
            self._scheduler.continue_generation(sg.ContinueGenerationReqInput(torch_empty_cache=False))
        return [trace.sample(self._layout.weights.spec.moe) for trace in ended.values()]

    def flush(self) -> None:
        """Forgets the KV of all prefixes. Raises EngineStateError with requests in flight, unless they are paused."""
        self._require_no_running("flush")
        self._flush()

    def close(self) -> None:
        """Gives up the engine's process groups and memory, on all ranks of the world together."""
        if not SGLangEngine._open:
            return
        self._live, self._done, self._parameters = {}, {}, {}
        del self._scheduler, self._kv
        sg.destroy_global_experts_capturer()
        leave_world()
        SGLangEngine._open = False

    # ---------------------------------------------------------------- inside

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
            self.prompt_tokens += len(trace.request.prompt.token_ids)
            self.cached_tokens += req.cached_tokens
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

    @torch.no_grad()
    def _zero_padding(self) -> None:
        for tensor in self._padded:
            tensor.zero_()

    def _flush(self) -> None:
        if not self._scheduler.flush_cache(empty_cache=False):
            raise EngineStateError("SGLang did not flush its prefix cache: it holds requests that are unknown here")


def _padded(layout: SGLangLayout, parameters: Mapping[str, Tensor], rank: int) -> list[Tensor]:
    """Parameters with elements that no sync writes, such as rows of a padded vocabulary."""
    covered: Counter[str] = Counter()
    for piece in layout.pieces(rank):
        covered[piece.param] += piece.box.size
    return [tensor for name, tensor in parameters.items() if covered[name] < tensor.numel()]
