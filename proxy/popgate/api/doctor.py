"""Serves ``/v1/admin/doctor``: runs the checks of ``popgate doctor`` in a running proxy, and shows what they found."""

from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from popgate.api.openapi_errors import problem_responses
from popgate.doctor.examination import Checkup
from popgate.domain.errors import Conflict
from popgate.runtime.single_run import Finished, SingleRun

NOT_OFFERED = "the doctor checks RabbitMQ and Redis, and this proxy runs on its embedded store"


class FindingAnswer(BaseModel):
    """A setting that harms popgate. docs/doctor.md describes each ``code``."""

    code: str
    severity: Annotated[Literal["error", "warning", "info"], Field(description="error: messages can be lost")]
    found: str
    why: str
    queues: list[str]
    command: Annotated[str, Field(description="the command or the advice that fixes it")]
    fixable: Annotated[bool, Field(description="whether `popgate doctor --fix` can carry it out")]


class NotLookedAtAnswer(BaseModel):
    what: str
    why: str
    flag: Annotated[str, Field(description="the setting that would allow the check")]


class ExaminationAnswer(BaseModel):
    """The findings of one run, the most severe ones first, and what could not be checked."""

    place: str
    rabbitmq_version: str
    findings: list[FindingAnswer]
    not_looked_at: list[NotLookedAtAnswer]
    at: Annotated[float, Field(description="when the run ended")]
    seconds: Annotated[float, Field(description="how long it took")]


class DoctorAnswer(BaseModel):
    """The doctor of the proxy that answers. ``latest`` is null if it has not run since the proxy started."""

    available: bool
    unavailable_because: str | None
    running: bool
    latest: ExaminationAnswer | None


def doctor_router(doctor: SingleRun[Checkup] | None) -> APIRouter:
    """Return the routes. ``doctor`` is None for a proxy without RabbitMQ."""
    router = APIRouter(prefix="/v1/admin/doctor", tags=["admin"], responses=problem_responses(503))

    @router.get("")
    async def get_doctor() -> DoctorAnswer:
        """Return the findings of the latest run at this proxy. Runs nothing."""
        latest = None if doctor is None or doctor.latest is None else _answer(doctor.latest)
        return DoctorAnswer(
            available=doctor is not None,
            unavailable_because=NOT_OFFERED if doctor is None else None,
            running=doctor is not None and doctor.is_running,
            latest=latest,
        )

    @router.post("", responses=problem_responses(400, 409))
    async def run_doctor() -> ExaminationAnswer:
        """Check the settings of RabbitMQ and Redis that harm popgate, as `popgate doctor` does. Changes nothing. A run
        takes some seconds, and at most 40. A proxy does one run at a time."""
        if doctor is None:
            raise Conflict(NOT_OFFERED)
        return _answer(await doctor.run())

    return router


def _answer(run: Finished[Checkup]) -> ExaminationAnswer:
    place, found = run.result
    return ExaminationAnswer(
        place=place,
        rabbitmq_version=".".join(map(str, found.version)),
        findings=[
            FindingAnswer(
                code=finding.code,
                severity=finding.severity.value,
                found=finding.found,
                why=finding.why,
                queues=list(finding.queues),
                command=finding.command,
                fixable=finding.fix is not None and finding.needs_fix,
            )
            for finding in found.findings
        ],
        not_looked_at=[NotLookedAtAnswer(what=one.what, why=one.why, flag=one.flag) for one in found.unseen],
        at=run.at,
        seconds=run.seconds,
    )
