import { Page } from './parts.js'; import { html } from './ui.js'; export const Cluster = () => html`<${Page} title='Cluster'><//>`
