// Small charts of the last minutes, as SVG. A chart shows one series; its caption has the latest value and the maximum.
import { rate as asRate, time } from "./format.js"
import { html, useState } from "./ui.js"

const WIDTH = 240
const HEIGHT = 44
const TOP = 3

// `points`: [{at, value}], oldest first; value null: not known. `seconds`: the time that the chart covers.
export function Chart({ label, points, seconds = 300, tone = "", format = asRate, unit = "" }) {
  const [place, setPlace] = useState(null)
  const last = points.at(-1)
  const known = points.filter((point) => point.value !== null)
  const max = known.reduce((most, point) => Math.max(most, point.value), 0)
  const end = last?.at ?? 0
  const x = (at) => WIDTH * (1 - (end - at) / seconds)
  const y = (value) => HEIGHT - 1 - (max > 0 ? (value / max) * (HEIGHT - TOP - 1) : 0)
  const pointed = place === null ? null : nearest(known, end - seconds * (1 - place))
  const shown = pointed ?? last
  const latest = known.at(-1)
  const words = latest
    ? `${label}: now ${format(latest.value)}${unit}, at most ${format(max)}${unit} in the last minutes`
    : `${label}: not known yet`
  const move = (event) => {
    const box = event.currentTarget.getBoundingClientRect()
    setPlace((event.clientX - box.left) / box.width)
  }
  return html`<figure class="chart ${max > 0 ? tone : ""}">
    <figcaption>
      <span class="chart-label">${label}</span>
      <span class="chart-value">${shown ? format(shown.value) : "–"}<span class="unit">${unit}</span></span>
    </figcaption>
    <svg
      viewBox="0 0 ${WIDTH} ${HEIGHT}"
      preserveAspectRatio="none"
      role="img"
      aria-label=${words}
      onPointerMove=${move}
      onPointerLeave=${() => setPlace(null)}
    >
      <line class="chart-base" x1="0" x2=${WIDTH} y1=${HEIGHT - 0.5} y2=${HEIGHT - 0.5} />
      ${runs(points).map((run) => html`<${Run} run=${run} x=${x} y=${y} />`)}
      ${pointed && html`<line class="chart-cursor" x1=${x(pointed.at)} x2=${x(pointed.at)} y1="0" y2=${HEIGHT} />`}
    </svg>
    <div class="chart-foot" aria-hidden="true">
      <span>${pointed ? time(pointed.at) : known.length > 1 ? `max ${format(max)}` : "waiting for figures"}</span>
      <span>${Math.round(seconds / 60)} min</span>
    </div>
  </figure>`
}

function Run({ run, x, y }) {
  const line = run.map((point, i) => `${i ? "L" : "M"}${x(point.at).toFixed(1)} ${y(point.value).toFixed(1)}`).join("")
  const from = x(run[0].at).toFixed(1)
  const to = x(run.at(-1).at).toFixed(1)
  return html`<g>
    <path class="chart-area" d="${line}L${to} ${HEIGHT}L${from} ${HEIGHT}Z" />
    <path class="chart-line" d=${line} />
  </g>`
}

// Split a series where values are not known.
function runs(points) {
  const all = []
  let run = []
  for (const point of points) {
    if (point.value === null) {
      if (run.length) all.push(run)
      run = []
    } else run.push(point)
  }
  if (run.length) all.push(run)
  return all
}

function nearest(points, at) {
  let best = null
  for (const point of points) if (best === null || Math.abs(point.at - at) < Math.abs(best.at - at)) best = point
  return best
}

// Keeps the samples of counters, and makes series of rates of them.
export class History {
  constructor(seconds = 300) {
    this.seconds = seconds
    this.samples = []
  }
  // Add a sample: {at, values: {name: number}}.
  add(at, values) {
    this.samples.push({ at, values })
    while (this.samples.length && this.samples[0].at < at - this.seconds - 15) this.samples.shift()
  }
  // Return the rate of a counter over time. A counter that has fallen was reset: the rate of that step is not known.
  rates(name) {
    const points = []
    for (let i = 1; i < this.samples.length; i += 1) {
      const [before, after] = [this.samples[i - 1], this.samples[i]]
      const step = (after.values[name] ?? 0) - (before.values[name] ?? 0)
      const known = after.values[name] !== undefined || before.values[name] !== undefined
      const value = step < 0 || !known ? (known ? null : 0) : step / Math.max(0.001, after.at - before.at)
      points.push({ at: after.at, value })
    }
    return points
  }
  values(name) {
    return this.samples.map(({ at, values }) => ({ at, value: values[name] ?? null }))
  }
}
