import { Page } from './parts.js'; import { html } from './ui.js'; export const Find = () => html`<${Page} title='Find'><//>`
