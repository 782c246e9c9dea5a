// Shows the reports of the Spark pipeline: was everything delivered?
import { base, get, path, token } from "./api.js"
import { refusal } from "./access.js"
import { bytes, count } from "./format.js"
import { Actions, Ago, At, Awaited, Failure, Figure, Figures, Notice, Section, useAction } from "./parts.js"
import { usePoll } from "./poll.js"
import { Table } from "./table.js"
import { html } from "./ui.js"

const PATH = "/v1/admin/reports"
const READ_SECONDS = 30
const DOWNLOAD_SECONDS = 120

export function Reports() {
  const why = refusal("inspect")
  const poll = usePoll((signal) => (why ? null : get(PATH, { signal })), why ? 0 : READ_SECONDS, [why])
  return html`<${Section} title="Was everything delivered?">
    ${why
      ? html`<${Notice}>The reports of the journal are shown to callers that may inspect the whole server. ${why}<//>`
      : html`<${Awaited} poll=${poll} what="The reports can't be read" notOffered="This version of the proxy shows no reports.">${(data) => html`<${All} data=${data} />`}<//>`}
  <//>`
}

function All({ data }) {
  if (data.trouble) return html`<${Notice} tone="bad">The reports can't be read: ${data.trouble}<//>`
  if (data.reports.length === 0) return html`<${HowTo} configured=${data.configured} />`
  const [latest, ...others] = data.reports
  return html`
    <${Latest} report=${latest} />
    ${others.length > 0 &&
    html`<${Table}
      caption="Earlier reports"
      rows=${others}
      keyOf=${(report) => report.name}
      columns=${[
        { key: "name", label: "Report", head: true, sort: (report) => report.name, cell: (report) => html`<code>${report.name}</code>` },
        { key: "verdict", label: "Verdict", kind: "text", cell: (report) => report.verdict?.headline ?? "" },
        { key: "at", label: "Written", num: true, sort: (report) => report.written_at, cell: (report) => html`<${At} at=${report.written_at} />` },
        { key: "size", label: "Size", num: true, minor: true, cell: (report) => bytes(report.bytes) },
        { key: "open", label: "", cell: (report) => html`<${Open} report=${report} />` },
      ]}
    />`}
  `
}

const sum = (counts) => Object.values(counts).reduce((all, one) => all + one, 0)

function Latest({ report }) {
  const { verdict } = report
  const faults = verdict ? sum(verdict.faults) : 0
  const unsure = verdict ? sum(verdict.not_certain) : 0
  const tone = faults ? "bad" : unsure || verdict?.journal_events_missing ? "warn" : ""
  return html`
    <div class="notice ${tone}">
      ${verdict ? html`<p><strong>${verdict.headline}</strong></p><p>${verdict.text}</p>` : html`<p><strong>The report ${report.name}</strong> has no verdict: only audits have one.</p>`}
      <p class="hint">Report <code>${report.name}</code>, ${bytes(report.bytes)}, written <${Ago} at=${report.written_at} />${verdict?.end ? html`, about events until ${new Date(verdict.end).toLocaleString("en-GB")}` : ""}</p>
      <${Open} report=${report} />
    </div>
    ${verdict &&
    html`<${Figures} label="The latest audit">
      <${Figure} label="Faults" value=${count(faults)} tone=${faults ? "bad" : ""} note=${kinds(verdict.faults)} />
      <${Figure} label="Not certain" value=${count(unsure)} note=${kinds(verdict.not_certain)} />
      <${Figure} label="Events missing" value=${count(verdict.journal_events_missing)} tone=${verdict.journal_events_missing ? "bad" : ""} note="in the journal itself" />
    <//>`}
  `
}

const kinds = (counts) =>
  Object.entries(counts)
    .map(([kind, number]) => `${count(number)} ${kind.replaceAll("_", " ")}`)
    .join(", ") || null

// A key is not sent with a link, so a report is then read here, and saved as a file.
function Open({ report }) {
  const where = `${PATH}/${encodeURIComponent(report.name)}`
  const [save, busy, error] = useAction(async () => {
    const text = await get(where, { seconds: DOWNLOAD_SECONDS })
    const url = URL.createObjectURL(new Blob([text], { type: "text/html" }))
    const link = Object.assign(document.createElement("a"), { href: url, download: `${report.name}.html` })
    link.click()
    setTimeout(() => URL.revokeObjectURL(url), 60_000)
  }, "The report is saved.")
  if (!token()) return html`<a class="button" href=${base + where.slice(1)} target="_blank" rel="noopener">Open<span class="unseen"> the report ${report.name} in a new tab</span></a>`
  return html`<${Actions} label=${`Report ${report.name}`} actions=${[{ label: "Save the report", busy, onClick: save }]} /><${Failure} error=${error} alert />`
}

const HowTo = ({ configured }) =>
  html`<${Notice}>
    <p>There is no report yet. Spark makes one from the journal; it names each missing or doubled message:</p>
    <pre tabindex="0" aria-label="Command">popgate-pipeline audit --journal FOLDER --out REPORTS/audit</pre>
    <p>${configured ? "This proxy shows what is in its --report-folder: write the report into a folder in it." : html`Start the proxy with <code>--report-folder REPORTS</code>, and the latest report is shown here.`}</p>
  <//>`
