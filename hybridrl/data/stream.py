"""The order in which examples are handed out: every one once an epoch, and resumable to the example."""

import dataclasses
import hashlib
import random
from collections.abc import Sequence
from typing import Any

from hybridrl.data.demonstrations import Demonstration
from hybridrl.data.errors import DataError
from hybridrl.rollout.samples import Prompt


class Order:
    """Indices of `size` examples, epoch after epoch, each epoch in an order of its own by (seed, epoch).

    All of it follows from one number, the count of indices handed out, so every rank computes the same and a resumed
    run goes on with the next index. An epoch that ends inside a batch goes over into the next one: no index is left out
    or doubled within an epoch. The order comes from a generator of its own; global ones are not touched.
    """

    def __init__(self, size: int, *, seed: int, shuffle: bool) -> None:
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self.position = 0
        """Indices handed out since the start."""
        self._epoch: int | None = None
        self._permutation: list[int] = []

    def take(self, count: int) -> list[int]:
        """The next `count` indices."""
        taken = [self._index(self.position + offset) for offset in range(count)]
        self.position += count
        return taken

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, self.size)
        if epoch != self._epoch:
            self._permutation = list(range(self.size))
            if self.shuffle:
                random.Random(f"{self.seed}/{epoch}").shuffle(self._permutation)
            self._epoch = epoch
        return self._permutation[place]


class _Stream:
    """What streams of prompts and demonstrations share: the order, its checks and its state."""

    def __init__(self, digest: str, size: int, *, batch: int, seed: int, shuffle: bool, option: str) -> None:
        if batch < 1:
            raise DataError(f"{option}={batch}; expected at least 1")
        if size < batch:
            raise DataError(
                f"the data has {size} usable rows, fewer than a batch ({option}={batch}); give more, or a smaller batch"
            )
        self._order = Order(size, seed=seed, shuffle=shuffle)
        self._digest = digest

    @property
    def size(self) -> int:
        """Examples of an epoch."""
        return self._order.size

    @property
    def epoch(self) -> float:
        """Epochs handed out, with fractions."""
        return self._order.position / self._order.size

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands: counts only what was handed out. For `load_state_dict`; plain numbers and text."""
        order = self._order
        return {
            "position": order.position,
            "size": order.size,
            "seed": order.seed,
            "shuffle": order.shuffle,
            "digest": self._digest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` stands. Raises DataError if the data, the seed or the shuffling are not the same."""
        own = self.state_dict()
        changed = [
            f"{key} was {state.get(key)!r}, is {own[key]!r}"
            for key in own
            if key != "position" and state.get(key) != own[key]
        ]
        if changed:
            raise DataError(
                f"the saved place in the data does not fit it: {'; '.join(changed)}; "
                "resume with the data, tokenizer, template and data.seed of the saved run"
            )
        self._order.position = int(state["position"])


class PromptStream(_Stream):
    """Prompts in steps of `batch`. Raises DataError when made if there are fewer prompts than that."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        batch: int,
        seed: int,
        shuffle: bool = True,
        option: str = "trainer.prompts_per_step",
    ) -> None:
        digest = _digest((prompt.token_ids, prompt.answer) for prompt in prompts)
        super().__init__(digest, len(prompts), batch=batch, seed=seed, shuffle=shuffle, option=option)
        self._prompts = prompts

    def next(self, count: int) -> list[Prompt]:
        """The next prompts, alike on all ranks. Ids count prompts handed out, so they never recur in a run, even where
        an epoch's border brings one row twice into a step."""
        first = self._order.position
        return [
            dataclasses.replace(self._prompts[index], id=first + offset)
            for offset, index in enumerate(self._order.take(count))
        ]


class DemonstrationStream(_Stream):
    """Demonstrations in steps of `batch`. Raises DataError when made if there are fewer than that."""

    def __init__(
        self,
        demonstrations: Sequence[Demonstration],
        *,
        batch: int,
        seed: int,
        shuffle: bool = True,
        option: str = "warm_start.batch_size",
    ) -> None:
        digest = _digest((example.token_ids, example.mask) for example in demonstrations)
        super().__init__(digest, len(demonstrations), batch=batch, seed=seed, shuffle=shuffle, option=option)
        self._demonstrations = demonstrations

    def next(self, count: int) -> list[Demonstration]:
        """The next demonstrations, alike on all ranks."""
        return [self._demonstrations[index] for index in self._order.take(count)]


class PreferenceStream(_Stream):
    """Pairs or verdicts, handed out by their places in steps of `batch`; the last `holdout` of them are not.

    Raises DataError when made if there are fewer than a batch.
    """

    def __init__(
        self,
        examples: Sequence[Any],
        *,
        batch: int,
        seed: int,
        shuffle: bool = True,
        holdout: int = 0,
        option: str = "trainer.prompts_per_step",
    ) -> None:
        if holdout and len(examples) - holdout < batch:
            raise DataError(
                f"preference.holdout={holdout} of {len(examples)} usable rows leaves fewer than a batch "
                f"({option}={batch}); hold out less, or give more"
            )
        trained = len(examples) - holdout
        super().__init__(_digest(examples[:trained]), trained, batch=batch, seed=seed, shuffle=shuffle, option=option)
        self.examples = examples
        """All of them: `Pair` or `Verdict`."""
        self.held_out = range(trained, len(examples))

    def next(self, count: int) -> list[int]:
        """The places in `examples` of the next ones, alike on all ranks."""
        return self._order.take(count)


def _digest(items: Any) -> str:
    digest = hashlib.sha256()
    for item in items:
        digest.update(repr(item).encode())
    return digest.hexdigest()[:16]
