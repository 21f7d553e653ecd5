"""Rows: token sequences with what a loss needs to know of each token. NumPy, alike on all ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from hybridrl.rollout.routes import NO_EXPERT, Routes
from hybridrl.rollout.samples import Finish, Sample

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sequence, prompt and response. Entry i of every array is about token i.

    Token 0 is never trained, since nothing predicts it. Raises ValueError where arrays differ in length, the sequence
    is empty or token 0 is marked.
    """

    index: int
    """Position in the global batch: results come back in this order."""
    token_ids: Tokens
    """[length] int64."""
    mask: Bools
    """[length] bool: True for trained tokens."""
    pair: int | None = None
    """Rows with one number are compared with each other: they share a micro-batch."""
    fields: dict[str, Floats] = field(default_factory=dict)
    """[length] float32 each: `advantages`, `old_log_probs`, `ref_log_probs`, `rollout_log_probs`, `weights`, and where
    asked for `importance` and `selected`. Entries of tokens that are not trained mean nothing."""

    routes: Routes | None = None
    """[length, layers, k] int8 or int16: the experts that each token is to be routed to, where routing is replayed.
    `NO_EXPERT` in all of a token's layers leaves the token to the router."""

    def __post_init__(self) -> None:
        shapes = {name: array.shape for name, array in {"mask": self.mask, **self.fields}.items()}
        if self.routes is not None:
            shapes["routes"] = self.routes.shape[:1]
        wrong = {name: shape for name, shape in shapes.items() if shape != (len(self),)}
        if wrong:
            raise ValueError(f"row {self.index} has {len(self)} tokens, but {wrong}")
        if len(self) == 0:
            raise ValueError(f"row {self.index} has no tokens")
        if self.mask[0]:
            raise ValueError(f"row {self.index}: token 0 is marked as trained, but no token before it predicts it")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def trained(self) -> int:
        """Number of trained tokens."""
        return int(self.mask.sum())

    def with_fields(self, **fields: "Floats | float") -> Self:
        """A copy with further fields; a number stands for itself on every token."""
        arrays = {
            name: np.broadcast_to(np.asarray(value, np.float32), self.mask.shape)
            if np.ndim(value) == 0
            else np.asarray(value, np.float32)
            for name, value in fields.items()
        }
        return replace(self, fields={**self.fields, **arrays})


def rows_together(rows: Sequence[Row]) -> list[list[int]]:
    """The places in `rows` of those that share a micro-batch: rows of one pair, and each other row by itself."""
    groups: dict[object, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(("row", place) if row.pair is None else ("pair", row.pair), []).append(place)
    return list(groups.values())


def rows_from_samples(samples: Iterable[Sample], *, filter_truncated: bool = False, replay: bool = False) -> list[Row]:
    """One row a sample, in order, with `rollout_log_probs`. A failed sample keeps its place and trains nothing.

    So does, with `filter_truncated`, one that was cut at a limit of length (DAPO, Yu et al. 2025, section 3.4).
    With `replay` the rows have the engine's routed experts; the last token, which went through no pass of the engine,
    is left to the router. Raises ValueError for a sample without them.
    """
    rows, samples = [], list(samples)
    like = next((s.routed_experts for s in samples if s.routed_experts is not None), None)
    for index, sample in enumerate(samples):
        prompt = len(sample.prompt.token_ids)
        kept = not sample.failed and not (filter_truncated and sample.finish is Finish.LENGTH)
        rows.append(
            Row(
                index=index,
                token_ids=np.asarray([*sample.prompt.token_ids, *sample.response_ids], np.int64),
                mask=np.asarray([False] * prompt + [kept and m for m in sample.mask], np.bool_),
                fields={"rollout_log_probs": np.asarray([0.0] * prompt + list(sample.log_probs), np.float32)},
                routes=_routes(sample, like) if replay else None,
            )
        )
    return rows


def _routes(sample: Sample, like: Routes | None) -> Routes | None:
    """The engine's routed experts, with a free row for the last token; all free, as wide as `like`, of a sample that
    the engine ran no pass for."""
    tokens, found = len(sample.prompt.token_ids) + len(sample.response_ids), sample.routed_experts
    if found is None and not sample.response_ids:
        return None if like is None else np.full((tokens, *like.shape[1:]), NO_EXPERT, like.dtype)
    if found is None or len(found) != tokens - 1:
        have = "none" if found is None else f"those of {len(found)} tokens"
        raise ValueError(
            f"prompt {sample.prompt.id}, sample {sample.index}: algorithm.routing_replay=r3 needs the routed experts "
            f"of {tokens - 1} tokens, the engine gave {have}"
        )
    free = np.full((1, *found.shape[1:]), NO_EXPERT, found.dtype)
    return np.concatenate([found, free])


def rows_from_examples(examples: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> list[Row]:
    """One row a demonstration, given as token ids and a mask of the tokens to learn."""
    return [
        Row(index=i, token_ids=np.asarray(token_ids, np.int64), mask=np.asarray(mask, np.bool_))
        for i, (token_ids, mask) in enumerate(examples)
    ]
