// The list of topics and groups, and the page of one topic.
import { ownersOf, troubles } from "./attention.js"
import { adminOf, groupRows, keyOf, pageOf, totals, useCluster, useStates, useTopics } from "./data.js"
import { del, get, path, put } from "./api.js"
import { count, duration, plural } from "./format.js"
import { Actions, Badge, Failure, FormDialog, Input, Loading, Page, Facts, Section } from "./parts.js"
import { usePoll } from "./poll.js"
import { Table } from "./table.js"
import { html, useMemo, useState } from "./ui.js"

export function Topics() {
  const topics = useTopics()
  const cluster = useCluster(10)
  const [filter, setFilter] = useState("")
  const [creating, setCreating] = useState(false)
  const rows = useMemo(() => groupRows(topics.data), [topics.data])
  const wanted = filter.trim().toLowerCase()
  const shown = useMemo(() => (wanted ? rows.filter((row) => row.key.toLowerCase().includes(wanted)) : rows), [rows, wanted])
  const owners = useMemo(() => ownersOf(cluster.data), [cluster.data])
  return html`<${Page}
    title="Topics"
    actions=${html`<${Actions} actions=${[{ label: "Create a topic", kind: "primary", needs: [["create", null]], onClick: () => setCreating(true) }]} />`}
  >
    <${Failure} error=${topics.error} what="The topics can't be listed" />
    <div class="filters" role="search">
      <${Input} label="Filter by topic or group" type="search" value=${filter} onInput=${setFilter} placeholder="orders" />
      <p class="found" aria-live="polite">${topics.data ? `${plural(shown.length, "row")}${wanted ? ` of ${count(rows.length)}` : ""}` : ""}</p>
    </div>
    ${topics.data === null ? !topics.error && html`<${Loading} />` : html`<${GroupTable} rows=${shown} all=${rows} owners=${owners} empty=${wanted ? "No topic and no group matches." : "There are no topics yet."} />`}
    ${creating && html`<${CreateTopic} onClose=${() => setCreating(false)} onDone=${topics.refresh} />`}
  <//>`
}

const number = (name) => (row) => row.state?.[name] ?? null

function GroupTable({ rows, all, owners, empty, caption = "Topics and groups" }) {
  const [onScreen, setOnScreen] = useState([])
  const known = useStates(all, onScreen)
  const withStates = rows.map((row) => ({ ...row, ...known.get(row.key), key: row.key }))
  const figure = (name, label, more = {}) => ({
    key: name,
    label,
    num: true,
    sort: number(name),
    cell: (row) => html`<span class=${row.state?.[name] ? "" : "zero"}>${count(row.state?.[name])}</span>`,
    ...more,
  })
  return html`<${Table}
    caption=${caption}
    rows=${withStates}
    keyOf=${(row) => row.key}
    sortBy=${{ key: "topic", order: "ascending" }}
    empty=${empty}
    onPage=${(page) => setOnScreen(page.map((row) => row.key))}
    columns=${[
      {
        key: "topic",
        label: "Topic / group",
        head: true,
        sort: (row) => row.key,
        cell: (row) =>
          html`<a href=${path`#/topics/${row.topic}`}>${row.topic}</a>${row.group === null
              ? html` <span class="quiet">no groups</span>`
              : html`<span class="quiet"> / </span><a href=${pageOf(row.topic, row.group)}>${row.group}</a>`}`,
      },
      { key: "state", label: "State", cell: (row) => html`<${StateBadges} row=${row} owners=${owners} />` },
      figure("ready", "Ready"),
      figure("in_flight", "In flight", { minor: true }),
      figure("delayed", "Delayed", { minor: true }),
      figure("blocked", "Blocked", { minor: true }),
      figure("dead", "Dead", { cell: (row) => (row.state?.dead ? html`<a class="bad" href=${pageOf(row.topic, row.group, "dead-letters")}>${count(row.state.dead)}</a>` : html`<span class="zero">${count(row.state?.dead)}</span>`) }),
      { key: "oldest", label: "Oldest", num: true, minor: true, sort: number("oldest_age_seconds"), cell: (row) => duration(row.state?.oldest_age_seconds) },
      { key: "queues", label: "Queues", num: true, minor: true, sort: (row) => row.spec.queues, cell: (row) => count(row.spec.queues) },
    ]}
  />`
}

function StateBadges({ row, owners }) {
  if (row.group === null) return ""
  if (!row.state) return row.error ? html`<${Badge} tone="bad" title=${row.error.message}>no answer<//>` : html`<span class="quiet">…</span>`
  const { mode, policy } = row.state
  const found = troubles(row.state, owners, row.isStalled).filter((one) => one.word !== "paused" && one.word !== "draining")
  return html`${mode !== "pop" && html`<${Badge} tone=${mode === "draining" ? "warn" : "plain"}>${mode}<//> `}
  ${policy.paused && html`<${Badge} tone="warn">paused<//> `}
  ${found.length > 0 && html`<${Badge} tone=${found[0].tone} title=${found.map((one) => one.text).join("; ")}>${found[0].word}<//> `}
  ${mode === "pop" && !policy.paused && found.length === 0 && html`<${Badge} tone="good">ok<//>`}`
}

// A whole number in a form: null if it is empty, NaN if it is none.
export const wholeOf = (text) => (text.trim() === "" ? null : /^\d+$/.test(text.trim()) ? Number(text) : NaN)

function CreateTopic({ onClose, onDone }) {
  const [topic, setTopic] = useState("")
  const [kind, setKind] = useState("own")
  const [queues, setQueues] = useState("1")
  const [adopt, setAdopt] = useState("")
  const names = adopt.split(/[\n,]/).map((one) => one.trim()).filter(Boolean)
  return html`<${FormDialog}
    title="Create a topic"
    verb="Create"
    submit=${async () => {
      const answer = await put(path`/v1/admin/topics/${topic.trim()}`, kind === "own" ? { queues: wholeOf(queues) ?? 1 } : { adopt: names })
      onDone()
      location.hash = path`#/topics/${answer.topic}`
    }}
    done=${`The topic ${topic} is created.`}
    fields=${["topic"]}
    onClose=${onClose}
  >
    ${(error) => html`
      <${Input} label="Name" hint="1 to 64 characters of A-Z a-z 0-9 . _ -" value=${topic} onInput=${setTopic} required pattern="[A-Za-z0-9._\\-]{1,64}" error=${error?.field === "topic" ? error.message : ""} autocomplete="off" wide />
      <fieldset>
        <legend>Queues</legend>
        <label><input type="radio" name="kind" checked=${kind === "own"} onChange=${() => setKind("own")} /> popgate's own</label>
        <label><input type="radio" name="kind" checked=${kind === "adopt"} onChange=${() => setKind("adopt")} /> existing queues of RabbitMQ, which stay unchanged</label>
      </fieldset>
      ${kind === "own"
        ? html`<${Input} label="Number of queues" type="number" min="1" max="64" value=${queues} onInput=${setQueues} />`
        : html`<${Input} label="Queues to adopt" hint="Names with commas between them. No other consumer may be attached to them." value=${adopt} onInput=${setAdopt} required wide />`}
    `}
  <//>`
}

// -- one topic ---------------------------------------------------------------------------------------------------------

export function Topic({ topic }) {
  const poll = usePoll((signal) => get(path`/v1/admin/topics/${topic}`, { signal }), 10, [topic])
  const cluster = useCluster(10)
  const [dialog, setDialog] = useState(null)
  const rows = useMemo(() => (poll.data ? groupRows([poll.data]) : []), [poll.data])
  const owners = useMemo(() => ownersOf(cluster.data), [cluster.data])
  const spec = poll.data
  const sums = totals(rows)
  return html`<${Page}
    title=${topic}
    crumbs=${[["Topics", "#/topics"]]}
    badges=${spec?.adopted.length ? html`<${Badge}>adopted queues<//>` : null}
    actions=${html`<${Actions}
      actions=${[
        { label: "Create a group", needs: [["create", { topic }]], onClick: () => setDialog("group") },
        { label: "Delete the topic", kind: "danger", needs: [["admin", { topic, group: "*" }]], onClick: () => setDialog("delete") },
      ]}
    />`}
  >
    <${Failure} error=${poll.error} what="The topic can't be read" />
    ${spec &&
    html`
      <${Facts}
        rows=${[
          ["Queues", count(spec.queues)],
          ["Adopted", spec.adopted.length ? spec.adopted.join(", ") : "none: the queues are popgate's own"],
          spec.adopted.length && ["Unique message ids", spec.unique_message_ids ? "yes, as declared" : "not declared"],
        ]}
      />
      <${Section} title="Groups" aside="each group gets every message that is published after its creation">
        <${GroupTable} caption=${`Groups of ${topic}`} rows=${rows.filter((row) => row.group !== null)} all=${rows} owners=${owners} empty="This topic has no groups, so nothing can be published to it." />
      <//>
    `}
    ${dialog === "group" && html`<${CreateGroup} topic=${topic} onClose=${() => setDialog(null)} onDone=${poll.refresh} />`}
    ${dialog === "delete" &&
    html`<${FormDialog}
      title="Delete the topic ${topic}?"
      verb="Delete the topic"
      kind="danger"
      phrase=${topic}
      submit=${async () => {
        await del(path`/v1/admin/topics/${topic}`)
        location.hash = "#/topics"
      }}
      done=${`The topic ${topic} is deleted.`}
      onClose=${() => setDialog(null)}
    >
      <p>
        This deletes the topic, ${plural(sums.groups, "group")}, and permanently
        ${sums.measured < sums.groups ? " at least" : ""} <strong>${plural(sums.ready + sums.in_flight + sums.delayed, "message")}</strong> and
        <strong> ${plural(sums.dead, "dead letter")}</strong>.
        ${spec?.adopted.length ? ` The adopted queues stay as they are, with their messages: ${spec.adopted.join(", ")}.` : ""}
      </p>
    <//>`}
  <//>`
}

function CreateGroup({ topic, onClose, onDone }) {
  const [group, setGroup] = useState("")
  return html`<${FormDialog}
    title="Create a group of ${topic}"
    verb="Create"
    submit=${async () => {
      await put(adminOf(topic, group.trim()))
      onDone()
    }}
    done=${`The group ${keyOf(topic, group)} is created.`}
    onClose=${onClose}
  >
    <p>The group gets every message that is published from now on. Its policy has the defaults, and can be changed on its page.</p>
    <${Input} label="Name" hint="1 to 64 characters of A-Z a-z 0-9 . _ -" value=${group} onInput=${setGroup} required pattern="[A-Za-z0-9._\\-]{1,64}" autocomplete="off" wide />
  <//>`
}
