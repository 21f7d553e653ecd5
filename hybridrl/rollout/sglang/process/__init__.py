"""SGLang in processes of its own, beside the trainer's ranks (`rollout.sglang.hosting=subprocess`).

The first rank of a replica starts a server (`server.py`), which runs SGLang's own Engine, whose scheduler processes run
`scheduler.py`. They lay their parameters in shared memory (`shared.py`), and every rank of the replica maps those of
its engine rank: a weight sync writes the engine's own weights, in place. `engine.py` is what the trainer calls.
"""
