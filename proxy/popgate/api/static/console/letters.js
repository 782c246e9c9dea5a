// Reads dead letters: page by page, searched by the proxy over all letters of the group, or only counted.
import { get, now, query } from "./api.js"
import { adminOf } from "./data.js"
import { count, plural } from "./format.js"
import { Button, Failure, Input, Select } from "./parts.js"
import { usePoll } from "./poll.js"
import { html, useRef, useState } from "./ui.js"

export const PAGE = 100
export const LOADED_MAX = 1000 // as many ids as one request may name
const PREVIEW_BYTES = 240
const READ_SECONDS = 40
const CAUSES = [
  ["", "any"],
  ["rejected", "rejected by a client"],
  ["max_deliveries", "delivered too often"],
  ["unreadable", "unreadable for popgate"],
]
const NOTHING = { text: "", cause: "", reason: "", client: "", ordering_key: "", message_id: "", header: "", dead_after: "", dead_before: "" }

const listOf = (topic, group, what) => `${adminOf(topic, group)}/dead-letters${query(what)}`

// Loads letters. Lists are read only when they are asked for: on RabbitMQ, each takes the letters out of the queue for a
// moment. `conditions` null: all letters.
export function useLetters(topic, group) {
  const [state, setState] = useState({ letters: null, dead: null, next: null, searched: 0, conditions: null, error: null, busy: false })
  const turn = useRef(0)
  const load = async (conditions, after, known, searched, most) => {
    const mine = ++turn.current
    setState((before) => ({ ...before, busy: true, error: null }))
    let letters = known
    let next = after
    try {
      do {
        const page = await get(listOf(topic, group, { ...conditions, max_messages: PAGE, body_bytes_max: PREVIEW_BYTES, after: next }), { seconds: READ_SECONDS })
        if (mine !== turn.current) return // another search has begun
        letters = [...letters, ...page.messages]
        searched += page.searched ?? page.messages.length
        next = page.next ?? null
        const busy = next !== null && letters.length < most
        setState({ letters, dead: page.dead, next, searched, conditions, error: null, busy })
      } while (next && letters.length < most)
    } catch (error) {
      if (mine === turn.current) setState((before) => ({ ...before, error, busy: false }))
    }
  }
  const search = (conditions) => load(conditions, null, [], 0, PAGE)
  const reload = () => search(state.conditions)
  const more = (most) => load(state.conditions, state.next, state.letters, state.searched, Math.min(LOADED_MAX, most))
  return { ...state, search, reload, more }
}

// Count the letters that meet the conditions now. Those that come later are left out of `conditions` of the result, so
// that what is done with the result affects no letter that was not counted.
export function useCount(topic, group, conditions) {
  const load = async (signal) => {
    if (conditions === null) return null
    const at = now()
    const bounded = { ...conditions, dead_before: Math.min(conditions.dead_before ?? at, at) }
    let matching = 0
    let after = null
    do {
      const page = await get(listOf(topic, group, { ...bounded, max_messages: 0, after }), { signal, seconds: READ_SECONDS })
      matching += page.matching
      after = page.next ?? null
    } while (after)
    return { matching, conditions: bounded }
  }
  return usePoll(load, 0, [topic, group, JSON.stringify(conditions)])
}

// Return the conditions of the form as the interface takes them, or null if there are none.
function conditionsOf(form) {
  const set = Object.entries(form).filter(([, value]) => value.trim() !== "")
  if (set.length === 0) return null
  return Object.fromEntries(set.map(([name, value]) => [name, name.startsWith("dead_") ? new Date(value).getTime() / 1000 : value.trim()]))
}

export function LetterSearch({ letters }) {
  const [form, setForm] = useState(NOTHING)
  const of = (name) => ({ value: form[name], onInput: (value) => setForm({ ...form, [name]: value }) })
  const ask = (next) => {
    setForm(next)
    letters.search(conditionsOf(next))
  }
  const submit = (event) => {
    event.preventDefault()
    ask(form)
  }
  const more = ["reason", "client", "ordering_key", "message_id", "header", "dead_after", "dead_before"].filter((name) => form[name]).length
  return html`<form class="filters" role="search" aria-label="Search the dead letters" onSubmit=${submit}>
    <${Input} label="Text in the reason, error, ids, key, client, headers or body" type="search" ...${of("text")} wide />
    <${Select} label="Cause" value=${form.cause} onChange=${(cause) => ask({ ...form, cause })} options=${CAUSES} />
    <${Button} type="submit">Search<//>
    ${letters.conditions && html`<${Button} onClick=${() => ask(NOTHING)}>Show all<//>`}
    <details class="more">
      <summary>More conditions${more ? ` (${count(more)})` : ""}</summary>
      <div class="filters">
        <${Input} label="Reason or error contains" type="search" ...${of("reason")} />
        <${Input} label="Client that had it last" type="search" ...${of("client")} autocomplete="off" />
        <${Input} label="Ordering key" type="search" ...${of("ordering_key")} autocomplete="off" />
        <${Input} label="Message id" type="search" ...${of("message_id")} autocomplete="off" />
        <${Input} label="A header contains" type="search" placeholder="name: value" ...${of("header")} />
        <${Input} label="Dead since, from" type="datetime-local" step="1" ...${of("dead_after")} />
        <${Input} label="Dead since, before" type="datetime-local" step="1" ...${of("dead_before")} />
      </div>
    </details>
  </form>`
}

// What is known of the search, in one line.
export function Found({ letters }) {
  const { conditions, searched, dead, next, busy } = letters
  if (letters.letters === null) return null
  const shown = letters.letters.length
  if (conditions === null) return shown < dead && html`<p class="found" aria-live="polite">${count(shown)} of ${plural(dead, "letter")} loaded</p>`
  const words = `${plural(shown, "letter matches", "letters match")}${next ? " so far" : ""}`
  return html`<p class="found" aria-live="polite">${words}, ${count(searched)} of ${plural(dead, "letter")} searched${busy ? "…" : ""}</p>`
}

export function MoreLetters({ letters }) {
  const { next, busy, conditions, dead } = letters
  const shown = letters.letters.length
  if (!next || busy) return null
  if (shown >= LOADED_MAX) {
    return html`<p class="hint">The oldest ${count(LOADED_MAX)} of these letters are loaded. Search for fewer, or redrive or purge them, to see the next.</p>`
  }
  if (conditions) return html`<div class="toolbar"><${Button} onClick=${() => letters.more(shown + PAGE)}>Search on<//></div>`
  const left = dead - shown
  const most = Math.min(LOADED_MAX, dead)
  return html`<div class="toolbar" role="group" aria-label="More letters">
    <${Button} onClick=${() => letters.more(shown + PAGE)}>Load ${count(Math.min(PAGE, left))} more<//>
    ${left > PAGE && html`<${Button} onClick=${() => letters.more(most)}>Load up to ${count(most)}<//>`}
  </div>`
}

// Says how many letters an action will affect, before it is confirmed.
export function Counted({ found }) {
  if (found.error) return html`<${Failure} error=${found.error} what="The letters can't be counted" />`
  return found.data === null ? html`<p class="hint" aria-busy="true">Counting the letters that match…</p>` : null
}
