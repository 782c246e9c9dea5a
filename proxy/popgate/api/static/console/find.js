// "Where is my message?": one message in all groups of its topic.
import { get, path, query } from "./api.js"
import { StateBadge, Unreachable, Where } from "./browse.js"
import { pageOf, useTopics } from "./data.js"
import { count, duration } from "./format.js"
import { At, Awaited, Button, Empty, Facts, Input, Notice, Page, Section } from "./parts.js"
import { usePoll } from "./poll.js"
import { Table } from "./table.js"
import { html, useEffect, useState } from "./ui.js"

export function Find({ steps }) {
  const [askedTopic = "", askedId = ""] = steps
  const topics = useTopics()
  const [topic, setTopic] = useState(askedTopic)
  const [id, setId] = useState(askedId)
  useEffect(() => {
    setTopic(askedTopic)
    setId(askedId)
  }, [askedTopic, askedId])
  const submit = (event) => {
    event.preventDefault()
    location.hash = path`#/find/${topic.trim()}/${id.trim()}`
  }
  return html`<${Page} title="Find a message">
    <form class="filters" role="search" onSubmit=${submit}>
      <${Input} label="Topic" value=${topic} onInput=${setTopic} list="topics" required autocomplete="off" />
      <datalist id="topics">${(topics.data ?? []).slice(0, 1000).map((spec) => html`<option value=${spec.topic}></option>`)}</datalist>
      <${Input} label="Message id" value=${id} onInput=${setId} required autocomplete="off" spellcheck="false" wide />
      <${Button} type="submit" kind="primary" disabled=${!topic.trim() || !id.trim()}>Find<//>
    </form>
    ${askedTopic && askedId
      ? html`<${Found} key=${`${askedTopic}/${askedId}`} topic=${askedTopic} id=${askedId} />`
      : html`<${Empty}>Give the topic and the message id, as the publisher got it in its answer. To look through the messages of a group, open its page Messages.<//>`}
  <//>`
}

// Ids with a slash can't be in a path.
const whereIs = (topic, id) =>
  path`/v1/admin/topics/${topic}/messages` + (id.includes("/") ? query({ message_id: id }) : path`/${id}`)

function Found({ topic, id }) {
  const poll = usePoll((signal) => get(whereIs(topic, id), { signal, seconds: 40 }), 5, [topic, id])
  return html`<${Awaited} poll=${poll} what="The message can't be looked for" notOffered="This version of the proxy can't look for a message by its id. Dead letters can be searched on the page of their group.">
    ${(data) => html`
      <${Unreachable} proxies=${data.unreachable} />
      <${Section} title="In each group of ${topic}">
        ${groupsOf(data).length === 0
          ? html`<${Empty}>No group of ${topic} knows this message: it was never published here, or it was settled and forgotten.<//>`
          : groupsOf(data).map((one) => html`<${InGroup} key=${one.group} topic=${topic} one=${one} />`)}
      <//>
      ${data.story && html`<${Story} story=${data.story} />`}
    `}
  <//>`
}

// The answer lists the groups, as an array or by name.
function groupsOf(data) {
  const groups = data.groups ?? []
  return Array.isArray(groups) ? groups : Object.entries(groups).map(([group, one]) => ({ group, ...one }))
}

const TONES = { dead: "bad", unknown: "warn", blocked: "warn", expired: "warn" }

function InGroup({ topic, one }) {
  const copies = one.copies ?? [one]
  return html`<div class="notice story ${TONES[one.state] ?? ""}">
    <p><a href=${pageOf(topic, one.group)}><strong>${topic}/${one.group}</strong></a> <${StateBadge} state=${one.state} /></p>
    ${copies.map((copy, i) => html`<${Copy} key=${copy.id ?? i} topic=${topic} group=${one.group} copy=${copy} />`)}
    ${(one.because ?? []).length > 0 && html`<ul class="reasons">${one.because.map((text) => html`<li>${text}</li>`)}</ul>`}
  </div>`
}

// One copy of the message. Its place is in `message`, or in the copy itself.
function Copy({ topic, group, copy }) {
  const place = copy.message ?? copy
  const attempt = place.attempt ?? null
  return html`<div class="stack">
    ${(copy.detail ?? copy.sentence) && html`<p>${copy.detail ?? copy.sentence}</p>`}
    <${Facts}
      rows=${[
        (place.lease || place.queue !== undefined) && !["settled", "dead"].includes(copy.state) && ["Where", html`<${Where} row=${place} />`],
        attempt !== null && ["Attempt", count(attempt)],
        place.ordering_key && ["Ordering key", place.ordering_key],
        place.published_at && ["Published", html`<${At} at=${place.published_at} />`],
        copy.at && ["At", html`<${At} at=${copy.at} />`],
        copy.settled_by && ["By", html`<code>${copy.settled_by}</code>`],
        copy.reason && ["Reason", copy.reason],
        copy.source && ["Known by", copy.source.replace("_", " ")],
        copy.dead_letter && ["Dead letter", html`<a href=${pageOf(topic, group, "dead-letters")}><code>${copy.dead_letter}</code></a>`],
      ]}
    />
  </div>`
}

function Story({ story }) {
  return html`<${Section} title="What the journal tells" aside=${story.is_complete ? "" : "incomplete"}>
    ${story.trouble && html`<${Notice} tone="warn">${story.trouble}<//>`}
    <${Table}
      caption="Events of the message"
      rows=${story.events.map((event, i) => ({ ...event, i }))}
      keyOf=${(event) => String(event.i)}
      empty="The journal's files have no event of this message yet."
      columns=${[
        { key: "at", label: "At", cell: (event) => html`<${At} at=${event.at} />` },
        { key: "event", label: "Event", head: true, cell: (event) => event.event.replace(/_/g, " ") },
        { key: "group", label: "Group", cell: (event) => event.group ?? "" },
        { key: "client", label: "Client", cell: (event) => (event.client ? html`<code>${event.client}</code>` : "") },
        { key: "attempt", label: "Attempt", num: true, cell: (event) => (event.delivery_count ? count(event.delivery_count) : "") },
        { key: "held", label: "Held for", num: true, minor: true, cell: (event) => (event.held_seconds === null ? "" : duration(event.held_seconds)) },
        { key: "detail", label: "Detail", kind: "text", minor: true, cell: (event) => event.detail ?? "" },
      ]}
    />
  <//>`
}
