// Starts the console: the frame around the pages, the way between them, and the form for the key.
import { caller, readCaller } from "./access.js"
import { base, connection, get, isToken, retryNow, token, useToken } from "./api.js"
import { duration } from "./format.js"
import { Overview } from "./overview.js"
import { Badge, Button, Dialog, Facts, Failure, Input, Loading, Notice, Page, At } from "./parts.js"
import { html, lazy, render, say, spoken, store, useEffect, useState, useStore, useTick } from "./ui.js"

// The other pages are loaded when they are first opened.
const Topics = lazy(() => import("./topics.js"), "Topics")
const Topic = lazy(() => import("./topics.js"), "Topic")
const Subscription = lazy(() => import("./subscription.js"), "Subscription")
const Find = lazy(() => import("./find.js"), "Find")
const Locks = lazy(() => import("./locks.js"), "Locks")
const Cluster = lazy(() => import("./cluster.js"), "Cluster")
const Replicas = lazy(() => import("./replicas.js"), "Replicas")
const Checks = lazy(() => import("./checks.js"), "Checks")
const Journal = lazy(() => import("./checks.js"), "Journal")

const PLACES = [
  ["", "Overview"],
  ["topics", "Topics"],
  ["find", "Find a message"],
  ["locks", "Locks"],
  ["cluster", "Cluster"],
  ["replicas", "Replicas"],
  ["checks", "Checks"],
  ["journal", "Journal"],
]

// -- the way -----------------------------------------------------------------------------------------------------------

const readPlace = () => location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decode)

function decode(part) {
  try {
    return decodeURIComponent(part)
  } catch {
    return part
  }
}

const place = store(readPlace())
addEventListener("hashchange", () => place.set(readPlace()))

function Here({ steps }) {
  const [first = "", topic, group, tab = ""] = steps
  if (first === "topics" && group) return html`<${Subscription} key=${`${topic}/${group}`} topic=${topic} group=${group} tab=${tab} />`
  if (first === "topics" && topic) return html`<${Topic} key=${topic} topic=${topic} />`
  const pages = { "": Overview, topics: Topics, find: Find, locks: Locks, cluster: Cluster, replicas: Replicas, checks: Checks, journal: Journal }
  const One = pages[first]
  if (!One) return html`<${Page} title="Not found"><p>There is no such page. <a href="#/">Go to the overview</a>.</p><//>`
  return html`<${One} steps=${steps.slice(1)} />`
}

// -- the frame ---------------------------------------------------------------------------------------------------------

function App() {
  const { needsKey, away } = useStore(connection)
  const who = useStore(caller)
  const steps = useStore(place)
  const [error, setError] = useState(null)
  const [server, setServer] = useState(null)
  const load = async () => {
    setError(null)
    try {
      await readCaller()
      setServer(await get("/v1"))
    } catch (problem) {
      setError(problem)
    }
  }
  useEffect(() => {
    load()
  }, [])
  useEffect(() => {
    if (!away && error?.status === 0) load()
  }, [away])
  const signedOut = () => {
    useToken(null)
    caller.set(null)
    load()
  }
  if (needsKey) {
    return html`<${Frame} who=${null}><${SignIn} refused=${Boolean(token())} onKey=${load} /><//>`
  }
  if (!who) {
    return html`<${Frame} who=${null}>${error ? html`<${Failure} error=${error} what="The console can't start" />` : html`<${Loading} />`}<//>`
  }
  return html`<${Frame} who=${who} server=${server} steps=${steps} onSignOut=${signedOut}><${Here} steps=${steps} /><//>`
}

function Frame({ who, server, steps, onSignOut, children }) {
  const [open, setOpen] = useState(false)
  useEffect(() => setOpen(false), [steps])
  return html`<div class="frame">
    <a class="skip" href="#main" onClick=${skip}>Skip to the content</a>
    <header class="top">
      <a class="brand" href="#/"><img src=${`${base}console/icon.svg`} alt="" width="22" height="22" />popgate</a>
      ${who &&
      html`<button type="button" class="button menu" aria-expanded=${open ? "true" : "false"} aria-controls="places" onClick=${() => setOpen(!open)}>Menu</button>`}
    </header>
    ${who &&
    html`<aside class="side ${open ? "open" : ""}" id="places" aria-label="Menu and settings">
      <nav aria-label="Pages">
        <ul>
          ${PLACES.map(([name, label]) => {
            const current = (steps[0] ?? "") === name
            return html`<li><a href="#/${name}" aria-current=${current ? (steps.length > 1 ? "true" : "page") : undefined}>${label}</a></li>`
          })}
        </ul>
      </nav>
      <${Foot} who=${who} server=${server} onSignOut=${onSignOut} />
    </aside>`}
    <div class="content">
      <section aria-label="State of the proxy">
        <${Away} />
        ${who && html`<${Open} who=${who} />`}
      </section>
      <main id="main" tabindex="-1">${children}</main>
    </div>
    <${Spoken} />
  </div>`
}

const Spoken = () => html`<div class="unseen" role="status" aria-live="polite">${useStore(spoken)}</div>`

function skip(event) {
  event.preventDefault()
  document.getElementById("main").focus()
}

// Says that the proxy authenticates nobody.
function Open({ who }) {
  if (who.insecure) {
    const missing = who.authenticated ? "its connections are not encrypted (no TLS)" : "it authenticates no callers: whoever reaches it may read and delete everything"
    return html`<div class="bar bad" role="note">
      <strong>This proxy runs with --insecure.</strong> Other machines reach it, and ${missing}.
    </div>`
  }
  if (who.authenticated) return null
  return html`<div class="bar" role="note"><strong>No authentication.</strong> Every program on this machine may do everything with this proxy.</div>`
}

// Says that the proxy does not answer, and when it is tried again.
function Away() {
  const { away } = useStore(connection)
  const [wasAway, setWasAway] = useState(false)
  useEffect(() => {
    if (away) setWasAway(true)
    else if (wasAway) {
      setWasAway(false)
      say("The proxy answers again.")
    }
  }, [away])
  if (!away) return null
  return html`<div class="bar bad away">
    <span role="alert"><strong>The proxy does not answer:</strong> ${away.why}. The page shows what was known before.</span>
    <${Countdown} at=${away.at} />
    <${Button} onClick=${retryNow}>Try now<//>
  </div>`
}

function Countdown({ at }) {
  useTick(1)
  return html`<span class="num">Next try in ${duration(Math.max(0, Math.ceil(at - Date.now() / 1000)))}</span>`
}

function Foot({ who, server, onSignOut }) {
  const [shown, setShown] = useState(false)
  return html`<div class="foot">
    <${Theme} />
    ${who.authenticated
      ? html`<div class="who">
          <button type="button" class="link" onClick=${() => setShown(true)}>${who.principal}</button>
          ${token() && html`<button type="button" class="link" onClick=${onSignOut}>Sign out</button>`}
        </div>`
      : html`<p class="who"><${Badge} tone="warn">no authentication<//></p>`}
    <p class="version">${server ? `popgate ${server.version} on ${server.broker === "embedded" ? "its embedded store" : server.broker}` : ""}</p>
    ${!token() && html`<p><a href=${`${base}docs`}>HTTP interface</a></p>`}
    ${shown && html`<${Rights} who=${who} onClose=${() => setShown(false)} />`}
  </div>`
}

function Rights({ who, onClose }) {
  const names = (patterns) => (patterns.includes("*") ? "all" : patterns.join(", ") || "none")
  return html`<${Dialog} title=${`What ${who.principal} may do`} onClose=${onClose}>
    <${Facts} rows=${[["Credential", html`<code>${who.credential}</code>`], ["Ends", who.expires_at ? html`<${At} at=${who.expires_at} />` : "never"]]} />
    ${who.grants.length === 0 && html`<${Notice} tone="warn">Nothing: this principal has no grants.<//>`}
    <ul class="grants">
      ${who.grants.map(
        (grant) => html`<li>
          <strong>${grant.actions.join(", ")}</strong>
          <span>topics: ${names(grant.topics)} · groups: ${names(grant.groups)} · locks: ${names(grant.locks)}</span>
        </li>`,
      )}
    </ul>
    <div class="dialog-buttons"><${Button} onClick=${onClose}>Close<//></div>
  <//>`
}

function Theme() {
  const [theme, setTheme] = useState(document.documentElement.dataset.theme ?? "")
  const choose = (event) => {
    const next = event.currentTarget.value
    setTheme(next)
    if (next) {
      document.documentElement.dataset.theme = next
      localStorage.setItem("popgate.theme", next)
    } else {
      delete document.documentElement.dataset.theme
      localStorage.removeItem("popgate.theme")
    }
  }
  return html`<label class="theme"
    >Theme
    <select value=${theme} onChange=${choose}>
      <option value="" selected=${theme === ""}>System</option>
      <option value="light" selected=${theme === "light"}>Light</option>
      <option value="dark" selected=${theme === "dark"}>Dark</option>
    </select>
  </label>`
}

// -- the key -----------------------------------------------------------------------------------------------------------

function SignIn({ refused, onKey }) {
  const [key, setKey] = useState("")
  const [isOdd, setOdd] = useState(false)
  const submit = (event) => {
    event.preventDefault()
    setOdd(!isToken(key.trim()))
    if (!isToken(key.trim())) return
    useToken(key.trim())
    onKey()
  }
  return html`<${Page} title="Sign in">
    <form class="sign-in" onSubmit=${submit}>
      ${isOdd && html`<${Notice} tone="bad" alert>A key has only letters, digits and signs of ASCII, and no spaces. Copy the whole key again.<//>`}
      ${refused && !isOdd && html`<${Notice} tone="bad" alert>The proxy does not accept this key. It may be mistyped, revoked or expired.<//>`}
      <p>This proxy needs an API key, or a token of its OpenID provider. The browser keeps it for this tab only, until the tab is closed.</p>
      <${Input} label="API key or token" type="password" value=${key} onInput=${setKey} autocomplete="off" spellcheck="false" required wide />
      <${Button} type="submit" kind="primary" disabled=${key.trim() === ""}>Sign in<//>
      <p class="hint">An administrator makes a key for you with <code>popgate keys add NAME --role operator</code>.</p>
    </form>
  <//>`
}

render(html`<${App} />`, document.getElementById("app"))
