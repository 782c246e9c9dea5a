// The dead letters of a group: read, filter, redrive and purge.
import { get, path } from "./api.js"
import { Found, LetterSearch, MoreLetters, useLetters } from "./letters.js"
import { Actions, At, Awaited, Button, Dialog, Facts, Failure, Loading, Notice, Section } from "./parts.js"
import { PurgeLetters, RedriveLetters, RedriveProgress } from "./redrive.js"
import { adminOf } from "./data.js"
import { Body, Headers } from "./message.js"
import { bytes, count, duration, NONE, plural, shortId } from "./format.js"
import { refusal } from "./access.js"
import { Table } from "./table.js"
import { html, useEffect, useState } from "./ui.js"

export function DeadLetters({ topic, group, dead, onChanged }) {
  const mayRead = refusal("consume", { topic, group })
  const letters = useLetters(topic, group)
  const [chosen, setChosen] = useState(new Set())
  const [dialog, setDialog] = useState(null)
  const [redrives, setRedrives] = useState(0)
  useEffect(() => {
    if (!mayRead) letters.search(null)
  }, [topic, group])
  const picked = [...chosen].filter((id) => letters.letters?.some((letter) => letter.id === id))
  const changed = () => {
    setChosen(new Set())
    setRedrives(redrives + 1)
    onChanged()
    if (!mayRead) letters.reload()
  }
  const shared = { topic, group, dead: letters.dead ?? dead, ids: picked, conditions: letters.conditions, onClose: () => setDialog(null), onChanged: changed }
  return html`
    <${RedriveProgress} topic=${topic} group=${group} key=${redrives} onEnd=${changed} />
    <${Section} title="Dead letters" aside=${letters.dead === null ? "" : `${plural(letters.dead, "letter")}, the oldest first`}>
      <${LetterActions} topic=${topic} group=${group} dead=${letters.dead ?? dead} picked=${picked.length} isSearch=${letters.conditions !== null} busy=${letters.busy} onDialog=${setDialog} onReload=${letters.reload} mayRead=${!mayRead} />
      ${!mayRead && html`<${LetterSearch} letters=${letters} />`}
      ${mayRead
        ? html`<${Notice}>The letters can't be read here. ${mayRead}<//>`
        : html`<${Awaited} poll=${{ data: letters.letters, error: letters.error }} what="The dead letters can't be listed">
            ${() => html`
              ${dead !== null && letters.dead !== null && dead > letters.dead && html`<${Notice}>${plural(dead - letters.dead, "letter has", "letters have")} come since this list was loaded.<//>`}
              <${Found} letters=${letters} />
              <${LetterTable} topic=${topic} group=${group} letters=${letters.letters} isSearch=${letters.conditions !== null} busy=${letters.busy} chosen=${chosen} onChosen=${setChosen} />
              <${MoreLetters} letters=${letters} />
            `}
          <//>`}
    <//>
    ${dialog === "redrive" && html`<${RedriveLetters} ...${shared} />`} ${dialog === "purge" && html`<${PurgeLetters} ...${shared} />`}
  `
}

function LetterActions({ topic, group, dead, picked, isSearch, busy, onDialog, onReload, mayRead }) {
  const admin = ["admin", { topic, group }]
  const which = picked === 0 && isSearch ? "all that match" : picked ? `the ${count(picked)} selected` : dead === 1 ? "the one letter" : `all ${dead ? count(dead) : "letters"}`
  return html`<${Actions}
    label="Actions on dead letters"
    actions=${[
      { label: `Redrive ${which}…`, kind: "primary", needs: [admin], disabled: !dead, onClick: () => onDialog("redrive") },
      { label: `Purge ${which}…`, kind: "danger", needs: [admin], disabled: !dead, onClick: () => onDialog("purge") },
      mayRead && { label: "Load again", busy, onClick: onReload },
    ]}
  />`
}

function LetterTable({ topic, group, letters, isSearch, busy, chosen, onChosen }) {
  const [open, setOpen] = useState(null)
  const toggle = (id) => {
    const next = new Set(chosen)
    if (!next.delete(id)) next.add(id)
    onChosen(next)
  }
  const areAll = letters.length > 0 && letters.every((letter) => chosen.has(letter.id))
  const toggleAll = () => {
    const next = new Set(chosen)
    for (const letter of letters) {
      if (areAll) next.delete(letter.id)
      else next.add(letter.id)
    }
    onChosen(next)
  }
  return html`
    ${letters.length > 0 &&
    html`<label class="hint"><input type="checkbox" checked=${areAll} onChange=${toggleAll} /> Select ${isSearch ? `the ${plural(letters.length, "letter")} that match` : `all ${count(letters.length)} loaded letters`}</label>`}
    <${Table}
      caption="List of dead letters"
      rows=${letters}
      keyOf=${(letter) => letter.id}
      empty=${busy ? "Searching…" : isSearch ? "No letter matches." : "There are no dead letters."}
      rowClass=${(letter) => (chosen.has(letter.id) ? "chosen" : "")}
      columns=${[
        {
          key: "id",
          label: "Message",
          head: true,
          cell: (letter) => html`<input type="checkbox" checked=${chosen.has(letter.id)} onChange=${() => toggle(letter.id)} aria-label=${`Select ${letter.message_id ?? letter.id}`} />
            <button type="button" class="link mono" aria-haspopup="dialog" title=${letter.message_id ?? letter.id} onClick=${() => setOpen(letter.id)}>${shortId(letter.message_id ?? letter.id)}</button>`,
        },
        { key: "reason", label: "Reason", kind: "text", sort: (letter) => letter.reason ?? "", cell: (letter) => letter.reason ?? NONE },
        { key: "body", label: "Body", kind: "preview mono", minor: true, cell: (letter) => letter.body ?? (letter.body_base64 !== undefined ? `binary, ${bytes(letter.body_bytes)}` : NONE) },
        { key: "deliveries", label: "Deliveries", num: true, minor: true, sort: (letter) => letter.delivery_count ?? null, cell: (letter) => count(letter.delivery_count) },
        { key: "at", label: "Dead since", num: true, sort: (letter) => letter.dead_lettered_at ?? null, cell: (letter) => html`<${At} at=${letter.dead_lettered_at} />` },
      ]}
    />
    ${open !== null && html`<${Letter} topic=${topic} group=${group} id=${open} onClose=${() => setOpen(null)} />`}
  `
}

function Attempts({ attempts }) {
  const words = (one) => [one.error_type, one.error_text].filter(Boolean).join(": ") || one.reason || ""
  return html`<${Table}
    caption="Attempts"
    rows=${attempts}
    keyOf=${(one) => String(one.attempt)}
    columns=${[
      { key: "attempt", label: "Attempt", num: true, head: true, cell: (one) => count(one.attempt) },
      { key: "outcome", label: "Outcome", cell: (one) => one.outcome },
      { key: "client", label: "Client", cell: (one) => html`<code>${one.client ?? ""}</code>` },
      { key: "began", label: "Leased", num: true, minor: true, cell: (one) => html`<${At} at=${one.leased_at} />` },
      { key: "held", label: "Held for", num: true, minor: true, cell: (one) => duration(one.ended_at - one.leased_at) },
      { key: "error", label: "Error", kind: "text", cell: words },
    ]}
  />`
}

// One letter with its whole body.
function Letter({ topic, group, id, onClose }) {
  const [letter, setLetter] = useState(null)
  const [error, setError] = useState(null)
  useEffect(() => {
    get(`${adminOf(topic, group)}${path`/dead-letters/${id}`}`, { seconds: 40 }).then(setLetter, setError)
  }, [id])
  return html`<${Dialog} title=${letter?.message_id ?? id} onClose=${onClose} wide>
    <div class="stack">
      <${Failure} error=${error} what="The letter can't be read" />
      ${!letter && !error && html`<${Loading} />`}
      ${letter &&
      html`
        <${Facts}
          rows=${[
            ["Reason", letter.reason],
            ["Cause", letter.cause],
            letter.error && ["Error", html`<code>${[letter.error.type, letter.error.message ?? letter.error.text].filter(Boolean).join(": ")}</code>`],
            letter.client && ["Client", html`<code>${letter.client}</code>`],
            ["Deliveries", count(letter.delivery_count)],
            ["First delivered", html`<${At} at=${letter.first_delivered_at} />`],
            ["Dead since", html`<${At} at=${letter.dead_lettered_at} />`],
            ["Published", html`<${At} at=${letter.published_at} />`],
            ["Ordering key", letter.ordering_key],
            ["Queue", letter.source_queue === undefined ? null : String(letter.source_queue)],
            ["Id of the letter", html`<code>${letter.id}</code>`],
          ]}
        />
        ${letter.attempts?.length > 0 && html`<${Attempts} attempts=${letter.attempts} />`}
        <${Headers} headers=${letter.headers} />
        <${Body} text=${letter.body} base64=${letter.body_base64} size=${letter.body_bytes} />
      `}
      <div class="dialog-buttons"><${Button} onClick=${onClose}>Close<//></div>
    </div>
  <//>`
}
