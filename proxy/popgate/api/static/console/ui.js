// The one place that names the vendored libraries: every other module imports what it needs from here.
import { h, render, Fragment } from "./preact.mjs"
import { useCallback, useEffect, useId, useLayoutEffect, useMemo, useReducer, useRef, useState } from "./hooks.mjs"
import htm from "./htm.mjs"

export const html = htm.bind(h)
export { Fragment, render, useCallback, useEffect, useId, useLayoutEffect, useMemo, useReducer, useRef, useState }

// A value that components can follow. `set` tells all of them.
export function store(value) {
  const listeners = new Set()
  return {
    get value() {
      return value
    },
    set(next) {
      if (Object.is(next, value)) return
      value = next
      for (const listener of [...listeners]) listener()
    },
    subscribe(listener) {
      listeners.add(listener)
      return () => listeners.delete(listener)
    },
  }
}

// Return the value of a store, and render again whenever it changes.
export function useStore(source) {
  const [, changed] = useReducer((count) => count + 1, 0)
  useEffect(() => {
    changed()
    return source.subscribe(changed)
  }, [source])
  return source.value
}

// Render again every `seconds`, for times that count down or up.
export function useTick(seconds = 1) {
  const [, tick] = useReducer((count) => count + 1, 0)
  useEffect(() => {
    const timer = setInterval(tick, seconds * 1000)
    return () => clearInterval(timer)
  }, [seconds])
}

// A component whose module is loaded when it is first shown: lazy(() => import("./page.js"), "Page").
export function lazy(load, name) {
  let component = null
  return function Lazy(props) {
    const [, loaded] = useState(false)
    const [failed, setFailed] = useState(false)
    useEffect(() => {
      if (component === null) {
        load().then(
          (module) => {
            component = module[name]
            loaded(true)
          },
          () => setFailed(true),
        )
      }
    }, [])
    if (failed) return html`<p class="empty">This page can't be loaded. Load the console again.</p>`
    return component === null ? html`<p class="empty" aria-busy="true">Loading…</p>` : h(component, props)
  }
}

// The text that a screen reader speaks next. Used for results of what the user did, never for live figures.
export const spoken = store("")
export function say(text) {
  spoken.set("")
  setTimeout(() => spoken.set(text), 60)
}
