// A table that shows one page of its rows at a time, so that thousands of rows stay cheap.
import { count } from "./format.js"
import { Button, Empty } from "./parts.js"
import { html, useEffect, useId, useMemo, useRef, useState } from "./ui.js"

export const PAGE_ROWS = 50

// `columns`: [{key, label, cell(row), sort(row)?, num?, minor?, head?}]. A column with `sort` has a button in its head. `minor`
// columns are hidden on narrow screens; `head` marks the cell that names its row. Rows whose sort value is null are last.
//
// `onPage` is called with the rows that are shown. `empty` is shown instead of a table without rows.
export function Table({ caption, columns, rows, keyOf, sortBy, empty, onPage, pageRows = PAGE_ROWS, rowClass }) {
  const [sorting, setSorting] = useState(sortBy ?? null)
  const [page, setPage] = useState(0)
  const sorted = useMemo(() => sort(rows, columns, sorting), [rows, sorting])
  const pages = Math.max(1, Math.ceil(sorted.length / pageRows))
  const current = Math.min(page, pages - 1)
  const shown = sorted.slice(current * pageRows, (current + 1) * pageRows)
  const names = shown.map(keyOf).join("\n")
  useEffect(() => onPage?.(shown), [names])
  if (rows.length === 0) return html`<${Empty}>${empty ?? "Nothing here."}<//>`
  return html`<div class="table-box">
    <${Scroll} label=${caption}>
      <table>
        <caption class="unseen">
          ${caption}
        </caption>
        <thead>
          <tr>
            ${columns.map((column) => html`<${Head} key=${column.key} column=${column} sorting=${sorting} onSort=${setSorting} />`)}
          </tr>
        </thead>
        <tbody>
          ${shown.map((row) => html`<${Row} key=${keyOf(row)} row=${row} columns=${columns} kind=${rowClass?.(row)} />`)}
        </tbody>
      </table>
    <//>
    ${sorted.length > pageRows && html`<${Pager} page=${current} pages=${pages} rows=${pageRows} total=${sorted.length} onPage=${setPage} caption=${caption} />`}
  </div>`
}

const kindOf = (column) => [column.num && "num", column.minor && "minor", column.kind].filter(Boolean).join(" ")

function Row({ row, columns, kind }) {
  return html`<tr class=${kind}>
    ${columns.map((column) =>
      column.head
        ? html`<th scope="row" class=${kindOf(column)}>${column.cell(row)}</th>`
        : html`<td class=${kindOf(column)}>${column.cell(row)}</td>`,
    )}
  </tr>`
}

function Head({ column, sorting, onSort }) {
  if (!column.sort) return html`<th scope="col" class=${kindOf(column)}>${column.label}</th>`
  const mine = sorting?.key === column.key
  const first = column.num ? "descending" : "ascending"
  const other = first === "descending" ? "ascending" : "descending"
  const next = mine && sorting.order === first ? other : first
  return html`<th scope="col" class=${kindOf(column)} aria-sort=${mine ? sorting.order : undefined}>
    <button type="button" class="sort" onClick=${() => onSort({ key: column.key, order: next })}>
      ${column.label}<span class="arrow" aria-hidden="true">${mine ? (sorting.order === "ascending" ? "↑" : "↓") : ""}</span>
    </button>
  </th>`
}

function sort(rows, columns, sorting) {
  const column = columns.find((one) => one.key === sorting?.key)
  if (!column) return rows
  const sign = sorting.order === "descending" ? -1 : 1
  return rows
    .map((row) => [column.sort(row), row])
    .sort(([a], [b]) => {
      if (a === null || a === undefined) return b === null || b === undefined ? 0 : 1
      if (b === null || b === undefined) return -1
      return sign * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b)
    })
    .map(([, row]) => row)
}

function Pager({ page, pages, rows, total, onPage, caption }) {
  const last = Math.min(total, (page + 1) * rows)
  return html`<nav class="pager" aria-label="Pages of: ${caption}">
    <${Button} disabled=${page === 0} onClick=${() => onPage(0)} aria-label="First page">«<//>
    <${Button} disabled=${page === 0} onClick=${() => onPage(page - 1)} aria-label="Previous page">‹<//>
    <span class="num">${count(page * rows + 1)}–${count(last)} of ${count(total)}</span>
    <${Button} disabled=${page >= pages - 1} onClick=${() => onPage(page + 1)} aria-label="Next page">›<//>
    <${Button} disabled=${page >= pages - 1} onClick=${() => onPage(pages - 1)} aria-label="Last page">»<//>
  </nav>`
}

// A box that scrolls sideways if its content is wider. Only then it can get the focus, to be scrolled by the keyboard.
export function Scroll({ label, children }) {
  const box = useRef(null)
  const [wide, setWide] = useState(false)
  const id = useId()
  useEffect(() => {
    const measure = () => box.current && setWide(box.current.scrollWidth > box.current.clientWidth + 1)
    const observer = new ResizeObserver(measure)
    observer.observe(box.current)
    if (box.current.firstElementChild) observer.observe(box.current.firstElementChild)
    return () => observer.disconnect()
  }, [])
  return html`<div
    ref=${box}
    id=${id}
    class="scroll"
    tabindex=${wide ? 0 : undefined}
    role=${wide ? "region" : undefined}
    aria-label=${wide ? label : undefined}
  >
    ${children}
  </div>`
}
