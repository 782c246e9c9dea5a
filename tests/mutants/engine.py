"""Slips in the engine."""

from mutants.slip import Slip

DEAD = ("engine/test_dead_letter_faults.py", "engine/test_redrive_faults.py", "unit/test_dead_letter.py")
DEDUP = ("contract/test_dedup_store.py", "engine/test_dedup_faults.py", "contract/test_http_dedup.py")
MACHINE = ("engine/test_channel_faults.py", "engine/test_old_leases.py", "engine/test_engine_machine.py")

ENGINE = (
    # -- what may be forgotten, and how much is held ----------------------------------------------------------------
    Slip(
        "engine/queue/settlement_evidence.py",
        "if self._owed and proved_acks >= self._owed:",
        "if self._owed:",
        ("unit/test_settlement_evidence.py",),
    ),
    Slip(
        "engine/queue/settlement_evidence.py",
        "self._unproved[0][0] <= proved_acks:",
        "self._unproved[0][0] <= proved_acks + 1:",
        ("unit/test_settlement_evidence.py",),
    ),
    Slip(
        "engine/queue/settlement_evidence.py",
        "bound = min(self._proved_until, unproved, detached)",
        "bound = min(self._proved_until, unproved)",
        ("unit/test_settlement_evidence.py",),
    ),
    Slip(
        "engine/queue/prefetch_window.py",
        "min(limit, GROWTH * self.prefetch)",
        "GROWTH * self.prefetch",
        ("unit/test_prefetch_window.py",),
    ),
    Slip("engine/queue/prefetch_window.py", "or size > mean else", "else", ("unit/test_prefetch_window.py",)),
    # -- order ------------------------------------------------------------------------------------------------------
    Slip(
        "engine/queue/ordering_keys.py",
        "        message.is_head = last is None\n",
        "        message.is_head = True\n",
        ("unit/test_ordering_keys.py",),
    ),
    Slip(
        "engine/queue/ordering_keys.py",
        "deferred.sort(key=lambda one: (_is_new(one[2]), one[0]))",
        "deferred.sort(key=lambda one: one[0])",
        ("unit/test_ordering_keys.py", "engine/test_channel_faults.py"),
    ),
    Slip(
        "engine/queue/ordering_keys.py",
        "            message.rank = rank\n",
        "",
        ("unit/test_ordering_keys.py", "engine/test_channel_faults.py"),
    ),
    Slip(
        "engine/queue/ordering_keys.py",
        "            following.is_head = True\n",
        "            following.is_head = False\n",
        ("unit/test_ordering_keys.py",),
    ),
    Slip(
        "engine/queue/state.py",
        "if backlog > requeued:",
        "if False:",
        ("engine/test_channel_faults.py",),
    ),
    Slip(
        "engine/queue/redelivery_order.py",
        "                self._prefetch.widen()\n",
        "",
        ("engine/test_forwarded_pops.py",),
        unnoticed="waiting pops raise the prefetch, too; this line ends the questions to the broker when none waits",
    ),
    Slip(
        "engine/subscription/serving.py",
        "if self._wanted_by and self.capacity() > 0 and not self.ready.has_any():",
        "if False:",
        ("engine/test_forwarded_pops.py",),
    ),
    Slip(
        "engine/queue/host.py",
        "        channel = self._channels.end()\n        self._unopened.add(self.queue.number)\n",
        "        channel = self._channels.end()\n",
        ("engine/test_lacking_queues.py",),
    ),
    Slip(
        "engine/queue/host.py",
        "        self.claim.is_owned = True\n        self._unopened.add(self.queue.number)\n",
        "        self.claim.is_owned = True\n",
        ("engine/test_lacking_queues.py",),
    ),
    Slip(
        "engine/queue/state.py",
        "        self.flow.note()\n        effects.has_news = True\n",
        "        effects.has_news = True\n",
        ("engine/test_lacking_queues.py", "engine/test_memory.py"),
    ),
    Slip(
        "engine/queue/flow.py",
        "        self._is_asked = True\n        self.note()\n",
        "        self._is_asked = True\n",
        ("engine/test_lacking_queues.py", "engine/test_memory.py", "unit/test_flow.py"),
    ),
    Slip(
        "engine/queue/flow.py",
        "        self._budget.let_go(size)\n        self.note()\n",
        "        self._budget.let_go(size)\n",
        ("engine/test_lacking_queues.py", "unit/test_flow.py"),
    ),
    Slip(
        "engine/queue/flow.py",
        "        self._is_open = True\n        self.note()\n",
        "        self._is_open = True\n",
        ("unit/test_flow.py",),
    ),
    Slip(
        "engine/context/engine_context.py",
        "        self._kept_bytes += size\n        self.cuts += 1\n",
        "        self._kept_bytes += size\n",
        ("unit/test_flow.py",),
    ),
    Slip(
        "engine/lease/served_group.py",
        "if self._lacking.share_was_cut():",
        "if False:",
        ("engine/test_lacking_queues.py",),
    ),
    # -- publishing -------------------------------------------------------------------------------------------------
    Slip(
        "engine/publish/publishing.py",
        "            if outcome.status is PublishStatus.PUBLISHED:\n                stored",
        "            if outcome.status is not PublishStatus.REFUSED:\n                stored",
        ("contract/test_http_interface.py", "engine/test_dedup_faults.py"),
    ),
    Slip(
        "engine/publish/publishing.py",
        "    if subject.queue_index in missing:\n",
        "    if False:\n",
        ("engine/test_deleted_queues.py",),
    ),
    Slip(
        "engine/publish/publishing.py",
        "expires_at=now + delay_seconds + new.ttl_seconds",
        "expires_at=now + new.ttl_seconds",
        ("contract/test_http_delays.py", "engine/test_time_to_live.py"),
    ),
    Slip(
        "engine/publish/publishing.py",
        "next(self._round_robin) % spec.queue_count",
        "0",
        ("contract/test_http_interface.py",),
    ),
    Slip(
        "engine/publish/deduplication.py",
        "            if not error.outcome_unknown:\n",
        "            if True:\n",
        DEDUP,
    ),
    Slip(
        "engine/publish/deduplication.py",
        "owners.setdefault(new.dedup_id, place)",
        "owners[new.dedup_id] = place",
        DEDUP,
    ),
    Slip("engine/publish/deduplication.py", "            if is_confirmed:\n", "            if True:\n", DEDUP),
    # -- handing out and settling -----------------------------------------------------------------------------------
    Slip(
        "engine/lease/granting.py",
        "        if any(host.claim.is_lost for host in hosts):\n",
        "        if False:\n",
        ("engine/test_lost_data.py",),
    ),
    Slip(
        "engine/lease/granting.py",
        "elif status is GrantStatus.EXHAUSTED and is_here:",
        "elif False:",
        ("engine/test_dead_letter_faults.py", "engine/test_lost_data.py"),
    ),
    Slip(
        "engine/lease/granting.py",
        "            self._withdraw(lease_id, self._unanswered[lease_id], helds)\n",
        "            pass\n",
        ("engine/test_store_faults.py", "engine/test_interrupted_pops.py"),
    ),
    Slip(
        "engine/queue/state.py",
        "        self._ack(tags, settled_at, effects)\n        effects.has",
        "        effects.has",
        MACHINE,
    ),
    Slip(
        "engine/queue/host.py",
        "        if record.epoch > self.epoch > 0:\n",
        "        if False:\n",
        ("engine/test_stops_and_claims.py",),
    ),
    Slip(
        "engine/queue/state.py",
        "            elif message.state in RECOVERABLE:\n                self.memory.forget(message)\n",
        "",
        ("engine/test_memory.py",),
    ),
    Slip(
        "engine/queue/state.py",
        "                repeated.append(tag)  # a second copy",
        "                pass  # a second copy",
        DEDUP,
    ),
    Slip(
        "engine/queue/state.py",
        "            self._ack([tag], self.evidence.detached.pop(copy_id), effects)\n",
        "            self.evidence.detached.pop(copy_id)\n",
        MACHINE,
    ),
    Slip(
        "engine/queue/delivery_guard.py",
        "to_move=self._failed_in_a_row <= SET_ASIDE_MAX",
        "to_move=False",
        ("contract/test_http_poison.py",),
    ),
    Slip(
        "engine/lease/moves.py",
        "cause, message = UNREADABLE, bare(message)",
        "cause = UNREADABLE",
        ("contract/test_http_poison.py",),
    ),
    Slip(
        "engine/lease/moves.py",
        "        if was_unreadable:\n            self._gets_stuck",
        "        if False:\n            self._gets_stuck",
        ("contract/test_http_poison.py",),
    ),
    Slip(
        "engine/dead_letters/dead_moves.py",
        "elif move.is_new or outcome.unfit or",
        "elif outcome.unfit or",
        ("engine/test_redrive_faults.py",),
    ),
    Slip(
        "engine/lease/expired_leases.py",
        "buffered.state is MessageState.LEASED and buffered.deadline <= now\n",
        "buffered.state is MessageState.LEASED\n",
        ("engine/test_store_faults.py",),
    ),
    Slip(
        "engine/lease/discarding.py",
        "message.expires_at > self._context.clock.wall():",
        "message.expires_at > self._context.clock.wall() - 1:",
        ("engine/test_time_to_live.py",),
    ),
    # -- what is parked, settled, given back and remembered -----------------------------------------------------------
    Slip(
        "engine/subscription/collecting.py",
        "        if silence >= FORGET_SECONDS:\n            self._lone_count = 0\n",
        "",
        ("unit/test_collecting.py",),
    ),
    Slip(
        "engine/subscription/parked_pops.py",
        "                self._index.remove(wanted)\n",
        "                pass\n",
        ("engine/test_filtered_pops.py",),
    ),
    Slip(
        "engine/subscription/parked_pops.py",
        "            self._new[wanted] = None\n",
        "",
        ("engine/test_filtered_pops.py",),
    ),
    Slip(
        "engine/queue/claim.py",
        "        if self.is_owned and losses != self._losses:\n",
        "        if False:\n",
        (
            "engine/test_lost_data.py",
            "engine/test_stops_and_claims.py",
        ),
    ),
    Slip(
        "engine/queue/recovered_records.py",
        "        found.append(_bare(copy_id, RecordState.ACKED, 1, settled_at))\n",
        "        pass\n",
        ("engine/test_lost_data.py",),
    ),
    Slip(
        "engine/settle/settling.py",
        "if group != own_group or topic != own_topic or",
        "if",
        ("contract/test_http_interface.py",),
    ),
    Slip(
        "engine/settle/settling.py",
        "            if verb is not Verb.REJECT and is_pulled(receipt.lease_id):\n",
        "            if False:\n",
        ("engine/test_pulling.py",),
    ),
    Slip(
        "engine/settle/settling.py",
        "                        results[one.place] = EXPIRED\n\n    async def settle_held",
        "                        pass\n\n    async def settle_held",
        ("engine/test_unidentified_messages.py",),
    ),
    Slip(
        "engine/queue/host.py",
        "        if message is not None and message.is_undecided:\n",
        "        if message is not None:\n",
        ("contract/test_http_interface.py",),
    ),
    Slip(
        "engine/queue/body_memory.py",
        "if message.message is None or message.is_kept or message.is_transient:",
        "if message.message is None or message.is_kept:",
        (
            "engine/test_unidentified_messages.py",
            "engine/test_memory.py",
        ),
    ),
    Slip(
        "engine/queue/flow.py",
        "        if tag <= self._credit_from_tag:\n            self._held_before -= 1\n",
        "",
        ("engine/test_memory.py",),
    ),
    Slip(
        "engine/queue/record_upkeep.py",
        "older_than_seconds=max(SETTLED_KEPT_SECONDS, context.options.dedup_seconds)",
        "older_than_seconds=SETTLED_KEPT_SECONDS",
        ("engine/test_record_times.py",),
    ),
    Slip(
        "engine/queue/record_upkeep.py",
        "settled = await context.leases.peek(host.broker_queue, missing) if missing else {}",
        "settled = {}",
        ("engine/test_stops_and_claims.py",),
    ),
    Slip(
        "engine/lease/body_retrieval.py",
        "                self._group.host(buffered).state.memory.wanted.discard(buffered)",
        "                pass",
        ("engine/test_memory.py",),
    ),
    Slip(
        "engine/pull/pulling.py",
        "        if is_pull and holding.to is not None:",
        "        if False:",
        ("engine/test_pulling.py",),
    ),
    Slip(
        "engine/pull/pulling.py",
        "        if receipt.lease_id != lease.lease_id:\n",
        "        if False:\n",
        ("engine/test_pulling.py",),
    ),
    Slip(
        "engine/lease/pull_lease.py",
        "        if last is not None and self.is_mine(last):\n            buffered = last.next_of_key()\n",
        "        if last is not None and self.is_mine(last):\n            buffered = last\n",
        ("engine/test_pulling.py",),
    ),
    # -- channels and their deliveries ------------------------------------------------------------------------------
    Slip(
        "engine/queue/queue_channels.py",
        "        if self._channels.listener is self:\n            self._consumer.on_deliveries(deliveries)\n",
        "        self._consumer.on_deliveries(deliveries)\n",
        ("engine/test_channel_faults.py",),
    ),
    Slip(
        "engine/queue/prefetch_control.py",
        "        effects.has_news = True  # messages",
        "        # messages",
        ("engine/test_filtered_pops.py",),
    ),
    Slip(
        "engine/queue/delivery_counts.py",
        "max(0, delivery.earlier_deliveries - self._unseen_returns)",
        "delivery.earlier_deliveries",
        ("engine/test_unidentified_messages.py",),
    ),
    Slip(
        "engine/queue/host.py",
        "        self.state.deliveries.returns_unseen()\n",
        "",
        ("engine/test_unidentified_messages.py",),
    ),
    Slip(
        "engine/queue/state.py",
        "            self.deliveries.returns_unseen()\n",
        "            pass\n",
        ("engine/test_unidentified_messages.py",),
    ),
    # -- dead letters -----------------------------------------------------------------------------------------------
    Slip(
        "engine/dead_letters/dead_turns.py",
        "(self._owner is not owner or self._walk.ended)",
        "self._walk.ended",
        ("engine/test_dead_letter_faults.py",),
    ),
    Slip(
        "engine/settle/rejecting.py",
        "            firsts.setdefault(one.receipt, one)\n",
        "            firsts[one.receipt] = one\n",
        ("engine/test_dead_letter_faults.py",),
    ),
)
