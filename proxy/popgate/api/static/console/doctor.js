// Runs the doctor's checks of RabbitMQ and Redis at the proxy, and shows what they found.
import { get, post } from "./api.js"
import { refusal } from "./access.js"
import { count, duration, plural } from "./format.js"
import { Actions, Ago, Awaited, Badge, Empty, Failure, Notice, Section, useAction } from "./parts.js"
import { usePoll } from "./poll.js"
import { html, useState } from "./ui.js"

const PATH = "/v1/admin/doctor"
const RUN_SECONDS = 60
const QUEUES_SHOWN = 5
const TONES = { error: "bad", warning: "warn", info: "plain" }

export function Doctor() {
  const why = refusal("admin")
  const poll = usePoll((signal) => (why ? null : get(PATH, { signal })), 0, [why])
  const [latest, setLatest] = useState(null)
  const [run, busy, error] = useAction(async () => setLatest(await post(PATH, {}, { seconds: RUN_SECONDS })), "The doctor has finished.")
  const shown = latest ?? poll.data?.latest
  if (poll.error?.isNotOffered) return html`<${Section} title="Doctor"><${Command} /><//>`
  return html`<${Section} title="Doctor" aside=${shown ? html`last run <${Ago} at=${shown.at} />, in ${duration(shown.seconds)}` : ""}>
    ${why
      ? html`<${Notice}>The doctor checks RabbitMQ, Redis and their policies. ${why}<//>`
      : html`<${Awaited} poll=${poll} what="The doctor can't be asked">
          ${(data) =>
            data.available
              ? html`<${Actions} label="Doctor" actions=${[{ label: "Run the doctor", kind: shown ? "" : "primary", busy, onClick: run }]} />
                  <${Failure} error=${error} what="The doctor could not look" alert />
                  ${shown ? html`<${Findings} found=${shown} />` : html`<p class="hint">It looks for settings of RabbitMQ and Redis that harm popgate. It takes a few seconds, and changes nothing.</p>`}`
              : html`<${Notice}>There is nothing to examine: ${data.unavailable_because}.<//>`}
        <//>`}
  <//>`
}

function Findings({ found }) {
  const toFix = found.findings.filter((finding) => finding.severity !== "info").length
  return html`
    <p class="hint">${found.place}, version ${found.rabbitmq_version || "unknown"}: ${toFix === 0 ? "nothing to fix" : plural(toFix, "finding to fix", "findings to fix")}${found.findings.length > toFix ? `, ${plural(found.findings.length - toFix, "note")}` : ""}.</p>
    ${found.findings.length === 0 && html`<${Empty}>Nothing that was looked at harms popgate.<//>`}
    <ul class="findings" aria-label="Findings">
      ${found.findings.map((finding) => html`<${Finding} key=${finding.code + finding.found} finding=${finding} />`)}
    </ul>
    ${found.not_looked_at.length > 0 && html`<${NotLookedAt} all=${found.not_looked_at} />`}
    ${found.findings.some((finding) => finding.fixable) && html`<${Command} />`}
  `
}

// The doctor's texts begin in lower case, for the command line. Names such as popgate stay as they are.
const sentence = (text) => (/^[a-z]+[ ,]/.test(text) && !text.startsWith("popgate ") ? text[0].toUpperCase() + text.slice(1) : text)

const Finding = ({ finding }) =>
  html`<li class="finding ${TONES[finding.severity] ?? ""}">
    <p><${Badge} tone=${TONES[finding.severity] ?? "plain"}>${finding.severity}<//> <strong>${sentence(finding.found)}</strong></p>
    ${finding.queues.length > 0 && html`<p class="hint">Queues: ${finding.queues.slice(0, QUEUES_SHOWN).join(", ")}${finding.queues.length > QUEUES_SHOWN ? ` and ${count(finding.queues.length - QUEUES_SHOWN)} more` : ""}</p>`}
    <p>${sentence(finding.why)}.</p>
    <p class="hint">Remedy${finding.fixable ? ", which the doctor can carry out" : ""}:</p>
    <pre tabindex="0" aria-label=${`Remedy of ${finding.code}`}>${finding.command}</pre>
    <p class="hint"><code>${finding.code}</code></p>
  </li>`

const NotLookedAt = ({ all }) =>
  html`<details class="more">
    <summary>Not looked at (${count(all.length)})</summary>
    <ul class="reasons">
      ${all.map((one) => html`<li key=${one.what}><strong>${one.what}</strong>: ${one.why}. <span class="hint">Setting: <code>${one.flag}</code></span></li>`)}
    </ul>
  </details>`

const Command = () =>
  html`<${Notice}>
    <p>The console changes nothing here. To carry out remedies, run the doctor on the proxy's machine, with the settings of <code>popgate serve</code>. It shows each command:</p>
    <pre tabindex="0" aria-label="Command">popgate doctor --fix</pre>
  <//>`
