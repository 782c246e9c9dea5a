// The messages of a group, without leasing any: search by state and ordering key.
import { get, now, path, query } from "./api.js"
import { refusal } from "./access.js"
import { adminOf } from "./data.js"
import { bytes, count, duration, NONE, plural, shortId } from "./format.js"
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
  const [found, setFound] = useState({ messages: null, next: null, notShown: 0, unreachable: [], error: null, busy: false })
  const [open, setOpen] = useState(null)
  const load = async (after, before, what) => {
    setFound((one) => ({ ...one, busy: true, error: null }))
    try {
      const page = await get(`${adminOf(topic, group)}/messages${query({ ...what, limit: LIMIT, after })}`, { seconds: 40 })
      setFound({ messages: [...before, ...page.messages], next: page.next ?? null, notShown: page.not_shown === undefined ? 0 : page.not_shown, unreachable: page.unreachable, error: null, busy: false })
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
    ${found.messages && html`<${NotShown} count=${found.notShown} busy=${found.busy} onFetch=${() => load(null, [], { ...asked, fetch: "true" })} />`}
    <${Unreachable} proxies=${found.unreachable} />
    ${open && html`<${MessageDialog} topic=${topic} message=${open} onClose=${() => setOpen(null)} />`}
  <//>`
}

// The publisher's id, or popgate's own id of this copy.
export const idOf = (row) => row.message_id ?? row.id ?? ""

export function Unreachable({ proxies }) {
  if (!proxies?.length) return null
  return html`<${Notice} tone="warn">
    ${proxies.map((one) => html`<p>The proxy <code>${one.proxy}</code> does not answer, so the messages of its queues are missing: ${one.detail}</p>`)}
  <//>`
}

// Messages that wait at the broker are not in the list until a proxy reads some of them.
function NotShown({ count: hidden, busy, onFetch }) {
  if (hidden === 0) return null
  const words =
    hidden === null
      ? "The broker does not answer, so it is not known how many messages wait there."
      : `${plural(hidden, "message waits", "messages wait")} at the broker, and no proxy has read ${hidden === 1 ? "it" : "them"} yet.`
  return html`<div class="toolbar" role="group" aria-label="Messages at the broker">
    <p class="hint">${words} Reading some returns them afterwards; RabbitMQ counts this as a delivery.</p>
    <${Button} kind="small" disabled=${busy} onClick=${onFetch}>Read some from the broker<//>
  </div>`
}

const rowKey = (row) => row.id ?? [row.queue, row.state, row.place, row.message_id, row.attempt].join(" ")

function MessageTable({ messages, onOpen, empty }) {
  return html`<${Table}
    caption="List of messages"
    rows=${messages}
    keyOf=${rowKey}
    empty=${empty}
    columns=${[
      { key: "id", label: "Message", head: true, cell: (row) => html`<button type="button" class="link mono" aria-haspopup="dialog" title=${idOf(row)} onClick=${() => onOpen(row)}>${shortId(idOf(row))}</button>` },
      { key: "state", label: "State", sort: (row) => row.state, cell: (row) => html`<${StateBadge} state=${row.state} />` },
      { key: "where", label: "Where", cell: (row) => html`<${Where} row=${row} />` },
      { key: "key", label: "Key", minor: true, sort: (row) => row.ordering_key ?? null, cell: (row) => row.ordering_key ?? NONE },
      { key: "body", label: "Body", kind: "preview mono", minor: true, cell: (row) => previewOf(row) },
      { key: "attempt", label: "Attempt", num: true, minor: true, sort: (row) => row.attempt, cell: (row) => count(row.attempt) },
      { key: "published", label: "Published", num: true, minor: true, sort: (row) => row.published_at ?? null, cell: (row) => html`<${At} at=${row.published_at} />` },
    ]}
  />`
}

function previewOf(row) {
  if (row.body_preview !== null && row.body_preview !== undefined) return row.body_preview
  return row.body_preview_base64 ? `binary, ${bytes(row.body_bytes)}` : NONE
}

// The message that blocks another one: an object, or its id.
const firstOf = (blocking) => (typeof blocking === "string" ? blocking : idOf(blocking))

// Where a message stands, in a few words.
export function Where({ row }) {
  if (row.lease) {
    const ends = row.lease.deadline === null ? html`<span class="quiet">until it commits</span>` : html`<${Left} until=${row.lease.deadline} />`
    return html`${row.lease.client ? html`<code class="name" title=${row.lease.client}>${row.lease.client}</code> ` : ""}${ends}`
  }
  if (row.blocked_by) return html`<span class="quiet">behind</span> <code>${shortId(firstOf(row.blocked_by))}</code>${row.blocked_by.ahead > 1 ? ` and ${count(row.blocked_by.ahead - 1)} more` : ""}`
  if (row.visible_at && row.visible_at > now()) return html`<span class="quiet">visible in</span> ${duration(Math.ceil(row.visible_at - now()))}`
  if (row.place !== null && row.place !== undefined) return html`<span class="quiet">queue ${row.queue}, place</span> ${count(row.place)}`
  return row.queue === null || row.queue === undefined ? NONE : html`<span class="quiet">queue ${row.queue}</span>`
}

function MessageDialog({ topic, message, onClose }) {
  const preview = message.body_preview
  return html`<${Dialog} title=${idOf(message) || "A message without an id"} onClose=${onClose} wide>
    <div class="stack">
      <${Facts}
        rows=${[
          ["State", html`<${StateBadge} state=${message.state} />`],
          ["Where", html`<${Where} row=${message} />`],
          ["Queue", String(message.queue)],
          ["Attempt", count(message.attempt)],
          ["Published", html`<${At} at=${message.published_at} />`],
          message.first_delivered_at && ["First delivered", html`<${At} at=${message.first_delivered_at} />`],
          message.expires_at && ["Time to live ends", html`<${At} at=${message.expires_at} />`],
          ["Ordering key", message.ordering_key],
          message.id && ["Id of this copy", html`<code>${message.id}</code>`],
        ]}
      />
      <${Headers} headers=${message.headers} />
      <${Body} text=${preview ?? undefined} base64=${message.body_preview_base64 ?? undefined} size=${message.body_bytes} isCut=${preview !== null && preview !== undefined && new TextEncoder().encode(preview).length < message.body_bytes} />
      <div class="dialog-buttons">
        ${idOf(message) && html`<a class="button" href=${path`#/find/${topic}/${idOf(message)}`}>Where is it in each group?</a>`}
        <${Button} onClick=${onClose}>Close<//>
      </div>
    </div>
  <//>`
}
