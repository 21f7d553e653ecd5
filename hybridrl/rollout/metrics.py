"""What a step's samples say of themselves, as metrics."""

from collections.abc import Mapping, Sequence

from hybridrl.rollout.samples import Finish, Sample


def response_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Metrics of a step's samples, of all ranks together.

    - `response_length/mean`, `/min`, `/max`: tokens a response;
    - `response_length/clipped`: share of the responses that were cut by a limit;
    - `rollout/duplicates`: share of a prompt's responses that repeat an earlier one of the same prompt, averaged over
      prompts. Near 1 the samples of a group are all alike, and group-relative advantages are zero;
    - `tokens/generated`: tokens that the policy drew, over all samples.

    Raises ValueError if there are no samples.
    """
    if not samples:
        raise ValueError("a step without samples has no response metrics")
    lengths = [len(s.response_ids) for s in samples]
    return {
        "response_length/mean": sum(lengths) / len(lengths),
        "response_length/min": float(min(lengths)),
        "response_length/max": float(max(lengths)),
        "response_length/clipped": sum(s.finish is Finish.LENGTH for s in samples) / len(samples),
        "rollout/duplicates": _duplicates(samples),
        "tokens/generated": float(sum(sum(s.mask) for s in samples)),
    }


def staleness_metrics(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """`staleness/mean`, `/max`: how many weight versions before `version`, that of the update, tokens were drawn.

    Over the policy's own tokens; zeros where there are none.
    """
    ages = [version - v for s in samples for v, own in zip(s.versions, s.mask, strict=True) if own]
    return {
        "staleness/mean": sum(ages) / max(1, len(ages)),
        "staleness/max": float(max(ages, default=0)),
    }


def prefix_metrics(counts: Mapping[str, float]) -> dict[str, float]:
    """`rollout/prefix_hit_rate`: share of the prompt tokens that no replica computed anew, from `Replicas.take_counts`
    summed over replicas; 0 where no prompt was served."""
    return {"rollout/prefix_hit_rate": counts["tokens/prompt_cached"] / max(1.0, counts["tokens/prompt"])}


def _duplicates(samples: Sequence[Sample]) -> float:
    groups: dict[int, list[tuple[int, ...]]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt.id, []).append(tuple(sample.response_ids))
    return sum(1 - len(set(group)) / len(group) for group in groups.values()) / len(groups)
