"""How a job ended, held against what it was given and what happened to it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .disturbances import Scene
from .look import Seen, folders_of
from .oracle import Before, Finding, Place

SIDE_SECONDS = 60.0
ALL_DAMAGED = "all damaged"
_RAW = re.compile(
    r"^(?:AttributeError|AssertionError|TypeError|KeyError|IndexError|NameError|UnboundLocalError)\b", re.M
)


def note_words(scene: Scene, before: Before) -> None:
    """Tell the oracle what the ranks began, and where they went back to."""
    # of each rank: another one may have begun to save before this one is through with the same restore
    restored: dict[int, Mapping[str, Any]] = {}
    newer: set[tuple[int, int]] = set()
    for word in scene.running.all_words("restored", "looked", "back", "saving", "saved"):
        rank = word["rank"]
        if word["what"] == "saving":
            scene.oracle.saving(word["step"], word["tag"], word["line"], word["loss"])
            place, at = (word["step"], word["tag"]), restored.pop(rank, None)
            if at is not None and at["step"] is not None and place not in newer:
                _note_where(scene, before, (at["step"], at["tag"]), word["tag"], newer)
            newer.add(place)
        elif word["what"] in ("restored", "looked"):
            restored[rank] = word
        elif word["what"] == "back":
            # who is killed in it may have gone back or not
            restored.setdefault(rank, {"step": word["step"], "tag": -1})


def _note_where(scene: Scene, before: Before, at: Place, tag: int, newer: set[Place]) -> None:
    """Tell the oracle from where a save began, if it left something behind."""
    saved = [one for one in scene.running.all_words("saved") if one["tag"] == tag]
    is_sure = len(saved) == scene.running.count
    everything = before.sure | before.possible | newer
    if any(step > at[0] for step, _ in everything) or at[1] in scene.oracle.left:
        scene.oracle.went_back(before, at, {*before.possible, *newer}, is_sure=is_sure)


def check_ends(scene: Scene, before: Before, after: Before) -> str:
    """Check all that a job did."""
    running, plan = scene.running, scene.plan
    for word in running.all_words("restored"):
        scene.oracle.check_restored(before, word, plan.go_to)
    for word in running.all_words("looked"):
        if word["step"] is not None:
            scene.oracle.check_values(word)
    for word in running.all_words("not there"):
        # it may be gone by now; what was harmed in the durable tier may have been whole on nodes, which keep new steps
        is_whole = word["step"] in before.durable and word["step"] not in scene.destroyed
        is_refused = word["kind"] != "CheckpointNotFoundError"
        _expect(not (is_whole and is_refused), f"a step that is whole was refused: {word}")
    places = {(word["step"], word["tag"]) for word in running.all_words("restored")}
    _expect(len(places) <= 1, f"ranks restored {places}")
    is_all_damaged = before.newest is None and not running.has_said("restored") and any(folders_of(plan.run))
    if is_all_damaged:  # then a restore raises, and a person has to decide
        scene.excuses.add("all damaged")
    _check_errors(scene, before)
    _check_others(scene)
    confirmed = {
        (word["step"], word["tag"])
        for word in running.all_words("event")
        if word["event"] == "StepSaved" and "durable" in word["tiers"]
    }
    scene.oracle.check_kept(before, after, confirmed, scene.destroyed, scene.rules)
    _check_newest(scene, before, after)
    _check_copies(scene, after)
    _check_last(scene, after)
    if any(running.all_words("unmet")):
        return "unmet"
    if running.killed:
        return "killed"
    if running.has_said("closed"):
        return "preempted" if any(word["preempted"] for word in running.all_words("left")) else "closed"
    if is_all_damaged and "durable" not in scene.excuses:
        return ALL_DAMAGED
    return "raised" if any(running.all_words("raised")) else "left"


def _check_errors(scene: Scene, before: Before) -> None:
    running = scene.running
    for rank in range(running.count):
        found = _RAW.search(running.log(rank))
        _expect(found is None, f"rank {rank} printed {found and found[0]}: see {running.where}/log-{rank}")
    taken = any(any(other.all_words("made")) for other in scene.others)
    excuses = scene.excuses | ({"taken"} if taken else set())
    raised = list(running.all_words("raised"))
    if any(f"step-{step}/" in word["text"] for word in raised for step in scene.destroyed):
        excuses.add("harmed")  # ranks that did not come to it themselves raise that another one failed
    removed = {step for word in running.all_words("event") for step in word.get("steps", ())}
    for word in raised:
        shown = f"rank {word['rank']} raised {word['kind']}: {word['text']}\n{word['trace']}"
        _expect(word["is_ours"], f"none of our errors: {shown}")
        # the newest step was completed after the first restore, and the rules keep no other
        gone = {scene.plan.go_to} - ({step for step, _ in before.sure} - removed)  # or before, with a disk
        is_removed = word["kind"] == "CheckpointNotFoundError" and bool(gone - {None})
        _expect(bool(excuses) or is_removed, f"for no reason: {shown}")


def _check_others(scene: Scene) -> None:
    """Check that another job did not get the run while this one had it."""
    for other in scene.others:
        for word in other.all_words("restored"):
            if word["step"] is not None:
                scene.oracle.check_values(word)
        for word in other.all_words("raised"):
            shown = f"another job raised {word['kind']}: {word['text']}\n{word['trace']}"
            _expect(word["is_ours"], f"none of our errors: {shown}")
            _expect(word["kind"] == "RunInUseError" or bool(scene.excuses), shown)
        for word in other.all_words("made"):
            left = [one["at"] for one in scene.running.all_words("closed", "raised", "left")]
            is_over = any(at < word["at"] for at in left)
            _expect(is_over or bool(scene.excuses), f"another job took the run over: {word}")


def _check_newest(scene: Scene, before: Before, after: Before) -> None:
    """Check that there is nothing older to restore than there was."""
    words = scene.running.all_words("restored", "back", "looked")
    newest = before.newest
    if newest is None or scene.has_lost_fast or scene.destroyed or any(word["what"] == "back" for word in words):
        return
    if scene.plan.go_to is not None or any((word["step"] or 0) < newest[0] for word in words):
        return
    _expect(after.newest is not None and after.newest >= newest, f"{newest} was there, and {after.newest} is")


def _check_copies(scene: Scene, after: Before) -> None:
    """Check that the newest step that is said to be copied is whole without any one of the nodes.

    One that is not newer than the durable tier's may have made room on a small node.
    """
    nodes, look = scene.plan.nodes, scene.oracle.look
    events = [word for word in scene.running.all_words("event") if word["event"] == "StepSaved"]
    copied, step = max(((word["tag"], word["step"]) for word in events if "copies" in word["tiers"]), default=(0, 0))
    if scene.has_lost_fast or step <= max(after.durable, default=-1) or not _has(look.on_nodes(nodes), copied):
        return
    for node in nodes:
        others = [other for other in nodes if other != node]
        _expect(_has(look.on_nodes(others), copied), f"save {copied} is not whole without {node}, and was copied")


def _has(seen: list[Seen], tag: int) -> bool:
    return any(one.root.tag == tag and one.is_whole for one in seen)


def _check_last(scene: Scene, after: Before) -> None:
    """Check that the last save of a job that was closed is durable, where it had to be."""
    if scene.excuses & {"durable"} or not scene.running.has_said("closed"):
        return
    due = {word["due_tag"] for word in scene.running.all_words("left")} - {None}
    for tag in due:
        known = scene.oracle.known[tag]
        if known.step not in scene.destroyed:
            there = after.durable.get(known.step)
            _expect(there == tag, f"step {known.step} ({tag}) was to be durable, and {dict(after.durable)} is there")


def check_sides(scene: Scene, before: Before) -> None:
    """Check the commands beside a job."""
    for side in scene.sides:
        code, output = side.join(SIDE_SECONDS)
        shown = f"dcp-nvcomp {side.name} ended with {code}:\n{output[-3000:]}"
        _expect(code is not None, f"it hangs: {shown}")
        _expect("Traceback" not in output, shown)
        is_excused = bool(scene.excuses & {"durable"} or scene.destroyed)
        name, *arguments = side.name.split()
        if name == "pin" and code == 0:
            scene.oracle.pins.add(int(arguments[-1]))
        elif name == "ls":
            _expect(code == 0 or is_excused or before.sure.isdisjoint(before.durable.items()), shown)


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise Finding(what)
