"""The peers port between the processes of the simulation: each message is encoded as bytes, as on production's wire."""

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeVar

from popgate.cluster.protocols import common_version
from popgate.domain.errors import NoCommonVersion, PeerUnavailable, PopgateError
from popgate.domain.names import InstanceId
from popgate.ports.claims import Member
from popgate.ports.peers import ForwardedAnswer, ForwardedRequest, PeerAnswers, PeerMessage, Peers
from popgate.wire.codec import CODEC
from popgate.wire.errors import NotUnderstood
from simulator.network import Answered, Network
from simulator.processes import Process

AnswerT = TypeVar("AnswerT")

ANSWER_SECONDS = 10.0
"""Seconds, as in ``HttpPeers``."""
DEATH_SECONDS = 0.05
"""Minimum seconds until a death is certain."""


class Address:
    """The address of one instance: its process, once it listens, and the handler that answers there."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.answers: PeerAnswers | None = None
        self.is_leaving = False

    @property
    def listening(self) -> Process | None:
        return None if self.answers is None else self.process


class SimulatedPeers:
    """The peers of ``me``, which runs in ``process``. ``members``: the cluster as ``me`` sees it."""

    def __init__(
        self,
        me: InstanceId,
        process: Process,
        network: Network,
        addresses: Mapping[InstanceId, Address],
        members: Callable[[], Mapping[InstanceId, Member]],
    ) -> None:
        self._me = me
        self._process = process
        self._network = network
        self._addresses = addresses
        self._members = members

    async def ask(self, to: InstanceId, message: PeerMessage[AnswerT]) -> AnswerT:
        address = self.address(to)
        try:
            data = CODEC.encode_message(self.version(), self._me, message)

            async def work() -> Answered[bytes]:
                assert address.answers is not None
                version, sender, asked = CODEC.decode_message(data)
                try:
                    return Answered(CODEC.encode_answer(version, asked, await address.answers.answer(sender, asked)))
                except PopgateError as error:
                    return Answered(CODEC.encode_error(version, error))

            answer = await self._network.exchange(address.listening, work, seconds=ANSWER_SECONDS, asker=self._process)
            return CODEC.decode_answer(message, answer)
        except (NotUnderstood, NoCommonVersion) as error:
            raise PeerUnavailable(error.detail) from error
        except OSError as error:  # TimeoutError is a subclass
            raise PeerUnavailable(f"proxy {to} can't be reached: {error}") from error

    async def forward(
        self, to: InstanceId, request: ForwardedRequest, *, wait_seconds: float | None
    ) -> ForwardedAnswer:
        raise NotImplementedError("pops are passed on by the face of the simulation")

    async def died(self, member: Member) -> None:
        loop = asyncio.get_running_loop()
        address = self._addresses.get(member.instance)
        if address is None or address.listening is None or address.process.is_dead:
            await loop.create_future()  # never held: nothing is noticed
            return
        died: asyncio.Future[None] = loop.create_future()

        def tell() -> None:
            if not died.done() and not address.is_leaving:
                died.set_result(None)

        address.process.at_death(tell)
        try:
            await died
        finally:
            address.process.not_at_death(tell)
        await asyncio.sleep(DEATH_SECONDS + self._network.weather.seconds())

    def version(self) -> int:
        """Return the cluster's present protocol version. Raises: NoCommonVersion."""
        return common_version(CODEC.protocols, self._members().values())

    def address(self, to: InstanceId) -> Address:
        """Return the address of a member. Raises: PeerUnavailable, if it is no member."""
        address = self._addresses.get(to)
        if to not in self._members() or address is None:
            raise PeerUnavailable(f"proxy {to} is no longer a member of the cluster")
        return address


_conforms: type[Peers] = SimulatedPeers
