// Redrives and purges dead letters: the dialogs, and the progress of a redrive.
import { del, get, post } from "./api.js"
import { refusal } from "./access.js"
import { adminOf, keyOf } from "./data.js"
import { count, duration, plural, rate } from "./format.js"
import { Counted, useCount } from "./letters.js"
import { At, Button, Facts, Failure, FormDialog, Input, Notice, Progress, Section, Select, useAction } from "./parts.js"
import { usePoll } from "./poll.js"
import { html, useEffect, useRef, useState } from "./ui.js"

const RUNNING_SECONDS = 1
const IDLE_SECONDS = 10
const ANSWER_SECONDS = 1 // a short redrive has ended when its request is answered

const numberOf = (text) => (text.trim() === "" ? undefined : Number(text))

export function RedriveLetters({ topic, group, dead, ids, conditions, onClose, onChanged }) {
  const isSearch = ids.length === 0 && conditions !== null
  const found = useCount(topic, group, isSearch ? conditions : null)
  const [perSecond, setPerSecond] = useState("50")
  const [most, setMost] = useState("")
  const [target, setTarget] = useState("")
  const goal = target.trim()
  const all = isSearch ? (found.data?.matching ?? 0) : dead
  const number = ids.length || Math.min(all, numberOf(most) ?? all)
  const pace = numberOf(perSecond)
  const why = refusal("publish", { topic: goal || topic }) || (goal && refusal("consume", { topic, group }))
  return html`<${FormDialog}
    title="Redrive dead letters of ${keyOf(topic, group)}"
    verb=${`Redrive ${plural(number, "letter")}`}
    disabled=${Boolean(why) || (isSearch && number === 0)}
    submit=${async () => {
      const order = { rate_per_second: pace, target_topic: goal || undefined, wait_seconds: ANSWER_SECONDS }
      if (ids.length) order.ids = ids
      else order.max_messages = numberOf(most)
      if (isSearch) order.filter = found.data.conditions
      await post(`${adminOf(topic, group)}/dead-letters/redrive`, order)
      onChanged()
    }}
    done="The redrive has started."
    fields=${["rate_per_second", "max_messages", "target_topic"]}
    onClose=${onClose}
  >
    ${(error) => html`
      ${isSearch && html`<${Counted} found=${found} />`}
      <p>
        ${ids.length ? html`The <strong>${plural(ids.length, "selected letter")}</strong>` : html`<strong>${plural(number, "letter")}</strong>${isSearch ? (number === 1 ? " that matches" : " that match") : ""}, the oldest first,`}
        ${" "}${number === 1 ? "goes" : "go"} to ${goal ? html`all groups of the topic <strong>${goal}</strong>` : html`the end of ${number === 1 ? "its queue" : "their queues"}, for this group only`}.
        ${" "}Delivery counts start at 1 again.${pace > 0 && number > pace ? ` This takes about ${duration(number / pace)}.` : ""}
      </p>
      ${!pace && number > 100 && html`<${Notice} tone="warn">Without a rate, all of them come back at once. If the fault that made them dead is not repaired, they load your clients, and die again.<//>`}
      <${Input} label="Rate, in letters per second" hint="Empty: as fast as possible" inputmode="decimal" value=${perSecond} onInput=${setPerSecond} error=${error?.field === "rate_per_second" ? error.message : ""} />
      ${ids.length === 0 && html`<${Input} label="At most this many letters" hint=${isSearch ? "Empty: all that match" : "Empty: all that exist now"} inputmode="numeric" value=${most} onInput=${setMost} error=${error?.field === "max_messages" ? error.message : ""} />`}
      <${Input} label="To another topic" hint="Empty: each letter goes back to the queue from which it came" value=${target} onInput=${setTarget} autocomplete="off" error=${error?.field === "target_topic" ? error.message : ""} />
      ${why && html`<${Notice} tone="warn">${why}<//>`}
    `}
  <//>`
}

// Shows the running redrive, and the latest one until it is dismissed.
export function RedriveProgress({ topic, group, onEnd }) {
  const where = `${adminOf(topic, group)}/dead-letters/redrive`
  const [seconds, setSeconds] = useState(RUNNING_SECONDS)
  const poll = usePoll((signal) => get(where, { signal }), seconds, [topic, group])
  const [cancel, busy, error] = useAction(() => del(where), "The redrive is cancelled.")
  const wasRunning = useRef(false)
  const data = poll.data
  const isRunning = data?.state === "running" || data?.state === "cancelling"
  useEffect(() => {
    if (isRunning) wasRunning.current = true
    else if (data && wasRunning.current) {
      wasRunning.current = false
      onEnd()
    }
    setSeconds(isRunning || data === null ? (poll.error ? IDLE_SECONDS : RUNNING_SECONDS) : IDLE_SECONDS)
  }, [data, isRunning, poll.error])
  if (!data) return poll.error && poll.error.code !== "redrive_not_found" && poll.error.status !== 403 ? html`<${Failure} error=${poll.error} what="The progress of a redrive can't be read" />` : null
  return html`<${Section} title=${isRunning ? "A redrive is running" : "The latest redrive"}>
    <div class="notice ${data.state === "failed" ? "bad" : ""}">
      ${isRunning && data.total !== null && html`<${Progress} value=${data.moved + data.failed} max=${data.total} label="Progress of the redrive" />`}
      <${Facts}
        rows=${[
          ["State", data.state],
          ["Moved", `${count(data.moved)}${data.total === null ? "" : ` of ${count(data.total)}`}`],
          data.failed > 0 && ["Failed, still dead letters", count(data.failed)],
          data.not_found > 0 && ["Not found", count(data.not_found)],
          ["Rate", data.rate_per_second ? `at most ${rate(data.rate_per_second)}/s` : "not limited"],
          ["To", data.target_topic ?? "the original queues"],
          ["Started", html`<${At} at=${data.started_at} />`],
          data.ended_at && ["Ended", html`<${At} at=${data.ended_at} />`],
        ]}
      />
      ${data.trouble && html`<p class="bad">${data.trouble}</p>`}
      <${Failure} error=${error} alert />
      ${isRunning && html`<${Button} kind="danger" disabled=${busy || data.state === "cancelling" || Boolean(refusal("admin", { topic, group }))} onClick=${cancel}>Cancel the redrive<//>`}
    </div>
  <//>`
}

const AGES = [
  ["", "all of them"],
  ["86400", "dead for more than a day"],
  ["604800", "dead for more than a week"],
  ["2592000", "dead for more than 30 days"],
]

export function PurgeLetters({ topic, group, dead, ids, conditions, onClose, onChanged }) {
  const [older, setOlder] = useState("")
  const isSearch = ids.length === 0 && conditions !== null
  const found = useCount(topic, group, isSearch ? conditions : null)
  const matching = found.data?.matching ?? 0
  const what = isSearch ? plural(matching, "dead letter that matches", "dead letters that match") : ids.length ? plural(ids.length, "selected letter") : older ? `the letters that are ${AGES.find(([age]) => age === older)[1]}` : `all ${plural(dead, "dead letter")}`
  return html`<${FormDialog}
    title="Purge dead letters of ${keyOf(topic, group)}?"
    verb="Purge permanently"
    kind="danger"
    phrase=${keyOf(topic, group)}
    disabled=${isSearch && matching === 0}
    submit=${async () => {
      const order = isSearch ? { filter: found.data.conditions } : ids.length ? { ids } : older ? { older_than_seconds: Number(older) } : {}
      const answer = await post(`${adminOf(topic, group)}/dead-letters/purge`, order)
      onChanged()
      return answer
    }}
    done=${(answer) => `${plural(answer.purged, "dead letter")} purged, ${count(answer.dead)} left.${answer.complete ? "" : " It took too long: purge again for the rest."}`}
    onClose=${onClose}
  >
    ${isSearch && html`<${Counted} found=${found} />`}
    ${ids.length === 0 && !isSearch && html`<${Select} label="Which letters" value=${older} onChange=${setOlder} options=${AGES} />`}
    <p>This permanently deletes <strong>${what}</strong> of ${keyOf(topic, group)}, with ${ids.length === 1 ? "its body" : "their bodies"}. There is no way back.</p>
  <//>`
}
