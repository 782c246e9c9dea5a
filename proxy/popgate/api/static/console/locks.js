import { Page } from './parts.js'; import { html } from './ui.js'; export const Locks = () => html`<${Page} title='Locks'><//>`
