"""Failures of a proof, apart from its findings."""

from popgate.domain.errors import PopgateError


class ProverFailed(PopgateError):
    """Nothing can be proven, because the implementation does not work undisturbed, or a process failed."""

    code = "prover_failed"


class BrokerMissing(PopgateError):
    """The broker can't be reached."""

    code = "broker_missing"
