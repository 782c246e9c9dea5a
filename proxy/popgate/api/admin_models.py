"""Defines the pydantic models of the admin interface: the bodies of its requests and answers, and their limits."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from popgate.domain.errors import InvalidRequest
from popgate.domain.names import NAME_LENGTH_MAX, NAME_PATTERN, QUEUES_MAX
from popgate.domain.replica_wanted import REPLICAS_MAX
from popgate.domain.topics import (
    INVISIBILITY_SECONDS_MAX,
    MAX_DELIVERIES_MAX,
    MAX_IN_FLIGHT_MAX,
    MULTIPLIER_MAX,
    RELEASE_DELAY_SECONDS_MAX,
    Policy,
    RetryPolicy,
)

ADOPTABLE_PATTERN = r"^[A-Za-z0-9_.:@#,/+ -]{1,255}$"
"""Pattern of the names of queues that can be adopted: all names that AMQP client libraries accept. RabbitMQ itself
accepts any name."""
PATTERNS_IN_WORDS = {
    NAME_PATTERN: f"must be 1 to {NAME_LENGTH_MAX} characters of A-Z a-z 0-9 . _ -",
    ADOPTABLE_PATTERN: "must be 1 to 255 characters of A-Z a-z 0-9 _ . : @ # , / + - and the space",
}
"""For each pattern, the requirement that errors state if a name does not match."""
_DEFAULT = Policy()


def _whole(value: object) -> object:
    """Convert a float without a fraction to an int, because JSON has only one type of number. Return other values
    unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_WHOLE = BeforeValidator(_whole)


class _Input(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class TopicChange(_Input):
    """A request that creates or changes a topic. It must set either ``queues`` or ``adopt``."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["queues"], "properties": {"adopt": False, "unique_message_ids": {"const": False}}},
                {"required": ["adopt"], "properties": {"queues": False}},
            ]
        },
    )

    queues: Annotated[int, Field(ge=1, le=QUEUES_MAX, description="number of popgate's own queues"), _WHOLE] = 1
    adopt: Annotated[
        list[Annotated[str, Field(pattern=ADOPTABLE_PATTERN)]],
        Field(min_length=1, max_length=QUEUES_MAX, description="existing RabbitMQ queues; they remain unchanged"),
    ] = []
    unique_message_ids: Annotated[
        bool, Field(description="adopted queues only: no two messages ever share a message_id")
    ] = False


class RetryChange(_Input):
    initial_seconds: Annotated[
        float, Field(ge=0, le=RELEASE_DELAY_SECONDS_MAX, description="the delay after the first delivery")
    ] = _DEFAULT.retry.initial_seconds
    multiplier: Annotated[float, Field(ge=1, le=MULTIPLIER_MAX)] = _DEFAULT.retry.multiplier
    max_seconds: Annotated[float, Field(ge=0, le=RELEASE_DELAY_SECONDS_MAX)] = _DEFAULT.retry.max_seconds

    def applied_to(self, present: RetryPolicy) -> RetryPolicy:
        """Return ``present`` with this change applied. Raises: InvalidRequest if the initial delay would exceed the
        maximum delay."""
        named = self.model_fields_set
        retry = RetryPolicy(
            initial_seconds=self.initial_seconds if "initial_seconds" in named else present.initial_seconds,
            multiplier=self.multiplier if "multiplier" in named else present.multiplier,
            max_seconds=self.max_seconds if "max_seconds" in named else present.max_seconds,
        )
        if retry.initial_seconds > retry.max_seconds:
            field = "retry.initial_seconds" if "initial_seconds" in named else "retry.max_seconds"
            raise InvalidRequest(
                f"{field}: initial_seconds ({retry.initial_seconds:g}) must not be more than "
                f"max_seconds ({retry.max_seconds:g})",
                field=field,
            )
        return retry


class PolicyChange(_Input):
    """A change of a group's policy. Omitted fields keep their values. In a new group, omitted fields get their
    defaults."""

    invisibility_seconds: Annotated[
        float,
        Field(ge=1, le=INVISIBILITY_SECONDS_MAX, description="how long a lease lasts unless the pop says otherwise"),
    ] = _DEFAULT.invisibility_seconds
    max_lease_seconds: Annotated[
        float,
        Field(
            ge=1,
            le=INVISIBILITY_SECONDS_MAX,
            description="maximum age of a lease; longer requests by a pop or an extension are limited to it. Lease "
            "groups have their own limit",
        ),
    ] = _DEFAULT.max_lease_seconds
    max_deliveries: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_DELIVERIES_MAX,
            description="number of deliveries after which a message is dead-lettered; null: never",
        ),
        _WHOLE,
    ] = _DEFAULT.max_deliveries
    retry: RetryChange = RetryChange()
    max_in_flight: Annotated[
        int | None,
        Field(ge=1, le=MAX_IN_FLIGHT_MAX, description="maximum number of leases at a time; null: no limit"),
        _WHOLE,
    ] = _DEFAULT.max_in_flight
    paused: Annotated[bool, Field(description="hand out no messages; leases can be settled")] = _DEFAULT.paused
    min_replicas: Annotated[
        int | None,
        Field(
            ge=0,
            le=REPLICAS_MAX,
            description="number of replicas of the group's queues for a replica keeper to maintain; 0: leave them as "
            "they are; null: use the keeper's settings",
        ),
        _WHOLE,
    ] = _DEFAULT.min_replicas

    def applied_to(self, present: Policy) -> Policy:
        """Return the policy ``present`` with this change applied.

        Raises: InvalidRequest if the initial length of leases would exceed the maximum length.
        """
        named = self.model_fields_set
        policy = Policy(
            invisibility_seconds=(
                self.invisibility_seconds if "invisibility_seconds" in named else present.invisibility_seconds
            ),
            max_lease_seconds=self.max_lease_seconds if "max_lease_seconds" in named else present.max_lease_seconds,
            max_deliveries=self.max_deliveries if "max_deliveries" in named else present.max_deliveries,
            retry=self.retry.applied_to(present.retry) if "retry" in named else present.retry,
            max_in_flight=self.max_in_flight if "max_in_flight" in named else present.max_in_flight,
            paused=self.paused if "paused" in named else present.paused,
            min_replicas=self.min_replicas if "min_replicas" in named else present.min_replicas,
        )
        if policy.invisibility_seconds > policy.max_lease_seconds:
            field = "invisibility_seconds" if "invisibility_seconds" in named else "max_lease_seconds"
            raise InvalidRequest(
                f"{field}: invisibility_seconds ({policy.invisibility_seconds:g}) must not be more than "
                f"max_lease_seconds ({policy.max_lease_seconds:g})",
                field=field,
            )
        return policy


class TopicAnswer(BaseModel):
    topic: str
    queues: int
    adopted: list[str]
    unique_message_ids: bool
    groups: list[str]
    warnings: Annotated[list[str], Field(description="warnings about adopted queues")] = []


class TopicList(BaseModel):
    topics: list[TopicAnswer]


class RetryAnswer(BaseModel):
    initial_seconds: float
    multiplier: float
    max_seconds: float


class PolicyAnswer(BaseModel):
    invisibility_seconds: float
    max_lease_seconds: float
    max_deliveries: int | None
    retry: RetryAnswer
    max_in_flight: int | None
    paused: bool
    min_replicas: int | None


class GroupAnswer(BaseModel):
    topic: str
    group: str
    mode: Literal["pop", "draining", "pull"]
    policy: PolicyAnswer
    warnings: Annotated[list[str], Field(description="warnings about the change")] = []


class ProtocolRange(BaseModel):
    min: int
    max: int


class IndexAnswer(BaseModel):
    service: Literal["popgate"]
    version: str
    protocol: ProtocolRange
    broker: Annotated[str, Field(description='"embedded" or "rabbitmq"')]
    features: list[str]


class HealthAnswer(BaseModel):
    status: Literal["ok"]
