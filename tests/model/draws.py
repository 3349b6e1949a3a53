"""The values that the state machine's rules draw: few, so that they collide.

Times are in the past, now, an hour away or far ahead, so that nothing depends on the speed of the
steps.
"""

from hypothesis import strategies as st

from lisa.core.model.keys import keyed_id
from tests.model.scheduling import Made
from tests.model.sending import Outgoing

HOUR = "3600000"
FAR = "4000000000000"
OCCURRENCES = ("e@1", "e@2")
"""Ids of one schedule's occurrences, the newer one last."""

KEYED = tuple(keyed_id(key, own_id) for key, own_id in ("ka", "kb", "la"))
"""Ids of messages with keys, two of them with the same one."""

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
