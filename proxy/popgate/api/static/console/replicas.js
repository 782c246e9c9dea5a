// The replicas of RabbitMQ's quorum queues and streams, as the replica keeper sees them.
import { get } from "./api.js"
import { count, plural } from "./format.js"
import { Ago, At, Awaited, Badge, Empty, Facts, Input, Notice, Page, Section } from "./parts.js"
import { usePoll } from "./poll.js"
import { Table } from "./table.js"
import { html, useState } from "./ui.js"

export function Replicas() {
  const poll = usePoll((signal) => get("/v1/admin/replicas", { signal }), 10, [])
  return html`<${Page} title="Replicas">
    <${Awaited} poll=${poll} what="The replicas can't be read">
      ${(data) =>
        data.keeps
          ? html`<${Kept} data=${data} />`
          : html`<${Notice}>This proxy has no replica keeper, so it does not look at the replicas of RabbitMQ's queues. Start it with <code>--replica-keeper true</code>, or run <code>popgate replicas</code>. The embedded store has no replicas.<//>`}
    <//>
  <//>`
}

const percent = (share) => `${Math.round(share * 100)} %`
const TONES = { enough: "good", stall: "bad", no_node: "bad", no_majority: "bad", unseen: "bad" }
const toneOf = (verdict) => TONES[verdict] ?? "warn"

function Kept({ data }) {
  const [filter, setFilter] = useState("")
  const wanted = filter.trim().toLowerCase()
  const queues = data.queues.filter((queue) => !wanted || `${queue.queue} ${queue.verdict} ${queue.reason}`.toLowerCase().includes(wanted))
  return html`
    <${Facts}
      rows=${[
        ["Keeper at work", data.is_at_work ? "this proxy's" : data.at_work ? html`<code>${data.at_work.holder}</code>` : html`<${Badge} tone="bad">none<//>`],
        data.at_work?.since && ["Since", html`<${At} at=${data.at_work.since} />`],
        ["Looked at", html`<${Ago} at=${data.at} />`],
        ["Changes under way", count(data.under_way.length)],
      ]}
    />
    <${Section} title="Queues and streams" aside=${plural(queues.length, "queue")}>
      <div class="filters" role="search"><${Input} label="Filter by name or decision" type="search" value=${filter} onInput=${setFilter} /></div>
      <${Table}
        caption="Replicas of queues and streams"
        rows=${queues}
        keyOf=${(queue) => `${queue.vhost} ${queue.queue}`}
        empty=${data.queues.length ? "No queue matches." : "RabbitMQ has no quorum queue and no stream here."}
        columns=${[
          { key: "queue", label: "Queue", head: true, sort: (queue) => queue.queue, cell: (queue) => html`<code>${queue.queue}</code>` },
          { key: "kind", label: "Kind", minor: true, cell: (queue) => queue.kind },
          { key: "online", label: "Online", num: true, sort: (queue) => queue.online.length - queue.wanted, cell: (queue) => html`<span class=${queue.online.length < queue.wanted ? "bad" : ""} title=${queue.members.join(", ")}>${queue.online.length} of ${queue.wanted}</span>` },
          { key: "source", label: "Asked by", minor: true, cell: (queue) => queue.source },
          { key: "verdict", label: "Decision", sort: (queue) => queue.verdict, cell: (queue) => html`<${Badge} tone=${toneOf(queue.verdict)}>${queue.verdict.replace("_", " ")}<//>` },
          { key: "reason", label: "Why", kind: "text", minor: true, cell: (queue) => queue.reason },
        ]}
      />
    <//>
    <${Section} title="Nodes of RabbitMQ">
      <${Table}
        caption="Nodes"
        rows=${data.nodes}
        keyOf=${(node) => node.node}
        columns=${[
          { key: "node", label: "Node", head: true, cell: (node) => html`<code>${node.node}</code>` },
          { key: "running", label: "State", cell: (node) => (node.running ? node.unfit_reason ? html`<${Badge} tone="warn" title=${node.unfit_reason}>gets none<//>` : html`<${Badge} tone="good">running<//>` : html`<${Badge} tone="bad">down<//>`) },
          { key: "replicas", label: "Replicas", num: true, sort: (node) => node.replicas, cell: (node) => count(node.replicas) },
          { key: "zone", label: "Zone", minor: true, cell: (node) => node.zone ?? "–" },
          { key: "memory", label: "Memory", num: true, minor: true, cell: (node) => percent(node.memory_share) },
          { key: "disk", label: "Disk", num: true, minor: true, cell: (node) => percent(node.disk_share) },
          { key: "why", label: "Why", kind: "text", minor: true, cell: (node) => node.unfit_reason ?? "" },
        ]}
      />
    <//>
    <${Section} title="Changes and events" aside="of this proxy's keeper">
      ${data.under_way.length > 0 && html`<ul class="reasons">${data.under_way.map((change) => html`<li class="warn">under way: ${change.kind} on <code>${change.node}</code> for <code>${change.queue}</code>: ${change.reason}</li>`)}</ul>`}
      ${data.events.length === 0
        ? html`<${Empty}>Nothing has happened yet.<//>`
        : html`<${Table}
            caption="Events of the replica keeper"
            rows=${data.events.map((event, i) => ({ ...event, i })).reverse()}
            keyOf=${(event) => String(event.i)}
            pageRows=${20}
            columns=${[
              { key: "at", label: "At", cell: (event) => html`<${At} at=${event.at} />` },
              { key: "event", label: "Event", cell: (event) => `${event.event} ${event.what}` },
              { key: "queue", label: "Queue", cell: (event) => html`<code>${event.queue ?? ""}</code>` },
              { key: "node", label: "Node", minor: true, cell: (event) => html`<code>${event.node}</code>` },
              { key: "reason", label: "Why", kind: "text", minor: true, cell: (event) => event.reason },
            ]}
          />`}
    <//>
  `
}
