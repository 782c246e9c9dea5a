"""Slips in the domain: pure decisions, without I/O."""

from mutants.slip import Slip

LEASES = ("contract/test_leases.py", "contract/test_lease_keeping.py", "contract/test_lease_model.py")
DEAD = ("engine/test_dead_letter_faults.py", "engine/test_redrive_faults.py", "unit/test_dead_letter.py")
KEYS = ("unit/test_derived_keys.py",)
PROPERTIES = ("unit/test_rabbitmq_properties.py", "unit/test_identity.py")

DOMAIN = (
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
    Slip("domain/lease.py", "if reason else record.reason,", "if reason else reason,", (*LEASES, *DEAD)),
    # -- identity, messages, receipts -------------------------------------------------------------------------------
    Slip("domain/identity.py", 'return "" if self._accepts_untagged else', 'return "" if True else', PROPERTIES),
    Slip(
        "domain/identity.py",
        "key.signer(target) for target in targets)",
        "key.signer(target) for target in targets[:1])",
        PROPERTIES,
    ),
    Slip("domain/identity.py", "for key in self._trusted:", "for key in self._keys:", ("unit/test_identity.py",)),
    Slip("domain/derived_keys.py", "block + info + bytes((number,))", "info + bytes((number,))", KEYS),
    Slip("domain/derived_keys.py", "purpose.encode(), length)", 'b"", length)', KEYS),
    Slip("domain/identity.py", "hashing.update(copy_id.encode())", "hashing.update(copy_id[:16].encode())", PROPERTIES),
    Slip(
        "domain/message.py",
        "0 <= value <= TIME_MAX",
        "value <= TIME_MAX",
        (*PROPERTIES, "engine/test_record_times.py", "contract/test_http_hostile_messages.py"),
    ),
    Slip("domain/message.py", "return -(2**63) <= value < 2**63", "return True", ("unit/test_dead_letter.py",)),
    Slip(
        "domain/message.py",
        "counter = (counter + 1) & 0xFF_FFFF_FFFF",
        "counter = counter & 0xFF_FFFF_FFFF",
        ("engine/test_engine_machine.py",),
    ),
    Slip("domain/receipt.py", ' or "=" in handle:', ":", ("unit/test_receipts.py",)),
    Slip("domain/receipt.py", "for secret in secrets:", "for secret in secrets[:1]:", ("unit/test_receipts.py",)),
    Slip(
        "domain/receipt.py",
        "if len(handle) > RECEIPT_LENGTH_MAX or ",
        "if ",
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
        ("unit/test_modes.py", "engine/test_modes.py"),
    ),
    Slip(
        "domain/modes.py",
        "return spec.mode_generation if spec.mode is ConsumeMode.POP else -1",
        "return spec.mode_generation",
        ("unit/test_modes.py", "engine/test_modes.py"),
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
        ("engine/test_filtered_pops.py", "unit/test_filters.py"),
    ),
    Slip("domain/filters.py", "(isinstance(value, bool), value)", "(False, value)", ("unit/test_filters.py",)),
    # -- pull mode, balance, quotas, locks, replicas ------------------------------------------------------------------
    Slip(
        "domain/assignment.py",
        "0 < one.until <= shown]",
        "0 < one.until]",
        (
            "unit/test_assignment.py",
            "engine/test_pulling.py",
        ),
    ),
    Slip(
        "domain/assignment.py",
        "return one if one.since <= shown <= session.generation else None",
        "return one if shown <= session.generation else None",
        (
            "unit/test_assignment.py",
            "engine/test_pulling.py",
        ),
    ),
    Slip(
        "domain/assignment.py",
        "            elif one.to is not None:\n                holdings[number] = Holding(one.to, generation)\n",
        "",
        (
            "unit/test_assignment.py",
            "engine/test_pulling.py",
        ),
    ),
    Slip("domain/balance.py", "if counts[member] > share]", "if counts[member] >= share]", ("unit/test_balance.py",)),
    Slip(
        "domain/balance.py",
        "must_hold_off = is_moved and not is_overdue and",
        "must_hold_off = is_moved and",
        ("unit/test_balance_steps.py",),
    ),
    Slip(
        "domain/balance.py",
        "is_ready = is_moved and handover is not Handover.TAKE and next_in_line(waiting) == to",
        "is_ready = is_moved and handover is not Handover.TAKE",
        (
            "unit/test_balance_steps.py",
            "unit/test_balance.py",
        ),
    ),
    Slip(
        "domain/lease_group.py",
        "return min(now + seconds, held_since + age_seconds_max)",
        "return now + seconds",
        ("contract/test_lease_groups_store.py",),
    ),
    Slip(
        "domain/lease_group.py",
        "(number + 1) * span // slices",
        "number * span // slices + span // slices",
        (
            "engine/test_lease_groups.py",
            "contract/test_http_lease_groups.py",
        ),
    ),
    Slip("domain/quotas.py", "present + more > limit", "present + more >= limit", ("contract/test_http_quotas.py",)),
    Slip(
        "domain/locks.py",
        "max(int(wall_seconds * TOKENS_PER_SECOND), above + 1)",
        "int(wall_seconds * TOKENS_PER_SECOND)",
        (
            "contract/test_amqp_lock_administration.py::test_a_slot_that_is_taken_away_by_an_administrator_whose_clock_is_behind_is_fenced",
        ),
    ),
    Slip(
        "domain/replica_plan.py",
        "            if name not in self._nodes and absent >=",
        "            if absent >=",
        ("unit/test_replica_plan.py",),
    ),
    Slip(
        "domain/replica_plan.py",
        "return online < majority(len(queue.members) + 1)",
        "return online < majority(len(queue.members))",
        ("unit/test_replica_plan.py",),
    ),
)
