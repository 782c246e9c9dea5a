// Whether the proxy and its servers are well, and how its journal is doing.
import { get } from "./api.js"
import { refusal } from "./access.js"
import { parseMetrics } from "./data.js"
import { Doctor } from "./doctor.js"
import { bytes, count, duration, plural } from "./format.js"
import { Awaited, Empty, Figure, Figures, Notice, Page, Section } from "./parts.js"
import { usePoll } from "./poll.js"
import { Reports } from "./reports.js"
import { html } from "./ui.js"

export function Checks() {
  const ready = usePoll((signal) => get("/readyz", { signal }), 5, [])
  return html`<${Page} title="Checks">
    <${Section} title="Is this proxy ready?">
      ${ready.error && ready.error.status !== 0
        ? html`<${Notice} tone="bad"><p><strong>Not ready.</strong> ${ready.error.message}</p>${ready.error.remedy && html`<p>${ready.error.remedy}</p>`}<//>`
        : ready.data
          ? html`<${Notice}><p><strong>Ready.</strong> Messages can be published and consumed.</p><//>`
          : html`<${Empty}>Asking…<//>`}
    <//>
    <${Doctor} />
  <//>`
}

export function Journal() {
  const why = refusal("metrics")
  const poll = usePoll(async (signal) => (why ? {} : figuresOf(await get("/metrics", { signal }))), why ? 0 : 5, [why])
  return html`<${Page} title="Journal">
    <${Section} title="Delivery events" aside="written by the proxy that has answered">
      ${why
        ? html`<${Notice}>The figures of the journal are in the proxy's metrics. ${why}<//>`
        : html`<${Awaited} poll=${poll} what="The figures can't be read">${(figures) => html`<${JournalFigures} figures=${figures} />`}<//>`}
    <//>
    <${Reports} />
  <//>`
}

const PREFIX = "popgate_journal_"

function figuresOf(text) {
  const figures = {}
  for (const { name, value } of parseMetrics(text)) {
    if (name.startsWith(PREFIX) && !name.endsWith("_created")) figures[name.slice(PREFIX.length).replace(/_total$/, "")] = value
  }
  return figures
}

function JournalFigures({ figures }) {
  if (figures.events_written === undefined) {
    return html`<${Notice}>This proxy writes no journal. Start it with <code>--journal FOLDER</code> to keep every delivery event as Parquet files.<//>`
  }
  const bad = figures.events_dropped > 0 || figures.write_failures > 0
  return html`
    <${Figures} label="Figures of the journal">
      <${Figure} label="Written" value=${count(figures.events_written)} />
      <${Figure} label="Waiting" value=${count(figures.buffered_events)} />
      <${Figure} label="Lag" value=${duration(figures.lag_seconds)} />
      <${Figure} label="Dropped" value=${count(figures.events_dropped)} tone=${figures.events_dropped ? "bad" : ""} />
      <${Figure} label="Failed writes" value=${count(figures.write_failures)} tone=${figures.write_failures ? "bad" : ""} />
      <${Figure} label="Files" value=${count(figures.files)} />
      <${Figure} label="Size" value=${bytes(figures.bytes)} />
    <//>
    ${bad && html`<${Notice} tone="bad">${plural(figures.events_dropped, "event was", "events were")} lost, and ${plural(figures.write_failures, "write has", "writes have")} failed: check the journal's disk or bucket, and the proxy's log.<//>`}
  `
}
