"""`dcp-nvcomp info`: versions, engines, kernels."""

from __future__ import annotations

import json

import typer

from dcp_nvcomp.cli.common import AsJson, Output


def info_command(as_json: AsJson = False) -> None:
    """Show versions, which engines run here, whether the compiled kernels are there, and if not, why not."""
    from dcp_nvcomp.maintenance.environment import info

    found = info()
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
        return
    output = Output()
    width = max(map(len, [*found.versions, *found.kernels, "CPU engine", "CUDA engine"]))
    for name, version in found.versions.items():
        output.print(f"{name:<{width}}  {version or 'not installed'}")
    output.print(f"{'CPU engine':<{width}}  {found.cpu}")
    output.print(f"{'CUDA engine':<{width}}  {found.cuda}")
    for name, state in found.kernels.items():
        output.print(f"{name:<{width}}  {state}")
