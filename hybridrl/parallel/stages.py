"""Which layers each pipeline stage, and each of its virtual chunks, builds. Pure; equal to Megatron's own division."""


def stage_layers(
    num_layers: int, pp: int, vpp: int = 1, first: int | None = None, last: int | None = None
) -> list[list[list[int]]]:
    """Global layer indices by `[pipeline rank][chunk]`.

    Args:
        num_layers: layers of the whole model.
        pp: pipeline stages.
        vpp: chunks of a stage (interleaved schedule); chunk `v` of all stages comes before chunk `v + 1` of any.
        first: layers of the first stage, None for an even share.
        last: layers of the last stage, None for an even share.

    Raises ValueError where some layer would be built nowhere or some chunk would be empty; the message gives the
    numbers.
    """
    counts = _stage_counts(num_layers, pp, vpp, first, last)
    for stage, count in enumerate(counts):
        if count % vpp:
            raise ValueError(f"stage {stage} has {count} layers, which vpp={vpp} chunks do not divide")
    stages: list[list[list[int]]] = [[] for _ in range(pp)]
    start = 0
    for _ in range(vpp):
        for stage, count in enumerate(counts):
            stages[stage].append(list(range(start, start + count // vpp)))
            start += count // vpp
    assert start == num_layers
    return stages


def _stage_counts(num_layers: int, pp: int, vpp: int, first: int | None, last: int | None) -> list[int]:
    given = {"num_layers": num_layers, "pp": pp, "vpp": vpp, "first_stage_layers": first, "last_stage_layers": last}
    low = [f"{name}={value} must be at least 1" for name, value in given.items() if value is not None and value < 1]
    if low:
        raise ValueError("; ".join(low))
    if pp == 1:
        wrong = [f"{name}={value}" for name, value in list(given.items())[3:] if value is not None]
        wrong += [f"vpp={vpp}"] if vpp > 1 else []
        if wrong:
            raise ValueError(f"{' and '.join(wrong)} with pp=1: there are no stages to divide layers over")
        return [num_layers]
    middle = pp - (first is not None) - (last is not None)
    rest = num_layers - (first or 0) - (last or 0)
    how = f"num_layers={num_layers} on pp={pp} stages"
    if first is not None or last is not None:
        how += f" with first_stage_layers={first} and last_stage_layers={last}"
    if middle == 0:
        if rest:
            raise ValueError(f"{how}: {rest} layers would be built nowhere")
        return [first or 0, last or 0]
    if rest < middle or rest % middle:
        raise ValueError(f"{how}: {rest} layers do not spread evenly over {middle} stages, at least one on each")
    share = rest // middle
    return ([] if first is None else [first]) + [share] * middle + ([] if last is None else [last])
