"""Carries out a fix through the management API or in Redis."""

from popgate.adapters.redis.connection import RedisConnection
from popgate.adapters.replicas.management import Management
from popgate.doctor.findings import Fix, FixResult, SetPermissions, SetPolicy
from popgate.domain.errors import BrokerUnavailable, Conflict, StateUnavailable


async def apply_fix(fix: Fix, management: Management | None, redis: RedisConnection | None) -> FixResult:
    """Carry out a fix, without retries. An error of RabbitMQ or Redis is not raised, but described in the result."""
    try:
        if isinstance(fix, SetPolicy | SetPermissions):
            assert management is not None, "without it nothing of this is seen"
            await _fix_broker(fix, management)
        else:
            assert redis is not None, "without it nothing of this is seen"
            if await redis.look("CONFIG", "SET", fix.name, fix.value) is None:
                return FixResult(command=fix.command, is_done=False, note=f"Redis refuses CONFIG SET {fix.name}")
            if await redis.look("CONFIG", "REWRITE") is None:
                note = f"it holds until Redis restarts: write '{fix.name} {fix.value}' into its configuration file"
                return FixResult(command=fix.command, is_done=True, note=note)
    except (BrokerUnavailable, Conflict, StateUnavailable) as error:
        return FixResult(command=fix.command, is_done=False, note=error.detail)
    return FixResult(command=fix.command, is_done=True)


async def _fix_broker(fix: SetPolicy | SetPermissions, management: Management) -> None:
    if isinstance(fix, SetPermissions):
        wanted = fix.permissions
        await management.set_permissions(
            fix.user, {"configure": wanted.configure, "write": wanted.write, "read": wanted.read}
        )
        return
    await management.set_policy(
        fix.name,
        {
            "pattern": fix.pattern,
            "definition": dict(fix.definition),
            "priority": fix.priority,
            "apply-to": fix.apply_to,
        },
    )
