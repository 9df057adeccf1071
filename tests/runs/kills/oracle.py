"""What must be restorable of a run by its files alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.soak.operator.look import Look, folders_of


def complete_on_nodes(nodes: Iterable[Path]) -> set[int]:
    """Return the steps of which one node has `.metadata`, and they together every data file that this names."""
    return {seen.root.step for seen in Look().on_nodes(nodes) if seen.is_there}


def complete_in(run: Path) -> set[int]:
    """Return the steps that are complete in the durable tier, where their removal was not begun."""
    return {step for step, seen in Look().durable(run).items() if seen.is_there}


def steps_in(place: Path) -> set[int]:
    """Return the steps of which anything is there."""
    return {step for step, folder in folders_of(place).items() if any(folder.iterdir())}


def last(count: int, steps: Iterable[int]) -> set[int]:
    """Return the newest steps, which is what the tests' rules keep."""
    return set(sorted(steps)[-count:])
