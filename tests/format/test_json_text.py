"""Errors about JSON stay short, whatever is in it."""

from __future__ import annotations

import pytest

from dcp_nvcomp.calls.json_text import parse_json


def test_a_number_of_a_thousand_digits_is_not_printed_whole() -> None:
    with pytest.raises(ValueError, match="is no finite number") as caught:
        parse_json("1" + 3000 * "0" + ".0")
    assert len(str(caught.value)) < 100
