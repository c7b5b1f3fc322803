from __future__ import annotations

import re

from autobalance.report.phases import phase_labels


def test_phases_and_steps_are_named_in_the_middle_of_their_span_where_there_is_room() -> None:
    marks = [("step 1 forward", 0.0), ("step 1 backward", 0.2), ("step 1 optimizer", 0.5), ("step 2 forward", 0.6)]
    told = re.findall(r'<text x="([\d.]+%)" y="\d+"[^>]*>([^<]+)', phase_labels([*marks, ("end", 1.0)]))
    # The optimizer has a tenth of the width, which is too little.
    assert told == [
        ("10%", "forward"),
        ("35%", "backward"),
        ("80%", "forward"),
        ("30%", "step 1"),
        ("80%", "step 2"),
    ]
    assert phase_labels([]) == ""
