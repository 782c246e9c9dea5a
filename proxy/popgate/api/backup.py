"""Serves ``/v1/admin/backup``: takes a backup of the data folder, and hands it out."""

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel
from starlette.responses import StreamingResponse

from popgate.api.openapi_errors import problem_responses
from popgate.api.visit import visit_of
from popgate.backup.archive import CONTENT_TYPE
from popgate.backup.hosted import BackupPhase, BackupState, HostedBackup
from popgate.domain.errors import Conflict


class BackupAnswer(BaseModel):
    """The present backup. ``bytes`` is the size of the store, of which ``bytes_copied`` are copied. The backup is the
    state of the store at ``taken_at``."""

    phase: BackupPhase
    bytes_copied: int
    bytes: int
    started_at: float | None
    taken_at: float | None
    failure: str | None


def backup_router(backup: HostedBackup | None) -> APIRouter:
    """Return the routes. ``backup`` is None if this application runs without a data folder."""
    router = APIRouter(prefix="/v1/admin/backup", tags=["admin"], responses=problem_responses(400, 503))

    @router.post("", status_code=202, responses=problem_responses(409))
    async def start_backup() -> BackupAnswer:
        """Begin to copy the store. A backup that no client has asked for lately is replaced. The copy needs as much
        free space in the data folder as the store has bytes."""
        return _answer(await _required(backup).start())

    @router.get("")
    async def get_backup() -> BackupAnswer:
        """Return the present backup, or why the last one failed."""
        return _answer(BackupState() if backup is None else backup.progress())

    archive: dict[str, Any] = {
        "description": "a tar archive; its last file is manifest.json",
        "content": {CONTENT_TYPE: {}},
    }

    @router.get("/archive", response_class=Response, responses={200: archive, **problem_responses(409)})
    async def get_backup_archive(request: Request) -> Response:
        """Return the backup, once it is ready. An archive without manifest.json at its end is incomplete."""
        if (visit := visit_of(request.scope)) is not None:
            visit.is_streaming = True  # a caller whose key is revoked gets no more of it
        return StreamingResponse(_required(backup).archive(), media_type=CONTENT_TYPE)

    @router.delete("", status_code=204, response_class=Response)
    async def delete_backup() -> None:
        """Delete the backup, or end it if it is being taken. Idempotent. Otherwise it is deleted ten minutes after it
        was read."""
        if backup is not None:
            await backup.delete()

    return router


def _required(backup: HostedBackup | None) -> HostedBackup:
    if backup is None:
        raise Conflict("this proxy has no data folder")
    return backup


def _answer(state: BackupState) -> BackupAnswer:
    return BackupAnswer(
        phase=state.phase,
        bytes_copied=state.bytes_copied,
        bytes=state.bytes,
        started_at=state.started_at,
        taken_at=state.taken_at,
        failure=state.failure,
    )
