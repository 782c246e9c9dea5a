"""Converts assignments to JSON for the stores, and back.

The stored rows (sessions and holdings) are lists. If a newer popgate appends fields to a row, this code ignores them.
So a stored assignment can still be read after an upgrade, and after a downgrade.
"""

from typing import Any

import orjson

from popgate.domain.assignment import Assignment, Holding, Session
from popgate.domain.names import ClientId
from popgate.domain.topics import ConsumeMode

_HOLDING_FIELDS = len(Holding._fields)


def assignment_json(assignment: Assignment) -> str:
    return orjson.dumps(
        {
            "generation": assignment.generation,
            "lease_generation": assignment.lease_generation,
            "sessions": {client_id: [*one] for client_id, one in assignment.sessions.items()},
            "holdings": {str(number): [*one] for number, one in assignment.holdings.items()},
        }
    ).decode()


def read_assignment(text: str | bytes) -> Assignment:
    fields: dict[str, Any] = orjson.loads(text)
    return Assignment(
        generation=fields["generation"],
        lease_generation=fields["lease_generation"],
        sessions={ClientId(client_id): _session(*row) for client_id, row in fields["sessions"].items()},
        holdings={int(number): Holding(*row[:_HOLDING_FIELDS]) for number, row in fields["holdings"].items()},
    )


def _session(supports: list[str], began: int, generation: int, *_: object) -> Session:
    return Session(tuple(ConsumeMode(mode) for mode in supports), began, generation)
