// Decides which groups need an operator's attention, and says why in a sentence.
import { duration, plural } from "./format.js"

const OLD_SECONDS = 300

// Return [{tone, text, word}] for one group, the worst first: `text` is a sentence, and `word` its short form. `owners`: the owner of each queue by its name on the broker, or
// null where the cluster is not known. `isStalled`: messages were ready and nothing was leased, twice in a row.
export function troubles(state, owners, isStalled = false) {
  const found = []
  const add = (tone, word, text) => found.push({ tone, word, text })
  const gone = state.queues.filter((queue) => queue.ready === null)
  if (gone.length) add("bad", "queue missing", `${plural(gone.length, "queue")} missing on the broker: ${gone.map((queue) => queue.broker_queue).join(", ")}`)
  if (owners) {
    const unowned = state.queues.filter((queue) => owners.has(queue.broker_queue) && owners.get(queue.broker_queue) === null)
    if (unowned.length) add("bad", "no owner", `${plural(unowned.length, "queue")} without an owner`)
  }
  if (state.dead > 0) add("warn", "dead letters", `${plural(state.dead, "dead letter")}`)
  if (state.policy.paused) add("warn", "paused", state.ready ? `paused, with ${plural(state.ready, "message")} waiting` : "paused")
  if (state.mode === "draining") add("warn", "draining", `draining: ${plural(state.in_flight, "lease")} left`)
  const most = state.policy.max_in_flight
  if (most !== null && state.in_flight >= most) add("warn", "at its limit", `at its limit of ${plural(most, "lease")}`)
  if (state.ready > 0 && state.blocked === state.ready && state.in_flight === 0) add("warn", "blocked", "every ready message is blocked behind one of its ordering key")
  if (state.ready > 0 && state.in_flight === 0 && !state.policy.paused) {
    if (state.pollers === 0) add("warn", "no clients", `${plural(state.ready, "message")} ready, and no client polls`)
    else if (isStalled) add("warn", "not taken", `${plural(state.ready, "message")} ready, and no client takes any`)
  }
  if (state.oldest_age_seconds !== null && state.oldest_age_seconds > OLD_SECONDS && !state.policy.paused) {
    add("warn", "old messages", `the oldest message waits for ${duration(state.oldest_age_seconds)}`)
  }
  return found
}

export const ownersOf = (cluster) =>
  cluster === null ? null : new Map(cluster.queues.map((queue) => [queue.broker_queue, queue.owner]))
