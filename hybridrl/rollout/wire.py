"""Samples as bytes, for the exchange between ranks: flat arrays one after another, without prompts and without pickle.

counts    int64 [6]            samples S, tokens T, bytes of the names, layers L, top-k K, bytes of an expert's id
rows      int64 [S, 7]         prompt id, index, tokens, finish, failed, whether there is a reward, rows of routed
                               experts (-1: none)
rewards   float64 [S]
scores    float64 [S, N]       each judge's score, by the names' order
tokens    int32 [T]
versions  int64 [T]
log-probs float32 [T]
scored    uint8 [S, N]         whether a judge scored the sample
mask      uint8 [T]
routes    int8 or int16 [R, L, K]   routed experts, R rows in all
names     uint8                the judges' names, a JSON list
"""

import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridrl.rollout.routes import Routes
from hybridrl.rollout.samples import Finish, Request, Sample

_FINISH = list(Finish)
_NO_ROUTES: Routes = np.empty((0, 0, 0), np.int8)


def encode(samples: Sequence[Sample]) -> bytes:
    """These samples as bytes.

    Raises ValueError if a sample's lists differ in length, or the samples' routed experts in layers, top-k or dtype.
    """
    for s in samples:
        lengths = (len(s.response_ids), len(s.log_probs), len(s.versions), len(s.mask))
        if len(set(lengths)) != 1:
            raise ValueError(
                f"prompt {s.prompt.id}, sample {s.index}: tokens, log-probs, versions and mask are of lengths {lengths}"
            )
    names = sorted({name for s in samples for name in s.rewards})
    text = json.dumps(names).encode()
    rows = [
        (
            *(s.prompt.id, s.index, len(s.response_ids), _FINISH.index(s.finish), s.failed, s.reward is not None),
            -1 if s.routed_experts is None else len(s.routed_experts),
        )
        for s in samples
    ]
    routes = _routes(samples)
    _, layers, top_k = routes.shape
    total = sum(row[2] for row in rows)
    arrays: list[NDArray[np.generic]] = [
        np.array([len(samples), total, len(text), layers, top_k, routes.itemsize], np.int64),
        np.array(rows, np.int64),
        np.array([0.0 if s.reward is None else s.reward for s in samples], np.float64),
        np.array([[s.rewards.get(name, 0.0) for name in names] for s in samples], np.float64),
        np.array([t for s in samples for t in s.response_ids], np.int32),
        np.array([v for s in samples for v in s.versions], np.int64),
        np.array([p for s in samples for p in s.log_probs], np.float32),
        np.array([[name in s.rewards for name in names] for s in samples], np.uint8),
        np.array([m for s in samples for m in s.mask], np.uint8),
        routes,
    ]
    return b"".join(array.tobytes() for array in arrays) + text


def _routes(samples: Sequence[Sample]) -> Routes:
    found = [s.routed_experts for s in samples if s.routed_experts is not None]
    kinds = {(array.shape[1:], array.dtype) for array in found}
    if len(kinds) > 1 or any(array.ndim != 3 or array.dtype not in (np.int8, np.int16) for array in found):
        raise ValueError(
            f"routed experts came as {sorted(map(str, kinds))}; expected one (layers, top-k), int8 or int16, for all "
            "samples"
        )
    return np.concatenate(found) if found else _NO_ROUTES


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
    count, total, text_bytes, layers, top_k, id_bytes = (int(n) for n in reader.take(np.int64, 6))
    rows = reader.take(np.int64, count, 7).tolist()
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
    routed = [max(row[6], 0) for row in rows]
    # a copy: what numpy reads from bytes cannot be written
    routes = reader.take(np.int8 if id_bytes == 1 else np.int16, sum(routed), layers, top_k).copy()
    by_sample = np.split(routes, np.cumsum(routed[:-1], dtype=np.int64))
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
                routed_experts=by_sample[i] if row[6] >= 0 else None,
            )
        )
        start = stop
    return samples
