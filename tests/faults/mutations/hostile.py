"""The protections of a process that loads a hostile file."""

from __future__ import annotations

from tests.faults.mutations import Mutation

_FILES = "tests/faults/test_hostile_files.py"
_SLICES = "tests/faults/test_forged_slices.py"
_OBJECTS = "tests/faults/test_hostile_objects.py"
_ATTACKS = "tests/format/metadata/test_attacks.py"
_BAD = "tests/format/test_bad_files.py"
_HOSTILE = "tests/format/test_hostile.py"


def _mutations(row: str, file: str, *changes: tuple[str, str, str]) -> tuple[Mutation, ...]:
    return tuple(Mutation(f"hostile {row}", f"dcp_nvcomp/{file}", old, new, tests) for old, new, tests in changes)


MUTATIONS = (
    *_mutations(
        "metadata",
        "format/metadata/pickle_machine.py",
        ("if len(marks) >= MAX_MARKS:", "if False:", f"{_ATTACKS} -k marks_in_marks"),
        ("budget = 1024 + end // 3", "budget = 1 << 60", f"{_ATTACKS} -k more_containers"),
        ("- blocks) > most_nbytes:", "- blocks) > 1 << 60:", "tests/format/metadata/test_memory.py -k unfolds"),
        ("if index > len(memo):", "if False:", f"{_ATTACKS} -k memo_slot"),
        (
            "if not isinstance(target, Instance) or target.state is not None:",
            "if not isinstance(target, Instance):",
            f"{_ATTACKS} -k build_changes_only",
        ),
        ("if found is None:", "if False:", f"{_ATTACKS} -k dotted_name"),
    ),
    *_mutations(
        "metadata",
        "format/metadata/values.py",
        ("if depth > _MAX_DEPTH:", "if False:", f"{_ATTACKS} -k dicts_in_dicts"),
        ("if self._budget < 0:", "if False:", f"{_ATTACKS} -k one_list_for_many"),
        ("if len(set(hashes)) + 100 < len(hashes):", "if False:", f"{_ATTACKS} -k collide"),
        ("if sum(last_indices.values()) > self._budget:", "if False:", f"{_ATTACKS} -k list_index"),
    ),
    *_mutations(
        "paths",
        "options.py",
        ('if ".." in parts or "." in parts or "" in parts:', "if False:", f"{_FILES} -k no_name_leaves"),
        ('if "\\\\" in name or any(ord(character) < 32 for character in name):', "if False:", f"{_FILES} -k no_name"),
        (
            'if name.startswith("/") or _SCHEME.match(name) or "::" in name:',
            "if False:",
            f"{_ATTACKS} -k out_of_the_checkpoint",
        ),
    ),
    *_mutations(
        "links",
        "storage/local/filesystem.py",
        (
            "os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder",
            "os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder",
            "tests/storage/test_local.py -k links_inside",
        ),
        (
            "os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder",
            "os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder",
            "tests/storage/test_local.py -k links_inside",
        ),
        ("if self._has_link(name):", "if False:", f"{_FILES} -k metadata_that_is_a_link"),
    ),
    *_mutations(
        "footers",
        "format/record.py",
        ("* element.nbytes > MAX_BLOCK_NBYTES:", "* element.nbytes > 1 << 80:", f"{_BAD} -k a_file_can_be_bad"),
        ("not 0 <= value <= MAX_INTEGER:", "value < 0:", f"{_BAD} -k absurd"),
        ("if start + elements > holder.elements:", "if False:", f"{_BAD} -k member"),
    ),
    *_mutations(
        "footers",
        "format/footer.py",
        ("if total > blocks:", "if False:", f"{_BAD} -k a_file_can_be_bad"),
        ("if count > MAX_BLOCK_SLICES:", "if False:", f"{_HOSTILE} -k millions_of_slices"),
        ("if offsets[-1] != trailer.footer_offset:", "if False:", f"{_BAD} -k a_file_can_be_bad"),
    ),
    *_mutations(
        "footers",
        "format/framing.py",
        ("if footer_nbytes > MAX_FOOTER_NBYTES:", "if False:", f"{_FILES} -k longer_than_any"),
    ),
    *_mutations(
        "footers",
        "format/data_file.py",
        ("min(footer_nbytes, MAX_FOOTER_NBYTES)", "footer_nbytes", f"{_FILES} -k metadata_makes_up"),
    ),
    *_mutations(
        "footers",
        "codecs/base.py",
        ("if len(pieces) <= _LAYOUT_PIECES:", "if True:", f"{_FILES} -k many_slices"),
    ),
    *_mutations(
        "frames",
        "codecs/coders/__init__.py",
        ("if claimed not in (len(out), zstandard.CONTENTSIZE_UNKNOWN) or", "if", f"{_SLICES} -k forged_slice_that"),
        ("allow_extra_data=False", "allow_extra_data=True", f"{_SLICES} -k forged_slice_that"),
        ("if len(decoded) != len(out):", "if False:", f"{_HOSTILE} -k bad_zstd"),
    ),
    *_mutations(
        "frames",
        "codecs/coders/__init__.py",
        ("decompress(stream, len(out) + 1)", "decompress(stream)", f"{_SLICES} -k a_thousandfold"),
        (" or decompressor.unused_data:", ":", f"{_SLICES} -k forged_slice_that"),
        ("not decompressor.eof or", "False or", f"{_HOSTILE} -k bad_deflate"),
    ),
    *_mutations(
        "slices that pass their CRC",
        "engines/cpu.py",
        (
            'if verify == "full" and checksum(out) != row.uncompressed_crc:',
            "if False:",
            f"{_SLICES} -k of_the_right_size",
        ),
        (
            "if not 0 <= stored_nbytes <= piece.nbytes or stop > source.size:",
            "if False:",
            f"{_BAD} {_HOSTILE} -k slice",
        ),
    ),
    *_mutations(
        "stock items",
        "loading/items.py",
        ("_SMALL_NBYTES: Final = 16 << 20", "_SMALL_NBYTES: Final = 1 << 40", f"{_FILES} -k bombs_of_stock"),
        ("max_window_size=_WINDOW_NBYTES", "", f"{_FILES} -k stock_window"),
        ("_STEP_NBYTES: Final = 256", "_STEP_NBYTES: Final = 1 << 12", f"{_FILES} -k bombs_of_stock"),
    ),
    *_mutations(
        "objects",
        "loading/safe_objects.py",
        ("if self.checks_objects:", "if False:", f"{_OBJECTS} -k executed"),
        ("weights_only=True)", "weights_only=False)", f"{_OBJECTS} -k payload_is_always"),
        ("    if not _is_archive(data):\n        # torch", "    if False:\n        # torch", f"{_OBJECTS} -k long_ago"),
        ("if len(members) < len(archive.infolist()):", "if False:", f"{_OBJECTS} -k that_inflates"),
        ("if sum(member.file_size for member in members) >", "if 0 >", f"{_OBJECTS} -k whose_files_are_one"),
        ("if bytearray not in trusted and", "if False and", f"{_OBJECTS} -k bytearray"),
    ),
    *_mutations(
        "objects",
        "loading/destinations.py",
        ("    if not inside:\n", "    if False:\n", f"{_OBJECTS} -k payload_of_another"),
    ),
)
