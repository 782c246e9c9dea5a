"""Serves ``/v1/admin/reports``: the reports that the Spark pipeline has written into ``--report-folder``."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Path, Response
from pydantic import BaseModel, Field

from popgate.api.openapi_errors import problem_responses
from popgate.api.problems import NotFound
from popgate.journal.reports import NAME_PATTERN, Report, ReportFolder, Verdict

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; sandbox allow-popups"
"""A report is one file with its style, without scripts."""
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
ReportInPath = Annotated[str, Path(pattern=NAME_PATTERN)]


class VerdictAnswer(BaseModel):
    """The result of an audit: was everything delivered?"""

    headline: str
    text: str
    faults: Annotated[dict[str, int], Field(description="number of certain faults by kind")]
    not_certain: Annotated[dict[str, int], Field(description="number of faults that gaps of the journal may explain")]
    journal_events_missing: int
    end: Annotated[str, Field(description="until when the journal was audited")]


class ReportAnswer(BaseModel):
    name: str
    written_at: float
    bytes: int
    verdict: Annotated[VerdictAnswer | None, Field(description="null if the report is no audit")]


class ReportsAnswer(BaseModel):
    """The reports, the latest one first."""

    configured: Annotated[bool, Field(description="whether the proxy has a --report-folder")]
    reports: list[ReportAnswer]
    trouble: Annotated[str | None, Field(description="why the folder can't be read; null: no trouble")]


def reports_router(folder: ReportFolder | None) -> APIRouter:
    """Return the routes. ``folder`` is None if no folder is configured."""
    router = APIRouter(prefix="/v1/admin/reports", tags=["admin"])

    @router.get("")
    async def list_reports() -> ReportsAnswer:
        """Return the reports of the Spark pipeline, the latest one first, with the verdicts of audits."""
        if folder is None:
            return ReportsAnswer(configured=False, reports=[], trouble=None)
        try:
            found = await asyncio.to_thread(folder.reports)
        except OSError as error:
            trouble = f"{folder.folder} can't be read: {error.strerror or error}"
            return ReportsAnswer(configured=True, reports=[], trouble=trouble)
        return ReportsAnswer(configured=True, reports=[_answer(one) for one in found], trouble=None)

    page: dict[str, Any] = {"description": "the report as a page, with all that it needs", "content": {"text/html": {}}}

    @router.get("/{name}", response_class=Response, responses={200: page, **problem_responses(400, 404)})
    async def get_report(name: ReportInPath) -> Response:
        """Return a report as a page."""
        try:
            content = None if folder is None else await asyncio.to_thread(folder.page, name)
        except OSError:
            content = None
        if content is None:
            raise NotFound(f"/v1/admin/reports/{name}")
        return Response(content, media_type="text/html; charset=utf-8", headers=_HEADERS)

    return router


def _answer(report: Report) -> ReportAnswer:
    verdict = None if report.verdict is None else _verdict(report.verdict)
    return ReportAnswer(name=report.name, written_at=report.written_at, bytes=report.size, verdict=verdict)


def _verdict(verdict: Verdict) -> VerdictAnswer:
    return VerdictAnswer(
        headline=verdict.headline,
        text=verdict.text,
        faults=verdict.faults,
        not_certain=verdict.not_certain,
        journal_events_missing=verdict.missing,
        end=verdict.end,
    )
