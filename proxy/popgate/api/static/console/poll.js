// Reads something again and again while a page shows it. Hidden pages and a proxy that is away are left alone.
import { connection, returned } from "./api.js"
import { useCallback, useEffect, useRef, useState, useStore } from "./ui.js"

const JITTER = 0.1

// Call `load(signal)` every `seconds`, and once more for each change of `inputs`. `seconds` 0: only once.
//
// Return {data, error, at, refresh}. `data` is the latest answer, also while later ones fail. What the proxy does not
// offer is not read again. A refusal with Retry-After is waited for.
export function usePoll(load, seconds, inputs) {
  const [state, setState] = useState({ data: null, error: null, at: null })
  const again = useRef(() => {})
  const back = useStore(returned)
  useEffect(() => {
    setState({ data: null, error: null, at: null })
  }, inputs)
  useEffect(() => {
    const ended = new AbortController()
    let timer = 0
    let isReading = false
    const later = (delay) => {
      clearTimeout(timer)
      if (delay > 0) timer = setTimeout(read, delay * 1000 * (1 + JITTER * Math.random()))
    }
    async function read() {
      clearTimeout(timer)
      if (ended.signal.aborted || isReading) return
      if (document.hidden) return // 'visibilitychange' goes on
      isReading = true
      let wait = seconds
      try {
        const data = await load(ended.signal)
        if (!ended.signal.aborted) setState({ data, error: null, at: Date.now() / 1000 })
      } catch (error) {
        if (ended.signal.aborted) return
        setState((before) => ({ ...before, error }))
        if (error.isNotOffered || error.status === 403) wait = 0
        else if (error.status === 0) wait = 0 // `returned` goes on
        else wait = Math.max(seconds, error.retryAfter ?? 0)
      } finally {
        isReading = false
      }
      if (!connection.value.needsKey) later(wait)
    }
    const shown = () => {
      if (!document.hidden && seconds > 0) read()
    }
    again.current = read
    document.addEventListener("visibilitychange", shown)
    read()
    return () => {
      ended.abort()
      clearTimeout(timer)
      document.removeEventListener("visibilitychange", shown)
    }
  }, [...inputs, seconds, back])
  const refresh = useCallback(() => again.current(), [])
  return { ...state, refresh }
}
