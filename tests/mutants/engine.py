"""Slips in the engine."""

from mutants.slip import Slip

DEAD = ("simulation/test_dead_letter_faults.py", "simulation/test_redrive_faults.py", "unit/test_dead_letter.py")
DEDUP = ("contract/test_dedup_store.py", "simulation/test_dedup_faults.py", "contract/test_http_dedup.py")
MACHINE = ("simulation/test_channel_faults.py", "simulation/test_old_leases.py", "simulation/test_engine_machine.py")

ENGINE = (
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
        ("simulation/test_channel_faults.py",),
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
        ("contract/test_http_interface.py",),
    ),
    Slip("engine/deduplication.py", "            if not error.outcome_unknown:\n", "            if True:\n", DEDUP),
    Slip("engine/deduplication.py", "owners.setdefault(new.dedup_id, place)", "owners[new.dedup_id] = place", DEDUP),
    Slip("engine/deduplication.py", "            if is_confirmed:\n", "            if True:\n", DEDUP),
    # -- handing out and settling -----------------------------------------------------------------------------------
    Slip(
        "engine/granting.py",
        "        if any(held.host.claiming.lost_epoch for held in candidates):\n",
        "        if False:\n",
        ("simulation/test_lost_data.py",),
    ),
    Slip(
        "engine/granting.py",
        "elif status is GrantStatus.EXHAUSTED and is_here:",
        "elif False:",
        ("simulation/test_dead_letter_faults.py", "simulation/test_lost_data.py"),
    ),
    Slip(
        "engine/granting.py",
        "            self._withdraw(lease_id, self._untold[lease_id], helds)\n",
        "            pass\n",
        ("simulation/test_store_faults.py", "simulation/test_interrupted_pops.py"),
    ),
    Slip(
        "engine/queue_host.py", "        self.ack(tags, settled_at)\n        self._sink", "        self._sink", MACHINE
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
        ("simulation/test_memory.py",),
    ),
    Slip(
        "engine/delivering.py",
        "                repeated.append(tag)  # a second copy",
        "                pass  # a second copy",
        DEDUP,
    ),
    Slip(
        "engine/delivering.py",
        "                host.ack([tag], detached.pop(copy_id))\n",
        "                detached.pop(copy_id)\n",
        MACHINE,
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
        ("simulation/test_store_faults.py",),
    ),
    Slip(
        "engine/discarding.py",
        "message.expires_at > self._room.clock.wall():",
        "message.expires_at > self._room.clock.wall() - 1:",
        ("simulation/test_time_to_live.py",),
    ),
    # -- what is parked, settled, given back and remembered -----------------------------------------------------------
    Slip(
        "engine/collecting.py",
        "        if silence >= FORGET_SECONDS:\n            self._lone_count = 0\n",
        "",
        ("unit/test_collecting.py",),
    ),
    Slip(
        "engine/parked.py",
        "                self._index.remove(wanted)\n",
        "                pass\n",
        ("simulation/test_filtered_pops.py",),
    ),
    Slip("engine/parked.py", "        self._newcomers.clear()\n", "", ("simulation/test_filtered_pops.py",)),
    Slip(
        "engine/claiming.py",
        "            if losses != self._losses:\n"
        '                raise StateUnavailable("the store has lost its data while a queue was taken")\n',
        "",
        (
            "simulation/test_lost_data.py",
            "simulation/test_stops_and_claims.py",
        ),
    ),
    Slip(
        "engine/remembering.py",
        "        found.append(_bare(copy_id, RecordState.ACKED, 1, settled_at))\n",
        "        pass\n",
        ("simulation/test_lost_data.py",),
    ),
    Slip(
        "engine/settling.py",
        "if receipt is None or receipt.queue[:2] != subscription.name or",
        "if receipt is None or",
        ("contract/test_http_interface.py",),
    ),
    Slip(
        "engine/settling.py",
        "            if verb is not Verb.REJECT and is_pulled(receipt.lease_id):\n",
        "            if False:\n",
        ("simulation/test_pulling.py",),
    ),
    Slip(
        "engine/settling.py",
        "                        results[one.place] = _EXPIRED\n\n    async def settle_held",
        "                        pass\n\n    async def settle_held",
        ("simulation/test_unidentified_messages.py",),
    ),
    Slip(
        "engine/settling.py",
        "            elif is_first and (held is None or not held.is_under_way):",
        "            elif is_first and held is None:",
        ("contract/test_http_interface.py",),
    ),
    Slip(
        "engine/returns.py",
        "if held.message is None or held.is_kept or held.copy_id.startswith(TRANSIENT_PREFIX):",
        "if held.message is None or held.is_kept:",
        (
            "simulation/test_unidentified_messages.py",
            "simulation/test_memory.py",
        ),
    ),
    Slip(
        "engine/supply.py",
        "        if tag > self._credit_from_tag:\n            self._credit_used -= 1",
        "        self._credit_used -= 1",
        ("simulation/test_memory.py",),
    ),
    Slip(
        "engine/upkeep.py",
        "older_than_seconds=max(SETTLED_KEPT_SECONDS, self._room.options.dedup_seconds)",
        "older_than_seconds=SETTLED_KEPT_SECONDS",
        ("simulation/test_record_times.py",),
    ),
    Slip(
        "engine/upkeep.py",
        "settled = await leases.peek(host.broker_queue, missing) if missing else {}",
        "settled = {}",
        ("simulation/test_stops_and_claims.py",),
    ),
    Slip(
        "engine/retrieval.py",
        "                held.host.returns.wanted.discard(held)",
        "                pass",
        ("simulation/test_memory.py",),
    ),
    Slip(
        "engine/pulling.py",
        "        if is_pull and holding.to is not None:",
        "        if False:",
        ("simulation/test_pulling.py",),
    ),
    Slip(
        "engine/pulling.py",
        "        if receipt.lease_id != lease.lease_id:\n",
        "        if False:\n",
        ("simulation/test_pulling.py",),
    ),
    Slip(
        "engine/pull_lease.py",
        "        if last is not None and self.is_mine(last):\n            held = last.next_in_line()\n",
        "        if last is not None and self.is_mine(last):\n            held = last\n",
        ("simulation/test_pulling.py",),
    ),
)
