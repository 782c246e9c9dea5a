"""Defines the errors with which a proof ends without a result."""

from popgate.domain.errors import PopgateError


class ProverFailed(PopgateError):
    """Nothing can be proven, because the lock implementation does not work even without faults, or because a process
    failed."""

    code = "prover_failed"


class BrokerMissing(PopgateError):
    """The broker can't be reached."""

    code = "broker_missing"
