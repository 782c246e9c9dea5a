// The messages of a group, without leasing any: search by state and ordering key.
import { get, now, path, query } from "./api.js"
import { refusal } from "./access.js"
import { adminOf } from "./data.js"
import { count, duration, NONE, plural, shortId } from "./format.js"
import { Body, Headers } from "./message.js"
import { At, Badge, Button, Dialog, Facts, Failure, Input, Left, Loading, Notice, Section, Select } from "./parts.js"
import { Table } from "./table.js"
import { html, useEffect, useState } from "./ui.js"

const LIMIT = 100

export const STATES = [
  ["any", "any"],
  ["ready", "ready"],
  ["leased", "leased"],
  ["delayed", "delayed"],
  ["blocked", "blocked"],
]
const TONES = { ready: "good", leased: "accent", blocked: "warn", delayed: "plain", dead: "bad", expired: "warn" }

export const StateBadge = ({ state }) => html`<${Badge} tone=${TONES[state] ?? "plain"}>${state}<//>`

export function Browse({ topic, group }) {
  const why = refusal("consume", { topic, group })
  const [state, setState] = useState("any")
  const [key, setKey] = useState("")
  const [asked, setAsked] = useState({ state: "any", key: "" })
  const [found, setFound] = useState({ messages: null, next: null, notShown: 0, error: null, busy: false })
  const [open, setOpen] = useState(null)
  const load = async (after, before, what) => {
    setFound((one) => ({ ...one, busy: true, error: null }))
    try {
      const page = await get(`${adminOf(topic, group)}/messages${query({ ...what, limit: LIMIT, after })}`, { seconds: 40 })
      setFound({ messages: [...before, ...page.messages], next: page.next ?? null, notShown: page.not_shown ?? 0, error: null, busy: false })
    } catch (error) {
      setFound((one) => ({ ...one, error, busy: false }))
    }
  }
  useEffect(() => {
    load(null, [], asked)
  }, [topic, group, asked])
  const submit = (event) => {
    event.preventDefault()
    setAsked({ state, key: key.trim() })
  }
  if (found.error?.isNotOffered) {
    return html`<${Notice}>This version of the proxy does not list messages that are not leased by you. Its counts are above, and dead letters can be read on their page.<//>`
  }
  if (found.error?.status === 403) return html`<${Notice}>The messages can't be read here. ${why || found.error.message}<//>`
  return html`<${Section} title="Messages" aside="looking leases nothing and changes nothing">
    <form class="filters" role="search" onSubmit=${submit}>
      <${Select} label="State" value=${state} onChange=${(next) => (setState(next), setAsked({ state: next, key: key.trim() }))} options=${STATES} />
      <${Input} label="Ordering key" type="search" value=${key} onInput=${setKey} autocomplete="off" />
      <${Button} type="submit" disabled=${found.busy}>${found.busy ? "Searching…" : "Search"}<//>
      <p class="found" aria-live="polite">${found.messages ? `${plural(found.messages.length, "message")}${found.next ? ", and there are more" : ""}` : ""}</p>
    </form>
    <${Failure} error=${found.error} what="The messages can't be listed" />
    ${found.messages === null && !found.error && html`<${Loading} />`}
    ${found.messages && html`<${MessageTable} topic=${topic} messages=${found.messages} onOpen=${setOpen} empty=${asked.key || asked.state !== "any" ? "No message matches." : "This group has no messages."} />`}
    ${found.next && html`<div class="toolbar"><${Button} disabled=${found.busy} onClick=${() => load(found.next, found.messages, asked)}>Load ${count(LIMIT)} more<//></div>`}
    ${hiddenWords(found.notShown)}
    ${open && html`<${MessageDialog} topic=${topic} message=${open} onClose=${() => setOpen(null)} />`}
  <//>`
}

// `not_shown` is a number, or an object or a text that says what can't be shown, and why.
function hiddenWords(hidden) {
  if (!hidden) return null
  const words =
    typeof hidden === "number" ? `${plural(hidden, "message")} more can't be shown: no proxy has them in its memory, or their owner does not answer.` : typeof hidden === "string" ? hidden : JSON.stringify(hidden)
  return html`<p class="hint">${words}</p>`
}

const rowKey = (row) => [row.queue, row.state, row.place, row.message_id, row.attempt].join(" ")

function MessageTable({ messages, onOpen, empty }) {
  return html`<${Table}
    caption="List of messages"
    rows=${messages}
    keyOf=${rowKey}
    empty=${empty}
    columns=${[
      { key: "id", label: "Message", head: true, cell: (row) => html`<button type="button" class="link mono" aria-haspopup="dialog" title=${row.message_id} onClick=${() => onOpen(row)}>${shortId(row.message_id ?? "without an id")}</button>` },
      { key: "state", label: "State", sort: (row) => row.state, cell: (row) => html`<${StateBadge} state=${row.state} />` },
      { key: "where", label: "Where", cell: (row) => html`<${Where} row=${row} />` },
      { key: "key", label: "Key", minor: true, sort: (row) => row.ordering_key ?? null, cell: (row) => row.ordering_key ?? NONE },
      { key: "body", label: "Body", kind: "preview mono", minor: true, cell: (row) => row.body_preview ?? NONE },
      { key: "attempt", label: "Attempt", num: true, minor: true, sort: (row) => row.attempt, cell: (row) => count(row.attempt) },
      { key: "published", label: "Published", num: true, minor: true, sort: (row) => row.published_at ?? null, cell: (row) => html`<${At} at=${row.published_at} />` },
    ]}
  />`
}

// Where a message stands, in a few words.
export function Where({ row }) {
  if (row.lease) return html`${row.lease.client ? html`<code>${row.lease.client}</code> ` : ""}<${Left} until=${row.lease.deadline} />`
  if (row.blocked_by) return html`<span class="quiet">behind</span> <code title=${row.blocked_by}>${shortId(row.blocked_by)}</code>`
  if (row.visible_at && row.visible_at > now()) return html`<span class="quiet">visible in</span> ${duration(Math.ceil(row.visible_at - now()))}`
  if (row.place !== null && row.place !== undefined) return html`<span class="quiet">queue ${row.queue}, place</span> ${count(row.place)}`
  return row.queue === null || row.queue === undefined ? NONE : html`<span class="quiet">queue ${row.queue}</span>`
}

function MessageDialog({ topic, message, onClose }) {
  const preview = message.body_preview
  return html`<${Dialog} title=${message.message_id ?? "A message without an id"} onClose=${onClose} wide>
    <div class="stack">
      <${Facts}
        rows=${[
          ["State", html`<${StateBadge} state=${message.state} />`],
          ["Where", html`<${Where} row=${message} />`],
          ["Queue", String(message.queue)],
          ["Attempt", count(message.attempt)],
          ["Published", html`<${At} at=${message.published_at} />`],
          ["Ordering key", message.ordering_key],
        ]}
      />
      <${Headers} headers=${message.headers} />
      <${Body} text=${preview ?? undefined} size=${message.body_bytes} isCut=${preview !== null && preview !== undefined && new TextEncoder().encode(preview).length < message.body_bytes} />
      <div class="dialog-buttons">
        ${message.message_id && html`<a class="button" href=${path`#/find/${topic}/${message.message_id}`}>Where is it in each group?</a>`}
        <${Button} onClick=${onClose}>Close<//>
      </div>
    </div>
  <//>`
}
