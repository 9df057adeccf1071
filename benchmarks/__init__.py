"""Benchmarks: this project compared with its peers, each comparison within one run.

    python -m benchmarks SUITE [--quick] [--json FILE] [--plot FILE.png]

measuring   alternating repeats, medians, what the machine is      results   tables, checks, JSON; plots.py draws
states      real optimizer state, as much as is wanted              peers     the writers and readers that are compared
processes   ranks, and children whose memory is watched             sinks     storage with a limited rate

Each suite is the module of its name with a `run(settings)`; `scale` has its parts in growth, planning and memory, `gpu`
in gpu_codecs and gpu_checkpoints. `python -m benchmarks.slices` is what the default slice sizes were chosen by.
"""
