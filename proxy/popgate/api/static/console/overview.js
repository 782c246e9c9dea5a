// The first page: is it working, and what is stuck?
import { refusal } from "./access.js"
import { ownersOf, troubles } from "./attention.js"
import { Chart } from "./charts.js"
import { groupRows, pageOf, totals, useCluster, useRates, useStates, useTopics } from "./data.js"
import { count, duration, NONE, shortDuration } from "./format.js"
import { Awaited, Badge, Empty, Failure, Figure, Figures, Loading, Notice, Page, Section } from "./parts.js"
import { Table } from "./table.js"
import { html, useMemo, useState } from "./ui.js"

export const SERIES = [
  ["published", "Published", ""],
  ["delivered", "Delivered", ""],
  ["acked", "Acked", "good"],
  ["expired", "Leases expired", "warn"],
  ["released", "Released", ""],
  ["dead_lettered", "Dead-lettered", "bad"],
]

export function Overview() {
  const topics = useTopics()
  const cluster = useCluster()
  const rows = useMemo(() => groupRows(topics.data), [topics.data])
  const [onScreen, setOnScreen] = useState([])
  const known = useStates(rows, onScreen)
  const sums = totals(rows)
  const owners = useMemo(() => ownersOf(cluster.data), [cluster.data])
  const inTrouble = rows
    .map((row) => withTroubles(row, known.get(row.key), owners))
    .filter((row) => row.found.length)
    .sort((a, b) => (a.found[0].tone === "bad" ? 0 : 1) - (b.found[0].tone === "bad" ? 0 : 1) || b.state.dead + b.state.ready - a.state.dead - a.state.ready)
  return html`<${Page} title="Overview">
    <${Failure} error=${topics.error} what="The topics can't be listed" />
    <${Figures} label="Totals of all groups">
      <${Figure} label="Topics" value=${topics.data ? count(topics.data.length) : NONE} href="#/topics" />
      <${Figure} label="Groups" value=${topics.data ? count(sums.groups) : NONE} note=${sums.measured < sums.groups ? `${count(sums.measured)} measured` : null} />
      <${Figure} label="Ready" value=${count(sums.ready)} />
      <${Figure} label="In flight" value=${count(sums.in_flight)} />
      <${Figure} label="Delayed" value=${count(sums.delayed)} />
      <${Figure} label="Blocked" value=${count(sums.blocked)} />
      <${Figure} label="Dead" value=${count(sums.dead)} tone=${sums.dead ? "bad" : ""} />
      <${Figure} label="Oldest" value=${shortDuration(sums.oldest)} />
    <//>
    <${Rates} cluster=${cluster} />
    <${Section} title="Needs attention" aside=${sums.measured < sums.groups ? `${count(sums.measured)} of ${count(sums.groups)} groups looked at` : ""}>
      ${topics.data === null
        ? html`<${Loading} />`
        : html`<${Table}
            caption="Groups that need attention"
            rows=${inTrouble}
            keyOf=${(row) => row.key}
            pageRows=${20}
            onPage=${(shown) => setOnScreen(shown.map((row) => row.key))}
            empty=${sums.groups === 0
              ? "There are no groups yet. Create a topic, or let a client publish."
              : sums.measured < sums.groups
                ? "Nothing so far."
                : "Nothing: no dead letters, no paused groups, no queue without an owner, no old messages."}
            columns=${[
              { key: "group", label: "Group", head: true, cell: (row) => html`<a href=${pageOf(row.topic, row.group)}>${row.topic}/<wbr />${row.group}</a>` },
              { key: "why", label: "Why", kind: "text", cell: (row) => html`<${Reasons} row=${row} />` },
              { key: "ready", label: "Ready", num: true, minor: true, sort: (row) => row.state.ready, cell: (row) => count(row.state.ready) },
              { key: "in_flight", label: "In flight", num: true, minor: true, sort: (row) => row.state.in_flight, cell: (row) => count(row.state.in_flight) },
              { key: "dead", label: "Dead", num: true, minor: true, sort: (row) => row.state.dead, cell: (row) => count(row.state.dead) },
              { key: "oldest", label: "Oldest", num: true, minor: true, sort: (row) => row.state.oldest_age_seconds, cell: (row) => duration(row.state.oldest_age_seconds) },
            ]}
          />`}
    <//>
    <${Proxies} cluster=${cluster} />
  <//>`
}

function withTroubles(row, one, owners) {
  return { ...row, state: one?.state, found: one?.state ? troubles(one.state, owners, one.isStalled) : [] }
}

const Reasons = ({ row }) =>
  html`<ul class="reasons">
    ${row.found.map(
      (one) => html`<li class=${one.tone}>
        ${one.text.includes("dead letter") ? html`<a href=${pageOf(row.topic, row.group, "dead-letters")}>${one.text}</a>` : one.text}
      </li>`,
    )}
  </ul>`

function Rates({ cluster }) {
  const why = refusal("metrics")
  const members = cluster.data?.members ?? (cluster.error ? [] : null)
  const { poll, history } = useRates(why ? null : members)
  const which = cluster.error ? "of the proxy that answers" : "of all proxies"
  return html`<${Section} title="Messages per second" aside=${`${which}, the last 5 minutes`}>
    ${why
      ? html`<${Notice}>The rates come from the proxies' metrics. ${why}<//>`
      : html`<${Failure} error=${poll.error} what="The metrics can't be read" />
          <div class="charts six">
            ${SERIES.map(([kind, label, tone]) => html`<${Chart} key=${kind} label=${label} tone=${tone} points=${history.rates(kind)} unit="/s" />`)}
          </div>`}
  <//>`
}

function Proxies({ cluster }) {
  return html`<${Section} title="Proxies" aside=${html`<a href="#/cluster">Cluster</a>`}>
    <${Awaited} poll=${cluster} what="The cluster can't be read">
      ${(data) =>
        data.members.length === 0
          ? html`<${Empty}>This proxy runs alone${data.queues.length ? `, and serves ${count(data.queues.length)} queues` : ""}. Its id is <code>${data.instance}</code>.<//>`
          : html`<${Table}
              caption="Proxies of the cluster"
              rows=${data.members}
              keyOf=${(member) => member.instance}
              columns=${[
                {
                  key: "instance",
                  label: "Proxy",
                  head: true,
                  cell: (member) => html`<code>${member.instance}</code> ${member.instance === data.instance && html`<${Badge}>this one<//>`}`,
                },
                { key: "address", label: "Address", minor: true, cell: (member) => member.address },
                { key: "queues", label: "Queues", num: true, cell: (member) => count(member.queues) },
                { key: "owns", label: "State", cell: (member) => (member.owns_queues ? html`<${Badge} tone="good">owns queues<//>` : html`<${Badge} tone="warn">owns none<//>`) },
              ]}
            />`}
    <//>
  <//>`
}
