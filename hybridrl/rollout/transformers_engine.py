"""The embedded engine: Hugging Face's own model in this process, a whole replica on every rank.

It needs nothing beside transformers, so the main job runs on any machine. It is not built for speed on large models: a
replica is never cut over ranks, and there is no paged cache.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hybridrl.models.families import trained_spec, weight_map
from hybridrl.models.live import live_tensors
from hybridrl.reshard.layouts.transformers import TransformersLayout
from hybridrl.rollout.base import EngineBase, check_requests
from hybridrl.rollout.causal_model import CausalModel
from hybridrl.rollout.decoder import Decoder
from hybridrl.rollout.parameters import EngineWeights, by_layout
from hybridrl.rollout.samples import Request, Sample
from hybridrl.rollout.stops import decoder


class TransformersEngine(EngineBase):
    """An `Engine` over the transformers model of a Hugging Face folder.

    - `ranks`: the world ranks that each hold a replica, `rank` being this one;
    - `max_batch_size`: sequences that decode together;
    - `load`: read the folder's weights (else parameters hold nothing until a sync); `publish` is due all the same;
    - `release_weights`: `sleep` gives back the weights' storage too, where it is the engine's own. The tensors stay the
      same objects; what they hold after `wake` is undefined until a sync;
    - `vocab_limit`: the tokenizer's length, where the checkpoint's vocabulary is padded beyond it: ids from there on
      are then never sampled, and have no mass in the log-probs. None keeps all of the checkpoint's rows, as a trainer
      does that knows no tokenizer;
    - `routed_experts`: samples of an MoE model carry the experts that their tokens were routed to;
    - `tokenizer`: the folder whose tokenizer says what text tokens are, for requests with stop strings.

    Raises ValueError for a model that the engine cannot compute, or where the layout and the module disagree.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        ranks: Sequence[int] = (0,),
        rank: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_batch_size: int = 64,
        load: bool = False,
        release_weights: bool = False,
        vocab_limit: int | None = None,
        routed_experts: bool = False,
        tokenizer: Path | str | None = None,
    ) -> None:
        if rank not in ranks:
            raise ValueError(f"rank {rank} is not among the engine's ranks {list(ranks)}")
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size={max_batch_size} must be at least 1")
        self._device = torch.device(device)
        spec = trained_spec(folder)
        layout = TransformersLayout(weight_map(spec), ranks, dtype=str(dtype).removeprefix("torch."))
        super().__init__(layout, sorted(ranks).index(rank), len(ranks))
        self._model = CausalModel(
            folder, device=self._device, dtype=dtype, moe=spec.moe, load=load, record_routes=routed_experts
        )
        found = by_layout(self._model.tensors(), layout, rank, owner="the transformers model")
        self._weights = EngineWeights(live_tensors(self._model.module, found), release=release_weights)
        self._decode = None if tokenizer is None else decoder(tokenizer)
        self._max_batch_size = max_batch_size
        self._vocab_limit = vocab_limit

    @property
    def max_positions(self) -> int:
        """The model's context: tokens of prompt and response together."""
        return self._model.max_positions

    def parameters(self) -> Mapping[str, Tensor]:
        """Live tensors under the layout's names. Raises EngineStateError while `sleep` has released them."""
        return self._weights.tensors()

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes these tensors' storage in place of the parameters' own; see `SharingEngine.adopt`."""
        self._weights.adopt(tensors)

    @torch.no_grad()
    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        """One sample a request, in the order of the requests.

        Log-probs are fp32 under the sampling distribution; at a temperature of 0 that has one token, with log-prob 0.
        A prompt that fills the context gives an empty response, cut by length.

        Raises EngineStateError while asleep or before `publish`; ValueError that lists what is wrong with the requests;
        FloatingPointError where logits are not finite.
        """
        self._require_weights("generate")
        check_requests(requests, self._model.vocab_size)
        assert self._version is not None
        decoder = Decoder(
            self._model.forward,
            device=self._device,
            max_batch_size=self._max_batch_size,
            max_positions=self._model.max_positions,
            vocab_limit=self._vocab_limit,
            recorder=self._model.recorder,
            decode=self._decode,
        )
        samples = decoder.run(requests, self._version)
        served = sum(len(sample.prompt.token_ids) for sample in samples if sample.response_ids)
        self.prompt_tokens += served
        self.cached_tokens += served - decoder.prefilled
        return samples

    def abort(self, which: Collection[tuple[int, int]] | None = None) -> list[Sample]:
        """None: nothing is in flight between calls of `generate`."""
        return []

    @property
    def cache_bytes(self) -> int:
        """None are held between calls of `generate`."""
        return 0

    def _require_no_running(self, what: str) -> None:
        """Nothing runs between calls of `generate`."""

    def _release(self) -> None:
        self._weights.free()

    def _restore_weights(self) -> None:
        self._weights.restore()

    def _restore_cache(self) -> None:
        """The key-value cache lives within a call of `generate` only."""

    def _begin_service(self, version: int) -> None:
        """Nothing that depends on the weights is kept."""
