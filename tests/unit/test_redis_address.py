"""The address of Redis: the forms of its URL, and the text of its errors."""

import pytest
from redis import exceptions as redis
from redis.asyncio import SSLConnection
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.sentinel import MasterNotFoundError

from popgate.adapters.redis.address import is_unverified, open_pool, parse_address
from popgate.adapters.redis.failures import state_failure
from popgate.domain.errors import StartupError


@pytest.mark.parametrize(
    ("url", "place", "host", "port"),
    [
        ("redis://localhost", "localhost:6379", "localhost", 6_379),
        ("redis://user:secret@redis.internal:6390/3", "redis.internal:6390/3", "redis.internal", 6_390),
        ("rediss://:secret@[::1]:6380", "::1:6380", "::1", 6_380),
        ("unix:///run/redis.sock?db=2", "/run/redis.sock", None, 6_379),
        ("redis+sentinel://:secret@one:5000,two/orders", "orders of one:5000,two", "one", 5_000),
    ],
)
def test_an_address_is_named_without_its_password(url: str, place: str, host: str | None, port: int) -> None:
    address = parse_address(url)
    assert (address.place, address.host, address.port) == (place, host, port)
    assert "secret" not in repr(address)


def test_a_sentinel_url_has_all_that_both_need() -> None:
    address = parse_address(
        "rediss+sentinel://user:p%40ss@one:5000,[::1]/orders/4?sentinel_password=other&ssl_ca_certs=/ca.pem"
    )
    assert address.sentinels == (("one", 5000), ("::1", 26_379))
    assert address.master == "orders"
    assert address.options == {
        "db": 4,
        "username": "user",
        "password": "p@ss",
        "ssl": True,
        "ssl_check_hostname": True,
        "ssl_ca_certs": "/ca.pem",
    }
    tls = {"ssl": True, "ssl_check_hostname": True, "ssl_ca_certs": "/ca.pem"}
    assert address.sentinel_options == {"password": "other", **tls}
    assert "other" not in repr(address)
    assert isinstance(open_pool(address), SentinelConnectionPool)


@pytest.mark.parametrize(
    ("query", "verifies"),
    [
        ("", True),
        ("?ssl_check_hostname=false", False),
        ("?ssl_cert_reqs=none", False),
        ("?ssl_ca_certs=/ssl_cert_reqs=none", True),
    ],
)
@pytest.mark.parametrize("url", ["rediss://localhost:6380/1", "rediss+sentinel://localhost/orders/0"])
def test_the_name_of_a_tls_server_is_verified_unless_the_url_says_otherwise(
    url: str, query: str, verifies: bool
) -> None:
    address = parse_address(url + query)
    assert open_pool(address).connection_kwargs.get("ssl_check_hostname", verifies) is verifies
    assert is_unverified(address) is not verifies


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:hunter2/x@host",
        "redis://user:1234/hunter2@host",
        "redis://:hunter2#x@host",
        "unix://user:1/hunter2@/run/redis.sock",
        "redis://host?hunter2=1",
        "rediss://host?ssl_cert_reqs=hunter2",
        "redis://host?retry=hunter2",
        "redis+sentinel://:hunter2/x@host/orders",
        "redis+sentinel://:p@host/orders/hunter2",
        "redis+sentinel://:p@host/orders?hunter2=1",
        "redis+sentinel://host:hunter2/orders",
        "hunter2://host",
        "redis://[hunter2",
    ],
)
def test_no_part_of_a_url_that_is_not_understood_is_shown(url: str) -> None:
    with pytest.raises(StartupError) as raised:
        parse_address(url)
    assert "hunter2" not in raised.value.detail
    assert raised.value.__cause__ is None


def test_a_tls_url_makes_tls_connections() -> None:
    pool = open_pool(parse_address("rediss://localhost:6380/1?ssl_cert_reqs=none"))
    assert pool.connection_class is SSLConnection


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost",
        "localhost:6379",
        "redis://localhost:port",
        "redis+sentinel://one,two",
        "redis+sentinel:///orders",
        "redis+sentinel://one/orders/zero",
        "redis+sentinel://one/orders/0/1",
        "redis+sentinel://one:port/orders",
        "redis+sentinel://one,/orders",
        "redis+sentinel://one/orders?no_such_option=1",
    ],
)
def test_what_is_no_address_is_refused_with_the_forms_that_are(url: str) -> None:
    with pytest.raises(StartupError, match=r"redis\+sentinel://host1:26379,host2:26379/master/0"):
        parse_address(url)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (redis.ConnectionError("Error 111 connecting"), "check that it runs"),
        (ConnectionResetError("reset"), "check that it runs"),
        (redis.TimeoutError("Timeout reading"), "does not answer"),
        (TimeoutError(), "does not answer"),
        (redis.MaxConnectionsError("4096 calls wait already"), "slower than its callers"),
        (redis.BusyLoadingError("Redis is loading the dataset in memory"), "is loading its data"),
        (redis.AuthenticationError("invalid username-password pair"), "check user and password"),
        (redis.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), "raise maxmemory"),
        (redis.ReadOnlyError("You can't write against a read only replica."), "replica"),
        (redis.NoPermissionError("this user has no permissions"), "all keys and scripts"),
        (MasterNotFoundError("No master found (<Connection(password=hunter2)>)"), "check the Sentinels"),
        (redis.ResponseError("Error running script: @user_script:1: -OOM command not allowed"), "raise maxmemory"),
        (redis.ResponseError("Error running script: -READONLY You can't write against a read only"), "replica"),
        (redis.ResponseError("MISCONF Errors writing to the AOF file: No space left on device"), "check its disk"),
        (redis.ResponseError("BUSY Redis is busy running a script."), "long-running script"),
    ],
)
def test_an_error_of_redis_is_told_with_its_remedy(error: redis.RedisError | OSError, says: str) -> None:
    failure = state_failure(error, "here:6379")
    assert failure is not None
    assert says in failure.detail
    assert "here:6379" in failure.detail
    assert "hunter2" not in failure.detail
    assert failure.retry_after_seconds > 0


def test_a_fault_of_a_script_is_no_failure_of_redis() -> None:
    assert state_failure(redis.ResponseError("user_script:12: attempt to index a nil value"), "here:6379") is None
