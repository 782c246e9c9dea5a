"""Messages between proxies, for Hypothesis to draw."""

from typing import Any

from hypothesis import strategies as st

from popgate.domain.message import Message
from popgate.domain.names import BrokerQueue, CopyId, GroupName, InstanceId, LeaseId, StreamName, TopicName
from popgate.ports import peers
from popgate.ports.peers import MESSAGES, PeerMessage

texts = st.text(max_size=20)
numbers = st.floats(allow_nan=False)
counts = st.integers(min_value=0, max_value=2**63 - 1)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | numbers | texts | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
st.register_type_strategy(int, counts)  # what MessagePack can represent; before any type check
st.register_type_strategy(float, numbers)
for new_type in (TopicName, GroupName, CopyId, LeaseId, StreamName, BrokerQueue, InstanceId):
    named: Any = new_type  # to Hypothesis it is a type
    st.register_type_strategy(named, texts.map(new_type))
st.register_type_strategy(
    Message,
    st.builds(
        Message,
        headers=st.dictionaries(texts, values, max_size=3),
        published_at=numbers,
        visible_at=numbers | st.none(),
        expires_at=numbers | st.none(),
    ),
)
st.register_type_strategy(  # without the fields that the first release of version 1 does not have
    peers.PeerOrder,
    st.tuples(texts, numbers | st.none(), texts).map(lambda three: peers.PeerOrder(*three)),
)
answers: dict[type[PeerMessage[Any]], st.SearchStrategy[Any]] = {
    peers.Learned: st.none(),
    peers.Wanted: st.booleans(),
    peers.Available: st.none(),
    peers.LeaseForGroup: counts,
    peers.Fetch: st.lists(st.none() | st.from_type(Message), max_size=4),
    peers.CountMessages: st.lists(st.from_type(peers.QueueCounts), max_size=4),
    peers.SettleAtOwner: st.lists(st.from_type(peers.PeerResult), max_size=4),
    peers.PurgeAtOwner: st.from_type(peers.PurgeResult),
    peers.Follow: st.none(),
}
"""The answers to each kind of message."""


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[InstanceId, PeerMessage[Any], Any]:
    """Generate a sender, its message, and the answer to it."""
    family = draw(st.sampled_from(list(MESSAGES.values())))
    return draw(texts.map(InstanceId)), draw(st.from_type(family)), draw(answers[family])
