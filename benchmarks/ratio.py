"""`ratio`: how small each codec makes each component of real optimizer state. Sizes, no times.

This project's and DCP's figures are of the data files of a checkpoint, with headers, footers and tables; those of ZipNN
and zstd are of the coded tensors alone. "large tensors" is the same state as permuted copies in tensors of 16 MB, where
what a tensor costs by itself no longer counts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.in_memory import ZipNNCoder, have_zipnn, zstd_nbytes
from benchmarks.measuring import Settings
from benchmarks.peers import Peer, data_nbytes, ours, remove, save, stock
from benchmarks.results import Plot, Report
from benchmarks.states import COMPONENTS, State, build_state, component, load_state, nbytes_of
from dcp_nvcomp.engines.cuda.support import cuda_unavailable_reason

Sizer = Callable[[State], int]

CODECS = ("auto", "planes-zstd", "planes-deflate", "zstd", "none")


def run(settings: Settings) -> Report:
    report = Report("ratio", settings)
    real = load_state(settings.state)
    columns = {name: {key: tensor for key, tensor in real.items() if component(key) == name} for name in COMPONENTS}
    columns["together"] = real
    columns["large tensors"] = build_state(settings.nbytes_or(128 << 20, quick=32 << 20), settings.state)
    headers = {name: (COMPONENTS.get(name, name), ".3f") for name in columns}
    table = report.table("ratio", "Uncompressed over stored size", coder=("coder", ""), **headers)
    with settings.scratch() as scratch:
        for name, sizer in _sizers(scratch, report).items():
            settings.say(name)
            ratios = {column: nbytes_of(state) / sizer(state) for column, state in columns.items()}
            table.add(coder=name, **ratios)
    series = {row["coder"]: [(headers[name][0], row[name]) for name in columns] for row in table.rows}
    report.plots.append(Plot("Uncompressed over stored size", "", "ratio", series))
    found = {row["coder"]: row["large tensors"] for row in table.rows}
    report.at_least("ratio over that of DCP+zstd, large tensors", found["dcp_nvcomp auto"] / found["dcp+zstd"], 1.11)
    return report


def _sizers(scratch: Path, report: Report) -> dict[str, Sizer]:
    codecs = list(CODECS)
    if cuda_unavailable_reason() is None:
        codecs.append("ans")
    else:
        report.notes.append("ans is left out: it needs an NVIDIA GPU")
    sizers: dict[str, Sizer] = {
        f"dcp_nvcomp {codec}": _checkpoint_sizer(scratch, ours(2, codec=codec)) for codec in codecs
    }
    if "ans" in codecs:
        on_host = sizers["dcp_nvcomp ans"]
        sizers["dcp_nvcomp ans"] = lambda state: on_host({name: tensor.cuda() for name, tensor in state.items()})
    sizers["dcp"] = _checkpoint_sizer(scratch, stock(1))
    sizers["dcp+zstd"] = _checkpoint_sizer(scratch, stock(1, zstd=True))
    if have_zipnn():
        sizers["zipnn"] = _zipnn_nbytes
    else:
        report.notes.append("zipnn is left out: it is not installed (the bench extra has it)")
    for level in (3, 9):
        sizers[f"zstd -{level}"] = lambda state, level=level: zstd_nbytes(state, level)
    return sizers


def _checkpoint_sizer(scratch: Path, peer: Peer) -> Sizer:
    def nbytes(state: State) -> int:
        path = scratch / "checkpoint"
        save(peer, path, state)
        found = data_nbytes(path)
        remove(path)
        return found

    return nbytes


def _zipnn_nbytes(state: State) -> int:
    coder = ZipNNCoder(2)
    return coder.nbytes(coder.encode(coder.prepare(state)))
