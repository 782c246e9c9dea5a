// Turns numbers and times into short texts of constant form, so that columns stay aligned.
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 })
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" })
const day = new Intl.DateTimeFormat("en-GB", { day: "2-digit", month: "short" })

export const NONE = "–"

export const count = (value) => (value === null || value === undefined ? NONE : whole.format(value))

// 1 message, 2 messages
export const plural = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`

export function rate(value) {
  if (value === null || value === undefined) return NONE
  if (value === 0) return "0"
  if (value < 0.1) return "<0.1"
  return value < 10 ? value.toFixed(1) : whole.format(value)
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE
  if (value < 1024) return `${value} B`
  const units = ["KiB", "MiB", "GiB", "TiB"]
  let size = value / 1024
  let unit = 0
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024
    unit += 1
  }
  return `${size < 10 ? size.toFixed(1) : whole.format(size)} ${units[unit]}`
}

// A duration with two units at most: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min, 3 d 4 h.
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE
  if (seconds < 0) return `-${duration(-seconds)}`
  if (seconds < 1) return seconds === 0 ? "0 s" : `${Math.max(0.1, seconds).toFixed(1)} s`
  const rest = Math.round(seconds)
  if (rest < 60) return `${rest} s`
  const steps = [
    [86400, "d", 3600, "h"],
    [3600, "h", 60, "min"],
    [60, "min", 1, "s"],
  ]
  const [size, unit, smaller, smallerUnit] = steps.find(([one]) => rest >= one)
  const left = Math.floor((rest % size) / smaller)
  return `${Math.floor(rest / size)} ${unit}${left ? ` ${left} ${smallerUnit}` : ""}`
}

// A duration for narrow places: 12 s, 1:55 min, 29 min, 2:05 h, 3.2 d.
export function shortDuration(seconds) {
  if (seconds === null || seconds === undefined) return NONE
  if (seconds < 59.5) return duration(seconds)
  const pair = (size) => `${Math.floor(seconds / size / 60)}:${String(Math.floor(seconds / size) % 60).padStart(2, "0")}`
  if (seconds < 600) return `${pair(1)} min`
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`
  return seconds < 86400 ? `${pair(60)} h` : `${(seconds / 86400).toFixed(1)} d`
}

// The time of day, with the date if it is another day.
export function time(at) {
  if (at === null || at === undefined) return NONE
  const date = new Date(at * 1000)
  const isToday = date.toDateString() === new Date().toDateString()
  return isToday ? clock.format(date) : `${day.format(date)} ${clock.format(date)}`
}

// A long id with its middle left out. Ids that popgate makes differ at both ends.
export const shortId = (id) => (id.length > 24 ? `${id.slice(0, 12)}…${id.slice(-7)}` : id)

export const exactTime = (at) => (at === null || at === undefined ? "" : new Date(at * 1000).toISOString())
