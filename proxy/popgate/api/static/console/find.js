// "Where is my message?": one message in all groups of its topic.
import { get, path } from "./api.js"
import { Where, StateBadge } from "./browse.js"
import { pageOf, useTopics } from "./data.js"
import { count } from "./format.js"
import { At, Awaited, Button, Empty, Facts, Input, Page, Section } from "./parts.js"
import { usePoll } from "./poll.js"
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

function Found({ topic, id }) {
  const poll = usePoll((signal) => get(path`/v1/admin/topics/${topic}/messages/${id}`, { signal, seconds: 40 }), 5, [topic, id])
  return html`<${Awaited} poll=${poll} what="The message can't be looked for" notOffered="This version of the proxy can't look for a message by its id. Dead letters can be searched on the page of their group.">
    ${(data) => html`<${Section} title=${`${id} in ${topic}`}>
      ${groupsOf(data).length === 0 ? html`<${Empty}>No group of ${topic} knows this message: it was never published here, or it was settled and forgotten.<//>` : groupsOf(data).map((one) => html`<${InGroup} key=${one.group} topic=${topic} one=${one} />`)}
    <//>`}
  <//>`
}

// The answer lists the groups, as an array or by name.
function groupsOf(data) {
  const groups = data.groups ?? []
  return Array.isArray(groups) ? groups : Object.entries(groups).map(([group, one]) => ({ group, ...one }))
}

// Names of fields that have a place of their own; all others are listed as they are.
const SHOWN = new Set(["group", "topic", "state", "lease", "place", "queue", "blocked_by", "visible_at", "attempt", "sentence", "published_at", "message_id", "headers", "body_preview", "body_bytes"])

function InGroup({ topic, one }) {
  const others = Object.entries(one).filter(([name, value]) => !SHOWN.has(name) && value !== null && value !== undefined)
  return html`<div class="notice story">
    <p><a href=${pageOf(topic, one.group)}><strong>${topic}/${one.group}</strong></a> <${StateBadge} state=${one.state} /></p>
    ${one.sentence && html`<p>${one.sentence}</p>`}
    <${Facts}
      rows=${[
        (one.lease || one.queue !== undefined) && ["Where", html`<${Where} row=${one} />`],
        one.attempt !== undefined && one.attempt !== null && ["Attempt", count(one.attempt)],
        one.published_at && ["Published", html`<${At} at=${one.published_at} />`],
        ...others.map(([name, value]) => [words(name), shownValue(name, value)]),
      ]}
    />
  </div>`
}

const words = (name) => name.replace(/_/g, " ").replace(/^./, (letter) => letter.toUpperCase())

function shownValue(name, value) {
  if (name.endsWith("_at") && typeof value === "number") return html`<${At} at=${value} />`
  return typeof value === "object" ? html`<code>${JSON.stringify(value)}</code>` : String(value)
}
