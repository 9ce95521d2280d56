"""Transport `p2p` in the driver: says how the ends are made, and compares what each engine holds with what was sent."""

from __future__ import annotations

import functools

from miles_core.errors import TransportError
from miles_core.kinds.transport import Staged, WeightSource
from miles_core.weights.digests import compare
from miles_transports.joined import Ends, JoinedTransport
from miles_transports.meeting import Address, Meeting
from miles_transports.options import P2pOptions
from miles_transports.p2p.ends import P2pReceiver, P2pSender


class P2pTransport(JoinedTransport):
    """See the package; `kinds.transport.Transport`."""

    name = "p2p"

    def __init__(self, options: P2pOptions) -> None:
        super().__init__(options.host, options.timeout_s)
        self._options = options
        self._generation = 0

    def ends(self, address: Address, source: WeightSource) -> Ends:
        self._generation = 0
        return Ends(
            senders=functools.partial(P2pSender, address, self._options),
            receiver=lambda engine: functools.partial(P2pReceiver, address, self._options, engine),
        )

    def failed(self, meeting: Meeting) -> None:
        # A write may be on its way still; nothing that it could reach is used again.
        self._generation += 1
        meeting.tell("generation", self._generation)

    async def publish(self, version: int) -> Staged:
        staged = await super().publish(version)
        try:
            _verify(staged)
        except TransportError:
            assert self._meeting is not None
            self.failed(self._meeting)
            raise
        return staged


def _verify(staged: Staged) -> None:
    """One-sided writes tell their receiver nothing: a short one is found by the digests of what lies there.

    Raises:
        TransportError: naming the engine and the tensors.
    """
    for index, received in enumerate(staged.received):
        if differences := compare(staged.sent.digests, received.digests):
            raise TransportError(
                f"engine {index} does not hold what was written to it",
                found=str(differences),
                where=f"engine {index}, version {received.version}",
                do="the engines keep serving the version they had; publish again, and look at that host's network",
            )
