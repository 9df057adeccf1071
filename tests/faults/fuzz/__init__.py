"""A coverage-guided fuzzer (atheris) for everything that reads what somebody else may have written.

    python -m tests.faults.fuzz --executions 200000               each target so often
    python -m tests.faults.fuzz --executions 200000 --target footer --seed 7
    python -m tests.faults.fuzz --executions 200000 --keep        and keep what reached new lines, in corpus.zip

    target     what runs
    ---------  --------------------------------------------------------------------------------------------------------
    metadata   `.metadata`: the pickle machine, the checks, torch's own classes
    rank       the metadata of several ranks, merged
    footer     a data file's trailer, footer, tables; then every record is looked at as a load does
    decode     a whole data file: footer, then every block through the CPU engine, without the CRCs in the way
    stock      an item of a stock DCP checkpoint: zstd streams, archives, `weights_only` loading

An execution passes if it returns, or raises a `CheckpointError`. Anything else is a finding: another exception, more
than a second, more than 64 MiB of memory (see limits.py). A finding's input is saved into the corpus, which
test_fuzz_corpus.py replays without atheris: so it stays found.

    limits.py     what one execution may do
    parts.py      a data file as parts, so that a mutated one has right CRCs and sums again
    targets.py    the five targets
    mutators.py   mutations that know the structure
    seeds.py      what the fuzzer begins with
    corpus.py     the inputs kept in git
    child.py      one target under libFuzzer, in a process of its own
"""
