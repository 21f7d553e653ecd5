"""Samples as bytes, for the exchange between ranks: flat arrays one after another, without prompts and without pickle.

counts    int64 [3]            samples S, tokens T, bytes of the names
rows      int64 [S, 6]         prompt id, index, tokens, finish, failed, whether there is a reward
rewards   float64 [S]
scores    float64 [S, N]       each judge's score, by the names' order
tokens    int32 [T]
versions  int64 [T]
log-probs float32 [T]
scored    uint8 [S, N]         whether a judge scored the sample
mask      uint8 [T]
names     uint8                the judges' names, a JSON list
"""

import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridrl.rollout.samples import Finish, Request, Sample

_FINISH = list(Finish)


def encode(samples: Sequence[Sample]) -> bytes:
    """These samples as bytes. Raises ValueError if a sample's lists differ in length."""
    for s in samples:
        lengths = (len(s.response_ids), len(s.log_probs), len(s.versions), len(s.mask))
        if len(set(lengths)) != 1:
            raise ValueError(
                f"prompt {s.prompt.id}, sample {s.index}: tokens, log-probs, versions and mask are of lengths {lengths}"
            )
    names = sorted({name for s in samples for name in s.rewards})
    text = json.dumps(names).encode()
    rows = [
        (s.prompt.id, s.index, len(s.response_ids), _FINISH.index(s.finish), s.failed, s.reward is not None)
        for s in samples
    ]
    arrays: list[NDArray[np.generic]] = [
        np.array([len(samples), sum(row[2] for row in rows), len(text)], np.int64),
        np.array(rows, np.int64),
        np.array([0.0 if s.reward is None else s.reward for s in samples], np.float64),
        np.array([[s.rewards.get(name, 0.0) for name in names] for s in samples], np.float64),
        np.array([t for s in samples for t in s.response_ids], np.int32),
        np.array([v for s in samples for v in s.versions], np.int64),
        np.array([p for s in samples for p in s.log_probs], np.float32),
        np.array([[name in s.rewards for name in names] for s in samples], np.uint8),
        np.array([m for s in samples for m in s.mask], np.uint8),
    ]
    return b"".join(array.tobytes() for array in arrays) + text


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, dtype: type[np.generic], *shape: int) -> NDArray[np.generic]:
        count = int(np.prod(shape, dtype=np.int64))
        end = self._at + count * np.dtype(dtype).itemsize
        if end > len(self._data):
            raise ValueError(f"the samples' bytes end at {len(self._data)}, expected at least {end}")
        array = np.frombuffer(self._data, dtype, count, self._at).reshape(shape)
        self._at = end
        return array

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data)} bytes of samples came, {self._at} were expected")


def decode(data: bytes, requests: Sequence[Request]) -> list[Sample]:
    """The samples in `data`, which must answer `requests`, one each and in order; their prompts are the requests'.

    Raises ValueError that says which samples came instead.
    """
    reader = _Reader(data)
    count, total, text_bytes = (int(n) for n in reader.take(np.int64, 3))
    rows = reader.take(np.int64, count, 6).tolist()
    came = [(row[0], row[1]) for row in rows]
    expected = [(r.prompt.id, r.index) for r in requests]
    if came != expected:
        wrong = [pair for pair in zip(came, expected, strict=False) if pair[0] != pair[1]][:4]
        raise ValueError(
            f"{count} samples came for {len(requests)} requests; "
            f"the first that differ, (prompt, index) found and expected: {wrong}"
        )
    names: list[str] = json.loads(data[len(data) - text_bytes :])
    rewards = reader.take(np.float64, count).tolist()
    scores = reader.take(np.float64, count, len(names)).tolist()
    tokens = reader.take(np.int32, total).tolist()
    versions = reader.take(np.int64, total).tolist()
    log_probs = reader.take(np.float32, total).tolist()
    scored = reader.take(np.uint8, count, len(names)).tolist()
    mask = reader.take(np.uint8, total).astype(bool).tolist()
    reader.take(np.uint8, text_bytes)
    reader.end()
    samples = []
    start = 0
    for i, (row, request) in enumerate(zip(rows, requests, strict=True)):
        stop = start + row[2]
        samples.append(
            Sample(
                prompt=request.prompt,
                index=request.index,
                response_ids=tokens[start:stop],
                log_probs=log_probs[start:stop],
                versions=versions[start:stop],
                mask=mask[start:stop],
                finish=_FINISH[row[3]],
                failed=bool(row[4]),
                reward=rewards[i] if row[5] else None,
                rewards={n: v for n, v, has in zip(names, scores[i], scored[i], strict=True) if has},
            )
        )
        start = stop
    return samples
