"""The values that the state machine's rules draw: few, so that they collide.

Times are in the past, now, an hour away or far ahead, so that nothing depends on the speed of the
steps.
"""

import os
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from lisa.core.model.keys import keyed_id
from tests.model.scheduling import Made
from tests.model.sending import Outgoing

HOUR = "3600000"
FAR = "4000000000000"
OCCURRENCES = ("e@1", "e@2")
"""Ids of one schedule's occurrences, the newer one last."""

KEYED = tuple(keyed_id(key, own_id) for key, own_id in ("ka", "kb", "la"))
"""Ids of messages with keys, two of them with the same one."""

STEPS = 3_000


def run_machine(
    kind: type[RuleBasedStateMachine], steps_of_one_run: int, *phases: Phase, **attributes: Any
) -> Counter[str]:
    """Run a machine with these class attributes, and return what it has `seen`.

    It takes some thousands of steps, the same each time, or LISA_MODEL_STEPS, different each time.
    """
    wanted = int(os.environ.get("LISA_MODEL_STEPS", "0"))
    seen: Counter[str] = Counter()
    run_state_machine_as_test(
        type("Machine", (kind,), {"seen": seen, **attributes}),
        settings=settings(
            max_examples=max(1, (wanted or STEPS) // steps_of_one_run),
            stateful_step_count=steps_of_one_run,
            derandomize=not wanted,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            phases=phases,
            report_multiple_bugs=False,
        ),
    )
    return seen


topics = st.sampled_from(["plain", "pair", "told"])
groups = st.sampled_from(["g", "h"])
consumers = st.sampled_from(["c1", "c2-h", "c3-h"])
ids = st.lists(st.integers(0, 9), min_size=1, max_size=3)  # which of the existing ones
dues = st.sampled_from(["+0", "+0", "1000", "2000", "-5", "+" + HOUR, FAR])
leases = st.sampled_from([None, None, 0, int(HOUR)])
letters = st.sampled_from(" -cd")
timeouts = st.sampled_from(["0", "0", HOUR])  # expires immediately, or not during the run
policies = st.sampled_from(["", "0", "0,0", f"0,{HOUR}", HOUR])
lates = st.sampled_from([f"{HOUR},skip", f"{HOUR},garbage", f"{HOUR},collapse", "0,run"])
own_lates = st.builds(
    lambda retry, late, lane: f"{retry};{late}{lane}",
    st.sampled_from(["*", "0"]),
    lates,
    st.sampled_from(["", ";5,", ";,1000"]),
)
own_lanes = st.sampled_from(["*;;5,", "0;;,1000", ";;2,0"])
picks = st.lists(st.integers(0, 99), min_size=1, max_size=3)
outgoing = st.builds(
    Outgoing,
    st.sampled_from(["a", "a", "b", "b", "c", "d", *OCCURRENCES, *KEYED, *KEYED]),
    dues,
    st.sampled_from(["", "xy", "longer"]),
    st.sampled_from([None, None, None, 0, int(HOUR)]),
    st.one_of(st.none(), st.none(), policies, own_lates, own_lanes),
)
batches = st.lists(outgoing, min_size=1, max_size=3)
OPTIONS = {
    "ack_timeout": timeouts,
    "retry_delays": policies,
    "max_ready": st.sampled_from([None, "1", "1", "2"]),
    "capacity": st.sampled_from([None, "", "2", "4"]),
    "retention": st.sampled_from([None, None, "0", HOUR]),
    "max_body_bytes": st.sampled_from([None, None, "4"]),
    "late": st.one_of(st.sampled_from([None, None, ""]), lates),
    "paused": st.sampled_from([None, "0", "0", "1"]),
}
OVERLAPS = ("allow", "allow", "skip", "queue_one", "replace_unstarted")
made = st.builds(
    Made,
    st.sampled_from("aabbcd"),
    st.sampled_from([1_000, 2_000, int(FAR)]),
    st.sampled_from([None, None, 0, int(HOUR)]),
    st.one_of(st.none(), policies),
)
