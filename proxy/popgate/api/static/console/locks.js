// The locks: who holds them, who waits, and how an operator takes one away.
import { del, get, path, post, put } from "./api.js"
import { count, NONE, plural } from "./format.js"
import { Actions, At, Awaited, Badge, Button, Field, FormDialog, Input, Left, Page, Select } from "./parts.js"
import { refusal } from "./access.js"
import { usePoll } from "./poll.js"
import { Table } from "./table.js"
import { html, useState } from "./ui.js"

const SECONDS = 3

export function Locks() {
  const poll = usePoll((signal) => get("/v1/locks", { signal }), SECONDS, [])
  const [filter, setFilter] = useState("")
  const [dialog, setDialog] = useState(null)
  const wanted = filter.trim().toLowerCase()
  const shown = (poll.data?.locks ?? []).filter((lock) => !wanted || lock.name.toLowerCase().includes(wanted) || lock.holders.some((one) => one.holder.toLowerCase().includes(wanted)))
  const close = () => setDialog(null)
  return html`<${Page} title="Locks" actions=${html`<${Actions} actions=${[{ label: "Define a lock", kind: "primary", needs: [["admin", null]], onClick: () => setDialog({ kind: "define" }) }]} />`}>
    <p class="hint">Holders and waiting clients are those of the proxy that has answered. Clients of other proxies hold locks there.</p>
    <div class="filters" role="search"><${Input} label="Filter by lock or holder" type="search" value=${filter} onInput=${setFilter} /></div>
    <${Awaited} poll=${poll} what="The locks can't be listed">
      ${(data) => html`<${LockTable} locks=${shown} onDialog=${setDialog} empty=${data.locks.length ? "No lock matches." : "There are no locks yet."} />`}
    <//>
    ${dialog?.kind === "define" && html`<${Define} onClose=${close} onDone=${poll.refresh} />`}
    ${dialog?.kind === "force" && html`<${Force} lock=${dialog.lock} onClose=${close} onDone=${poll.refresh} />`}
    ${dialog?.kind === "delete" && html`<${Delete} lock=${dialog.lock} onClose=${close} onDone=${poll.refresh} />`}
  <//>`
}

function LockTable({ locks, onDialog, empty }) {
  return html`<${Table}
    caption="Locks"
    rows=${locks}
    keyOf=${(lock) => lock.name}
    sortBy=${{ key: "name", order: "ascending" }}
    empty=${empty}
    columns=${[
      { key: "name", label: "Lock", head: true, sort: (lock) => lock.name, cell: (lock) => html`${lock.name} ${!lock.enabled && html`<${Badge} tone="warn">disabled<//>`}` },
      { key: "kind", label: "Kind", minor: true, cell: (lock) => `${lock.kind.replace("_", " ")}${lock.kind === "semaphore" ? ` of ${lock.slots}` : ""}` },
      { key: "holders", label: "Holders", kind: "text", sort: (lock) => lock.holders.length, cell: (lock) => html`<${Holders} lock=${lock} />` },
      { key: "waiting", label: "Waiting", num: true, sort: (lock) => lock.waiting, cell: (lock) => count(lock.waiting) },
      { key: "do", label: html`<span class="unseen">Actions</span>`, cell: (lock) => html`<${LockActions} lock=${lock} onDialog=${onDialog} />` },
    ]}
  />`
}

function Holders({ lock }) {
  if (lock.holders.length === 0) return html`<span class="quiet">free</span>`
  return html`<ul>
    ${lock.holders.map(
      (one) => html`<li>
        <code>${one.holder}</code>${" "}
        ${one.expires_at !== null && html`<${Left} until=${one.expires_at} />`}${" "}
        <span class="quiet">since <${At} at=${one.acquired_at} />, token ${one.fencing_token ?? NONE}</span>
      </li>`,
    )}
  </ul>`
}

function LockActions({ lock, onDialog }) {
  const why = refusal("admin", { lock: lock.name })
  return html`<div class="toolbar">
    <${Button} kind="small" disabled=${Boolean(why) || lock.holders.length === 0} title=${why} aria-label=${`Force-release ${lock.name}`} onClick=${() => onDialog({ kind: "force", lock })}>Force-release<//>
    <${Button} kind="small danger" disabled=${Boolean(why)} title=${why} aria-label=${`Delete ${lock.name}`} onClick=${() => onDialog({ kind: "delete", lock })}>Delete<//>
  </div>`
}

function Force({ lock, onClose, onDone }) {
  const [which, setWhich] = useState(lock.holders.length === 1 ? String(lock.holders[0].fencing_token ?? "") : "")
  const one = lock.holders.find((holder) => String(holder.fencing_token) === which)
  return html`<${FormDialog}
    title="Force-release ${lock.name}?"
    verb="Force-release"
    kind="danger"
    phrase=${lock.name}
    submit=${async () => {
      const answer = await post(path`/v1/locks/${lock.name}/force-release`, choiceOf(one))
      onDone()
      return answer
    }}
    done=${(answer) => `${plural(answer.released, "holder has", "holders have")} lost the lock ${lock.name}.`}
    onClose=${onClose}
  >
    ${lock.holders.length > 1 && html`<${Select} label="Holder" value=${which} onChange=${setWhich} options=${[["", `all ${count(lock.holders.length)} holders`], ...lock.holders.map((holder) => [String(holder.fencing_token), holder.holder])]} />`}
    <p>
      This takes the lock from <strong>${one ? one.holder : `all ${plural(lock.holders.length, "holder")}`}</strong>, ${lock.waiting ? `and gives it to ${lock.waiting === 1 ? "the client that waits" : `one of the ${count(lock.waiting)} clients that wait`}.` : "and makes it free."}
      ${" "}The holder learns of it only when it renews or verifies. Until then it may still work on what the lock protects, unless that checks fencing tokens.
    </p>
  <//>`
}

// Name one holder by its token. JavaScript rounds very large tokens: such a holder is named by its name.
function choiceOf(one) {
  if (!one) return {}
  return Number.isSafeInteger(one.fencing_token) ? { fencing_token: one.fencing_token } : { holder: one.holder }
}

function Delete({ lock, onClose, onDone }) {
  return html`<${FormDialog}
    title="Delete the lock ${lock.name}?"
    verb="Delete the lock"
    kind="danger"
    phrase=${lock.name}
    submit=${async () => {
      await del(path`/v1/locks/${lock.name}`)
      onDone()
    }}
    done=${`The lock ${lock.name} is deleted.`}
    onClose=${onClose}
  >
    <p>This deletes the lock. ${lock.holders.length ? html`<strong>${plural(lock.holders.length, "holder loses", "holders lose")} it</strong>, and ` : ""}${plural(lock.waiting, "waiting client gets", "waiting clients get")} no answer from it.</p>
  <//>`
}

function Define({ onClose, onDone }) {
  const [name, setName] = useState("")
  const [kind, setKind] = useState("mutex")
  const [slots, setSlots] = useState("2")
  const [enabled, setEnabled] = useState(true)
  const why = name.trim() ? refusal("admin", { lock: name.trim() }) : ""
  return html`<${FormDialog}
    title="Define a lock"
    verb="Define"
    disabled=${Boolean(why)}
    submit=${async () => {
      await put(path`/v1/locks/${name.trim()}`, kind === "mutex" ? { kind } : kind === "semaphore" ? { kind, slots: Number(slots) } : { kind, enabled })
      onDone()
    }}
    done=${`The lock ${name} is defined.`}
    fields=${["name"]}
    onClose=${onClose}
  >
    ${(error) => html`
      <${Input} label="Name" value=${name} onInput=${setName} required autocomplete="off" error=${error?.field === "name" ? error.message : ""} />
      <${Select} label="Kind" value=${kind} onChange=${setKind} options=${[["mutex", "mutex: one holder"], ["persistent_mutex", "persistent mutex: can be disabled"], ["semaphore", "semaphore: several holders"]]} />
      ${kind === "semaphore" && html`<${Input} label="Slots" type="number" min="0" max="64" value=${slots} onInput=${setSlots} />`}
      ${kind === "persistent_mutex" && html`<${Field} label="Can be acquired">${(ties) => html`<input type="checkbox" ...${ties} checked=${enabled} onChange=${() => setEnabled(!enabled)} />`}<//>`}
      ${why && html`<p class="hint bad">${why}</p>`}
    `}
  <//>`
}
