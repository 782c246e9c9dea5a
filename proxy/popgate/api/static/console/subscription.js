// The page of one group of a topic: its frame, and what is done to the whole group.
import { del, get, post } from "./api.js"
import { adminOf, keyOf, pageOf, stateOf } from "./data.js"
import { count, plural, shortDuration } from "./format.js"
import { Mode, SwitchMode } from "./mode.js"
import { Now } from "./now.js"
import { Actions, Badge, Failure, Figure, Figures, FormDialog, Loading, Page, useAction } from "./parts.js"
import { usePoll } from "./poll.js"
import { html, lazy, useState } from "./ui.js"

const DeadLetters = lazy(() => import("./dead.js"), "DeadLetters")
const Browse = lazy(() => import("./browse.js"), "Browse")
const PolicyPage = lazy(() => import("./policy.js"), "PolicyPage")
const STATE_SECONDS = 2
const MODE_SECONDS = 3

export function Subscription({ topic, group, tab }) {
  const state = usePoll((signal) => get(stateOf(topic, group), { signal }), STATE_SECONDS, [topic, group])
  const mode = usePoll((signal) => get(`${adminOf(topic, group)}/consume-mode`, { signal }), MODE_SECONDS, [topic, group])
  const [dialog, setDialog] = useState(null)
  const close = () => setDialog(null)
  const now = state.data
  const changed = () => {
    state.refresh()
    mode.refresh()
  }
  return html`<${Page}
    title=${keyOf(topic, group)}
    crumbs=${[["Topics", "#/topics"], [topic, `#/topics/${encodeURIComponent(topic)}`]]}
    badges=${now &&
    html`<${Badge} tone=${now.mode === "draining" ? "warn" : "plain"}>${now.mode} mode<//>
      ${now.policy.paused && html`<${Badge} tone="warn">paused<//>`}`}
    actions=${html`<${GroupActions} topic=${topic} group=${group} now=${now} onDialog=${setDialog} onChanged=${changed} />`}
  >
    <${Failure} error=${state.error} what="The state of the group can't be read" />
    ${now === null && !state.error && html`<${Loading} />`}
    ${now && html`<${Counts} topic=${topic} group=${group} now=${now} />`}
    <${Tabs} topic=${topic} group=${group} tab=${tab} dead=${now?.dead} />
    <${Mode} topic=${topic} group=${group} poll=${mode} onSwitch=${setDialog} />
    ${tab === "" && html`<${Now} topic=${topic} group=${group} state=${state} mode=${mode} />`}
    ${tab === "messages" && html`<${Browse} topic=${topic} group=${group} />`}
    ${tab === "dead-letters" && html`<${DeadLetters} topic=${topic} group=${group} dead=${now?.dead ?? null} onChanged=${changed} />`}
    ${tab === "policy" && html`<${PolicyPage} topic=${topic} group=${group} now=${now} onChanged=${changed} />`}
    ${dialog?.mode && html`<${SwitchMode} topic=${topic} group=${group} to=${dialog.mode} onClose=${close} onChanged=${changed} />`}
    ${dialog === "purge" && html`<${Purge} topic=${topic} group=${group} now=${now} onClose=${close} onChanged=${changed} />`}
    ${dialog === "delete" && html`<${Delete} topic=${topic} group=${group} now=${now} onClose=${close} />`}
  <//>`
}

function GroupActions({ topic, group, now, onDialog, onChanged }) {
  const admin = [["admin", { topic, group }]]
  const verb = now?.policy.paused ? "resume" : "pause"
  const [toggle, busy, error] = useAction(async () => {
    await post(`${adminOf(topic, group)}/${verb}`)
    onChanged()
  }, `${keyOf(topic, group)} is ${verb === "pause" ? "paused" : "handing out messages again"}.`)
  const to = now?.mode === "pop" ? "pull" : "pop"
  const ready = now !== null
  return html`<${Actions}
      actions=${[
        { label: verb === "pause" ? "Pause" : "Resume", kind: verb === "resume" ? "primary" : "", needs: admin, busy, disabled: !ready, onClick: toggle, title: verb === "pause" ? "Stop handing out messages; leases can still be settled" : "" },
        { label: `Switch to ${to}`, needs: admin, disabled: !ready, onClick: () => onDialog({ mode: to }) },
        { label: "Purge", kind: "danger", needs: admin, disabled: !ready, onClick: () => onDialog("purge") },
        { label: "Delete the group", kind: "danger", needs: admin, disabled: !ready, onClick: () => onDialog("delete") },
      ]}
    />
    <${Failure} error=${error} alert />`
}

function Counts({ topic, group, now }) {
  const waiting = now.ready - now.blocked
  return html`<${Figures} label="Messages of the group">
    <${Figure} label="Ready" value=${count(now.ready)} note=${now.blocked ? `${count(waiting)} can be popped` : null} />
    <${Figure} label="In flight" value=${count(now.in_flight)} note=${now.policy.max_in_flight === null ? null : `of at most ${count(now.policy.max_in_flight)}`} />
    <${Figure} label="Delayed" value=${count(now.delayed)} />
    <${Figure} label="Blocked" value=${count(now.blocked)} />
    <${Figure} label="Dead" value=${count(now.dead)} tone=${now.dead ? "bad" : ""} href=${pageOf(topic, group, "dead-letters")} />
    <${Figure} label="Oldest" value=${shortDuration(now.oldest_age_seconds)} />
    ${now.pollers !== undefined && html`<${Figure} label="Pollers" value=${count(now.pollers)} />`}
  <//>`
}

function Tabs({ topic, group, tab, dead }) {
  const all = [
    ["", "Now"],
    ["messages", "Messages"],
    ["dead-letters", dead ? `Dead letters (${count(dead)})` : "Dead letters"],
    ["policy", "Policy"],
  ]
  return html`<nav class="tabs" aria-label="Pages of this group">
    <ul>
      ${all.map(([name, label]) => html`<li key=${name}><a href=${pageOf(topic, group, name)} aria-current=${tab === name ? "page" : undefined}>${label}</a></li>`)}
    </ul>
  </nav>`
}

function Purge({ topic, group, now, onClose, onChanged }) {
  const poppable = now.ready - now.blocked
  return html`<${FormDialog}
    title="Purge ${keyOf(topic, group)}?"
    verb="Purge the messages"
    kind="danger"
    phrase=${keyOf(topic, group)}
    submit=${async () => {
      const answer = await post(`${adminOf(topic, group)}/purge`)
      onChanged()
      return answer
    }}
    done=${(answer) => `${plural(answer.purged, "message")} purged.${answer.complete ? "" : " Not all: purge again for the rest."}`}
    onClose=${onClose}
  >
    <p>
      This permanently deletes the messages that are visible now: <strong>about ${plural(poppable, "message")}</strong> of this group.
    </p>
    <p>
      It keeps what is leased (${count(now.in_flight)}), delayed (${count(now.delayed)}) or blocked (${count(now.blocked)}), all dead letters (${count(now.dead)}), and the messages of other groups.
      ${!now.policy.paused && " Messages that arrive meanwhile may be handed out: pause the group first if that matters."}
    </p>
  <//>`
}

function Delete({ topic, group, now, onClose }) {
  return html`<${FormDialog}
    title="Delete the group ${keyOf(topic, group)}?"
    verb="Delete the group"
    kind="danger"
    phrase=${keyOf(topic, group)}
    submit=${async () => {
      await del(adminOf(topic, group))
      location.hash = `#/topics/${encodeURIComponent(topic)}`
    }}
    done=${`The group ${keyOf(topic, group)} is deleted.`}
    onClose=${onClose}
  >
    <p>
      This permanently deletes the group with <strong>${plural(now.ready + now.in_flight + now.delayed, "message")}</strong> and
      <strong> ${plural(now.dead, "dead letter")}</strong>. Adopted queues stay as they are. Other groups of ${topic} are not affected.
    </p>
    ${now.in_flight > 0 && html`<p>Clients that hold ${plural(now.in_flight, "lease")} can't settle them any more.</p>`}
  <//>`
}
