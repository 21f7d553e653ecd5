"""The embedded engine: Hugging Face's own model in this process, a whole replica on every rank.

It needs nothing beside transformers, so the main job runs on any machine. It is not built for speed on large models: a
replica is never cut over ranks, and there is no paged cache.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hybridrl.models.families import load_spec, weight_map
from hybridrl.reshard.layout import Layout
from hybridrl.reshard.layouts.transformers import TransformersLayout
from hybridrl.rollout import sampling
from hybridrl.rollout.causal_model import CausalModel
from hybridrl.rollout.decoder import Decoder
from hybridrl.rollout.engine import EngineStateError
from hybridrl.rollout.samples import Request, Sample


class TransformersEngine:
    """An `Engine` over the transformers model of a Hugging Face folder.

    - `ranks`: the world ranks that each hold a replica, `rank` being this one;
    - `max_batch_size`: sequences that decode together;
    - `load`: read the folder's weights (else parameters hold nothing until a sync); `publish` is due all the same;
    - `release_weights`: `sleep` gives back the weights' storage too, where it is the engine's own. The tensors stay the
      same objects; what they hold after `wake` is undefined until a sync;
    - `vocab_limit`: the tokenizer's length, where the checkpoint's vocabulary is padded beyond it: ids from there on
      are then never sampled, and have no mass in the log-probs. None keeps all of the checkpoint's rows, as a trainer
      does that knows no tokenizer;
    - `routed_experts`: samples of an MoE model carry the experts that their tokens were routed to.

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
    ) -> None:
        if rank not in ranks:
            raise ValueError(f"rank {rank} is not among the engine's ranks {list(ranks)}")
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size={max_batch_size} must be at least 1")
        self.replica = sorted(ranks).index(rank)
        self.num_replicas = len(ranks)
        self._device = torch.device(device)
        spec = load_spec(folder)
        self._model = CausalModel(
            folder, device=self._device, dtype=dtype, moe=spec.moe, load=load, record_routes=routed_experts
        )
        self._layout = TransformersLayout(weight_map(spec), ranks, dtype=_name(dtype))
        self._tensors = _by_layout(self._model.tensors(), self._layout, rank)
        self._max_batch_size = max_batch_size
        self._vocab_limit = vocab_limit
        self._release = release_weights
        self._released: list[tuple[torch.UntypedStorage, int]] = []
        self._foreign: set[str] = set()
        """Parameters whose storage is the trainer's."""
        self._asleep = self._cache_asleep = False
        self._version: int | None = None

    @property
    def layout(self) -> Layout:
        """Whole weights on every rank of `ranks`, under the names that transformers holds them by in memory."""
        return self._layout

    @property
    def version(self) -> int | None:
        """Version of the weights in service, None before the first `publish` and after `sleep`."""
        return self._version

    @property
    def max_positions(self) -> int:
        """The model's context: tokens of prompt and response together."""
        return self._model.max_positions

    def parameters(self) -> Mapping[str, Tensor]:
        """Live tensors under the layout's names. Raises EngineStateError while `sleep` has released them."""
        if self._released:
            raise EngineStateError("the engine's weights are released: call wake before parameters")
        return self._tensors

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes these tensors' storage in place of the parameters' own; see `SharingEngine.adopt`."""
        wrong = [
            f"{name} is {_name(tensor.dtype)} {list(tensor.shape)}, the engine's is "
            f"{_name(self._tensors[name].dtype)} {list(self._tensors[name].shape)}"
            for name, tensor in tensors.items()
            if (tensor.dtype, tensor.shape) != (self._tensors[name].dtype, self._tensors[name].shape)
        ]
        if wrong:
            raise ValueError(f"the engine cannot take this storage: {'; '.join(wrong)}")
        for name, tensor in tensors.items():
            self._tensors[name].data = tensor
        self._foreign |= tensors.keys()

    @torch.no_grad()
    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        """One sample a request, in the order of the requests.

        Log-probs are fp32 under the sampling distribution; at a temperature of 0 that has one token, with log-prob 0.
        A prompt that fills the context gives an empty response, cut by length.

        Raises EngineStateError while asleep or before `publish`; ValueError that lists what is wrong with the requests;
        FloatingPointError where logits are not finite.
        """
        if self._asleep or self._cache_asleep:
            raise EngineStateError("the engine is asleep: call wake, sync the weights and publish before generate")
        if self._version is None:
            raise EngineStateError("no weights are in service: sync them and call publish before generate")
        self._check(requests)
        decoder = Decoder(
            self._model.forward,
            device=self._device,
            max_batch_size=self._max_batch_size,
            max_positions=self._model.max_positions,
            vocab_limit=self._vocab_limit,
            recorder=self._model.recorder,
        )
        return decoder.run(requests, self._version)

    def sleep(self) -> None:
        """Takes the weights out of service, and gives their storage back if the engine is to release it.

        The key-value cache lives within a call of `generate` only. Sleeping twice is the same as once.
        """
        self._version = None
        if self._release and not self._asleep:
            own = [tensor for name, tensor in self._tensors.items() if name not in self._foreign]
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in own}
            self._released = [(storage, storage.nbytes()) for storage in storages.values()]
            for storage, _ in self._released:
                storage.resize_(0)
        self._asleep = self._cache_asleep = True

    def wake(self) -> None:
        """Gives the weights their storage again. What they hold is not in service before `publish`."""
        self.wake_weights()
        self.wake_cache()

    def wake_weights(self) -> None:
        """See `wake`."""
        for storage, nbytes in self._released:
            storage.resize_(nbytes)
        self._released = []
        self._asleep = False

    def wake_cache(self) -> None:
        """Nothing has to be taken: see `sleep`. Raises EngineStateError before `wake_weights`."""
        if self._asleep:
            raise EngineStateError("the engine's weights are asleep: call wake_weights before wake_cache")
        self._cache_asleep = False

    @property
    def cache_bytes(self) -> int:
        """None are held between calls of `generate`."""
        return 0

    def publish(self, version: int) -> None:
        """Puts the parameters into service as weights `version`. Raises EngineStateError while asleep."""
        if self._asleep:
            raise EngineStateError(f"weights {version} were published to an engine that is asleep: call wake first")
        self._version = version

    def _check(self, requests: Sequence[Request]) -> None:
        problems = []
        for prompt in {id(r.prompt): r.prompt for r in requests}.values():
            if not prompt.token_ids:
                problems.append(f"prompt {prompt.id} has no tokens")
            elif not 0 <= min(prompt.token_ids) <= max(prompt.token_ids) < self._model.vocab_size:
                problems.append(
                    f"prompt {prompt.id} has token ids from {min(prompt.token_ids)} to {max(prompt.token_ids)}, the "
                    f"model's are 0 to {self._model.vocab_size - 1}"
                )
        if problems:
            raise ValueError("; ".join(problems))
        sampling.check([r.params for r in requests])


def _by_layout(tensors: Mapping[str, Tensor], layout: Layout, rank: int) -> dict[str, Tensor]:
    """The module's tensors in the layout's order; ValueError lists every name, shape and dtype that differs."""
    params = layout.params(rank)
    problems = [f"the module has no {name}" for name in params if name not in tensors]
    problems += [f"the layout has no {name}" for name in tensors if name not in params]
    for name in params.keys() & tensors.keys():
        found, expected = tensors[name], params[name]
        if (tuple(found.shape), _name(found.dtype)) != (expected.shape, expected.dtype):
            problems.append(
                f"{name} is {_name(found.dtype)} {tuple(found.shape)} in the module, "
                f"{expected.dtype} {expected.shape} in the layout"
            )
    if problems:
        raise ValueError(f"the transformers model and its layout disagree: {'; '.join(problems)}")
    return {name: tensors[name] for name in params}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
