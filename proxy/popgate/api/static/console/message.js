// Shows the contents of one message. Bodies and headers come from publishers: they are shown as text, never as markup.
import { bytes } from "./format.js"
import { Empty } from "./parts.js"
import { html, useState } from "./ui.js"

const SHOWN_MAX = 200_000 // characters of a body; more would make the page slow

// Return the text with indentation if it is JSON, or null.
function pretty(text) {
  if (!/^\s*[[{]/.test(text) || text.length > SHOWN_MAX) return null
  try {
    return JSON.stringify(JSON.parse(text), null, 2)
  } catch {
    return null
  }
}

export function Body({ text, base64, size, isCut }) {
  const [raw, setRaw] = useState(false)
  if (text === undefined && base64 === undefined) return html`<${Empty}>The body is not shown.<//>`
  const note = isCut ? `the beginning of ${bytes(size)}` : bytes(size)
  if (text === undefined) {
    return html`<div class="stack"><p class="hint">Binary body in base64, ${note}</p><pre tabindex="0" aria-label="Body in base64">${base64.slice(0, SHOWN_MAX)}</pre></div>`
  }
  if (text === "") return html`<${Empty}>The body is empty.<//>`
  const nice = pretty(text)
  return html`<div class="stack">
    <p class="hint">
      Body, ${note}${nice && html`${" · "}<button type="button" class="link" onClick=${() => setRaw(!raw)}>${raw ? "formatted" : "as it was sent"}</button>`}
    </p>
    <pre tabindex="0" aria-label="Body">${(nice && !raw ? nice : text).slice(0, SHOWN_MAX)}</pre>
    ${text.length > SHOWN_MAX && html`<p class="hint">The rest is not shown.</p>`}
  </div>`
}

export function Headers({ headers }) {
  const names = Object.keys(headers ?? {})
  if (names.length === 0) return html`<p class="hint">No headers</p>`
  return html`<div class="stack">
    <p class="hint">Headers</p>
    <pre tabindex="0" aria-label="Headers">${names.map((name) => `${name}: ${typeof headers[name] === "string" ? headers[name] : JSON.stringify(headers[name])}`).join("\n")}</pre>
  </div>`
}
