// The proxies of the cluster, and which of them owns which queue.
import { pageOf, useCluster } from "./data.js"
import { count, plural } from "./format.js"
import { Awaited, Badge, Empty, Figure, Figures, Input, Page, Section, Select } from "./parts.js"
import { Table } from "./table.js"
import { html, useState } from "./ui.js"

export function Cluster() {
  const poll = useCluster(3)
  return html`<${Page} title="Cluster">
    <${Awaited} poll=${poll} what="The cluster can't be read">${(data) => html`<${Whole} data=${data} />`}<//>
  <//>`
}

function Whole({ data }) {
  const unowned = data.queues.filter((queue) => queue.owner === null).length
  const versions = new Set(data.members.map((member) => `${member.protocol.min}-${member.protocol.max}`))
  return html`
    <${Figures} label="The cluster">
      <${Figure} label="Proxies" value=${count(Math.max(1, data.members.length))} />
      <${Figure} label="Queues" value=${count(data.queues.length)} />
      <${Figure} label="Without an owner" value=${count(unowned)} tone=${unowned ? "bad" : ""} />
      <${Figure} label="Moving" value=${count(data.moving)} />
      <${Figure} label="Protocol" value=${data.protocol ?? "–"} note=${versions.size > 1 ? "versions differ" : null} />
    <//>
    <${Section} title="Proxies" aside="requests are counted since the answering proxy has started">
      ${data.members.length === 0
        ? html`<${Empty}>The proxy <code>${data.instance}</code> runs alone, and owns every queue. A cluster needs Redis (--redis-url).<//>`
        : html`<${Members} data=${data} />`}
    <//>
    <${Owners} data=${data} />
  `
}

const Members = ({ data }) =>
  html`<${Table}
    caption="Proxies"
    rows=${data.members}
    keyOf=${(member) => member.instance}
    sortBy=${{ key: "instance", order: "ascending" }}
    columns=${[
      { key: "instance", label: "Proxy", head: true, sort: (member) => member.instance, cell: (member) => html`<code>${member.instance}</code> ${member.instance === data.instance && html`<${Badge}>answers here<//>`}` },
      { key: "address", label: "Address", minor: true, cell: (member) => html`<code>${member.address}</code>` },
      { key: "queues", label: "Queues", num: true, sort: (member) => member.queues, cell: (member) => count(member.queues) },
      { key: "asked", label: "Messages to it", num: true, minor: true, sort: (member) => member.asked, cell: (member) => count(member.asked) },
      { key: "passed", label: "Requests passed on", num: true, minor: true, sort: (member) => member.passed_on, cell: (member) => count(member.passed_on) },
      { key: "protocol", label: "Protocol", num: true, minor: true, cell: (member) => `${member.protocol.min}–${member.protocol.max}` },
      { key: "owns", label: "State", cell: (member) => (member.owns_queues ? html`<${Badge} tone="good">owns queues<//>` : html`<${Badge} tone="warn">owns none<//>`) },
    ]}
  />`

function Owners({ data }) {
  const [filter, setFilter] = useState("")
  const [which, setWhich] = useState("")
  const wanted = filter.trim().toLowerCase()
  const shown = data.queues.filter(
    (queue) =>
      (!wanted || `${queue.topic}/${queue.group} ${queue.broker_queue} ${queue.owner ?? ""}`.toLowerCase().includes(wanted)) &&
      (which === "" || (which === "none" ? queue.owner === null : queue.moves_to !== null)),
  )
  return html`<${Section} title="Queues">
    <div class="filters" role="search">
      <${Input} label="Filter by group, queue or owner" type="search" value=${filter} onInput=${setFilter} />
      <${Select} label="Show" value=${which} onChange=${setWhich} options=${[["", "all"], ["none", "without an owner"], ["moving", "that move"]]} />
      <p class="found" aria-live="polite">${plural(shown.length, "queue")}</p>
    </div>
    <${Table}
      caption="Owners of queues"
      rows=${shown}
      keyOf=${(queue) => `${queue.topic}/${queue.group}/${queue.queue}`}
      empty=${data.queues.length ? "No queue matches." : "There are no queues yet."}
      columns=${[
        { key: "group", label: "Group", head: true, sort: (queue) => `${queue.topic}/${queue.group}/${queue.queue}`, cell: (queue) => html`<a href=${pageOf(queue.topic, queue.group)}>${queue.topic}/${queue.group}</a>` },
        { key: "queue", label: "Queue", num: true, cell: (queue) => count(queue.queue) },
        { key: "name", label: "On the broker", minor: true, cell: (queue) => html`<code>${queue.broker_queue}</code>` },
        { key: "owner", label: "Owner", sort: (queue) => queue.owner ?? "", cell: (queue) => html`${queue.owner === null ? html`<${Badge} tone="bad">none<//>` : html`<code>${queue.owner}</code>`}${queue.moves_to && html` <${Badge} tone="warn">moves to ${queue.moves_to}<//>`}` },
      ]}
    />
  <//>`
}
