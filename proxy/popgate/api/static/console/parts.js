// The building blocks of every page: headings, notices, figures, buttons and dialogs.
import { now } from "./api.js"
import { refusal } from "./access.js"
import { count, duration, exactTime, NONE, time } from "./format.js"
import { html, say, useEffect, useId, useRef, useState, useTick } from "./ui.js"

let isFirstPage = true

// A page. When the user goes to it from another page, its heading gets the focus: a screen reader goes on there.
export function Page({ title, crumbs = [], badges, actions, children }) {
  const heading = useRef(null)
  useEffect(() => {
    document.title = `${title} · popgate`
    if (!isFirstPage) {
      heading.current?.focus({ preventScroll: true })
      scrollTo(0, 0)
    }
    isFirstPage = false
  }, [title])
  return html`<div class="page">
    <header class="page-head">
      ${crumbs.length > 0 &&
      html`<nav aria-label="Breadcrumb" class="crumbs">
        <ol>
          ${crumbs.map(([label, href]) => html`<li><a href=${href}>${label}</a></li>`)}
        </ol>
      </nav>`}
      <div class="page-title">
        <h1 ref=${heading} tabindex="-1">${title}</h1>
        ${badges}
      </div>
      ${actions && html`<div class="actions">${actions}</div>`}
    </header>
    ${children}
  </div>`
}

export function Section({ title, aside, children, id }) {
  const own = useId()
  return html`<section class="section" aria-labelledby=${id ?? own}>
    <div class="section-head">
      <h2 id=${id ?? own}>${title}</h2>
      ${aside && html`<div class="aside">${aside}</div>`}
    </div>
    ${children}
  </section>`
}

export const Badge = ({ tone = "plain", children, title }) => html`<span class="badge ${tone}" title=${title}>${children}</span>`

export const Notice = ({ tone = "info", children, alert }) =>
  html`<div class="notice ${tone}" role=${alert ? "alert" : undefined}>${children}</div>`

export const Empty = ({ children }) => html`<p class="empty">${children}</p>`

export const Loading = () => html`<p class="empty" aria-busy="true">Loading…</p>`

// An error of the proxy, in its own words, with what to do about it.
export function Failure({ error, what, alert }) {
  if (!error) return null
  if (error.status === 0) return null // the banner at the top says so
  return html`<${Notice} tone="bad" alert=${alert}>
    <p><strong>${what ? `${what}: ` : ""}${error.title || "The request has failed"}.</strong> ${error.message}</p>
    ${error.remedy && html`<p>${error.remedy}</p>`}
  <//>`
}

// What a part of the page shows until its first answer has arrived, and if the answer is an error.
export function Awaited({ poll, what, notOffered, children }) {
  if (poll.error?.isNotOffered && notOffered) return html`<${Notice}>${notOffered}<//>`
  if (poll.error && poll.data === null) return html`<${Failure} error=${poll.error} what=${what} />`
  if (poll.data === null) return html`<${Loading} />`
  return html`${poll.error && html`<${Failure} error=${poll.error} what=${what} />`}${children(poll.data)}`
}

// -- figures ---------------------------------------------------------------------------------------------------------

export const Figures = ({ label, children }) => html`<dl class="figures" aria-label=${label}>${children}</dl>`

// A number with a unit behind it: the unit is smaller.
function sized(value) {
  const match = /^(\S+) (\S+)$/.exec(String(value))
  return match ? html`${match[1]}<span class="unit">${" "}${match[2]}</span>` : value
}

export const Figure = ({ label, value, tone, note, href }) =>
  html`<div class="figure ${tone ?? ""}">
    <dt>${label}</dt>
    <dd>${href ? html`<a href=${href}>${sized(value)}</a>` : sized(value)}</dd>
    ${note && html`<dd class="note">${note}</dd>`}
  </div>`

// A list of names and values.
export const Facts = ({ rows }) =>
  html`<dl class="facts">
    ${rows
      .filter((row) => row)
      .map(([name, value]) => html`<div><dt>${name}</dt><dd>${value ?? NONE}</dd></div>`)}
  </dl>`

export const At = ({ at }) =>
  at === null || at === undefined ? NONE : html`<time datetime=${exactTime(at)} title=${exactTime(at)}>${time(at)}</time>`

// How long ago something was, counting on.
export function Ago({ at }) {
  useTick(1)
  if (at === null || at === undefined) return NONE
  return html`<time datetime=${exactTime(at)} title=${exactTime(at)}>${duration(Math.max(0, now() - at))} ago</time>`
}

// A pull client has its messages for ten years: until it commits them, or loses their queue.
const ENDLESS_SECONDS = 5 * 366 * 86400

// The time that is left until `until`, counting down, with a bar of what is left of `whole` seconds.
export function Left({ until, whole }) {
  useTick(1)
  if (until === null || until === undefined) return NONE
  const left = until - now()
  if (left > ENDLESS_SECONDS) return html`<span class="quiet">until it commits</span>`
  const share = whole ? Math.max(0, Math.min(1, left / whole)) : null
  const tone = left <= 0 ? "bad" : share !== null && share < 0.2 ? "warn" : ""
  return html`<span class="left ${tone}" title=${exactTime(until)}>
    ${share !== null && html`<span class="left-bar" aria-hidden="true"><span style=${{ width: `${share * 100}%` }}></span></span>`}
    <span class="num">${left <= 0 ? "ended" : duration(Math.ceil(left))}</span>
  </span>`
}

export const Progress = ({ value, max, label }) =>
  html`<progress value=${value} max=${Math.max(1, max)} aria-label=${label}>${count(value)} of ${count(max)}</progress>`

// -- doing something -------------------------------------------------------------------------------------------------

export function Button({ onClick, kind = "", type = "button", disabled, children, ...rest }) {
  return html`<button type=${type} class="button ${kind}" disabled=${disabled} onClick=${onClick} ...${rest}>${children}</button>`
}

// Buttons that need permissions: `actions` are [{label, needs: [[action, resource]], kind, onClick, busy}]. Those that
// the user may not use are disabled, and one line says which action is missing.
export function Actions({ actions, label = "Actions" }) {
  const id = useId()
  const shown = actions.filter(Boolean).map((one) => ({
    ...one,
    why: (one.needs ?? []).map(([action, resource]) => refusal(action, resource)).find(Boolean) ?? "",
  }))
  const reasons = [...new Set(shown.map((one) => one.why).filter(Boolean))]
  return html`<div class="toolbar" role="group" aria-label=${label}>
    ${shown.map(
      (one) => html`<${Button}
        kind=${one.kind}
        disabled=${Boolean(one.why) || one.disabled || one.busy}
        aria-describedby=${one.why ? id : undefined}
        title=${one.why || one.title}
        onClick=${one.onClick}
        >${one.busy ? `${one.label}…` : one.label}<//
      >`,
    )}
    ${reasons.length > 0 && html`<p class="why" id=${id}>${reasons.join(" ")}</p>`}
  </div>`
}

export function Field({ label, hint, error, children, wide }) {
  const id = useId()
  const described = [hint && `${id}-hint`, error && `${id}-error`].filter(Boolean).join(" ") || undefined
  return html`<div class="field ${wide ? "wide" : ""}">
    <label for=${id}>${label}</label>
    ${children({ id, "aria-describedby": described, "aria-invalid": error ? "true" : undefined })}
    ${hint && html`<p class="hint" id="${id}-hint">${hint}</p>`}
    ${error && html`<p class="hint bad" role="alert" id="${id}-error">${error}</p>`}
  </div>`
}

export const Input = ({ label, hint, error, value, onInput, wide, ...rest }) =>
  html`<${Field} label=${label} hint=${hint} error=${error} wide=${wide}>
    ${(ties) => html`<input ...${ties} ...${rest} value=${value} onInput=${(event) => onInput(event.currentTarget.value)} />`}
  <//>`

export const Select = ({ label, hint, value, onChange, options }) =>
  html`<${Field} label=${label} hint=${hint}>
    ${(ties) => html`<select ...${ties} value=${value} onChange=${(event) => onChange(event.currentTarget.value)}>
      ${options.map(([key, text]) => html`<option value=${key} selected=${key === value}>${text}</option>`)}
    </select>`}
  <//>`

// A modal dialog. The browser keeps the focus in it, and gives the focus back when it closes.
export function Dialog({ title, onClose, children, wide }) {
  const element = useRef(null)
  const id = useId()
  useEffect(() => {
    const before = document.activeElement
    element.current.showModal()
    return () => before?.isConnected && before.focus()
  }, [])
  return html`<dialog
    ref=${element}
    class=${wide ? "wide" : ""}
    aria-labelledby=${id}
    onCancel=${(event) => {
      event.preventDefault()
      onClose()
    }}
  >
    <h2 id=${id}>${title}</h2>
    ${children}
  </dialog>`
}

// A dialog with a form. `submit` is async: while it runs, the buttons wait; its error is shown, and the dialog stays.
// With `phrase`, the user must type this name first. `done` is spoken at the end. Errors about one of the `fields` are
// shown by these fields themselves.
export function FormDialog({ title, verb, kind = "primary", phrase, submit, done, onClose, children, disabled, wide, fields = [] }) {
  const [typed, setTyped] = useState("")
  const [busy, setBusy] = useState(false)
  const [error, setError] = useState(null)
  const run = async (event) => {
    event.preventDefault()
    if (busy || disabled || (phrase && typed !== phrase)) return
    setBusy(true)
    setError(null)
    try {
      const result = await submit()
      onClose()
      const text = typeof done === "function" ? done(result) : done
      if (text) say(text)
    } catch (problem) {
      setError(problem)
      setBusy(false)
    }
  }
  return html`<${Dialog} title=${title} onClose=${onClose} wide=${wide}>
    <form onSubmit=${run}>
      ${typeof children === "function" ? children(error) : children}
      ${phrase &&
      html`<${Input}
        label=${html`To confirm, type <code>${phrase}</code>`}
        value=${typed}
        onInput=${setTyped}
        autocomplete="off"
        spellcheck="false"
        wide
      />`}
      ${error?.status === 0
        ? html`<${Notice} tone="bad" alert><p>The proxy does not answer. Whether this was done is not known.</p><//>`
        : !fields.includes(error?.field) && html`<${Failure} error=${error} alert />`}
      <div class="dialog-buttons">
        <${Button} onClick=${onClose}>Cancel<//>
        <${Button} type="submit" kind=${kind} disabled=${busy || disabled || (phrase && typed !== phrase)}>
          ${busy ? "Working…" : verb}
        <//>
      </div>
    </form>
  <//>`
}

// Run something at once, for buttons without a dialog. Return [run, busy, error].
export function useAction(action, done) {
  const [state, setState] = useState({ busy: false, error: null })
  const run = async (...values) => {
    setState({ busy: true, error: null })
    try {
      const result = await action(...values)
      setState({ busy: false, error: null })
      if (done) say(done)
      return result
    } catch (error) {
      setState({ busy: false, error })
    }
  }
  return [run, state.busy, state.error]
}
