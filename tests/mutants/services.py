"""Slips around the engine: the process, HTTP, ownership, locks, the replica keeper, the client."""

from mutants.slip import Slip

SERVICES = (
    # -- the process --------------------------------------------------------------------------------------------------
    Slip(
        "runtime/faults.py",
        "        return failures >= ATTEMPTS_MAX\n\n    def is_unreadable",
        "        return failures > ATTEMPTS_MAX\n\n    def is_unreadable",
        ("contract/test_http_poison.py",),
    ),
    Slip("runtime/faults.py", "        if failures == 1:\n", "        if True:\n", ("unit/test_faults.py",)),
    Slip("runtime/background.py", "            await asyncio.sleep(AGAIN_SECONDS)\n", "", ("unit/test_background.py",)),
    Slip(
        "runtime/background.py",
        "        await asyncio.gather(*tasks, return_exceptions=True)\n",
        "",
        ("unit/test_background.py",),
    ),
    Slip("runtime/background.py", "        self._stopping = True\n", "", ("unit/test_background.py",)),
    Slip(
        "runtime/deadlines.py",
        "            if item.timer == self._due_at:\n",
        "            if True:\n",
        ("unit/test_deadlines.py",),
    ),
    Slip(
        "runtime/deadlines.py",
        "            self._stale_count = 0\n\n    def pop_due",
        "\n    def pop_due",
        ("unit/test_deadlines.py",),
    ),
    Slip(
        "runtime/shared_clock.py",
        "min(max(self._offset, now - answered), now - asked)",
        "now - asked",
        ("unit/test_shared_clock.py",),
    ),
    Slip("runtime/data_folder.py", "            check.unlink(missing_ok=True)\n", "", ("unit/test_data_folder.py",)),
    Slip("bootstrap/turns.py", " // SPREAD_DIVISOR - 1\n", " // SPREAD_DIVISOR\n", ("unit/test_bootstrap.py",)),
    Slip("bootstrap/endings.py", "_give_up, [code])", "_give_up, [0])", ("unit/test_bootstrap.py",)),
    # -- HTTP ---------------------------------------------------------------------------------------------------------
    Slip(
        "api/browsers.py",
        '_OWN_SITE = (b"same-origin", b"none")',
        '_OWN_SITE = (b"same-origin", b"none", b"same-site")',
        ("unit/test_api_browsers.py",),
    ),
    Slip("api/browsers.py", "if len(self._remembered) < REMEMBERED_MAX:", "if True:", ("unit/test_api_browsers.py",)),
    Slip(
        "api/connection_limiter.py",
        "        self._farewells.pop(connection, None)\n        self._forget_body(connection)\n",
        "        self._farewells.pop(connection, None)\n",
        ("contract/test_http_limits.py",),
    ),
    Slip(
        "api/connection_limiter.py",
        "        if connection not in self._heads:\n            self.is_served(connection)\n",
        "        if True:\n            self.is_served(connection)\n",
        ("contract/test_http_limits.py",),
    ),
    Slip(
        "api/connection_limiter.py",
        "                body.excused_seconds += SWEEP_SECONDS\n",
        "                pass\n",
        ("unit/test_api_connection_limiter.py",),
    ),
    Slip(
        "api/connection.py",
        "        if self.gone:\n            undo()\n",
        "        if self.gone:\n            pass\n",
        ("unit/test_api_forwarding.py",),
    ),
    Slip(
        "api/connection.py",
        "if answer.end > reached or (answer is newest and is_unread):",
        "if answer.end > reached:",
        ("contract/test_http_client_gone.py",),
    ),
    # -- who owns which queue -----------------------------------------------------------------------------------------
    Slip(
        "cluster/ownership.py",
        "            return False\n        return asyncio.get_running_loop().time() < self._former_until",
        "            return False\n        return False",
        ("contract/test_ownership.py",),
    ),
    Slip("cluster/ownership.py", "        self._lose(self._held() - owned)\n", "", ("contract/test_ownership.py",)),
    Slip(
        "cluster/ownership.py",
        "            await asyncio.gather(*(self._hand_over(queue) for queue in sorted(self._held())))\n",
        "            pass\n",
        ("contract/test_ownership.py",),
    ),
    # -- locks --------------------------------------------------------------------------------------------------------
    Slip(
        "locks/embedded.py",
        "                await place.granted.result().release()  #",
        "                pass  #",
        (
            "contract/test_http_locks_lost.py",
            "unit/test_hosted_locks.py",
        ),
    ),
    Slip(
        "locks/embedded.py",
        "at_least=first_token(self._clock.wall())",
        "at_least=0",
        (
            "unit/test_hosted_locks.py",
            "contract/test_http_locks.py",
        ),
    ),
    Slip(
        "locks/embedded.py",
        "        if self.slot.number > self._lock.slots:\n",
        "        if False:\n",
        ("contract/test_http_locks.py",),
    ),
    Slip(
        "locks/fence.py",
        "        if token < self.highest:\n",
        "        if token <= self.highest:\n",
        ("contract/test_fence.py",),
    ),
    Slip(
        "locks/definitions.py",
        "        except BaseException:\n            self._learn(definition)\n            raise\n",
        "        except BaseException:\n            raise\n",
        ("unit/test_hosted_locks.py",),
    ),
    Slip(
        "locks/grants.py",
        "if self._came_back is None or token.body != self._token.body:",
        "if self._came_back is None:",
        ("unit/test_lock_grants.py",),
    ),
    # -- the replica keeper -------------------------------------------------------------------------------------------
    Slip(
        "replicas/changing.py",
        "    if names != change.members:\n",
        "    if False:\n",
        ("contract/test_replica_keeper_faults.py",),
    ),
    Slip(
        "replicas/changing.py",
        "        if members and end is None:\n            end = _end(members)\n",
        "        if members:\n            end = _end(members)\n",
        ("contract/test_replica_keeper_faults.py",),
    ),
    Slip(
        "replicas/schedule.py",
        "self._next[queue] = min(self._next[queue], now + pause)",
        "self._next[queue] = now + pause",
        ("unit/test_replica_keeper.py",),
    ),
    Slip(
        "replicas/keeper.py",
        "            await term.close()\n            self._note(KeeperEvent.TERM_ENDED",
        "            self._note(KeeperEvent.TERM_ENDED",
        ("contract/test_replica_keeper_faults.py",),
    ),
    # -- the Python client --------------------------------------------------------------------------------------------
    Slip(
        "clients/python/popgate_client/exchange.py",
        "if not isinstance(error, RetryLater) or error.outcome_unknown:",
        "if not isinstance(error, RetryLater):",
        ("clients/test_client_patience.py",),
    ),
    Slip(
        "clients/python/popgate_client/exchange.py",
        "                if len(undecided) == len(entries):\n                    raise\n                break",
        "                break",
        ("clients/test_client_patience.py",),
    ),
    Slip(
        "clients/python/popgate_client/leases.py",
        "            held.ends_at = asked_at + held.seconds\n",
        "",
        ("unit/test_lease_book.py",),
    ),
    Slip(
        "clients/python/popgate_client/queue_worker.py",
        "            except BaseException as raised:",
        "            except Exception as raised:",
        ("clients/test_consume_modes.py",),
    ),
    Slip(
        "clients/python/popgate_client/lock_terms.py",
        "if self._lost is None and now >= self.ends_at:",
        "if self._lost is None and now > self.ends_at + self._ttl_seconds:",
        ("unit/test_lock_terms.py",),
    ),
    Slip(
        "clients/python/popgate_client/retrying.py",
        "        if self._failing_since is None:\n            self._failing_since = now\n",
        "        self._failing_since = now\n",
        ("clients/test_client_patience.py",),
    ),
)
