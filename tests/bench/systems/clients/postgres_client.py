"""Takes and deletes rows of a PostgreSQL table with asyncpg: leases as pgmq, or locks that a transaction holds."""

import asyncio
from importlib import import_module
from typing import Any

from bench.systems.clients.client import BODY_BYTES, LEASE_SECONDS, WAIT_SECONDS, Client
from bench.systems.metering import Job, Meter

CREATE = """
create table if not exists queue (
    msg_id bigint primary key generated always as identity,
    read_ct int not null default 0,
    enqueued_at timestamptz not null default now(),
    vt timestamptz not null,
    message jsonb
);
create index if not exists queue_vt on queue (vt);
truncate queue;
"""
FILL = "insert into queue (vt, message) select clock_timestamp(), to_jsonb(repeat('x', $2)) from generate_series(1, $1)"
READ = f"""
with taken as (
    select msg_id from queue where vt <= clock_timestamp() order by msg_id limit $1 for update skip locked
)
update queue set vt = clock_timestamp() + interval '{LEASE_SECONDS} seconds', read_ct = read_ct + 1
from taken where queue.msg_id = taken.msg_id
returning queue.msg_id, read_ct, enqueued_at, vt, message
"""
DELETE = "delete from queue where msg_id = any($1) returning msg_id"
TAKE = """
delete from queue where msg_id = any(array(
    select msg_id from queue order by msg_id limit $1 for update skip locked
)) returning msg_id, message
"""


async def _connected(job: Job) -> Any:
    return await import_module("asyncpg").connect(
        host="127.0.0.1", port=job.port, user=job.options["user"], database="postgres"
    )


async def _fill(job: Job) -> None:
    connection = await _connected(job)
    await connection.execute(CREATE)
    await connection.execute(FILL, job.total, BODY_BYTES)
    await connection.execute("vacuum analyze queue")  # as autovacuum would do before long
    await connection.close()


async def _as_pgmq(job: Job, connection: Any) -> int:
    """Lease rows in one statement, and delete them in another, each with its own commit."""
    rows = await connection.fetch(READ, job.batch)
    return len(await connection.fetch(DELETE, [row["msg_id"] for row in rows])) if rows else 0


async def _in_transaction(job: Job, connection: Any) -> int:
    """Delete rows, and commit when the work on them is done: a crash rolls back."""
    async with connection.transaction():
        return len(await connection.fetch(TAKE, job.batch))


def _client(take: Any) -> Client:
    async def drain(job: Job, meter: Meter) -> None:
        async def work(connection: Any) -> None:
            while not meter.is_done:
                count = await take(job, connection)
                meter.settled(count)
                if not count:
                    await asyncio.sleep(WAIT_SECONDS)

        connections = [await _connected(job) for _ in range(job.clients)]
        meter.start()
        await asyncio.gather(*(work(one) for one in connections))
        for one in connections:
            await one.close()

    return Client(fill=_fill, drain=drain)


PGMQ = _client(_as_pgmq)
TRANSACTION = _client(_in_transaction)
