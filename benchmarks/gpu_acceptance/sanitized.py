"""The program that compute-sanitizer watches: each of our kernels on small blocks."""

from __future__ import annotations

import argparse

from benchmarks.gpu_acceptance.host import Host
from benchmarks.gpu_acceptance.kernels import differences
from benchmarks.gpu_acceptance.literals import literal_probes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stand-in", action="store_true")
    host = Host(parser.parse_args().stand_in)
    device = host.device(compiled=not host.stand_in)
    for width in (2, 4, 8):
        for misaligned in (0, 1, 8):
            for count in host.pick((1, 9, 70_001), (1, 9)):
                assert not differences(device, width, "mixed", misaligned, count)
                assert not differences(device, width, "negative", misaligned, count)
    for name, work in literal_probes(host, count=60) if not host.stand_in else ():
        print(name, work())


if __name__ == "__main__":
    main()
