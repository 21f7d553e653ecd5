"""Batched generation: prompts in, sampled tokens and their log-probs out, with a key-value cache.

Up to `max_batch_size` sequences decode together. Where some end, waiting requests take their places; the samples of one
prompt share its prefill. What a sample draws depends on the weights, its prompt, seed and parameters alone: the batch
around it may move its logits in the last bits, never the uniform numbers that it draws with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridrl.models.spec import MoeSpec
from hybridrl.rollout import sampling
from hybridrl.rollout.route_recorder import RouteRecorder
from hybridrl.rollout.routes import pack
from hybridrl.rollout.samples import Finish, Request, Sample
from hybridrl.rollout.seeds import UniformStream
from hybridrl.rollout.slots import SlotCache
from hybridrl.rollout.stops import Decode, Ending

PREFILL_TOKENS = 16384  # tokens of one prefill pass, padding included; a longer prompt goes alone
REFILL_SHARE = 4  # waiting requests are let in once 1/REFILL_SHARE of the slots are free

Forward = Callable[[Tensor, Tensor, Tensor, SlotCache, Tensor], Tensor]
"""(token ids [rows, tokens], position ids alike, mask bool [rows, 1, tokens, keys], cache, column [rows]) → logits
[rows, vocabulary] of the token in each row's `column`."""


@dataclass(eq=False)
class _Sequence:
    """A request that is being answered."""

    request: Request
    order: int
    ending: Ending
    uniforms: UniformStream
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish: Finish | None = None
    routes: list[Tensor] = field(default_factory=list)
    """[tokens, layers, top-k] of the passes so far, on the model's device."""

    @property
    def stored(self) -> int:
        """Tokens whose keys and values lie in the cache: all but the last sampled one."""
        return len(self.request.prompt.token_ids) + len(self.tokens) - 1

    def append(self, token: int, log_prob: float) -> None:
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        self.finish = self.ending.append(token)


class Decoder:
    """One call's generation over `forward`; its cache is dropped with it.

    `max_positions` bounds prompt and response together. Tokens from `vocab_limit` on are never sampled. `recorder` is
    told by `forward` which experts its tokens went to; samples carry them then. `decode` serves stop strings.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        device: torch.device,
        max_batch_size: int,
        max_positions: int,
        vocab_limit: int | None = None,
        recorder: RouteRecorder | None = None,
        decode: Decode | None = None,
    ) -> None:
        self._forward = forward
        self._device = device
        self._slots = max_batch_size
        self._max_positions = max_positions
        self._vocab_limit = vocab_limit
        self._recorder = recorder
        self._decode_text = decode
        self.prefilled = 0
        """Prompt tokens computed so far."""
        self._active: list[_Sequence] = []  # the sequence at index i is in slot i
        self._cache = SlotCache(max_batch_size)

    def run(self, requests: Sequence[Request], version: int) -> list[Sample]:
        """One sample a request, in order. A request without room for a token ends at once, cut by length."""
        sequences = [self._sequence(i, request) for i, request in enumerate(requests)]
        waiting = sorted((s for s in sequences if s.finish is None), key=_place)
        self._slots = min(self._slots, len(waiting))
        self._cache = SlotCache(self._slots)
        while waiting or self._active:
            free = self._slots - len(self._active)
            if waiting and free >= min(-(-self._slots // REFILL_SHARE), len(waiting)):
                taken = self._prefill(waiting[:free])
                waiting = waiting[taken:]
            else:
                self._decode()
            self._retire()
        return [_sample(s, version, None if self._recorder is None else self._recorder.moe) for s in sequences]

    def _sequence(self, order: int, request: Request) -> _Sequence:
        room = self._max_positions - len(request.prompt.token_ids)
        limit = min(request.params.max_new_tokens, room)
        finish = Finish.LENGTH if limit < 1 else None
        ending = Ending(request.params, limit, self._decode_text)
        return _Sequence(request, order, ending, UniformStream(request.seed), finish=finish)

    def _prefill(self, candidates: Sequence[_Sequence]) -> int:
        """Lets in the first of the candidates, as many as one pass takes; returns how many."""
        prompts: dict[tuple[int, ...], int] = {}
        source: list[int] = []
        for sequence in candidates:
            token_ids = sequence.request.prompt.token_ids
            row = prompts.setdefault(token_ids, len(prompts))
            if row and len(prompts) * max(map(len, prompts)) > PREFILL_TOKENS:
                del prompts[token_ids]
                break
            source.append(row)
        width = max(map(len, prompts))
        # Padding lies on the right, where the causal mask hides it from every real token.
        padded = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in prompts], device=self._device)
        last = torch.tensor([len(ids) - 1 for ids in prompts], device=self._device)
        positions = torch.arange(width, device=self._device)
        mask = (positions[None, :] <= positions[:, None]).expand(len(prompts), 1, width, width)
        self._cache.prefill(len(self._active), source, width, self._device)
        logits = self._forward(padded, positions.expand_as(padded), mask, self._cache, last)
        self.prefilled += sum(map(len, prompts))
        admitted = list(candidates[: len(source)])
        self._active += admitted
        if self._recorder is not None:
            routes = self._recorder.take(len(prompts), width)
            for sequence, row in zip(admitted, source, strict=True):
                sequence.routes.append(routes[row, : len(sequence.request.prompt.token_ids)])
        self._sample(admitted, logits[torch.tensor(source, device=self._device)])
        return len(admitted)

    def _decode(self) -> None:
        """One token for every live sequence."""
        lengths = torch.tensor([s.stored for s in self._active], device=self._device)
        width = max(s.stored for s in self._active) + 1
        self._cache.decode(lengths, width)
        tokens = torch.tensor([[s.tokens[-1]] for s in self._active], device=self._device)
        mask = (torch.arange(width, device=self._device) <= lengths[:, None])[:, None, None]
        logits = self._forward(tokens, lengths[:, None], mask, self._cache, torch.zeros_like(lengths))
        if self._recorder is not None:
            for sequence, route in zip(self._active, self._recorder.take(len(lengths), 1), strict=True):
                sequence.routes.append(route)
        self._sample(self._active, logits)

    def _sample(self, sequences: Sequence[_Sequence], logits: Tensor) -> None:
        filters = sampling.Filters.of([s.request.params for s in sequences], self._device)
        log_probs = sampling.log_probs(logits, filters, self._vocab_limit)
        uniforms = [s.uniforms[len(s.tokens)] for s in sequences]
        tokens = sampling.draw(log_probs, torch.tensor(uniforms, dtype=torch.float64, device=self._device))
        tokens = tokens.clamp(max=logits.shape[-1] - 1)  # a NaN row has no place for u; refused below
        chosen = log_probs.gather(1, tokens[:, None])[:, 0]
        broken = (~chosen.isfinite()).nonzero()[:, 0].tolist()
        if broken:
            named = ", ".join(
                f"prompt {sequences[i].request.prompt.id} sample {sequences[i].request.index} "
                f"token {len(sequences[i].tokens)}"
                for i in broken[:8]
            )
            raise FloatingPointError(
                f"the model's logits are not finite at {len(broken)} of {len(sequences)} sequences ({named}): "
                "the weights in service, or the activations in this dtype, are broken"
            )
        for sequence, token, log_prob in zip(sequences, tokens.tolist(), chosen.tolist(), strict=True):
            sequence.append(token, log_prob)

    def _retire(self) -> None:
        """Frees the slots of ended sequences; the last live ones move into the gaps."""
        slot = 0
        while slot < len(self._active):
            if self._active[slot].finish is None:
                slot += 1
                continue
            last = self._active.pop()
            if slot < len(self._active):
                if last.finish is None:
                    self._cache.move(len(self._active), slot, last.stored)
                self._active[slot] = last


def _place(sequence: _Sequence) -> tuple[int, tuple[int, ...], int]:
    """Long prompts first, so the cache reaches its size early; alike prompts together, to share a prefill."""
    token_ids = sequence.request.prompt.token_ids
    return -len(token_ids), token_ids, sequence.order


def _sample(sequence: _Sequence, version: int, moe: MoeSpec | None) -> Sample:
    assert sequence.finish is not None
    routes = None
    if moe is not None and sequence.routes:
        routes = pack([torch.cat(sequence.routes).cpu().numpy()], moe)
    return Sample(
        prompt=sequence.request.prompt,
        index=sequence.request.index,
        response_ids=sequence.tokens,
        log_probs=sequence.log_probs,
        versions=[version] * len(sequence.tokens),
        finish=sequence.finish,
        routed_experts=routes,
    )
