// The consume mode of a group: its progress while it changes, and the dialog that switches it after a preview.
import { put } from "./api.js"
import { refusal } from "./access.js"
import { adminOf, keyOf } from "./data.js"
import { count, duration, plural } from "./format.js"
import { Button, Failure, FormDialog, Input, Loading, Notice } from "./parts.js"
import { usePoll } from "./poll.js"
import { html, useState } from "./ui.js"

// Shows a switch that is under way; nothing while every proxy serves the wanted mode.
export function Mode({ topic, group, poll, onSwitch }) {
  const data = poll.data
  if (!data || data.converged) return null
  const late = data.proxies.filter((proxy) => !proxy.converged)
  const back = data.wanted === "pull" ? "pop" : "pull"
  return html`<${Notice} tone="warn">
    <p><strong>This group changes to ${data.wanted} mode.</strong> Now it is in ${data.mode} mode, generation ${data.generation}.</p>
    ${data.drain && html`<p>${plural(data.drain.leases_left, "lease")} left; they are cut off in ${duration(data.drain.seconds_left)}.</p>`}
    ${late.length > 0 &&
    html`<p>
      ${plural(late.length, "proxy has", "proxies have")} not changed yet: ${late.map((proxy) => html`<code>${proxy.proxy}</code> (${proxy.mode === null ? "no answer" : proxy.mode}) `)}
    </p>`}
    ${!refusal("admin", { topic, group }) && html`<${Button} onClick=${() => onSwitch({ mode: back })}>Switch back to ${back}<//>`}
  <//>`
}

const STEPS = {
  draining: "draining: no new leases, and clients settle those that they hold",
  pull: "pull: each queue is read by one client, in order",
  pop: "pop: every client takes messages from all queues",
}

export function SwitchMode({ topic, group, to, onClose, onChanged }) {
  const [seconds, setSeconds] = useState("")
  const where = `${adminOf(topic, group)}/consume-mode`
  const drain = seconds.trim() === "" ? {} : { drain_timeout_seconds: Number(seconds) }
  const poll = usePoll((signal) => put(where, { mode: to, dry_run: true, ...drain }, { signal }), 3, [to, seconds])
  const preview = poll.data?.preview
  return html`<${FormDialog}
    title="Switch ${keyOf(topic, group)} to ${to} mode?"
    verb="Switch to ${to}"
    disabled=${!preview || preview.steps.length === 0}
    submit=${async () => {
      await put(where, { mode: to, ...drain })
      onChanged()
    }}
    done=${`${keyOf(topic, group)} changes to ${to} mode.`}
    onClose=${onClose}
  >
    <${Failure} error=${poll.error} what="There is no preview" />
    ${!preview && !poll.error && html`<${Loading} />`}
    ${preview && (preview.steps.length === 0 ? html`<${Notice}>The group is in ${to} mode, or changes to it already.<//>` : html`<${Preview} preview=${preview} />`)}
    <${Input}
      label="Seconds until leases are cut off"
      hint=${to === "pull" ? "Empty: the default" : "Empty: no drain; leases stay valid"}
      type="number"
      min="0"
      max="43200"
      value=${seconds}
      onInput=${setSeconds}
    />
  <//>`
}

function Preview({ preview }) {
  const busy = preview.queues.filter((queue) => queue.leases > 0)
  return html`<div>
    <p>The group goes through:</p>
    <ol class="steps">
      ${preview.steps.map((step) => html`<li>${STEPS[step]}</li>`)}
    </ol>
    <ul class="reasons">
      <li>${plural(preview.leases, "lease")} ${busy.length ? `in ${plural(busy.length, "queue")} (${busy.map((queue) => `${queue.queue}: ${count(queue.leases)}`).join(", ")})` : ""}</li>
      <li>${plural(preview.pollers, "waiting request ends", "waiting requests end")} empty</li>
      ${preview.pull_clients > 0 && html`<li class="warn">${plural(preview.pull_clients, "pull client loses its queues", "pull clients lose their queues")}</li>`}
      ${preview.drain_timeout_seconds !== null && html`<li>Leases have ${duration(preview.drain_timeout_seconds)} to be settled. Then they are cut off, and their work may be done twice.</li>`}
    </ul>
  </div>`
}
