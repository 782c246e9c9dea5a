// Keeps what several pages show: the topics, the states of their groups, and the rates of the whole cluster. The figures
// stay while the user goes from page to page.
import { get, path } from "./api.js"
import { may } from "./access.js"
import { History } from "./charts.js"
import { usePoll } from "./poll.js"
import { store, useEffect, useStore } from "./ui.js"

const TOPICS_SECONDS = 10
const RATES_SECONDS = 5
const SAMPLE_SECONDS_MIN = 0.7
const FIRST_RATES_SECONDS = 1 // until the charts have a line
const SHOWN_SECONDS = 3 // how old the state of a group on the screen may be
const OTHERS_SECONDS = 60 // and of all other groups
const IDLE_SECONDS = 5 // when to look again at a group whose messages no client seems to take
const AT_ONCE_MAX = 4
const REST_FACTOR = 3 // after the state of another group, rest three times as long as the answer took
const DRAW_SECONDS = 0.4

export const stateOf = (topic, group) => path`/v1/topics/${topic}/groups/${group}`
export const adminOf = (topic, group) => path`/v1/admin/topics/${topic}/groups/${group}`
export const pageOf = (topic, group, tab = "") => path`#/topics/${topic}/${group}` + (tab && `/${tab}`)
export const keyOf = (topic, group) => `${topic}/${group}`

// -- topics ----------------------------------------------------------------------------------------------------------

const topics = store(null)

export function useTopics() {
  const known = useStore(topics)
  const poll = usePoll(
    async (signal) => {
      const answer = await get("/v1/admin/topics", { signal })
      topics.set(answer.topics)
      forgetOthers(answer.topics)
      return answer.topics
    },
    TOPICS_SECONDS,
    [],
  )
  return { ...poll, data: poll.data ?? known }
}

// Return one row a group, and one for a topic without groups: {key, topic, group, spec}.
export function groupRows(all) {
  return (all ?? []).flatMap((spec) =>
    spec.groups.length
      ? spec.groups.map((group) => ({ key: keyOf(spec.topic, group), topic: spec.topic, group, spec }))
      : [{ key: keyOf(spec.topic, ""), topic: spec.topic, group: null, spec }],
  )
}

// -- states of groups ------------------------------------------------------------------------------------------------

// By key: {state, at, error, idle, isStalled}. The map is the same one all the time; `states` tells of changes now and then.
const known = new Map()
const states = store(0)
let wanted = new Map() // key -> {topic, group}
let shown = new Set()
let users = 0
let reading = 0
let restUntil = 0
let isReadingOthers = false // one at a time
let drawTimer = 0
let turnTimer = 0
const inProgress = new Set()

// Follow the states of these rows, those in `onScreen` (keys) more often. Return the map of what is known.
export function useStates(rows, onScreen) {
  useStore(states)
  useEffect(() => {
    wanted = new Map(rows.filter((row) => row.group !== null).map((row) => [row.key, row]))
    turn()
  }, [rows])
  useEffect(() => {
    shown = new Set(onScreen)
    turn()
  }, [onScreen])
  useEffect(() => {
    users += 1
    turn()
    return () => {
      users -= 1
    }
  }, [])
  return known
}

// Forget the states of groups that are deleted.
function forgetOthers(all) {
  const present = new Set(groupRows(all).map((row) => row.key))
  for (const key of known.keys()) if (!present.has(key)) known.delete(key)
}

const age = (key) => Date.now() / 1000 - (known.get(key)?.at ?? 0)

function next() {
  const free = (key) => !inProgress.has(key)
  let oldest = null
  for (const key of shown) {
    if (wanted.has(key) && free(key) && age(key) > SHOWN_SECONDS && (oldest === null || age(key) > age(oldest))) oldest = key
  }
  if (oldest !== null) return [oldest, true]
  if (isReadingOthers || Date.now() < restUntil) return null
  for (const key of wanted.keys()) {
    const limit = known.get(key)?.idle === 1 ? IDLE_SECONDS : OTHERS_SECONDS
    if (free(key) && age(key) > limit && (oldest === null || age(key) > age(oldest))) oldest = key
    if (oldest !== null && !known.has(oldest)) break
  }
  return oldest === null ? null : [oldest, false]
}

function turn() {
  clearTimeout(turnTimer)
  if (users === 0) return
  if (!document.hidden) {
    for (let one = next(); one !== null && reading < AT_ONCE_MAX; one = next()) readState(...one)
  }
  turnTimer = setTimeout(turn, Math.min(200, Math.max(5, restUntil - Date.now())))
}

async function readState(key, isShown) {
  const { topic, group } = wanted.get(key)
  const began = Date.now()
  reading += 1
  if (!isShown) isReadingOthers = true
  inProgress.add(key)
  try {
    const state = await get(stateOf(topic, group))
    const isIdle = state.ready > 0 && state.in_flight === 0
    const idle = isIdle ? (known.get(key)?.idle ?? 0) + 1 : 0
    const at = Date.now() / 1000
    known.set(key, { state, at, error: null, idle, isStalled: idle > 1 })
    if (isShown) recordState(topic, group, state, at) // so that the charts of its page have a past
  } catch (error) {
    known.set(key, { ...known.get(key), at: Date.now() / 1000, error })
    if (error.status === 0 || error.status === 429) restUntil = Date.now() + 5000
  } finally {
    reading -= 1
    inProgress.delete(key)
    if (!isShown) {
      isReadingOthers = false
      restUntil = Math.max(restUntil, Date.now() + Math.min(500, REST_FACTOR * (Date.now() - began)))
    }
    drawTimer ||= setTimeout(() => {
      drawTimer = 0
      states.set(states.value + 1)
    }, DRAW_SECONDS * 1000)
    turn()
  }
}

// Return the sums over all known states, how many are known, and how many there are.
export function totals(rows) {
  const sums = { ready: 0, in_flight: 0, delayed: 0, blocked: 0, dead: 0, oldest: null, measured: 0, groups: 0 }
  for (const row of rows) {
    if (row.group === null) continue
    sums.groups += 1
    const state = known.get(row.key)?.state
    if (!state) continue
    sums.measured += 1
    for (const name of ["ready", "in_flight", "delayed", "blocked", "dead"]) sums[name] += state[name]
    const oldest = state.oldest_age_seconds
    if (oldest !== null && (sums.oldest === null || oldest > sums.oldest)) sums.oldest = oldest
  }
  return sums
}

// -- the cluster, and rates ------------------------------------------------------------------------------------------

export const useCluster = (seconds = 5) => usePoll((signal) => get("/v1/admin/cluster", { signal }), seconds, [])

const SAMPLE = /^(\w+)\{(.*)\} (\S+)$/
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g

// Read Prometheus' text format: [{name, labels, value}].
export function parseMetrics(text) {
  const rows = []
  for (const line of text.split("\n")) {
    if (line.startsWith("#") || line === "") continue
    const match = SAMPLE.exec(line)
    if (match) {
      rows.push({ name: match[1], labels: Object.fromEntries([...match[2].matchAll(LABEL)].map(([, k, v]) => [k, v])), value: Number(match[3]) })
    } else {
      const [name, value] = line.split(" ")
      rows.push({ name, labels: {}, value: Number(value) })
    }
  }
  return rows
}

const EVENTS = "popgate_events_total"
const whole = new History()
const byGroup = new Map() // key -> History, of the groups whose pages were opened

// Read the metrics of all proxies and add the sums of their events to the histories.
async function readRates(members, group, signal) {
  const places = members.length > 1 ? members.map((one) => `/metrics?proxy=${encodeURIComponent(one.instance)}`) : ["/metrics"]
  const texts = await Promise.all(places.map((place) => get(place, { signal })))
  const sums = {}
  const own = {}
  let others = false
  for (const { name, labels, value } of texts.flatMap(parseMetrics)) {
    if (name !== EVENTS) continue
    sums[labels.kind] = (sums[labels.kind] ?? 0) + value
    if (group && labels.topic === group.topic && (labels.group === group.group || labels.group === "")) {
      own[labels.kind] = (own[labels.kind] ?? 0) + value
    }
    others ||= labels.topic === "(other)"
  }
  const at = Date.now() / 1000
  addSample(whole, at, sums)
  if (group) addSample(historyOf(group), at, own)
  return { at, others }
}

// Two samples at almost the same time would make wild rates.
function addSample(history, at, values) {
  if (at - (history.samples.at(-1)?.at ?? 0) > SAMPLE_SECONDS_MIN) history.add(at, values)
}

function historyOf({ topic, group }) {
  const key = keyOf(topic, group)
  if (!byGroup.has(key)) byGroup.set(key, new History())
  return byGroup.get(key)
}

// Follow the rates of events. Return {poll, history}: those of one group, or of everything. Needs the action metrics.
export function useRates(members, group = null) {
  const history = group ? historyOf(group) : whole
  const seconds = history.samples.length < 3 ? FIRST_RATES_SECONDS : RATES_SECONDS
  const names = (members ?? []).map((one) => one.instance).join()
  const poll = usePoll(
    (signal) => (members === null ? Promise.resolve(null) : readRates(members, group, signal)),
    may("metrics") && members !== null ? seconds : 0,
    [names, members === null, group?.topic, group?.group],
  )
  return { poll, history }
}

// Counters that the state of a group may have: then the rates of its page need no metrics.
export const STATE_COUNTERS = {
  published: "published_count",
  delivered: "delivered_count",
  acked: "settled_count",
  expired: "expired_count",
  redelivered: "redelivered_count",
  dead_lettered: "dead_lettered_count",
}
const countersByGroup = new Map()
const backlogs = new Map()

// Add what a state says to the histories of its group, and return them: `counters` is null without counters.
export function recordState(topic, group, state, at) {
  const key = keyOf(topic, group)
  if (!backlogs.has(key)) backlogs.set(key, new History())
  const backlog = backlogs.get(key)
  if (state && backlog.samples.at(-1)?.at !== at) {
    backlog.add(at, { ready: state.ready, in_flight: state.in_flight, dead: state.dead })
    if (typeof state.delivered_count === "number") {
      if (!countersByGroup.has(key)) countersByGroup.set(key, new History())
      const values = Object.entries(STATE_COUNTERS).map(([name, field]) => [name, state[field] ?? 0])
      countersByGroup.get(key).add(at, Object.fromEntries(values))
    }
  }
  return { backlog, counters: countersByGroup.get(key) ?? null }
}
