"""What all engines do alike: the order of their calls, which weights are in service, and the check of requests."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from hybridrl.reshard.layout import Layout
from hybridrl.rollout import sampling
from hybridrl.rollout.engine import EngineStateError
from hybridrl.rollout.samples import Request


class EngineBase(ABC):
    """The life of an engine. A subclass does with memory what `_release`, `_restore_*` and `_begin_service` say.

    Weights are in service from `publish` to `sleep`; `generate` needs them, and both stages of `wake`.
    """

    def __init__(self, layout: Layout, replica: int, num_replicas: int) -> None:
        self.replica, self.num_replicas = replica, num_replicas
        self._layout = layout
        self._version: int | None = None
        self._asleep = self._cache_asleep = False
        self.prompt_tokens = 0
        """Prompt tokens of all requests that have drawn a token so far."""
        self.cached_tokens = 0
        """Those of them whose KV was there from another request."""

    @property
    def layout(self) -> Layout:
        """Where this engine keeps the weights, under its own names: the destination of a weight sync."""
        return self._layout

    @property
    def version(self) -> int | None:
        """Version of the weights in service, None before the first `publish` and after `sleep`."""
        return self._version

    def sleep(self) -> None:
        """Takes the weights out of service and gives memory back. Sleeping twice is the same as once.

        Raises EngineStateError with requests in flight, unless they are paused.
        """
        if self._asleep:
            return
        self._require_no_running("sleep")
        self._version = None
        self._release()
        self._asleep = self._cache_asleep = True

    def wake(self) -> None:
        """Gives the engine its memory again, in both stages. What weights hold is not in service before `publish`."""
        self.wake_weights()
        self.wake_cache()

    def wake_weights(self) -> None:
        """The first stage of `wake`: a sync may write the weights."""
        self._restore_weights()
        self._asleep = False

    def wake_cache(self) -> None:
        """The second stage of `wake`: the KV cache. Raises EngineStateError before `wake_weights`."""
        if self._asleep:
            raise EngineStateError("the engine's weights are asleep: call wake_weights before wake_cache")
        self._restore_cache()
        self._cache_asleep = False

    def publish(self, version: int) -> None:
        """Puts the parameters into service as weights `version`, and forgets the KV of all prefixes.

        Raises EngineStateError while asleep, or with requests in flight that are not paused: their KV is of older
        weights.
        """
        if self._asleep:
            raise EngineStateError(f"weights {version} were published to an engine that is asleep: call wake first")
        self._require_no_running(f"publish({version})")
        self._begin_service(version)
        self._version = version

    def _require_weights(self, what: str) -> None:
        if self._asleep or self._cache_asleep:
            raise EngineStateError(f"the engine is asleep: call wake, sync the weights and publish before {what}")
        if self._version is None:
            raise EngineStateError(f"no weights are in service: sync them and call publish before {what}")

    @abstractmethod
    def _require_no_running(self, what: str) -> None:
        """Raises EngineStateError where requests use the KV cache."""

    @abstractmethod
    def _release(self) -> None:
        """Gives back the KV cache, if it is there, and the weights where they are to go too."""

    @abstractmethod
    def _restore_weights(self) -> None:
        """Takes the weights' memory, unless it is there."""

    @abstractmethod
    def _restore_cache(self) -> None:
        """Takes the KV cache's memory, unless it is there."""

    @abstractmethod
    def _begin_service(self, version: int) -> None:
        """What has to happen between the last write and the first use of new weights."""


def check_requests(requests: Sequence[Request], vocab_size: int) -> None:
    """Raises ValueError that lists prompts without tokens or with unknown ones, and parameters out of range."""
    problems = []
    for prompt in {id(r.prompt): r.prompt for r in requests}.values():
        if not prompt.token_ids:
            problems.append(f"prompt {prompt.id} has no tokens")
        elif not 0 <= min(prompt.token_ids) <= max(prompt.token_ids) < vocab_size:
            problems.append(
                f"prompt {prompt.id} has token ids from {min(prompt.token_ids)} to {max(prompt.token_ids)}, the "
                f"model's are 0 to {vocab_size - 1}"
            )
    if problems:
        raise ValueError("; ".join(problems))
    sampling.check([r.params for r in requests])
