"""Requests, made alike on every rank; the check of an engine's answer; and the samples of all replicas, shared.

How requests are spread over replicas is told in `routing.py`. A rank may judge its samples before `share`: rewards
travel with them.
"""

from collections import Counter
from collections.abc import Iterator, Sequence, Sized
from dataclasses import replace

import torch
import torch.distributed as dist

from hybridrl.config.schema import RolloutConfig
from hybridrl.rollout import wire
from hybridrl.rollout.samples import Finish, Prompt, Request, Sample, SamplingParams
from hybridrl.rollout.seeds import sample_seed
from hybridrl.rollout.stops import Decode


def make_requests(
    prompts: Sequence[Prompt],
    config: RolloutConfig,
    *,
    seed: int,
    step: int,
    eos_ids: Sequence[int],
    greedy: bool = False,
) -> list[Request]:
    """`config.n` requests a prompt, prompt by prompt, each with a seed of its own; the same list on every rank.

    `seed` is the run's. A response ends with any of `eos_ids`, of `config.stop_token_ids` or of `config.stop`. With
    `greedy` each prompt has one request more, of index `config.n`, at a temperature of 0.

    Raises ValueError that lists repeated prompt ids and prompts longer than `config.max_prompt_length` (dropping or
    cutting them is for the data to decide), or if nothing could end a response early.
    """
    problems = [f"prompt id {i} occurs {n} times" for i, n in Counter(p.id for p in prompts).items() if n > 1]
    problems += [
        f"prompt {p.id} has {len(p.token_ids)} tokens, rollout.max_prompt_length is {config.max_prompt_length}"
        for p in prompts
        if len(p.token_ids) > config.max_prompt_length
    ]
    stop = tuple(sorted({*eos_ids, *config.stop_token_ids}))
    if not stop:
        problems.append(
            "no token ends a response: neither generation_config.json nor config.json names an eos_token_id; give "
            "rollout.stop_token_ids"
        )
    if problems:
        raise ValueError("; ".join(problems))
    params = SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_new_tokens=config.max_response_length,
        stop_token_ids=stop,
        stop=tuple(config.stop),
    )
    each = [params] * config.n + [replace(params, temperature=0.0)] * greedy
    return [
        Request(prompt=prompt, index=index, seed=sample_seed(seed, step, prompt.id, index), params=own)
        for prompt in prompts
        for index, own in enumerate(each)
    ]


def check_samples(requests: Sequence[Request], samples: Sequence[Sample], decode: Decode | None = None) -> None:
    """Raises ValueError that lists what is wrong with an engine's answer: count, order, lengths, limits and stops.

    Stop strings are looked for with `decode`; without it a sample that asked for some is believed.
    """
    if len(samples) != len(requests):
        raise ValueError(f"{len(requests)} requests were answered by {len(samples)} samples")
    problems = [
        f"prompt {r.prompt.id}, sample {r.index}: {problem}"
        for r, s in zip(requests, samples, strict=True)
        for problem in (*_problems(r, s), *_ending_problems(r, s, decode))
    ]
    if problems:
        raise ValueError("; ".join(problems))


def _problems(request: Request, sample: Sample) -> list[str]:
    if (sample.prompt.id, sample.index) != (request.prompt.id, request.index):
        return [f"was answered by prompt {sample.prompt.id}, sample {sample.index}"]
    found = []
    tokens = len(sample.response_ids)
    lengths: dict[str, Sized] = {"log_probs": sample.log_probs, "versions": sample.versions, "mask": sample.mask}
    found += [f"{tokens} tokens came with {len(v)} {name}" for name, v in lengths.items() if len(v) != tokens]
    if tokens > max(request.params.max_new_tokens, 0):
        found.append(f"{tokens} tokens exceed max_new_tokens={request.params.max_new_tokens}")
    if (routes := sample.routed_experts) is not None and len(routes) != len(request.prompt.token_ids) + tokens - 1:
        found.append(
            f"routed experts of {len(routes)} tokens came with {len(request.prompt.token_ids)} of the prompt and "
            f"{tokens} of the response; expected all but the last"
        )
    return found


def _ending_problems(request: Request, sample: Sample, decode: Decode | None) -> Iterator[str]:
    tokens, ids, strings = sample.response_ids, request.params.stop_token_ids, request.params.stop
    if early := [token for token in tokens[:-1] if token in ids]:
        yield f"went on after stop token {early[0]}"
    by_token = bool(tokens) and tokens[-1] in ids
    if not strings or decode is None:
        if sample.finish is Finish.STOP and not by_token and not (tokens and strings):
            yield f"finished by {sample.finish} without a stop token at its end"
        return
    whole, before = decode(tokens), decode(tokens[:-1])
    if early_text := [text for text in strings if text in before]:
        yield f"went on after stop string {early_text[0]!r}"
    by_text = any(text in whole for text in strings)
    if sample.finish is Finish.STOP and not (by_token or by_text):
        yield f"finished by {sample.finish} without a stop token or a stop string at its end"
    if sample.finish is not Finish.STOP and by_text:
        yield f"finished by {sample.finish} with a stop string at its end"


def share(
    local: Sequence[Sample],
    requests: Sequence[Request],
    *,
    shares: Sequence[Sequence[int]],
    replica: int = 0,
    group: dist.ProcessGroup | None = None,
) -> list[Sample]:
    """All samples of the step, on every rank of `group` alike, in the order of `requests`.

    `local` are the samples of this rank's replica, judged or not; `shares` has the indices of each replica's requests,
    the same on every rank. Where several ranks make up a replica, the samples, and so the rewards, of its lowest rank
    count. Every rank joins the same two collectives, also one without samples. Prompts do not travel: every rank has
    the requests. Log-probs travel as fp32, rewards as fp64, routed experts as they are.

    Raises ValueError on every rank if a replica's samples are not those of its share, or a replica has no rank.
    """
    encoded = _gather(replica, wire.encode(local), group)
    if sorted(encoded) != list(range(len(shares))):
        raise ValueError(f"replicas {sorted(encoded)} shared their samples, expected 0 to {len(shares) - 1}")
    samples: list[Sample | None] = [None] * len(requests)
    for index, data in sorted(encoded.items()):
        mine = [requests[i] for i in shares[index]]
        try:
            for i, sample in zip(shares[index], wire.decode(data, mine), strict=True):
                samples[i] = sample
        except ValueError as error:
            raise ValueError(f"replica {index}: {error}") from error
    return [sample for sample in samples if sample is not None]


def _gather(replica: int, data: bytes, group: dist.ProcessGroup | None) -> dict[int, bytes]:
    """Every replica's bytes, from the lowest rank of each. In a world of one, or none, just this one's."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return {replica: data}
    device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
    world = dist.get_world_size(group)
    header = torch.tensor([replica, len(data)], dtype=torch.int64, device=device)
    headers = [torch.empty_like(header) for _ in range(world)]
    dist.all_gather(headers, header, group=group)
    replicas = [int(h[0]) for h in headers]
    leaders = {r: replicas.index(r) for r in replicas}
    sizes = [int(h[1]) if leaders[r] == rank else 0 for rank, (r, h) in enumerate(zip(replicas, headers, strict=True))]
    mine = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    if leaders[replica] == dist.get_rank(group):
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    bodies = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(bodies, mine, group=group)
    return {r: bodies[rank][: sizes[rank]].cpu().numpy().tobytes() for r, rank in leaders.items()}
