// What happens in a group now: why, how fast, in which queues, at which clients.
import { get, now as clock, path } from "./api.js"
import { Chart } from "./charts.js"
import { adminOf, recordState, useCluster, useRates } from "./data.js"
import { count, NONE, plural, shortId } from "./format.js"
import { refusal } from "./access.js"
import { idOf, Unreachable } from "./browse.js"
import { At, Awaited, Badge, Empty, Left, Notice, Section } from "./parts.js"
import { usePoll } from "./poll.js"
import { SERIES } from "./overview.js"
import { Table } from "./table.js"
import { html, useMemo } from "./ui.js"

const LEASES_SECONDS = 3
const LEASES_MAX = 100 // more are not shown: they change too fast to be read

export function Now({ topic, group, state, mode }) {
  const cluster = useCluster()
  const leases = usePoll((signal) => get(`${adminOf(topic, group)}/messages?state=leased&limit=${LEASES_MAX}`, { signal }), LEASES_SECONDS, [topic, group])
  if (state.data === null) return null
  return html`
    <${Why} topic=${topic} group=${group} />
    <${Rates} topic=${topic} group=${group} state=${state} cluster=${cluster} />
    <${Queues} state=${state.data} cluster=${cluster} />
    <${PullClients} clients=${mode.data?.clients ?? []} isPulled=${state.data.mode === "pull"} queues=${state.data.queues} />
    <${Clients} leases=${leases} mode=${mode} />
    <${Leases} leases=${leases} topic=${topic} group=${group} policy=${state.data.policy} />
  `
}

function Why({ topic, group }) {
  const poll = usePoll((signal) => get(`${adminOf(topic, group)}/explain`, { signal }), 5, [topic, group])
  if (poll.error?.isNotOffered) return null
  return html`<${Section} title="What does a pop get?">
    <${Awaited} poll=${poll} what="This can't be explained">
      ${(data) =>
        data.reasons.length === 0
          ? html`<${Empty}>${data.summary || "Nothing stands in the way of a pop."}<//>`
          : html`<ul class="explain">
              ${data.would_get && html`<li>${data.summary}</li>`}
              ${data.reasons.map((one) => html`<${Reason} key=${one.code} one=${one} />`)}
            </ul>`}
    <//>
  <//>`
}

const Reason = ({ one }) =>
  html`<li class=${one.stops_all === false ? "" : "warn"}>
    <strong>${one.detail ?? one.sentence}</strong>
    ${one.until && html`<span>Ends by itself in <${Left} until=${one.until} />${". "}</span>`}
    ${one.remedy && html`<span>${one.remedy}</span>`} <code>${one.code}</code>
  </li>`

const STATE_SERIES = [
  ["published", "Published", ""],
  ["delivered", "Delivered", ""],
  ["acked", "Settled", "good"],
  ["expired", "Leases expired", "warn"],
  ["redelivered", "Redelivered", ""],
  ["dead_lettered", "Dead-lettered", "bad"],
]

function Rates({ topic, group, state, cluster }) {
  const { backlog, counters } = recordState(topic, group, state.data, state.at)
  const fromState = counters !== null
  const why = fromState ? "" : refusal("metrics")
  const members = cluster.data?.members ?? (cluster.error ? [] : null)
  const { history } = useRates(fromState || why ? null : members, { topic, group })
  const source = fromState ? counters : history
  return html`<${Section} title="The last 5 minutes">
    <div class="charts ${why ? "" : "eight"}">
      <${Chart} label="Ready" points=${backlog.values("ready")} format=${count} />
      <${Chart} label="In flight" points=${backlog.values("in_flight")} format=${count} />
      ${!why && (fromState ? STATE_SERIES : SERIES).map(([kind, label, tone]) => html`<${Chart} key=${kind} label=${label} tone=${tone} points=${source.rates(kind)} unit="/s" />`)}
    </div>
    ${why && html`<${Notice}>The rates come from the proxies' metrics. ${why}<//>`}
  <//>`
}

function Queues({ state, cluster }) {
  const owners = useMemo(() => new Map((cluster.data?.queues ?? []).map((queue) => [queue.broker_queue, queue])), [cluster.data])
  const owner = (row) => {
    const found = owners.get(row.broker_queue)
    if (!found) return NONE
    if (found.owner === null) return html`<${Badge} tone="bad">no owner<//>`
    return html`<code>${found.owner}</code>${found.owner === cluster.data.instance && cluster.data.members.length > 0 && html` <span class="quiet">this one</span>`}${found.moves_to && html` <${Badge} tone="warn">moves to ${found.moves_to}<//>`}`
  }
  return html`<${Section} title="Queues" aside=${cluster.error?.status === 403 ? "the owners are shown to callers that may inspect the whole server" : ""}>
    <${Table}
      caption="Queues of the group"
      rows=${state.queues}
      keyOf=${(row) => row.broker_queue}
      columns=${[
        { key: "queue", label: "Queue", head: true, sort: (row) => row.queue, cell: (row) => html`<span class="num">${row.queue}</span> <code class="quiet">${row.broker_queue}</code>` },
        { key: "owner", label: "Owner", cell: owner },
        { key: "ready", label: "Ready", num: true, sort: (row) => row.ready, cell: (row) => (row.ready === null ? html`<${Badge} tone="bad">missing<//>` : count(row.ready)) },
        { key: "in_flight", label: "In flight", num: true, sort: (row) => row.in_flight, cell: (row) => count(row.in_flight) },
        { key: "delayed", label: "Delayed", num: true, minor: true, sort: (row) => row.delayed, cell: (row) => count(row.delayed) },
        { key: "blocked", label: "Blocked", num: true, minor: true, sort: (row) => row.blocked, cell: (row) => count(row.blocked) },
      ]}
    />
  <//>`
}

// The clients that are registered for pull mode. `queues`: the counts of the group's queues.
function PullClients({ clients, isPulled, queues }) {
  if (!isPulled) return null
  const counts = new Map(queues.map((queue) => [queue.queue, queue]))
  const lag = (client) => [...client.queues, ...client.leaving].reduce((sum, number) => sum + (counts.get(number)?.ready ?? 0) + (counts.get(number)?.in_flight ?? 0), 0)
  const free = queues.length - clients.reduce((sum, client) => sum + client.queues.length + client.leaving.length, 0)
  return html`<${Section} title="Pull clients" aside=${clients.length ? plural(clients.length, "client") : ""}>
    ${free > 0 && clients.length > 0 && html`<${Notice} tone="warn">${plural(free, "queue has", "queues have")} no client yet.<//>`}
    <${Table}
      caption="Pull clients"
      rows=${clients}
      keyOf=${(client) => client.client_id}
      sortBy=${{ key: "client", order: "ascending" }}
      empty="No pull client is registered, so no client reads the queues."
      columns=${[
        { key: "client", label: "Client", head: true, sort: (client) => client.client_id, cell: (client) => html`<code>${client.client_id}</code>` },
        { key: "queues", label: "Queues", cell: (client) => html`${client.queues.join(", ") || html`<span class="quiet">none</span>`}${client.leaving.length > 0 && html` <${Badge} tone="warn">releases ${client.leaving.join(", ")}<//>`}` },
        { key: "lag", label: "Lag", num: true, sort: lag, cell: (client) => count(lag(client)) },
        { key: "leases", label: "Not committed", num: true, sort: (client) => client.leases, cell: (client) => count(client.leases) },
        { key: "generation", label: "Generation", num: true, minor: true, sort: (client) => client.generation, cell: (client) => html`<code>${client.generation}</code>` },
      ]}
    />
  <//>`
}

function Clients({ leases, mode }) {
  const proxies = (mode.data?.proxies ?? []).filter((proxy) => proxy.mode !== null)
  const waiting = proxies.reduce((sum, proxy) => sum + proxy.pollers, 0)
  const byClient = new Map()
  for (const one of leases.data?.messages ?? []) {
    const name = one.lease?.client ?? null
    const known = byClient.get(name) ?? { name, leases: 0, first: null }
    known.leases += 1
    if (one.lease && (known.first === null || one.lease.deadline < known.first)) known.first = one.lease.deadline
    byClient.set(name, known)
  }
  const rows = [...byClient.values()].sort((a, b) => b.leases - a.leases)
  return html`<${Section} title="Clients" aside=${mode.data ? waiting === 0 ? "no request waits for messages" : `${plural(waiting, "request waits", "requests wait")} for messages${proxies.length > 1 ? `: ${proxies.map((proxy) => `${proxy.pollers} at ${proxy.proxy}`).join(", ")}` : ""}` : ""}>
    ${leases.error?.isNotOffered
      ? html`<${Notice}>This version of the proxy does not list leases, so the clients that hold them are not known here.<//>`
      : html`<${Awaited} poll=${leases} what="The leases can't be read">
          ${() => html`<${Table}
            caption="Clients that hold leases"
            rows=${rows}
            keyOf=${(row) => row.name ?? ""}
            empty="No client holds a lease."
            columns=${[
              { key: "client", label: "Client", head: true, cell: (row) => (row.name === null ? html`<span class="quiet">did not say its name</span>` : html`<code>${row.name}</code>`) },
              { key: "leases", label: "Leases", num: true, sort: (row) => row.leases, cell: (row) => count(row.leases) },
              { key: "first", label: "Next to end", num: true, sort: (row) => row.first, cell: (row) => html`<${Left} until=${row.first} />` },
            ]}
          />`}
        <//>`}
  <//>`
}

function Leases({ leases, topic, group, policy }) {
  if (leases.error?.isNotOffered) return null
  return html`<${Section} title="Leases" aside=${leases.data?.next ? `the ${LEASES_MAX} oldest messages` : ""}>
    <${Unreachable} proxies=${leases.data?.unreachable} />
    <${Awaited} poll=${leases} what="The leases can't be read">
      ${(data) => html`<${Table}
        caption="Leases and the time that is left"
        rows=${data.messages}
        keyOf=${(row) => row.id ?? `${row.queue} ${row.place} ${row.message_id}`}
        pageRows=${25}
        empty="Nothing is leased."
        columns=${[
          { key: "id", label: "Message", head: true, cell: (row) => html`<a class="mono" title=${idOf(row)} href=${path`#/find/${topic}/${idOf(row)}`}>${shortId(idOf(row))}</a>` },
          { key: "client", label: "Client", sort: (row) => row.lease?.client ?? "", cell: (row) => (row.lease?.client ? html`<code class="name" title=${row.lease.client}>${row.lease.client}</code>` : NONE) },
          { key: "left", label: "Time left", num: true, sort: (row) => row.lease?.deadline ?? null, cell: (row) => html`<${Left} until=${row.lease?.deadline} whole=${Math.max(policy.invisibility_seconds, (row.lease?.deadline ?? 0) - clock())} />` },
          { key: "attempt", label: "Attempt", num: true, sort: (row) => row.attempt, cell: (row) => html`${count(row.attempt)}${policy.max_deliveries ? html`<span class="quiet"> / ${count(policy.max_deliveries)}</span>` : ""}` },
          { key: "key", label: "Ordering key", minor: true, cell: (row) => row.ordering_key ?? NONE },
          { key: "published", label: "Published", minor: true, num: true, sort: (row) => row.published_at, cell: (row) => html`<${At} at=${row.published_at} />` },
        ]}
      />`}
    <//>
  <//>`
}
