"""Pages: no label of a picture is cut off."""

import re

from rmsnorm import page


def test_labels_of_a_heat_map_are_within_the_picture():
    """Each digit takes at most 7 of the picture's units: 11 px in any usual font without serifs."""
    picture = page.heat_map("where", [[1.0] * 33] * 9, (123456, 9999990))
    wide = int(re.search(r'width="(\d+)">', picture)[1])
    labels = re.findall(r'<text x="(\d+)" y="\d+"( text-anchor="end")?>(\d+)</text>', picture)
    assert {len(label) for _, _, label in labels} == {6, 7, 8}
    for x, at_the_end, label in labels:
        left = int(x) - 7 * len(label) if at_the_end else int(x)
        assert 0 <= left < left + 7 * len(label) <= wide, label


def test_bars_leave_the_room_of_labels_to_the_browser():
    picture = page.bars("how far", ["a label & more " * 9, "b"], [3.0, 0.0], ["<1 %", "0"])
    assert "<svg" not in picture
    assert "a label &amp; more " * 9 + "</th>" in picture
    assert [float(share) for share in re.findall(r"width: ([\d.]+)%", picture)] == [100.0, 0.2]
