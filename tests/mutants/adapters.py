"""Slips in the adapters: the embedded store, RabbitMQ, Redis, the journal."""

from mutants.slip import Slip

PROPERTIES = ("unit/test_rabbitmq_properties.py", "unit/test_identity.py")

ADAPTERS = (
    # -- RabbitMQ ---------------------------------------------------------------------------------------------------
    Slip(
        "adapters/rabbitmq/settlements.py",
        "while groups and groups[0].threshold <= proved:",
        "while groups and groups[0].threshold <= proved + 1:",
        ("unit/test_rabbitmq_settlements.py",),
    ),
    Slip(
        "adapters/rabbitmq/settlements.py",
        "            if tag in unsettled:\n                unsettled.remove(tag)\n                into.append(tag)\n",
        "            unsettled.discard(tag)\n            into.append(tag)\n",
        ("unit/test_rabbitmq_settlements.py",),
    ),
    Slip(
        "adapters/rabbitmq/settlements.py",
        "acks = [tag for tag in acks if tag >= lowest]",
        "acks = []",
        ("unit/test_rabbitmq_settlements.py",),
    ),
    Slip(
        "adapters/rabbitmq/properties.py",
        'return "%" + message_id if is_copy_id(message_id) else message_id',
        "return message_id",
        PROPERTIES,
    ),
    Slip(
        "adapters/rabbitmq/properties.py",
        "if name == self.count_header and isinstance(value, int) and self.delivery_count is None:",
        "if isinstance(value, int) and self.delivery_count is None:",
        (*PROPERTIES, "contract/test_rabbitmq_adoption.py"),
    ),
    Slip(
        "adapters/rabbitmq/confirms.py",
        "outcome = _PUBLISHED if taken else _REFUSED",
        "outcome = _PUBLISHED",
        ("contract/test_rabbitmq_publish_faults.py",),
    ),
    Slip(
        "adapters/rabbitmq/confirms.py",
        "        if returned.problem:  #",
        "        if False:  #",
        ("contract/test_rabbitmq_publish_faults.py",),
    ),
    Slip(
        "adapters/rabbitmq/channel.py",
        "if not ready and not consumers and self._prefetch:",
        "if False:",
        ("cluster/test_rabbitmq_faults.py::test_a_queue_whose_leader_does_not_answer_is_not_taken_for_empty",),
    ),
    Slip(
        "adapters/rabbitmq/channel_parser.py",
        "        if self._deliver is not None or self._returned is not None:\n            raise",
        "        if False:\n            raise",
        ("unit/test_rabbitmq_frame_interceptor.py",),
    ),
    # -- the embedded store -----------------------------------------------------------------------------------------
    Slip(
        "adapters/sqlite/group_commit.py",
        "            for forget in self._on_rollback:\n                forget()\n",
        "",
        ("unit/test_database.py", "unit/test_database_failures.py", "contract/test_leases.py"),
    ),
    Slip(
        "adapters/sqlite/group_commit.py",
        "            for pending in group:\n                self.write([pending])\n            return\n",
        "            return\n",
        ("unit/test_database.py",),
    ),
    Slip(
        "adapters/sqlite/group_commit.py",
        "        if connection.in_transaction:  #",
        "        if False:  #",
        ("unit/test_database.py",),
    ),
    # -- the embedded store, again ------------------------------------------------------------------------------------
    Slip(
        "adapters/sqlite/dedup.py",
        "AND confirmed = 0 AND copy_id NOT IN (SELECT copy_id FROM repeated_copy)",
        "AND confirmed = 0",
        (
            "contract/test_dedup_store.py",
            "engine/test_dedup_faults.py",
        ),
    ),
    Slip(
        "adapters/sqlite/dedup.py",
        "if batch is not None and batch.size == len(entries):",
        "if batch is not None:",
        (
            "contract/test_dedup_store.py",
            "engine/test_dedup_faults.py",
        ),
    ),
    Slip(
        "adapters/sqlite/dedup.py",
        "if found[entry.dedup_id][1] <= now - window_seconds]",
        "if found[entry.dedup_id][1] < now - window_seconds]",
        (
            "contract/test_dedup_store.py",
            "engine/test_dedup_faults.py",
        ),
    ),
    Slip(
        "adapters/sqlite/channel.py",
        "if self._fetching or self._returned or self._cursor != first",
        "if self._fetching or self._cursor != first",
        (
            "unit/test_sqlite_broker.py",
            "contract/test_broker_contract.py",
        ),
    ),
    Slip(
        "adapters/sqlite/channel.py",
        "            self._credit_from_tag = self._last_tag\n",
        "",
        (
            "unit/test_sqlite_broker.py",
            "contract/test_broker_contract.py",
        ),
    ),
    Slip(
        "adapters/sqlite/channel.py",
        "            self._returned.sort()\n",
        "",
        (
            "unit/test_sqlite_broker.py",
            "contract/test_broker_contract.py",
        ),
    ),
    Slip(
        "adapters/sqlite/acks.py",
        "            self._handed_in_count = before\n",
        "",
        (
            "unit/test_sqlite_broker.py",
            "contract/test_broker_contract.py",
        ),
    ),
    Slip(
        "adapters/sqlite/publishing.py",
        "once_in = queue_id if self.once else None",
        "once_in = None",
        (
            "unit/test_sqlite_broker.py",
            "contract/test_broker_contract.py",
        ),
    ),
    Slip(
        "adapters/sqlite/delayed.py",
        "        count_stored(connection, {queue_id: count})\n",
        "",
        ("unit/test_sqlite_broker.py",),
    ),
    Slip(
        "adapters/sqlite/attempts.py",
        "orjson.dumps([*earlier, *copies])",
        "orjson.dumps(copies)",
        (
            "contract/test_leases.py",
            "contract/test_lease_keeping.py",
        ),
    ),
    Slip(
        "adapters/sqlite/attempts.py",
        "ends_at = max(now + LOOK_AGAIN_SECONDS, *(",
        "ends_at = max(now, *(",
        ("unit/test_attempts.py",),
    ),
    Slip(
        "adapters/sqlite/lease_decisions.py",
        "        if epoch < epochs[key[0]]:\n",
        "        if False:\n",
        (
            "contract/test_leases.py",
            "contract/test_lease_keeping.py",
        ),
    ),
    Slip(
        "adapters/sqlite/lease_decisions.py",
        "_LETS_OTHERS_PASS = (GrantStatus.GRANTED, GrantStatus.SETTLED)",
        "_LETS_OTHERS_PASS = (GrantStatus.GRANTED, GrantStatus.SETTLED, GrantStatus.HELD)",
        (
            "contract/test_leases.py",
            "contract/test_lease_keeping.py",
        ),
    ),
    Slip(
        "adapters/sqlite/leases.py",
        "                if (queue_id, copy_id) not in known\n",
        "",
        (
            "contract/test_leases.py",
            "contract/test_lease_keeping.py",
        ),
    ),
    Slip(
        "adapters/sqlite/leases.py",
        "            delete_transient(connection, queue_id)\n",
        "",
        (
            "contract/test_leases.py",
            "contract/test_lease_keeping.py",
        ),
    ),
    Slip("adapters/sqlite/store_clock.py", "max(clock.wall(), high_water)", "clock.wall()", ("unit/test_database.py",)),
    # -- Redis --------------------------------------------------------------------------------------------------------
    Slip(
        "adapters/redis/scripts/queues.lua",
        "  count_leases(queue, {}, transient)\n",
        "",
        ("contract/test_limits.py",),
    ),
    Slip(
        "adapters/redis/scripts/granting.lua",
        "elseif granted == left then",
        "elseif left == 0 then",
        ("contract/test_limits.py",),
    ),
    Slip(
        "adapters/redis/scripts/limits.lua",
        "      redis.call('UNLINK', key_of('out', subscription), key_of('refused', subscription))\n",
        "",
        ("contract/test_limits.py",),
    ),
    Slip(
        "adapters/redis/scripts/dedup.lua",
        "if not redis.call('ZSCORE', noted, copy) then",
        "if true then",
        ("contract/test_dedup_store.py",),
    ),
    Slip(
        "adapters/redis/scripts/dedup.lua",
        "  call_all('ZADD', noted, repeated)\n",
        "",
        ("contract/test_dedup_store.py",),
    ),
    Slip(
        "adapters/redis/scripts/granting.lua",
        "if r.lease_id == lease_id and (state",
        "if (state",
        (
            "contract/test_lease_twin.py",
            "contract/test_leases.py",
        ),
    ),
    Slip(
        "adapters/redis/scripts/settling.lua",
        "math.max(latest, r.visible_at)",
        "latest",
        (
            "contract/test_lease_twin.py",
            "contract/test_leases.py",
        ),
    ),
    Slip(
        "adapters/redis/scripts/queues.lua",
        "visible_at = now + remaining",
        "visible_at = remaining",
        (
            "contract/test_leases.py",
            "contract/test_lease_keeping.py",
        ),
    ),
    Slip(
        "adapters/redis/scripts/cluster.lua",
        "if latest[2] and now - tonumber(latest[2]) > limit / 2 then",
        "if false then",
        ("contract/test_claims.py",),
    ),
    Slip(
        "adapters/redis/scripts/cluster.lua",
        "if redis.call('HGET', owners, queue) == me then released",
        "if true then released",
        ("contract/test_claims.py",),
    ),
    Slip(
        "adapters/redis/scripts/members.lua",
        "if epoch <= watermark or",
        "if epoch < watermark or",
        ("contract/test_lease_groups_store.py",),
    ),
    Slip(
        "adapters/redis/scripts/members.lua",
        "if not next_position then group.ends_at = ends_at end",
        "group.ends_at = ends_at",
        ("contract/test_lease_groups_store.py",),
    ),
    # -- RabbitMQ and the journal, again ------------------------------------------------------------------------------
    Slip(
        "adapters/rabbitmq/delay_key.py",
        "return ceil(delay_seconds)",
        "return int(delay_seconds)",
        (
            "unit/test_delay_key.py",
            "contract/test_rabbitmq_delays.py",
        ),
    ),
    Slip(
        "adapters/rabbitmq/confirms.py",
        "(waiting < self._count_max and self._bytes + size <= self._bytes_max)",
        "waiting < self._count_max",
        ("contract/test_rabbitmq_faults.py::test_a_channel_that_refuses_is_replaced_but_not_time_and_again",),
    ),
    Slip(
        "adapters/rabbitmq/confirms.py",
        "                self._returned.discard(copy_id)\n                outcome",
        "                outcome",
        ("contract/test_broker_contract.py::test_a_copy_that_no_queue_took_is_stored_when_it_is_published_again",),
    ),
    Slip(
        "adapters/journal_parquet/writer.py",
        "            self.event_count -= calls[0].event_count\n",
        "",
        ("contract/test_journal_files.py",),
    ),
    Slip(
        "adapters/journal_parquet/writer.py",
        "is_old or int(self._clock.wall() // SECONDS_OF_HOUR) > file.hour",
        "is_old",
        ("contract/test_journal_files.py",),
    ),
    Slip(
        "adapters/journal_parquet/places.py", "        _sync(target.parent)\n", "", ("contract/test_journal_files.py",)
    ),
    Slip(
        "adapters/journal_parquet/journal.py",
        "        self._next_seq += count\n        self._dropped",
        "        self._dropped",
        ("contract/test_journal_files.py",),
    ),
)
