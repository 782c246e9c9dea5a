// Sends requests to the proxy that has served this page. Owns the credential, and knows whether the proxy answers.
import { store } from "./ui.js"

const TOKEN = "popgate.token"
const READ_SECONDS = 12
const CHANGE_SECONDS = 60
const PROBE_SECONDS = 5

// The page is at PREFIX/console, and the interface at PREFIX/v1, so a reverse proxy may put both below a path.
export const base = new URL(".", location.href).pathname

// What stands between the user and the proxy. `away`: null, or why the proxy does not answer and when it is tried again.
export const connection = store({ away: null, needsKey: false })

// How far the proxy's clock is ahead of the browser's, in seconds. Small differences are ignored: Date has whole seconds.
let clockAhead = 0
export const now = () => Date.now() / 1000 + clockAhead

const REMEDIES = {
  topic_not_found: "Check the name, or create the topic.",
  group_not_found: "Check the name, or create the group.",
  dead_letter_not_found: "Load the list again: the letter may have been redriven or purged.",
  redrive_not_found: "Start a redrive. The proxy that handles these dead letters has run none since its start.",
  broker_unavailable: "Check that RabbitMQ is up and that this proxy can reach it. popgate retries by itself.",
  state_unavailable: "Check that Redis is up and that this proxy can reach it. popgate retries by itself.",
  peer_unavailable: "Another proxy must answer, and does not yet. This usually ends within seconds.",
  quota_exceeded: "Delete what is not used, or raise the limit.",
  wrong_mode: "Switch the group's consume mode, or wait until its drain has ended.",
  limit_exceeded: "This key has used as much as it may. Wait, or raise the limits of its principal.",
  forbidden: "An administrator can grant the action.",
  unauthenticated: "Give a valid API key or token.",
  internal_error: "This is a bug in popgate: the proxy's log has the details. You may try again.",
  host_not_allowed: "Open the console by the proxy's IP address, or start the proxy with --allowed-hosts.",
  late: "The proxy may be overloaded, or waits for RabbitMQ or Redis. The page Checks says whether it is ready.",
  not_found: "This proxy does not offer it.",
}

// An answer that is an error, or no answer at all (`status` 0).
export class Problem extends Error {
  constructor(status, fields = {}, retryAfter = null) {
    super(fields.detail || fields.title || `the proxy has answered ${status}`)
    Object.assign(this, { status, retryAfter, code: fields.code ?? "", title: fields.title ?? "", field: fields.field ?? "" })
    this.setting = fields.setting ?? ""
  }
  get remedy() {
    const words = REMEDIES[this.code] ?? ""
    return this.setting ? `${words} The setting is ${this.setting}.` : words
  }
  // Whether this version of the proxy has nothing at the path, as opposed to a missing topic or group.
  get isNotOffered() {
    return (this.status === 404 && this.code === "not_found") || this.status === 405
  }
}

export const token = () => sessionStorage.getItem(TOKEN)

// Whether a text can be a key or a token. The browser sends no header with other characters.
export const isToken = (value) => /^[\x21-\x7e]+$/.test(value)

export function useToken(value) {
  if (value) sessionStorage.setItem(TOKEN, value)
  else sessionStorage.removeItem(TOKEN)
  connection.set({ ...connection.value, needsKey: false })
}

// Make a path of a template, with each value encoded: path`/v1/admin/topics/${topic}`.
export const path = (parts, ...values) =>
  parts.reduce((all, part, i) => all + part + (i < values.length ? encodeURIComponent(values[i]) : ""), "")

// Make a query string of the values that are set.
export function query(values) {
  const set = Object.entries(values).filter(([, value]) => value !== "" && value !== null && value !== undefined)
  return set.length ? `?${new URLSearchParams(set)}` : ""
}

async function send(method, where, body, signal, seconds) {
  const headers = { accept: where === "/metrics" || where.startsWith("/metrics?") ? "text/plain" : "application/json" }
  const key = token()
  if (key) headers.authorization = `Bearer ${key}`
  if (method !== "GET") headers["content-type"] = "application/json"
  const late = AbortSignal.timeout(seconds * 1000)
  const both = signal ? AbortSignal.any([signal, late]) : late
  const url = base + where.slice(1)
  const text = body === undefined ? undefined : JSON.stringify(body)
  return fetch(url, { method, headers, body: text, signal: both, cache: "no-store", redirect: "error" })
}

function readClock(response) {
  const date = Date.parse(response.headers.get("date") ?? "")
  if (Number.isNaN(date)) return
  const ahead = date / 1000 + 0.5 - Date.now() / 1000
  clockAhead = Math.abs(ahead) > 2 ? ahead : 0
}

async function problemOf(response) {
  let fields = {}
  try {
    fields = await response.json()
  } catch {
    // not popgate's own answer
  }
  const after = Number(response.headers.get("retry-after"))
  return new Problem(response.status, fields, after > 0 ? after : null)
}

// Send a request and return the answer: an object, a text, or null where there is none. Throws a Problem.
export async function request(method, where, body, { signal, seconds } = {}) {
  let response
  try {
    response = await send(method, where, body, signal, seconds ?? (method === "GET" ? READ_SECONDS : CHANGE_SECONDS))
  } catch (error) {
    if (signal?.aborted) throw error
    if (error.name === "TimeoutError") {
      probe()
      throw new Problem(408, { title: "There is no answer in time", detail: `The proxy has not answered ${method} ${where}.`, code: "late" })
    }
    const why = "it can't be reached"
    lost(why)
    throw new Problem(0, { title: "The proxy does not answer", detail: why, code: "away" })
  }
  if (response.status === 502 || response.status === 504) {
    lost(`the server in front of it has answered ${response.status}`)
    throw await problemOf(response)
  }
  readClock(response)
  found()
  if (response.status === 401) {
    connection.set({ ...connection.value, needsKey: true })
    throw await problemOf(response)
  }
  if (!response.ok) throw await problemOf(response)
  if (response.status === 204) return null
  const type = response.headers.get("content-type") ?? ""
  return type.includes("json") ? response.json() : response.text()
}

export const get = (where, options) => request("GET", where, undefined, options)
export const post = (where, body = {}, options) => request("POST", where, body, options)
export const put = (where, body = {}, options) => request("PUT", where, body, options)
export const del = (where, options) => request("DELETE", where, undefined, options)

// -- a proxy that is away --------------------------------------------------------------------------------------------

let tries = 0
let timer = 0
export const returned = store(0) // counts the times that the proxy came back

function lost(why) {
  if (connection.value.away) return
  tries = 0
  retryLater(why)
}

// Find out whether a proxy that has not answered one request answers at all.
async function probe() {
  try {
    await send("GET", "/healthz", undefined, undefined, PROBE_SECONDS)
  } catch {
    lost("it has not answered in time")
  }
}

function found() {
  clearTimeout(timer)
  if (!connection.value.away) return
  connection.set({ ...connection.value, away: null })
  returned.set(returned.value + 1)
}

function retryLater(why) {
  const seconds = Math.min(15, 2 ** tries) * (0.8 + 0.4 * Math.random())
  tries += 1
  connection.set({ ...connection.value, away: { why, at: Date.now() / 1000 + seconds } })
  clearTimeout(timer)
  timer = setTimeout(retryNow, seconds * 1000)
}

export async function retryNow() {
  const why = connection.value.away?.why ?? ""
  try {
    const response = await send("GET", "/healthz", undefined, undefined, PROBE_SECONDS)
    if (response.status !== 502 && response.status !== 504) return found()
  } catch {
    // still away
  }
  if (connection.value.away) retryLater(why)
}
