// Shows and changes the policy of a group.
import { refusal } from "./access.js"
import { put } from "./api.js"
import { adminOf, keyOf } from "./data.js"
import { duration } from "./format.js"
import { Button, Failure, Input, Loading, Notice, Section, useAction } from "./parts.js"
import { html, say, useState } from "./ui.js"

// name, label, hint, whether it may be empty. Names with a dot are inside of `retry`.
const FIELDS = [
  ["invisibility_seconds", "Lease, in seconds", "how long a lease lasts unless the pop says otherwise"],
  ["max_lease_seconds", "Maximum age of a lease, in seconds", "with all extensions"],
  ["max_deliveries", "Deliveries before a message is dead-lettered", "empty: it is never dead-lettered", true],
  ["max_in_flight", "Maximum number of leases at a time", "empty: no limit", true],
  ["retry.initial_seconds", "Delay after the first expired delivery, in seconds", "0: visible again at once"],
  ["retry.multiplier", "Factor of each further delay", "from 1"],
  ["retry.max_seconds", "Maximum delay, in seconds", ""],
  ["min_replicas", "Replicas of the group's queues", "empty: as the replica keeper's settings say", true],
]

const read = (policy, name) => name.split(".").reduce((value, step) => value?.[step], policy)

// Return the change for a PUT: only what differs. Texts that are no number are sent as they are, and refused by the proxy.
function changeOf(texts, policy) {
  const change = {}
  for (const [name, , , mayBeEmpty] of FIELDS) {
    const text = texts[name]?.trim()
    if (text === undefined) continue
    const value = text === "" && mayBeEmpty ? null : text === "" || Number.isNaN(Number(text)) ? text : Number(text)
    if (value === read(policy, name)) continue
    const [first, second] = name.split(".")
    if (second) change[first] = { ...change[first], [second]: value }
    else change[first] = value
  }
  return change
}

export function PolicyPage({ topic, group, now, onChanged }) {
  const [texts, setTexts] = useState({})
  const why = refusal("admin", { topic, group })
  const [save, busy, error] = useAction(async (change) => {
    const answer = await put(adminOf(topic, group), change)
    setTexts({})
    onChanged()
    say(["The policy is changed.", ...(answer.warnings ?? [])].join(" "))
  })
  if (!now) return html`<${Loading} />`
  const policy = now.policy
  const change = changeOf(texts, policy)
  const isChanged = Object.keys(change).length > 0
  const submit = (event) => {
    event.preventDefault()
    if (isChanged) save(change)
  }
  return html`<${Section} title="Policy of ${keyOf(topic, group)}">
    ${why && html`<${Notice}>You can read the policy, but not change it. ${why}<//>`}
    <form class="policy" onSubmit=${submit}>
      ${FIELDS.map(([name, label, hint]) => {
        const value = read(policy, name)
        const seconds = name.endsWith("seconds") && value >= 60 ? `now ${duration(value)}` : ""
        return html`<${Input}
          key=${name}
          label=${label}
          hint=${[hint, seconds].filter(Boolean).join(" · ")}
          inputmode="decimal"
          value=${texts[name] ?? (value === null ? "" : String(value))}
          onInput=${(text) => setTexts((before) => ({ ...before, [name]: text }))}
          readonly=${Boolean(why)}
          error=${error?.field === name ? error.message : ""}
          autocomplete="off"
        />`
      })}
      <div class="form-end">
        ${error && !FIELDS.some(([name]) => name === error.field) && html`<${Failure} error=${error} alert />`}
        <${Button} type="submit" kind="primary" disabled=${!isChanged || busy || Boolean(why)}>${busy ? "Saving…" : "Save the policy"}<//>
        <${Button} disabled=${!isChanged || busy} onClick=${() => setTexts({})}>Undo<//>
      </div>
    </form>
  <//>`
}
