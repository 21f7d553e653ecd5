"""The protocol that every engine obeys."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from hybridrl.reshard.layout import Layout
from hybridrl.rollout.samples import Request, Sample

if TYPE_CHECKING:
    import torch


class Engine(Protocol):
    """An inference engine on this rank, or this rank's share of one.

    Every rank of a replica calls every method, in the same order. `generate` takes the requests of this rank's replica
    and returns the samples in the same order, on every rank of the replica alike.
    """

    replica: int
    """Index of the replica that this rank belongs to."""
    num_replicas: int
    prompt_tokens: int
    """Prompt tokens of all requests that have drawn a token so far."""
    cached_tokens: int
    """Those of them that were not computed: their KV was there from another request."""

    @property
    def layout(self) -> Layout:
        """Where this engine keeps the weights: the destination of a weight sync."""

    def parameters(self) -> Mapping[str, "torch.Tensor"]:
        """This rank's live parameters (and buffers) under the layout's names; written in place by a weight sync."""

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        """One sample a request. Replicas without any call it too: they may step together.

        Raises EngineStateError while asleep or before the weights are published.
        """

    def abort(self, which: Collection[tuple[int, int]] | None = None) -> list[Sample]:
        """Ends requests in flight, those of these (prompt id, index) or all; their samples, finished by `ABORT`."""

    def sleep(self) -> None:
        """Gives back memory that only generation needs (KV cache; weights where they are the engine's own)."""

    def wake(self) -> None:
        """Undoes `sleep`, both stages. Weights must be synced, and `publish` called, before the next `generate`."""

    def wake_weights(self) -> None:
        """The first stage of `wake`: the parameters have memory, and a weight sync may write them."""

    def wake_cache(self) -> None:
        """The second stage of `wake`: the KV cache has memory. Raises EngineStateError before `wake_weights`."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache that this rank's device holds between calls of `generate` now: 0 while asleep."""

    def publish(self, version: int) -> None:
        """Declares that the parameters hold weights `version`, whole; forgets every cache of older weights."""

    @property
    def version(self) -> int | None:
        """Version of the weights in service, None before the first `publish` and after `sleep`."""


@runtime_checkable
class SharingEngine(Engine, Protocol):
    """An engine in this process, whose parameters may lie in storage that the trainer owns."""

    def adopt(self, tensors: Mapping[str, "torch.Tensor"]) -> None:
        """Takes these tensors' storage for the parameters of these names in place of its own, and never frees it.

        What the storage's owner writes is the engine's from then on: it must happen while the engine sleeps, and be
        published. Raises ValueError that names each parameter which cannot lie elsewhere, or is laid out otherwise.
        """


class EngineStateError(RuntimeError):
    """A call that the engine's state does not allow (generate while asleep, or with weights half-written)."""
