"""A soak: random saves, loads, reshards, overwrites, checks, clean-ups, kills and corruptions against a model.

    python -m tests.soak --minutes 10 --seed 1                        on a local disk
    python -m tests.soak --minutes 10 --seed 1 --place s3             on the server of DCP_NVCOMP_TEST_S3
    python -m tests.soak --minutes 10 --seed 1 --place s3 --faults    with a proxy before it that loses and breaks much

The model knows of each checkpoint which contents it may hold: one after a save that returned, two after one that was
killed. Every step is done by processes of its own, forked from one that has torch imported and does nothing else, so
that any of them can be killed at any time. The soak stops at the first lie: a load that gives anything else than what
the model allows, a save that claims more or less than it did, a check that misses damage or sees some where none is.

    contents.py   what is saved: values from a seed, the same keys and shapes for all saves at a path
    ranks.py      forked processes as ranks of a process group, and killing one of them
    places.py     a disk or a bucket, and how to break files there
    actions.py    what a rank does: save, load, verify, recover, clean
    model.py      the steps, and what each must lead to
"""
