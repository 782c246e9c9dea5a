// Knows who the user is, and what the user may do. The rules are those of the proxy (popgate/domain/permissions.py),
// which checks every request itself: here they only say in advance what would be refused.
import { get } from "./api.js"
import { store } from "./ui.js"

export const caller = store(null)

export async function readCaller() {
  caller.set(await get("/v1/caller"))
}

function matches(pattern, name) {
  if (!pattern.includes("*")) return pattern === name
  const parts = pattern.split("*").map((part) => part.replace(/[.+?^${}()|[\]\\]/g, "\\$&"))
  return new RegExp(`^${parts.join(".*")}$`).test(name)
}

function covers(grant, { topic, group, lock, queue }) {
  if (topic === undefined && lock === undefined && queue === undefined) {
    return grant.topics.includes("*") && grant.groups.includes("*")
  }
  const fits = (patterns, name) => name === undefined || patterns.some((one) => one === "*" || matches(one, name))
  return fits(grant.topics, topic) && fits(grant.groups, group) && fits(grant.locks, lock) && fits(grant.queues, queue)
}

// Return whether the user may do `action` on {topic, group, lock}, or on the whole server. `resource` null: on anything.
export function may(action, resource = {}) {
  const actions = (grant) => grant.actions.includes(action) || (action === "inspect" && grant.actions.includes("admin"))
  return (caller.value?.grants ?? []).some((grant) => actions(grant) && (resource === null || covers(grant, resource)))
}

function named(resource) {
  if (resource === null) return "anything"
  const { topic, group, lock } = resource
  if (lock) return `lock ${lock}`
  if (topic) return group ? `${topic}/${group}` : `topic ${topic}`
  return "the whole server"
}

// Return why the user may not do this, as a sentence, or "" if the user may.
export function refusal(action, resource = {}) {
  if (may(action, resource)) return ""
  return `${caller.value?.principal ?? "This caller"} lacks the action ${action} on ${named(resource)}.`
}
