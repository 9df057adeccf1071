"""Runs a soak; see the package. Exit status 1 at the first lie."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from tests.faults.proxy import FaultProxy

from .model import Model
from .operator.chaos import operate
from .operator.clocks import load_faketime
from .places import Place
from .ranks import FORK, Job, run_jobs


def main() -> None:
    """Parse the command line and soak."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="drawn and printed where none is given")
    parser.add_argument("--place", choices=["disk", "s3"], default="disk")
    parser.add_argument("--directory", help="where on the disk; by default a new temporary directory")
    parser.add_argument("--faults", action="store_true", help="the network, or system calls, fail at random")
    parser.add_argument("--operator", action="store_true", help="jobs of training runs, and all that happens to them")
    parser.add_argument("--without", action="append", default=[], metavar="FAULT", help="of --operator: leave it out")
    parser.add_argument("--verbose", action="store_true", help="of --operator: print each job")
    parser.add_argument("--json", help="write what was done there")
    options = parser.parse_args()
    if options.operator:
        load_faketime()
    seed = random.SystemRandom().randrange(1 << 30) if options.seed is None else options.seed
    print(f"soak: seed {seed}, {options.minutes} minutes, {options.place}", flush=True)
    if options.operator:
        without = frozenset(options.without)
        record = operate(options.minutes, seed, without=without, verbose=options.verbose)
        _end({"seed": seed, "minutes": options.minutes, "place": "operator", "faults": True, **record}, options.json)
    on_disk = options.place == "disk"
    with _on_disk(options.directory, options.faults) if on_disk else _on_s3(options.faults) as (place, set_faults):
        model = Model(place, seed, set_faults)
        record = soak(model, options.minutes)
    _end({"seed": seed, "place": options.place, "faults": options.faults, **record}, options.json)


def _end(record: dict[str, Any], path: str | None) -> NoReturn:
    """Print what was done, write it down if asked, and exit."""
    print(json.dumps({name: value for name, value in record.items() if name != "lie"}))
    if path:
        with open(path, "w") as file:
            json.dump(record, file, indent=1)
            file.write("\n")
    sys.exit(1 if "lie" in record else 0)


def soak(model: Model, minutes: float) -> dict[str, Any]:
    """Step until the time is up or something is not so."""
    started, told = time.monotonic(), time.monotonic()
    steps, lie = 0, ""
    while time.monotonic() - started < 60 * minutes and not lie:
        before = {path: list(contents) for path, contents in model.possible.items()}
        try:
            done = model.step()
        except AssertionError:
            lie = f"step {steps}, from {before}:\n{traceback.format_exc()}"
            print(lie, file=sys.stderr)
            break
        steps += 1
        if time.monotonic() - told > 30:
            told = time.monotonic()
            print(f"{told - started:6.0f} s, step {steps}: {done}; {dict(model.counts)}", flush=True)
    record = {
        "seconds": round(time.monotonic() - started),
        "steps": steps,
        "counts": dict(sorted(model.counts.items())),
    }
    return {**record, "lie": lie} if lie else record


@contextmanager
def _on_disk(directory: str | None, faults: bool) -> Iterator[tuple[Place, Callable[[dict[str, float]], None] | None]]:
    root = tempfile.mkdtemp(prefix="soak-", dir=directory)
    yield Place(root, faulty=faults), None
    shutil.rmtree(root)  # not reached, and so kept, where the soak itself fails


@contextmanager
def _on_s3(faults: bool) -> Iterator[tuple[Place, Callable[[dict[str, float]], None] | None]]:
    endpoint = os.environ["DCP_NVCOMP_TEST_S3"]
    key = os.environ.get("DCP_NVCOMP_TEST_S3_KEY", "ci")
    secret = os.environ.get("DCP_NVCOMP_TEST_S3_SECRET", "cisecret")
    plain = {"endpoint_url": endpoint, "key": key, "secret": secret}
    bucket = f"soak-{uuid.uuid4().hex[:12]}"
    url = f"s3://{bucket}/run"
    run_jobs(Job(_make_bucket, (plain, bucket)))
    if not faults:
        yield Place(url, plain, plain), None
        return
    # in a process of its own: the parent has no threads, or it could not be forked
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=_serve_proxy, args=(endpoint, theirs), daemon=True)
    process.start()
    url_of_proxy = ours.recv()
    try:
        yield Place(url, {**plain, "endpoint_url": url_of_proxy}, plain, faulty=True), ours.send
    finally:
        process.kill()
        process.join()


def _serve_proxy(endpoint: str, connection: Connection) -> None:
    with FaultProxy(endpoint) as proxy:
        connection.send(proxy.url)
        while True:
            proxy.rates = connection.recv()


def _make_bucket(options: dict[str, Any], bucket: str) -> None:
    import s3fs

    s3fs.S3FileSystem(**options).mkdir(bucket)


if __name__ == "__main__":
    main()
