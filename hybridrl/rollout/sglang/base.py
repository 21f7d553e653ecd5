"""What both hostings of SGLang do alike: requests and samples, and what happens between them.

Beside the protocol of `hybridrl.rollout.engine` there are the parts of `generate` (`submit`, `step`, `take`) and what
acts between steps (`pause`, `resume`, `abort`, `flush`).
"""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence

from hybridrl.models.spec import ModelSpec
from hybridrl.reshard.layouts.sglang import SGLangLayout
from hybridrl.rollout.base import EngineBase, check_requests
from hybridrl.rollout.engine import EngineStateError
from hybridrl.rollout.samples import Finish, Request, Sample
from hybridrl.rollout.sglang.options import EngineOptions
from hybridrl.rollout.sglang.trace import Trace, budget, problems
from hybridrl.rollout.stops import decoder


class SGLangBase(EngineBase):
    """An engine over SGLang. Every rank of a replica makes the same calls in the same order.

    A subclass hands traces to SGLang (`_queue`), works on them (`step`), and fills them with what was drawn.
    """

    _layout: SGLangLayout

    def __init__(self, options: EngineOptions, layout: SGLangLayout, replica: int, num_replicas: int) -> None:
        super().__init__(layout, replica, num_replicas)
        self._options = options
        self._decode = None if options.tokenizer is None else decoder(options.tokenizer)
        self._live: dict[str, Trace] = {}
        self._done: dict[str, Trace] = {}
        self._submitted = 0
        self._lockstep = False
        """Whether replicas step together, also those without any requests."""
        self._paused = False

    @property
    def spec(self) -> ModelSpec:
        """The model's."""
        return self._layout.weights.spec

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
        while self._live or self._lockstep:
            if not self.step():
                break
        return self.take()

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests; `step` works on them. Raises as `generate` does."""
        self._require_service("generate")
        check_requests(requests, self.spec.vocab_size)
        found = problems(requests, kv_tokens=self._options.kv_tokens, max_positions=self._options.max_positions)
        if found:
            raise ValueError("; ".join(found))
        started = {}
        for request in requests:
            # of one length, since SGLang takes an id for all ids that begin with it
            rid = f"{self._submitted:016d}"
            self._submitted += 1
            trace = Trace(request, budget(request, self._options.max_positions), self._decode)
            if trace.max_new_tokens:
                started[rid] = trace
            else:
                trace.finish = Finish.LENGTH
                self._done[rid] = trace
        self._live |= started
        self._queue(started)

    @abstractmethod
    def step(self) -> int:
        """Works on what is queued, for a moment; the number of requests still in flight. Raises as `generate` does."""

    def take(self) -> list[Sample]:
        """Samples that ended since the last call, in the order in which they were submitted."""
        done, self._done = self._done, {}
        return [done[rid].sample(self.spec.moe) for rid in sorted(done)]

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
        self._retract()
        self._paused = True

    def resume(self) -> None:
        """Goes on after `pause`. Raises EngineStateError while asleep or before the weights are published."""
        if not self._paused:
            return
        self._require_weights("resume")
        self._go_on()
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
        if not ended:
            return []
        if not self._paused:
            self._retract()
        self._end(ended)
        if not self._paused:
            self._go_on()
        for rid in ended:
            del self._live[rid]
        return [trace.sample(self.spec.moe) for trace in ended.values()]

    def flush(self) -> None:
        """Forgets the KV of all prefixes. Raises EngineStateError with requests in flight, unless they are paused."""
        self._require_no_running("flush")
        self._flush()

    def _count(self, trace: Trace) -> None:
        """Counts the prompt of a request that has its first token."""
        self.prompt_tokens += len(trace.request.prompt.token_ids)
        self.cached_tokens += trace.cached_tokens

    def _require_service(self, what: str) -> None:
        self._require_weights(what)
        if self._paused:
            raise EngineStateError(f"the engine is paused: call resume before {what}")

    def _require_no_running(self, what: str) -> None:
        if self._live and not self._paused:
            raise EngineStateError(f"{len(self._live)} requests are in flight: pause or abort them before {what}")

    @abstractmethod
    def _queue(self, traces: Mapping[str, Trace]) -> None:
        """Gives requests to SGLang under their ids."""

    @abstractmethod
    def _retract(self) -> None:
        """Stops SGLang between steps and takes every request off its KV."""

    @abstractmethod
    def _go_on(self) -> None:
        """Undoes `_retract`; requests wait to be computed anew."""

    @abstractmethod
    def _end(self, traces: Mapping[str, Trace]) -> None:
        """Has SGLang let go of requests that are retracted, and gives their traces a finish."""

    @abstractmethod
    def _flush(self) -> None:
        """Has SGLang forget all prefixes."""
