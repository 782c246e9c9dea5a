"""Small slips, each in one place of the product, and the tests that should notice it.

A slip is one that a tired author or a careless merge could make: a boundary off by one, a condition turned around, a
step left out. ``unnoticed`` explains one that no test can notice, because nothing that is promised depends on it.
"""

from typing import NamedTuple


class Slip(NamedTuple):
    """In ``file``, below ``proxy/popgate``, ``before`` stands exactly once. ``tests`` are below ``tests``."""

    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    unnoticed: str = ""


LEASES = ("contract/test_leases.py", "contract/test_lease_keeping.py", "contract/test_lease_model.py")
SETTLING = ("contract/test_http_settlements.py", "simulation/test_engine_machine.py")
ENGINE = ("simulation/test_engine_machine.py", "simulation/test_channel_faults.py", "simulation/test_old_leases.py")
DEDUP = ("contract/test_dedup_store.py", "simulation/test_dedup_faults.py", "contract/test_http_dedup.py")
DEAD = ("simulation/test_dead_letter_faults.py", "simulation/test_redrive_faults.py", "unit/test_dead_letter.py")
PROPERTIES = ("unit/test_rabbitmq_properties.py", "unit/test_identity.py")

SLIPS = (
    # -- the lease record -------------------------------------------------------------------------------------------
    Slip("domain/lease.py", "        if remaining > 0.0:\n", "        if remaining > 0.5:\n", LEASES),
    Slip("domain/lease.py", "count + 1, first, now, epoch, now)", "count, first, now, epoch, now)", LEASES),
    Slip("domain/lease.py", "and count >= max_deliveries:", "and count > max_deliveries:", LEASES),
    Slip("domain/lease.py", "first = earlier_deliveries, now\n", "first = 0, now\n", LEASES),
    Slip(
        "domain/lease.py",
        "(record.lease_id != lease_id and action is not SettleAction.DISCARD)",
        "(record.lease_id != lease_id and action is SettleAction.ACK)",
        LEASES,
    ),
    Slip(
        "domain/lease.py", "not in _ALLOWED_FROM[action] or (action", "not in _ALLOWED_FROM[action] and (action", LEASES
    ),
    Slip("domain/lease.py", "- (action is SettleAction.WITHDRAW),", ",", LEASES),
    Slip("domain/lease.py", "latest = record.leased_at + age", "latest = record.changed_at + age", LEASES),
    Slip("domain/lease.py", "    if is_overtaken and action is SettleAction.RELEASE:\n", "    if False:\n", LEASES),
    Slip("domain/lease.py", "visible_at = min(visible_at, latest)\n", "visible_at = max(visible_at, latest)\n", LEASES),
    Slip("domain/lease.py", "reason=reason or record.reason,", "reason=reason,", (*LEASES, *DEAD)),
    # -- identity, messages, receipts -------------------------------------------------------------------------------
    Slip("domain/identity.py", 'return "" if self._accepts_untagged else', 'return "" if True else', PROPERTIES),
    Slip(
        "domain/identity.py",
        "for target in targets] for key in self._keys}",
        "for target in targets[:1]] for key in self._keys}",
        PROPERTIES,
    ),
    Slip("domain/identity.py", "hashing.update(copy_id.encode())", "hashing.update(copy_id[:16].encode())", PROPERTIES),
    Slip(
        "domain/message.py",
        "0 <= value <= TIME_MAX",
        "value <= TIME_MAX",
        (*PROPERTIES, "simulation/test_record_times.py", "contract/test_http_hostile_messages.py"),
    ),
    Slip("domain/message.py", "return -(2**63) <= value < 2**63", "return True", ("unit/test_dead_letter.py",)),
    Slip(
        "domain/message.py",
        "counter = (counter + 1) & 0xFF_FFFF_FFFF",
        "counter = counter & 0xFF_FFFF_FFFF",
        ("simulation/test_engine_machine.py",),
    ),
    Slip("domain/receipt.py", "or len(handle) % 4:", "or False:", ("unit/test_receipts.py",)),
    Slip(
        "domain/receipt.py",
        "if len(handle) > RECEIPT_LENGTH_MAX:",
        "if False:",
        ("unit/test_receipts.py",),
        unnoticed="the tag of a longer handle does not fit either: the check only saves work",
    ),
    Slip(
        "domain/topics.py", "** max(0, delivery_count - 1)", "** max(0, delivery_count)", ("unit/test_retry_policy.py",)
    ),
    Slip("domain/topics.py", "return min(grown, self.max_seconds)", "return grown", ("unit/test_retry_policy.py",)),
    Slip(
        "domain/modes.py",
        "if seconds <= 0 and to is ConsumeMode.POP:",
        "if seconds <= 0:",
        ("unit/test_modes.py", "simulation/test_modes.py"),
    ),
    Slip(
        "domain/modes.py",
        "return spec.mode_generation if spec.mode is ConsumeMode.POP else -1",
        "return spec.mode_generation",
        ("unit/test_modes.py", "simulation/test_modes.py"),
    ),
    Slip(
        "domain/dead_letter.py",
        "if len(headers) + len(letter.body) > MESSAGE_BYTES_MAX:",
        "if False:",
        ("unit/test_dead_letter.py",),
    ),
    Slip(
        "domain/dead_letter.py",
        "if size is None or size > len(letter.body):",
        "if size is None:",
        ("unit/test_dead_letter.py",),
    ),
    # -- filters ----------------------------------------------------------------------------------------------------
    Slip(
        "domain/filter_index.py",
        "        if ABSENT in values:\n            self._optional[name] += 1\n",
        "",
        ("simulation/test_filtered_pops.py", "unit/test_filters.py"),
    ),
    Slip("domain/filters.py", "(isinstance(value, bool), value)", "(False, value)", ("unit/test_filters.py",)),
    # -- what may be forgotten, and how much is held ----------------------------------------------------------------
    Slip(
        "engine/evidence.py",
        "if self._owed and proved_acks >= self._owed:",
        "if self._owed:",
        ("unit/test_evidence.py",),
    ),
    Slip(
        "engine/evidence.py",
        "self._unproved[0][0] <= proved_acks:",
        "self._unproved[0][0] <= proved_acks + 1:",
        ("unit/test_evidence.py",),
    ),
    Slip(
        "engine/evidence.py",
        "bound = min(self._proved_until, unproved, detached)",
        "bound = min(self._proved_until, unproved)",
        ("unit/test_evidence.py",),
    ),
    Slip("engine/window.py", "min(limit, GROWTH * self.prefetch)", "GROWTH * self.prefetch", ("unit/test_window.py",)),
    Slip("engine/window.py", "or size > mean else", "else", ("unit/test_window.py",)),
    # -- order ------------------------------------------------------------------------------------------------------
    Slip(
        "engine/lines.py",
        "        held.is_first = last is None\n",
        "        held.is_first = True\n",
        ("unit/test_lines.py",),
    ),
    Slip(
        "engine/lines.py",
        "unsorted.sort(key=lambda one: (_is_new(one[2]), one[0]))",
        "unsorted.sort(key=lambda one: one[0])",
        ("unit/test_lines.py", "simulation/test_channel_faults.py"),
    ),
    Slip(
        "engine/lines.py",
        "            held.rank = rank\n",
        "",
        ("unit/test_lines.py", "simulation/test_channel_faults.py"),
    ),
    Slip(
        "engine/lines.py",
        "            following.is_first = True\n",
        "            following.is_first = False\n",
        ("unit/test_lines.py",),
    ),
    Slip(
        "engine/places.py",
        "self._sorting is channel and backlog <= given_back:",
        "self._sorting is channel:",
        ("simulation/test_channel_faults.py", "contract/test_rabbitmq_hand_overs.py"),
    ),
    # -- publishing -------------------------------------------------------------------------------------------------
    Slip(
        "engine/publishing.py",
        "            if outcome.status is PublishStatus.PUBLISHED:\n                stored",
        "            if outcome.status is not PublishStatus.REFUSED:\n                stored",
        ("contract/test_http_interface.py", "simulation/test_dedup_faults.py"),
    ),
    Slip(
        "engine/publishing.py",
        "    if subject.queue_index in missing:\n",
        "    if False:\n",
        ("simulation/test_deleted_queues.py",),
    ),
    Slip(
        "engine/publishing.py",
        "expires_at=now + delay_seconds + new.ttl_seconds",
        "expires_at=now + new.ttl_seconds",
        ("contract/test_http_delays.py", "simulation/test_time_to_live.py"),
    ),
    Slip(
        "engine/publishing.py",
        "next(self._round_robin) % spec.queue_count",
        "0",
        ("contract/test_http_ordering.py", "contract/test_http_interface.py"),
    ),
    Slip("engine/deduplication.py", "            if not error.outcome_unknown:\n", "            if True:\n", DEDUP),
    Slip("engine/deduplication.py", "owners.setdefault(new.dedup_id, place)", "owners[new.dedup_id] = place", DEDUP),
    Slip("engine/deduplication.py", "            if is_confirmed:\n", "            if True:\n", DEDUP),
    Slip("engine/deduplication.py", "if one.dedup_id not in standing and results", "if results", DEDUP),
    # -- handing out and settling -----------------------------------------------------------------------------------
    Slip(
        "engine/granting.py",
        "        if any(held.host.claiming.lost_epoch for held in candidates):\n",
        "        if False:\n",
        ("simulation/test_store_faults.py",),
    ),
    Slip(
        "engine/granting.py",
        "elif status is GrantStatus.EXHAUSTED and is_here:",
        "elif False:",
        ("simulation/test_dead_letter_faults.py", "simulation/test_engine_machine.py"),
    ),
    Slip(
        "engine/granting.py",
        "            self._withdraw(lease_id, self._untold[lease_id], helds)\n",
        "            pass\n",
        ("simulation/test_store_faults.py", "simulation/test_interrupted_pops.py"),
    ),
    Slip(
        "engine/queue_host.py", "        self.ack(tags, settled_at)\n        self._sink", "        self._sink", ENGINE
    ),
    Slip(
        "engine/queue_host.py",
        "        if record.epoch > self.epoch > 0:\n",
        "        if False:\n",
        ("simulation/test_stops_and_claims.py",),
    ),
    Slip(
        "engine/queue_host.py",
        "            elif held.state in BROUGHT_BACK:\n                self.clear_body(held)\n",
        "",
        ENGINE,
    ),
    Slip(
        "engine/delivering.py",
        "                repeated.append(tag)  # a second copy",
        "                pass  # a second copy",
        (*ENGINE, *DEAD),
    ),
    Slip(
        "engine/delivering.py",
        "                host.ack([tag], detached.pop(copy_id))\n",
        "                detached.pop(copy_id)\n",
        ENGINE,
    ),
    Slip(
        "engine/delivering.py",
        "        if self._failed_in_a_row > SET_ASIDE_MAX:\n",
        "        if True:\n",
        ("contract/test_http_poison.py",),
    ),
    Slip(
        "engine/moves.py",
        "cause, message = UNREADABLE, bare(message)",
        "cause = UNREADABLE",
        ("contract/test_http_poison.py",),
    ),
    Slip(
        "engine/moves.py",
        "        if was_unreadable:\n            self._gets_stuck",
        "        if False:\n            self._gets_stuck",
        ("contract/test_http_poison.py",),
    ),
    Slip(
        "engine/dead_moves.py",
        "elif move.is_new or outcome.unfit or",
        "elif outcome.unfit or",
        ("simulation/test_redrive_faults.py",),
    ),
    Slip(
        "engine/expiring.py",
        "held.state is HeldState.LEASED and held.deadline <= now]",
        "held.state is HeldState.LEASED]",
        ENGINE,
    ),
    Slip(
        "engine/discarding.py",
        "message.expires_at > self._room.clock.wall():",
        "message.expires_at > self._room.clock.wall() - 1:",
        ("simulation/test_time_to_live.py",),
    ),
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
        "                if name == self.count_header and isinstance(value, int):",
        "                if isinstance(value, int):",
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
        ("cluster/test_rabbitmq_faults.py",),
    ),
    Slip(
        "adapters/rabbitmq/fast_lane.py",
        "        if self._deliver is not None or self._returned is not None:\n            raise",
        "        if False:\n            raise",
        ("unit/test_rabbitmq_fast_lane.py",),
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
        "            for work in group:\n                self.write([work])\n            return\n",
        "            return\n",
        ("unit/test_database.py",),
    ),
    Slip(
        "adapters/sqlite/group_commit.py",
        "        if connection.in_transaction:  #",
        "        if False:  #",
        ("simulation/test_settle_faults.py",),
    ),
)
